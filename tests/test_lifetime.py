"""Nothing that a killed process had started goes on, whenever it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.run_process import alive

PARENT = """
import multiprocessing, os, sys, time
from pathlib import Path
from moe_rl.lifetime import end_children_with_this
def child(out):
    Path(out).write_text(str(os.getpid()))
    time.sleep(600)
if __name__ == "__main__":
    if sys.argv[2] == "cover":
        end_children_with_this(Path(sys.argv[1]))
    multiprocessing.get_context("spawn").Process(target=child, args=(sys.argv[1] + "/pid",)).start()
    time.sleep(600)
"""


@pytest.mark.parametrize("cover", [True, False])
def test_a_spawned_process_ends_with_a_killed_parent(tmp_path: Path, cover: bool):
    """Without the cover it goes on: the fault is there."""
    directory = tmp_path / "a directory's"  # a name that a shell would take apart
    directory.mkdir()
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "parent.py"), str(directory), "cover" if cover else ""]
    root = Path(__file__).parent.parent
    parent = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(root)})
    pid = directory / "pid"
    until(lambda: pid.is_file() and pid.read_text())
    child = int(pid.read_text())
    parent.kill()
    parent.wait()
    if cover:
        until(lambda: not alive(child))
    else:
        time.sleep(1)
        assert alive(child)
        os.kill(child, signal.SIGKILL)


def until(condition, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
