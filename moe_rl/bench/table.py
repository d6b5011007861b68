"""What a benchmark found: the row of each case, as a table on the terminal, results.tsv, results.json and curves.png."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from moe_rl.durable import write_atomic
from moe_rl.errors import UserError
from moe_rl.observe.curves import compare, series
from moe_rl.observe.metrics import read_metrics

SCORED = 5  # last steps that the score is the mean of
WARM_UP = 2  # first steps that are in no median
TSV, JSON, CURVES = "results.tsv", "results.json", "curves.png"
DRAWN = (
    "reward/accuracy",
    "reward/mean",
    "actor/loss",
    "actor/grad_norm",
    "tokens/per_second",
    "memory/gpu_peak_gib",
    "memory/host_peak_gib",
)
PACKAGES = ("moe-rl", "torch", "megatron-core", "transformers", "ray", "transformer-engine")


def _column(title: str, meaning: str, spec: str = "", default: Any = None) -> Any:
    """A field of a row: heading (none: not on the terminal) and format in the table, and what it means."""
    return field(default=default, metadata={"title": title, "meaning": meaning, "spec": spec})


@dataclass
class Row:
    """One case; None where there is nothing to tell. The meaning of each field goes into results.json."""

    case: str
    status: str = _column(
        "status",
        "ok; refused: a rule says that it cannot run here; failed exit N; killed SIGNAL; timed out; interrupted or not"
        " run: the benchmark was ended",
        default="not run",
    )
    steps: int | None = _column("steps", "steps done")
    score: float | None = _column("score", f"reward/accuracy, mean of the last {SCORED} steps done", ".4f")
    reward: float | None = _column("", f"reward/mean, mean of the last {SCORED} steps done")
    loss: float | None = _column("loss", "actor/loss of the last step done", "+.2e")
    grad_norm: float | None = _column("grad norm", "actor/grad_norm of the last step done", ".4f")
    tokens_per_s: float | None = _column(
        "tokens/s",
        f"tokens/per_second, median without the first {WARM_UP} steps (without the first of {WARM_UP})",
        ".1f",
    )
    update_s: float | None = _column("update s", "time/update (forward, backward, optimizer step), likewise", ".3f")
    gpu_allocated_gib: float | None = _column(
        "GPU alloc GiB", "memory/gpu_peak_gib: the process that allocated most; 0 without a GPU", ".3f"
    )
    gpu_reserved_gib: float | None = _column(
        "GPU reserved GiB", "memory/gpu_reserved_peak_gib: the process whose allocator held most", ".3f"
    )
    workers_host_gib: float | None = _column(
        "workers GiB",
        "memory/host_peak_gib: sum over trainer and rollout processes of each one's own peak resident memory",
        ".2f",
    )
    host_gib: float | None = _column(
        "host GiB",
        "highest sum of the proportional set sizes (shared pages counted once) of all processes of the case: driver,"
        " Ray's, workers; read twice a second, or as often as that takes at most 5 % of a core",
        ".2f",
    )
    seconds: float | None = _column("wall s", "seconds from start to end, start of the processes included", ".0f")
    error: str = _column("", "first line of its error, or the rule's reason", default="")
    log: str = _column("", "its output, below the directory of the results", default="")
    curves: dict[str, list[Any]] = field(
        default_factory=dict,
        metadata={"title": "", "meaning": "the metrics of each step by their names in docs/metrics.md"},
    )


FIELDS = dataclasses.fields(Row)


def measure(row: Row, run_dir: Path) -> None:
    """Fill in what the metrics of a run say, be it whole or cut off."""
    metrics = read_metrics(run_dir)
    row.steps = len(metrics)
    if not metrics:
        return

    def values(key: str) -> list[float]:
        return series(metrics, key)[1]

    def steady(key: str) -> float | None:
        found = values(key)
        return median(found[min(WARM_UP, len(found) - 1) :]) if found else None

    def last(key: str) -> float | None:
        return metrics[-1].get(key)

    accuracy, reward = (values(key)[-SCORED:] for key in ("reward/accuracy", "reward/mean"))
    row.score, row.reward = (fmean(found) if found else None for found in (accuracy, reward))
    row.loss, row.grad_norm = last("actor/loss"), last("actor/grad_norm")
    row.tokens_per_s, row.update_s = steady("tokens/per_second"), steady("time/update")
    row.gpu_allocated_gib, row.gpu_reserved_gib = last("memory/gpu_peak_gib"), last("memory/gpu_reserved_peak_gib")
    row.workers_host_gib = last("memory/host_peak_gib")
    row.curves = {key: [line.get(key) for line in metrics] for key in ("step", *DRAWN)}


def make_directory(directory: Path) -> None:
    """Make the directory of the results and try it, so that nothing is measured that cannot be written.

    Raises:
        UserError: it cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            "bench.out",
            f"{directory} cannot be written: {error.strerror}",
            "Results go there.",
            "Choose another --out.",
        ) from error


def make_directory_of(file: Path) -> None:
    """The same for results in one file. Raises UserError also where `file` is a directory."""
    if file.is_dir():
        raise UserError("bench.out", f"--out {file} is a directory", "It names a file.", "Add the file's name.")
    make_directory(file.absolute().parent)


def write(out: Path, rows: Sequence[Row], about: Mapping[str, Any]) -> None:
    """Replace results.tsv and results.json, each at once."""
    columns = [f.name for f in FIELDS if f.name != "curves"]
    lines = [columns, *([_cell(getattr(row, name)) for name in columns] for row in rows)]
    write_atomic(out / TSV, "".join("\t".join(line) + "\n" for line in lines))
    head = json.dumps({**about, "columns": {f.name: f.metadata.get("meaning", "its name") for f in FIELDS}}, indent=1)
    body = ",\n".join(json.dumps(_rounded(dataclasses.asdict(row)), allow_nan=False) for row in rows)
    write_atomic(out / JSON, f'{head.removesuffix("\n}")},\n "rows": [\n{body}\n ]\n}}\n')


def draw(out: Path, rows: Sequence[Row]) -> None:
    """Write curves.png: a panel for each metric, a line for each case that did a step."""
    runs = {row.case: _steps(row.curves) for row in rows if row.curves}
    if runs:
        (out / CURVES).write_bytes(compare(runs, DRAWN))


def show(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print the table, what its columns mean, and what is to be said of the cases that did not end well."""
    console = console or Console()
    shown = [f for f in FIELDS if f.metadata.get("title")]
    table = Table("case", *(f.metadata["title"] for f in shown), box=None, header_style="")
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        cells = ((getattr(row, f.name), f.metadata.get("spec", "")) for f in shown)
        table.add_row(row.case, *("-" if value is None else f"{value:{spec}}" for value, spec in cells))
    # a cell cut off says nothing: on a narrow terminal the lines wrap
    console.width = max(console.width, console.measure(table, options=console.options.update(width=500)).maximum)
    console.print(table)
    for f in shown:
        console.print(f"  {f.metadata['title']}: {f.metadata['meaning']}", highlight=False, soft_wrap=True)
    for error, cases in _by_error(rows).items():
        console.print(f"{', '.join(cases)}:\n  {error}", highlight=False, markup=False, soft_wrap=True)


def machine() -> dict[str, Any]:
    """Hardware and versions of this machine. GPUs are asked of the driver: a CUDA context would take their memory."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        gpus = []
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "hardware": {
            "machine": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpus": gpus,
        },
        "versions": versions,
    }


def _by_error(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Cases by what is to be said of them: those with the same reason together."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.error:
            said = f"{row.status}: {row.error}" + (f" (see {row.log})" if row.log else "")
            found.setdefault(said, []).append(row.case)
    return found


def _steps(curves: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(curves, values, strict=True)) for values in zip(*curves.values(), strict=True)]


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split())


def _rounded(value: Any) -> Any:
    """The same with six digits of each number."""
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
