"""Processes that do not outlive the one that started them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shlex
import signal
import sys
from multiprocessing import resource_tracker
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LAUNCHER = """#!/bin/sh
exec {python} -ISc 'import ctypes, os, sys
ctypes.CDLL(None).prctl({option}, {signal})
os.execv(sys.argv[1], sys.argv[1:])' {python} "$@"
"""


def end_with_parent() -> None:
    """Have this process killed when the thread that started it ends, be it by SIGKILL (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_children_with_this(directory: Path) -> None:
    """The same, from their first instruction on, for all that `multiprocessing` spawns from now on: what a library starts so
    would otherwise wait for ever for a process that was killed, with its GPU's memory.

    A launcher is written to `directory`; where nothing there may be executed, children are left as they are.
    """
    resource_tracker.ensure_running()  # this one stays: it tidies up after a process that was killed
    launcher, python = directory / "python", shlex.quote(sys.executable)
    launcher.write_text(_LAUNCHER.format(python=python, option=_PR_SET_PDEATHSIG, signal=int(signal.SIGKILL)))
    launcher.chmod(0o700)
    if os.access(launcher, os.X_OK):
        multiprocessing.set_executable(str(launcher))
