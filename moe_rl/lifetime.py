"""Processes that do not outlive the one that started them."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Have this process killed when the thread that started it ends, be it by SIGKILL (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
