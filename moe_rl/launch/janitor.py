"""A small process that outlives the driver by a moment, however the driver ends, and clears away its Ray session.

The kernel kills Ray's servers with the driver, and its workers follow; its agents would stay for a minute, and the
session's directory for ever. Run as a script, by the interpreter alone: ``python -I -S janitor.py DIRECTORY``; it acts
when its standard input closes.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

LIMIT_S = 30.0


def users(directory: str) -> list[int]:
    """Processes of the session: Ray's by their title or arguments, with a file below `directory` open as each logs there."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            command = (process / "cmdline").read_bytes()
            if (command.startswith(b"ray::") or directory.encode() in command) and any(
                os.readlink(entry.path).startswith(directory) for entry in os.scandir(process / "fd")
            ):
                found.append(int(process.name))
        except (OSError, ValueError):  # it is gone, is another user's, or is no process
            pass
    return found


def clear(directory: str) -> None:
    """Kill the users of a session's directory and remove it."""
    deadline = time.monotonic() + LIMIT_S
    while (pids := users(directory)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        time.sleep(0.05)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    clear(sys.argv[1] + os.sep)
