"""`moe-rl bench optimizer`: GRPO on one model under each way to hold the optimizer, every case a real `moe-rl train`."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_rl.config import Config, load_config
from moe_rl.config.problem import Problem, nearest, raise_all
from moe_rl.config.rules import check, model_directory
from moe_rl.errors import UserError
from moe_rl.models.family import read_facts
from moe_rl.trainer.inputs import read_inputs

from .process import Ended, watch
from .table import TSV, Row, draw, machine, make_directory, measure, show, write

TASKS = ("grpo",)
Overrides = dict[str, Any]

# Each case takes one line of each table; its name joins theirs. Ranks are for one model: times layout.tp * layout.pp.
SHARDING: dict[str, Overrides] = {
    "whole": {"cluster.gpus_per_node": 1},
    "sharded": {"cluster.gpus_per_node": 2},
}
OFFLOAD: dict[str, Overrides] = {
    "offload0": {"optimizer.offload_fraction": 0},
    "offload0.5": {"optimizer.offload_fraction": 0.5},
    "offload1": {"optimizer.offload_fraction": 1},
}
PRECISION: dict[str, Overrides] = {
    name: {
        "engine.dtype": weights,
        "optimizer.precision_aware": aware,
        "optimizer.grad_dtype": gradients,
        "optimizer.moment_dtype": moments,
    }
    for name, weights, aware, gradients, moments in (
        ("fp32", "fp32", False, "fp32", "fp32"),
        ("bf16", "bf16", False, "fp32", "fp32"),
        ("bf16-bf16grad", "bf16", False, "bf16", "fp32"),
        ("pa", "bf16", True, "fp32", "fp32"),
        ("pa-bf16grad", "bf16", True, "bf16", "fp32"),
        ("pa-bf16grad-bf16moments", "bf16", True, "bf16", "bf16"),
    )
}
CASES: dict[str, Overrides] = {
    f"{s}-{o}-{p}": SHARDING[s] | OFFLOAD[o] | PRECISION[p] for s in SHARDING for o in OFFLOAD for p in PRECISION
}
DEFAULT = (
    "whole-offload0-fp32",
    "whole-offload0.5-fp32",
    "whole-offload1-fp32",
    "sharded-offload0-fp32",
    "sharded-offload0.5-fp32",
    "sharded-offload1-fp32",
    "whole-offload0-bf16",
    "whole-offload1-bf16",
    "whole-offload0-pa",
    "whole-offload0-pa-bf16grad-bf16moments",
    "whole-offload0.5-pa-bf16grad",
    "whole-offload1-pa-bf16grad",
    "sharded-offload0-bf16",
    "sharded-offload1-bf16",
    "sharded-offload1-pa-bf16grad",
)
VARIED = {key for case in CASES.values() for key in case} | {"cluster.nodes"}
# What the command line may change: the plainest layout, and nothing beside the training itself
COMMON = (
    "layout.tp=1",
    "layout.pp=1",
    "layout.ep=1",
    "layout.etp=1",
    "layout.vpp=1",
    "layout.stages=",
    "trainer.validate_every=0",
    "checkpoint.contents=[model]",
    "observe.tensorboard=false",
    "observe.samples_per_step=0",
)


def benchmark(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    hw: str | None = None,
    files: Sequence[Path] = (),
    task: str = "grpo",
    cases: str | None = None,
    max_step: int | None = None,
    out: Path | None = None,
    case_timeout_s: float = 3600.0,
) -> tuple[list[Row], bool]:
    """Run the cases one after the other; their rows, and whether Ctrl-C or SIGTERM ended it early.

    Args:
        recipe, overrides, hw, files: as for `moe-rl train`; `overrides` hold for every case.
        cases: names divided by commas, or `all`; None: :data:`DEFAULT`.
        max_step: a case ends there, or at `trainer.steps` if that comes first.
        out: directory for the results, new or without any; None: a new one under runs/.
        case_timeout_s: a case that takes longer is ended.

    Raises:
        UserError: the input is wrong whatever the case; nothing has started.
    """
    names = _chosen(task, cases, max_step, case_timeout_s, overrides)
    directory = (out or Path("runs")).absolute()
    if out and ((out / TSV).exists() or out.is_file()):
        what = f"--out {out} is a file" if out.is_file() else f"--out {out} already holds results"
        raise UserError("bench.out", what, "It would be lost.", "Choose another directory.")
    common = [*COMMON, *overrides]
    arguments, refused = _plan(
        names, lambda *case: load_config(recipe, [*common, *case], hw=hw, files=files), max_step, directory
    )
    make_directory(directory)
    if out is None:
        directory = Path(tempfile.mkdtemp(prefix=f"bench-optimizer-{time.strftime('%Y%m%d-%H%M%S')}-", dir=directory))
    options = [*(["--hw", hw] if hw else []), *(word for file in files for word in ("--file", str(file)))]
    rows = [Row(name, "refused", error=refused[name]) if name in refused else Row(name) for name in names]
    with _stop_asked() as asked:
        for row in rows:
            if row.case in arguments and not asked():
                print(f"{row.case}: running", flush=True)
                _run_case(row, [recipe, *options, *common, *arguments[row.case]], directory, case_timeout_s, asked)
                print(f"  {row.status}, {row.steps} steps, {row.seconds:.0f} s  {row.error}".rstrip(), flush=True)
            write(directory, rows, _about(directory))
        draw(directory, rows)
        show(rows)
        print(f"results: {directory}")
        return rows, asked()


def _chosen(
    task: str, cases: str | None, max_step: int | None, timeout_s: float, overrides: Sequence[str]
) -> list[str]:
    """Names of the cases, once each; a UserError for what no configuration is needed to see."""
    names = list(DEFAULT) if cases is None else [name.strip() for name in cases.split(",")]
    names = list(CASES if "all" in names else dict.fromkeys(names))
    axes = "-".join("{" + ",".join(axis) + "}" for axis in (SHARDING, OFFLOAD, PRECISION))
    for option, kind, name, known, meaning in (
        ("--task", "task", task, TASKS, f"There is: {', '.join(TASKS)}."),
        *(("--cases", "case", name, CASES, f"Names are {axes}.") for name in names),
    ):
        if name not in known:
            near = nearest(name, known)
            what = f"there is no {kind} {name!r}" + (f"; nearest: {near}" if near else "")
            raise UserError(f"bench.{kind}", what, meaning, f"Correct {option}.")
    for option, value, rule in (
        ("--max-step", max_step, "bench.max_step"),
        ("--case-timeout", timeout_s, "bench.timeout"),
    ):
        if value is not None and not value >= 1:
            raise UserError(rule, f"{option} is {value:g}", "No step would be done.", f"Give {option} at least 1.")
    for key in (text.partition("=")[0].strip() for text in overrides):
        if key in VARIED:
            fix = "Leave it out, and choose the cases with --cases."
            raise UserError("bench.key", f"{key} is given for all cases", "It is what tells the cases apart.", fix)
    return names


def _plan(
    names: Sequence[str], load: Callable[..., Config], max_step: int | None, directory: Path
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The overrides of each case that can run here, and the reason of each that is refused.

    Raises:
        UserError: what is wrong does not depend on the case.
    """
    base = load()
    steps = min(base.trainer.steps, max_step or base.trainer.steps)
    ranks = base.layout.tp * base.layout.pp
    facts = None if any(model_directory(base)) else read_facts(base.model, base.model.family)
    overrides: dict[str, list[str]] = {}
    problems: dict[str, dict[tuple[str, str], Problem]] = {}
    for name, case in CASES.items():
        values = {"trainer.steps": steps, "checkpoint.every": steps, "cluster.nodes": 1, **case}
        values["cluster.gpus_per_node"] *= ranks
        overrides[name] = [f"{key}={str(value).lower()}" for key, value in values.items()]
        found = check(load(*overrides[name]), facts, run_dir=directory)
        problems[name] = {(problem.rule, problem.what): problem for problem in found}
    first, *others = problems.values()
    raise_all([problem for key, problem in first.items() if all(key in other for other in others)])
    refused = {
        name: "; ".join(f"{p.what} [{p.rule}]: {p.why}" for p in problems[name].values())
        for name in names
        if problems[name]
    }
    runnable = {name: overrides[name] for name in names if name not in refused}
    for case_overrides in list(runnable.values())[:1]:  # weights, tokenizer, verifier and data are the same for all
        read_inputs(load(*case_overrides), directory)
    return runnable, refused


def _run_case(row: Row, arguments: Sequence[str], out: Path, timeout_s: float, asked: Callable[[], bool]) -> None:
    """Run one case in a directory of its own below `out` and fill in its row; its checkpoint is not kept."""
    private = Path(tempfile.mkdtemp(prefix=f"{row.case}-", dir=out.resolve()))
    run_dir, log, scratch = private / "run", private / "output.log", private / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-m", "moe_rl.cli", "train", *arguments, "--run-dir", str(run_dir), "--resume", "never"]
    try:
        ended = watch(command, log, scratch, timeout_s, asked)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    row.status, row.seconds, row.host_gib = _status(ended), ended.seconds, ended.host_gib
    row.log = f"{private.name}/{log.name}"
    if row.status != "ok":
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = (line.removeprefix("error: ") for line in lines if line.startswith("error: "))
        row.error = next(errors, "no message; last line: " + (lines[-1] if lines else "none"))
    measure(row, run_dir)


def _status(ended: Ended) -> str:
    if ended.cut or ended.code == 0:
        return ended.cut or "ok"
    return f"killed {signal.Signals(-ended.code).name}" if ended.code < 0 else f"failed exit {ended.code}"


@contextmanager
def _stop_asked() -> Iterator[Callable[[], bool]]:
    """A function that tells whether Ctrl-C, SIGTERM or a hang-up came: nothing is interrupted, so nothing is left behind."""
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup, or a job in the background
            signal.signal(number, lambda number, _: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _about(out: Path) -> dict[str, Any]:
    """How and where the results came about."""
    manifests = (json.loads(file.read_text()) for file in out.glob("*/run/manifest.json"))
    revision = next((manifest["git"] for manifest in manifests), None)
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {"command": command, "revision": revision, **machine()}
