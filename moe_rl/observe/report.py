"""report.html of a run: summary, curves, times, versions and configuration in one file that needs nothing beside it."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_rl.errors import UserError

from .curves import TIMES, Rows, draw, series
from .metrics import METRICS, SAMPLES, read_jsonl
from .progress import clock

WINDOW = 10  # steps at either end that a mean is taken over
SAMPLES_SHOWN = 8

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.5em 0}td,th{border:1px solid #ccc;padding:.2em .7em;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}.curves img{width:49%;min-width:380px}
pre{background:#f6f6f6;padding:1em;overflow-x:auto;font-size:12px}.note{color:#a00}
"""


def build(run_dir: str | Path) -> Path:
    """Write ``report.html`` and ``report/*.png`` into a run directory; the path of the page.

    Half-written lines and missing keys are left out, and named on the page where they are lines.

    Raises:
        UserError: the directory holds no run, or one that finished no step, or cannot be written.
    """
    run = Path(run_dir)
    if not (run / METRICS).is_file():
        raise UserError(
            "report.run_dir",
            f"{run} holds no {METRICS}",
            "It is not there, or is no run's directory." if not run.is_dir() else "It is no run's directory.",
            "give the directory that `moe-rl train` wrote",
        )
    lines = read_jsonl(run / METRICS)
    rows = sorted((r for r in lines.rows if isinstance(r.get("step"), int)), key=lambda r: r["step"])
    if not rows:
        raise UserError("report.empty", f"{run / METRICS} holds no step", "The run finished none.", "let it finish one")
    images = draw(rows)
    page = _page(run, rows, lines.damaged, images)
    try:
        (run / "report").mkdir(exist_ok=True)
        for name, (_, png) in images.items():
            (run / "report" / f"{name}.png").write_bytes(png)
        (run / "report.html").write_text(page, encoding="utf-8")
    except OSError as e:
        raise UserError("report.write", f"cannot write into {run}: {e.strerror}", "", "make it writable") from None
    return run / "report.html"


def _page(run: Path, rows: Rows, damaged: list[int], images: dict[str, tuple[str, bytes]]) -> str:
    manifest = _manifest(run)
    parts = [
        f"<h1>{html.escape(run.resolve().name)}</h1>",
        *(
            f"<p class=note>{len(damaged)} damaged lines of {METRICS} were left out: {damaged}</p>"
            for _ in [0]
            if damaged
        ),
        "<h2>Summary</h2>",
        _table(_summary(rows)),
        "<h2>Curves</h2><div class=curves>",
        *(
            f'<img alt="{html.escape(title)}" src="data:image/png;base64,{_base64(png)}">'
            for title, png in images.values()
        ),
        "</div>",
        "<h2>Time by phase</h2>",
        _table(_times(rows), ("phase", "mean, s", "share")),
        _samples(run),
        "<h2>Versions and layout</h2>",
        _table(_flat(manifest)) if manifest else "<p>The run left no manifest.json.</p>",
        "<h2>Configuration</h2>",
        _configuration(run),
    ]
    title = html.escape(run.resolve().name)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>{''.join(parts)}"
    )


def _summary(rows: Rows) -> list[tuple[str, str]]:
    def ends(key: str) -> str:
        values = series(rows, key)[1]
        if not values:
            return "-"
        first, last = _mean(values[:WINDOW]), _mean(values[-WINDOW:])
        return f"{first:.4g} → {last:.4g} ({last - first:+.4g})"

    def extreme(key: str, choose: Any) -> str:
        values = series(rows, key)[1]
        return f"{choose(values):.6g}" if values else "-"

    evals = series(rows, "eval/accuracy")
    walls = series(rows, "time/wall")[1]
    attempts = [int(a) for a in series(rows, "attempt")[1]]
    return [
        ("Steps", f"{rows[0]['step']} to {rows[-1]['step']}"),
        ("Attempts", str(max(attempts)) if attempts else "-"),
        (f"reward/accuracy, first {WINDOW} → last {WINDOW} steps", ends("reward/accuracy")),
        (f"reward/mean, first {WINDOW} → last {WINDOW} steps", ends("reward/mean")),
        (
            "eval/accuracy, first → last",
            f"{evals[1][0]:.4g} (step {evals[0][0]}) → {evals[1][-1]:.4g} (step {evals[0][-1]})" if evals[0] else "-",
        ),
        ("response/length_mean, first → last", ends("response/length_mean")),
        ("mismatch/pearson_prob, lowest", extreme("mismatch/pearson_prob", min)),
        ("mismatch/k3_kl, highest", extreme("mismatch/k3_kl", max)),
        ("time/wall", clock(walls[-1]) if walls else "-"),
        ("time/step, mean", extreme("time/step", _mean) + " s"),
        ("tokens/per_second, mean", extreme("tokens/per_second", _mean)),
        ("memory/host_peak_gib", extreme("memory/host_peak_gib", max)),
        ("memory/gpu_peak_gib", extreme("memory/gpu_peak_gib", max)),
        ("memory/gpu_reserved_peak_gib", extreme("memory/gpu_reserved_peak_gib", max)),
    ]


def _times(rows: Rows) -> list[tuple[str, str, str]]:
    whole = sum(series(rows, "time/step")[1])
    totals = [(name, sum(series(rows, f"time/{name}")[1])) for name in TIMES]
    return [
        (name, f"{total / len(rows):.2f}", f"{total / whole:.1%}" if whole else "-") for name, total in totals if total
    ]


def _samples(run: Path) -> str:
    """The last step's samples, as text."""
    rows = [r for r in read_jsonl(run / SAMPLES).rows if isinstance(r.get("step"), int)]
    if not rows:
        return ""
    last = max(r["step"] for r in rows)
    shown = [r for r in rows if r["step"] == last][:SAMPLES_SHOWN]
    columns = ("prompt", "response", "answer", "reward")
    return f"<h2>Samples of step {last}</h2>" + _table(
        [tuple(str(r.get(c, "")) for c in columns) for r in shown], columns
    )


def _configuration(run: Path) -> str:
    path = run / "config.resolved.yaml"
    if not path.is_file():
        return "<p>The run left no config.resolved.yaml.</p>"
    return (
        f"<details><summary>{path.name}</summary><pre>{html.escape(path.read_text(errors='replace'))}</pre></details>"
    )


def _manifest(run: Path) -> dict[str, Any]:
    try:
        content = json.loads((run / "manifest.json").read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """A nested object as rows of dotted names; a list of plain values is one row."""
    if isinstance(value, dict):
        return [row for key, v in value.items() for row in _flat(v, f"{prefix}.{key}" if prefix else str(key))]
    return [(prefix, "\n".join(map(str, value)) if isinstance(value, list) else str(value))]


def _table(rows: Iterable[tuple[str, ...]], head: tuple[str, ...] = ()) -> str:
    def cell(i: int, text: str) -> str:
        number = " class=n" if i and _is_number(text) else ""
        return f"<td{number}>{html.escape(text).replace(chr(10), '<br>')}</td>"

    top = "<tr>" + "".join(f"<th>{html.escape(h)}</th>" for h in head) + "</tr>" if head else ""
    body = "".join("<tr>" + "".join(cell(i, t) for i, t in enumerate(row)) + "</tr>" for row in rows)
    return f"<table>{top}{body}</table>"


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text.rstrip("%")))
    except ValueError:
        return False


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _base64(png: bytes) -> str:
    return base64.b64encode(png).decode()
