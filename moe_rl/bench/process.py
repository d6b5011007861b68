"""One command as a group of processes: started apart, its memory watched, and ended whole whatever it does."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

POLL_S = 0.2
SAMPLE_S = 0.5  # between two readings of memory, and at least 20 times the CPU time of one: it walks all pages
GRACE_S = 20.0  # for a driver to shut its workers down when interrupted
CLEAR_S = 30.0  # for the run's janitor to clear up after its driver
PR_SET_PDEATHSIG = 1


class Ended(NamedTuple):
    """How a command ended: `code` as of subprocess (minus the signal), `cut` is "timed out", "interrupted" or ""."""

    code: int
    cut: str
    seconds: float
    host_gib: float


def proportional_gib(processes: Sequence[psutil.Process]) -> float:
    """Proportional set size (shared pages counted once) of those processes that are still there, in GiB."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 2**30


def watch(
    command: Sequence[str], log: Path, scratch: Path, timeout_s: float, asked_to_stop: Callable[[], bool]
) -> Ended:
    """Run a command to its end, or to `timeout_s`, or until `asked_to_stop`; when this returns no process of it is left.

    Args:
        log: file for its output, standard error included.
        scratch: an existing directory of its own, for its temporary files.
    """
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should this process be killed
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # `nohup … &` starts us with it ignored, which is handed down

    # Ray's cluster at RAY_ADDRESS is others' too: its processes are not ours to measure or to end
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"TMPDIR": str(scratch)}
    began, peak, cut, due = time.monotonic(), 0.0, "", 0.0
    with log.open("wb") as output:
        child = psutil.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C on the terminal is ours to hand on
            preexec_fn=prepare,
        )
        try:
            while child.poll() is None and not cut:
                now, used = time.monotonic(), time.process_time()
                if now >= due:
                    with suppress(psutil.Error):
                        peak = max(peak, proportional_gib([child, *child.children(recursive=True)]))
                    due = now + max(SAMPLE_S, 20 * (time.process_time() - used))
                cut = "interrupted" if asked_to_stop() else "timed out" if now - began > timeout_s else ""
                time.sleep(POLL_S)
            seconds = time.monotonic() - began
        finally:
            _end(child, scratch)
    return Ended(child.returncode, cut, seconds, peak)


def _end(child: psutil.Popen, scratch: Path) -> None:
    """Interrupt the command, then kill what is left of it and all that it started, and wait until that is gone."""
    with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            child.wait(GRACE_S)
    if child.poll() is None:
        child.kill()
        child.wait()
    deadline = time.monotonic() + CLEAR_S
    while left := _descendants(child.pid, scratch):
        if time.monotonic() > deadline:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        time.sleep(POLL_S)


def _descendants(session: int, scratch: Path) -> list[psutil.Process]:
    """Living processes of a command that has ended: those of its session, and those that inherited its TMPDIR.

    A process that sets its title may overwrite its environment; one that leads a session of its own has left this one.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            ours = os.getsid(process.pid) == session or process.environ().get("TMPDIR") == str(scratch)
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
