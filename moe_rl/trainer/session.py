"""A Ray cluster of this process's own: its directory, its processes, and which signals are whose."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray

from moe_rl.launch.node import make_scratch, start_janitor


class Session:
    """Ray on this machine, for this process alone: no other cluster is joined, and nothing of it outlives `end`, or by
    more than seconds this process's death.
    """

    def __init__(self) -> None:
        self.path = make_scratch()
        self._janitor = start_janitor(self.path)

    def start(self, **options: Any) -> None:
        """Start Ray; `options` go to `ray.init`."""
        with signals_held():
            ray.init(address="local", include_dashboard=False, _temp_dir=str(self.path), **options)

    def end(self) -> None:
        """Stop Ray, and see to it that all its processes are gone."""
        with _killed_when_asked(psutil.Process().children()):
            ray.shutdown()
        self._janitor.communicate()


@contextmanager
def signals_held() -> Iterator[None]:
    """While Ray starts, SIGTERM and Ctrl-C wait; then they reach the handlers that were set before.

    Ray replaces the driver's handler of SIGTERM. Its processes, which share the driver's process group, inherit the blocked
    signals: `timeout`, `kill %1` and batch systems send SIGTERM to all of a job, and a step could not be finished without
    them. An interrupt in the middle of `ray.init` can end the driver by a segmentation fault (Ray 2.60).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _killed_when_asked(processes: list[psutil.Process]) -> Iterator[None]:
    """Around Ray's shutdown, which asks one process after the other by SIGTERM and waits a second for each: they have
    that signal blocked, so each is killed as soon as it is asked.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            for process in processes:
                if _sigterm_pending(process.pid):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _sigterm_pending(pid: int) -> bool:
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return bool(int(fields["ShdPnd"], 16) >> (signal.SIGTERM - 1) & 1)
    except (OSError, KeyError):
        return False
