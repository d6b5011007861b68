"""The saves of a run as the driver sees them: one at a time, and none counted before it is whole on disk."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_rl.trainer.state import SHARD_DIGESTS, RunDirectory, RunState
from moe_rl.units import size_text

REPORT = "save.json"  # what the save took, by the ranks (moe_rl/engine/shards.py)
POLL_S = 0.05


class Checkpoints:
    """Saves checkpoints of a run, beside its steps where `background` is set.

    A background save is published, as any other, once the ranks' digests lie in its directory: they write them last. The
    state that goes with it is that of the save, whatever the run has become since.

    Args:
        finish: waits until the ranks have no save in flight, and raises what it failed with.
        keep: how many checkpoints are kept.
    """

    def __init__(self, run: RunDirectory, finish: Callable[[], None], keep: int, background: bool) -> None:
        self.run, self.finish, self.keep, self.background = run, finish, keep, background
        self._thread: threading.Thread | None = None
        self._abandoned = threading.Event()
        self._fault: BaseException | None = None
        self._durable: dict[str, Any] = {}

    def save(self, state: RunState, write_shards: Callable[[Path], None]) -> None:
        """Save `state` and what `write_shards` has the ranks write; a save in flight is waited for first.

        Raises:
            RunFailed: it failed, or the one before it did.
        """
        self.wait()
        began, state = time.perf_counter(), copy.deepcopy(state)
        work = self.run.begin(state, write_shards)
        if self.background:
            self._thread = threading.Thread(target=self._publish_when_whole, args=(work, state, began), daemon=True)
            self._thread.start()
        else:
            self._publish(state, began)

    def _publish(self, state: RunState, began: float) -> None:
        path = self.run.publish(state, self.keep)
        report = json.loads((path / REPORT).read_text())
        seconds = time.perf_counter() - began
        found = {"durable": state.step, "durable_seconds": seconds, **report}
        self._durable = {f"checkpoint/{name}": value for name, value in found.items()}

    def _publish_when_whole(self, work: Path, state: RunState, began: float) -> None:
        try:
            while not (work / SHARD_DIGESTS).is_file():
                if self._abandoned.wait(POLL_S):
                    return
            self._publish(state, began)
        except BaseException as error:
            self._fault = error

    def durable(self) -> dict[str, Any]:
        """The metrics of the newest checkpoint that became durable since the last call, {} if none did. Never waits.

        Raises:
            RunFailed: a save in the background could not be published.
        """
        if self._fault is not None:
            raise self._fault
        found, self._durable = self._durable, {}
        return found

    def wait(self) -> None:
        """Wait for the save in flight, if there is one, until it is durable.

        Raises:
            RunFailed: it failed.
        """
        if self._thread is not None:
            self.finish()
            self._thread.join()
            self._thread = None
        if self._fault is not None:
            raise self._fault

    def settle(self, timeout_s: float) -> None:
        """Let a save in flight become durable if it does so in time: for a run that ends by a fault of something else."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def abandon(self) -> None:
        """Leave a save in flight as it is."""
        self._abandoned.set()
        if self._thread is not None:
            self._thread.join()


def summary(metrics: dict[str, Any]) -> str:
    """A line about a checkpoint that became durable."""
    value = {name.removeprefix("checkpoint/"): number for name, number in metrics.items()}
    return (
        f"checkpoint of step {value['durable']} is on disk: {size_text(value['bytes'])}, {value['write_seconds']:.1f} s"
        f" of writing, whole after {value['durable_seconds']:.1f} s; above what was in use: host"
        f" {value['host_peak_gib']:.2f} GiB of a rank (staged by all {value['staged_gib']:.2f}), GPU"
        f" {value['gpu_peak_gib']:.2f} GiB"
    )
