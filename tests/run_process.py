"""`moe-rl train` as a user starts it: a process with a run directory, whose every descendant can be found again.

A mark in the environment is inherited by all that a run starts, whatever session or process group it moves to, so that
leftovers are found by it. Each run has a directory of its own for temporary files.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "MOE_RL_TEST_RUN"
SHARED_MEMORY = Path("/dev/shm")


class Run:
    """A started `moe-rl train`.

    Args:
        run_dir: the run directory.
        arguments: recipe and overrides.
    """

    def __init__(self, run_dir: Path, *arguments: str, resume: str = "auto") -> None:
        self.run_dir, self.mark = run_dir, uuid.uuid4().hex
        # Ray's sockets lie below it, and a socket's path has 107 characters at most
        self.scratch = Path(tempfile.mkdtemp(prefix="mrt_", dir="/tmp"))
        self.shared_before = set(SHARED_MEMORY.iterdir())
        self.out = tempfile.TemporaryFile("w+")
        self.err = tempfile.TemporaryFile("w+")
        command = [sys.executable, "-m", "moe_rl.cli", "train", *arguments]
        environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "TMPDIR")}
        self.process = subprocess.Popen(
            [*command, "--run-dir", str(run_dir), "--resume", resume],
            stdout=self.out,
            stderr=self.err,
            env=environment | {MARK: self.mark, "TMPDIR": str(self.scratch)},
            start_new_session=True,  # a process group of its own, as a shell gives one to each job
        )

    # --------------------------------------------------------------------------------------------------- its progress
    def step(self) -> int:
        """The step that metrics.jsonl was written for last, 0 before the first."""
        rows = metrics(self.run_dir)
        return rows[-1]["step"] if rows else 0

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = 240.0) -> Any:
        """Poll until `condition` holds; fails if the run ends before."""
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended ({self.process.returncode}) before {what}:\n{self.stderr()}")
            assert time.monotonic() < deadline, f"{timeout_s} s without {what}:\n{self.stdout()}\n{self.stderr()}"
            time.sleep(0.005)
        return found

    def worker(self, name: str) -> int:
        """Process id of a worker of this attempt."""
        return json.loads((self.run_dir / "manifest.json").read_text())["workers"][name]["pid"]

    def wait_inside(self, step: int, share: float) -> None:
        """Wait until `step` has run for `share` of the time that the step before it took."""
        self.wait_for(self.running, "its workers")
        began, taken = time.monotonic(), 1.0
        for done in range(self.step() + 1, step):
            self.wait_for(lambda done=done: self.step() >= done, f"step {done}")
            taken, began = time.monotonic() - began, time.monotonic()
        while time.monotonic() < began + share * taken and self.step() < step:  # a first step takes longer than others
            time.sleep(0.005)

    def running(self) -> bool:
        """Whether this attempt's workers hold the weights: it has cut back the records and written the manifest."""
        manifest = self.run_dir / "manifest.json"
        return manifest.is_file() and session_of(self.worker("trainer_0")) == self.process.pid

    # -------------------------------------------------------------------------------------------------------- its end
    def wait(self, timeout_s: float = 240.0) -> int:
        """The exit code."""
        return self.process.wait(timeout_s)

    def stdout(self) -> str:
        self.out.seek(0)
        return self.out.read()

    def stderr(self) -> str:
        self.err.seek(0)
        return self.err.read()

    def processes(self) -> dict[int, str]:
        """Living processes of this run, the driver aside: pid -> command line.

        They are known by the mark or by the driver's session: a process that sets its title may overwrite the one, and
        a process group leader of its own leaves the other.
        """
        found = {}
        for path in Path("/proc").iterdir():
            pid = int(path.name) if path.name.isdigit() else os.getpid()
            if pid not in (self.process.pid, os.getpid()) and alive(pid):
                if session_of(pid) == self.process.pid or f"{MARK}={self.mark}" in environment_of(pid):
                    found[pid] = command_line(pid)
        return found

    def seconds_until_gone(self, limit_s: float) -> float:
        """How long the run's processes stayed after this call; fails at `limit_s`, naming them."""
        began = time.monotonic()
        while left := self.processes():
            assert time.monotonic() - began < limit_s, f"left behind after {limit_s} s: {left}"
            time.sleep(0.05)
        return time.monotonic() - began

    def temporary_files(self) -> list[str]:
        return sorted(p.name for p in self.scratch.iterdir())

    def shared_memory(self) -> set[Path]:
        """What this run left in shared memory, once its processes are gone: files that no process has mapped."""
        left = set(SHARED_MEMORY.iterdir()) - self.shared_before
        used = mapped_inodes() if left else set()
        return {path for path in left if path.exists() and path.stat().st_ino not in used}

    def clean(self) -> None:
        """End what is left and drop the temporary files: for a test's end, whatever happened in it."""
        for pid in [self.process.pid] if self.process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.out.close()
        self.err.close()


def alive(pid: int) -> bool:
    """Whether a process runs: a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def mapped_inodes() -> set[int]:
    """Inodes of the files in shared memory that a living process uses. (A semaphore is mapped under another name.)"""
    found = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = [line.split() for line in path.read_text().splitlines() if "/dev/shm/" in line]
        except OSError:
            continue
        found |= {int(line[4]) for line in lines}
    return found


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def environment_of(pid: int) -> str:
    """A process's environment as it was started, '' if it is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except (OSError, ValueError):
        return ""


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    except OSError:
        return ""


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics.jsonl."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []
    return [json.loads(line) for line in lines]


def comparable(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics that a resume must not change: all but times, memory, saves and the attempt."""
    kinds = ("time/", "memory/", "checkpoint/")
    names = ("attempt", "rollout/restarts", "sync/seconds", "sync/gbps", "tokens/per_second")
    return [{k: v for k, v in row.items() if not k.startswith(kinds) and k not in names} for row in metrics(run_dir)]


def seeded(name: str) -> random.Random:
    """Random moments that a failure can be repeated from: KILL_SEED, or drawn and printed."""
    seed = int(os.environ.get("KILL_SEED") or time.time_ns() % 10**6)
    print(f"{name}: KILL_SEED={seed}")
    return random.Random(f"{name}/{seed}")


def samples(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of samples.jsonl."""
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def latest(run_dir: Path) -> Path:
    """The checkpoint that the pointer names."""
    return run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()


def damage(checkpoint: Path) -> list[str]:
    """Files of a checkpoint that are not as its manifest says, by a count of our own."""
    listed = json.loads((checkpoint / "manifest.json").read_text())["files"]
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in checkpoint.iterdir()}
    return [name for name, entry in listed.items() if found.get(name) != entry["sha256"]]
