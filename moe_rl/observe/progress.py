"""What a run is doing, for a person: a live line on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

WINDOW = 10  # steps whose mean time gives the time left
PHASES = ("rollout", "reward", "log_prob", "update", "sync", "checkpoint", "validation")
SHOWN = (
    ("reward/accuracy", "accuracy", ".3f"),
    ("reward/mean", "reward", ".3f"),
    ("eval/accuracy", "eval", ".3f"),
    ("actor/loss", "loss", ".4f"),
    ("mismatch/pearson_prob", "pearson", ".5f"),
)


class Progress:
    """Shows step, phase, the worker that took longest, times and the time left.

    Args:
        total: steps of the run.
        done: steps already done when it starts.
        console: where to; None is standard output.
    """

    def __init__(self, total: int, done: int = 0, console: Console | None = None) -> None:
        self.total, self.done = total, done
        self.console = console or Console()
        self._phase, self._since = "", time.monotonic()
        self._step_began = time.monotonic()
        self._durations: deque[float] = deque(maxlen=WINDOW)
        self._slowest: dict[str, tuple[str, float, float]] = {}
        self._last: Mapping[str, Any] = {}
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live = Live(self, console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def phase(self, name: str) -> None:
        """A phase begins (start, load, rollout, reward, log_prob, update, sync, checkpoint, validation)."""
        now = time.monotonic()
        if self._phase in ("", "start", "load", "checkpoint"):
            self._step_began = now
        self._phase, self._since = name, now
        if not self._live and name in ("start", "load"):
            self._print({"start": "starting the workers", "load": "loading the checkpoint"}[name])

    def slowest(self, name: str, seconds: Mapping[str, float]) -> None:
        """The seconds each worker spent in a phase; the longest is shown, with its lead over the shortest."""
        if seconds:
            worker = max(seconds, key=lambda w: seconds[w])
            self._slowest[name] = (worker, seconds[worker], seconds[worker] - min(seconds.values()))

    def step(self, metrics: Mapping[str, Any]) -> None:
        """A step is done, with its metrics (docs/metrics.md)."""
        now = time.monotonic()
        self._durations.append(metrics.get("time/step") or now - self._step_began)
        self.done = metrics.get("step", self.done + 1)
        self._last = metrics
        if not self._live:
            parts = [
                f"step {self.done}/{self.total}",
                *self._results(),
                self._times(),
                self._slowest_text(),
                self._left(),
            ]
            self._print("  ".join(p for p in parts if p))
        self._phase, self._since, self._step_began = "", now, now
        self._slowest = {}

    def note(self, text: str) -> None:
        """A line of its own, beside those of the steps."""
        self._print(text)

    def seconds_left(self) -> float | None:
        """Expected time to the last step: the steps left times the mean of the last ten; None before the first."""
        if not self._durations:
            return None
        return (self.total - self.done) * sum(self._durations) / len(self._durations)

    def __rich__(self) -> Group:
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self.total, completed=self.done, width=24)
        doing = f"{self._phase} {time.monotonic() - self._since:.0f} s" if self._phase else ""
        head.add_row(f"step {min(self.done + bool(self._phase), self.total)}/{self.total}", bar, doing, self._left())
        lines = [Text("  ".join(self._results())), Text("  ".join(filter(None, (self._times(), self._slowest_text()))))]
        return Group(head, *(line for line in lines if line.plain))

    def _results(self) -> list[str]:
        found = [(label, self._last.get(key), spec) for key, label, spec in SHOWN]
        return [f"{label} {value:{spec}}" for label, value, spec in found if isinstance(value, (int, float))]

    def _times(self) -> str:
        times = [(name, self._last.get(f"time/{name}")) for name in PHASES]
        parts = [f"{name} {value:.1f}" for name, value in times if isinstance(value, (int, float)) and value >= 0.05]
        whole = self._last.get("time/step")
        return f"{whole:.1f} s ({', '.join(parts)})" if isinstance(whole, (int, float)) else ""

    def _slowest_text(self) -> str:
        """The worker that kept the others waiting longest in this step."""
        if not self._slowest:
            return ""
        name, (worker, seconds, lead) = max(self._slowest.items(), key=lambda kv: (kv[1][2], kv[1][1]))
        return f"slowest {worker} in {name} {seconds:.1f} s (+{lead:.1f})"

    def _left(self) -> str:
        seconds = self.seconds_left()
        return "" if seconds is None else f"{clock(seconds)} left"

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def clock(seconds: float) -> str:
    """Seconds as 45 s, 3:05 or 2:03:05."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
