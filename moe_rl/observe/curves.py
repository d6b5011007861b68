"""The curves of a run, or of several beside each other, as PNG images, drawn from the keys that are there."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[dict[str, Any]]
TIMES = ("rollout", "reward", "log_prob", "update", "sync", "canary", "validation", "checkpoint")
MOST_BARS = 200  # bars are one object each; beyond this an area is as clear


@dataclass(frozen=True)
class Panel:
    """One image: file name, title, label of the y axis, and the keys drawn. `log` asks for a logarithmic axis."""

    name: str
    title: str
    unit: str
    keys: tuple[str, ...]
    log: bool = False


PANELS = (
    Panel("accuracy", "Accuracy", "share right", ("reward/accuracy", "eval/accuracy")),
    Panel("reward", "Reward", "mean reward", ("reward/mean", "eval/reward")),
    Panel("groups", "Groups without a signal", "share of groups", ("reward/std_groups_zero",)),
    Panel("loss", "Loss", "", ("actor/loss",)),
    Panel("grad_norm", "Gradient norm", "", ("actor/grad_norm",), log=True),
    Panel("entropy", "Entropy", "nats per token", ("actor/entropy",)),
    Panel("clip", "Tokens the loss clips", "share of tokens", ("actor/clip_frac",)),
    Panel("kl", "KL", "nats per token", ("kl/reference", "kl/old")),
    Panel(
        "pearson",
        "Rollout against trainer: correlation",
        "Pearson of probabilities",
        ("mismatch/pearson_prob", "sync/canary_pearson_prob"),
    ),
    Panel(
        "mismatch", "Rollout against trainer: distance", "nats", ("mismatch/k3_kl", "mismatch/logprob_abs_max"), True
    ),
    Panel("length", "Length of responses", "tokens", ("response/length_mean",)),
    Panel("cut", "Responses cut or aborted", "share", ("response/clip_ratio", "response/aborted_ratio")),
    Panel("throughput", "Throughput", "tokens per second", ("tokens/per_second",)),
    Panel("memory", "Peak memory", "GiB", ("memory/host_peak_gib", "memory/gpu_peak_gib")),
)


def series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of a key, where it is a finite number."""
    points = [(row["step"], row.get(key)) for row in rows]
    kept = [(s, float(v)) for s, v in points if isinstance(v, (int, float)) and math.isfinite(v)]
    return [s for s, _ in kept], [v for _, v in kept]


def draw(rows: Rows) -> dict[str, tuple[str, bytes]]:
    """Every panel that has data: file name -> (title, PNG)."""
    images = {p.name: (p.title, _lines(rows, p)) for p in PANELS if any(series(rows, key)[0] for key in p.keys)}
    if any(series(rows, f"time/{name}")[0] for name in TIMES):
        images["time"] = ("Time by phase", _stack(rows))
    return images


def compare(runs: Mapping[str, Rows], keys: Sequence[str]) -> bytes:
    """One image of several runs: a panel for each key that any of them has other than zero, a line for each run.

    Runs that agree would hide each other, so each is drawn thinner than the one before it.
    """
    shown = [key for key in keys if any(any(series(rows, key)[1]) for rows in runs.values())]
    columns, lines = min(2, len(shown)) or 1, -(-len(shown) // 2) or 1
    figure = _canvas(5.6 * columns, 3.2 * lines + 0.25 * -(-len(runs) // columns))
    for place, key in enumerate(shown, 1):
        axes = _axes(figure, key, "", (lines, columns, place))
        for i, (name, rows) in enumerate(runs.items()):
            width, style = 5.0 - 4.0 * i / max(len(runs) - 1, 1), ("-", "--", ":", "-.")[i // 10 % 4]
            axes.plot(*series(rows, key), label=name, color=f"C{i}", linewidth=width, linestyle=style)
    if shown:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns, fontsize=8)
    return _png(figure)


def _canvas(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, and no global state of pyplot
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _axes(figure: Any, title: str, unit: str, place: tuple[int, int, int] = (1, 1, 1)) -> Any:
    axes = figure.add_subplot(*place)
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.ticklabel_format(axis="y", useOffset=False)  # 0.9999, not 1 and an offset
    axes.xaxis.get_major_locator().set_params(integer=True)
    return axes


def _figure(title: str, unit: str) -> tuple[Any, Any]:
    figure = _canvas(5.6, 3.2)
    return figure, _axes(figure, title, unit)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _lines(rows: Rows, panel: Panel) -> bytes:
    figure, axes = _figure(panel.title, panel.unit)
    lowest = math.inf
    for key in panel.keys:
        steps, values = series(rows, key)
        if steps:
            axes.plot(steps, values, marker="o" if len(steps) < 40 else "", markersize=3, linewidth=1.3, label=key)
            lowest = min(lowest, *values)
    for step in _resumes(rows):
        axes.axvline(step - 0.5, color="grey", linestyle=":", linewidth=1)
    if panel.log and lowest > 0:
        axes.set_yscale("log")
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(fontsize=8)
    return _png(figure)


def _stack(rows: Rows) -> bytes:
    figure, axes = _figure("Time by phase", "seconds per step")
    steps = [row["step"] for row in rows]
    layers = {name: [_seconds(row, name) for row in rows] for name in TIMES}
    layers = {name: values for name, values in layers.items() if any(values)}
    if len(rows) > MOST_BARS:
        axes.stackplot(steps, *layers.values(), labels=list(layers))
    else:
        bottom = [0.0] * len(rows)
        for name, values in layers.items():
            axes.bar(steps, values, bottom=bottom, width=1.0, label=name)
            bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    axes.legend(fontsize=8)
    return _png(figure)


def _seconds(row: dict[str, Any], phase: str) -> float:
    value = row.get(f"time/{phase}")
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def _resumes(rows: Rows) -> list[int]:
    """Steps that are the first of a new attempt."""
    return [b["step"] for a, b in zip(rows, rows[1:], strict=False) if a.get("attempt") != b.get("attempt")]
