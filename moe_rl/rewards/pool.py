"""Worker processes for verifiers that may hang or crash: each item has a deadline, and past it the worker is killed.

Workers are plain subprocesses, not forks (the driver has threads) and not multiprocessing's spawn (which runs the
user's main script again). One item is with a worker at a time, so a deadline is an item's own.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO

from moe_rl.errors import RunFailed, UserError

from .judge import Verdict, describe_exception, failed
from .registry import RewardItem, VerifierSpec

STDERR = 2
LOAD_S = 120.0  # a verifier's imports may be heavy; its items have reward.timeout_s
_START = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from moe_rl.rewards.worker import main; main(%d, %d)"


class Worker:
    """One process. `item` is the index it works on, or None; `deadline` is monotonic seconds."""

    def __init__(self, spec: bytes, log: IO[bytes] | None) -> None:
        self.connection, child = Pipe()
        reader, self._lifeline = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START % (child.fileno(), reader), json.dumps(sys.path)],
                pass_fds=(child.fileno(), reader),
                stdin=subprocess.DEVNULL,
                stdout=log or STDERR,
                stderr=log or STDERR,
                start_new_session=True,  # Ctrl-C is the driver's, and killing the group takes its children along
            )
        finally:
            child.close()
            os.close(reader)
        self.loaded = False
        self.item: int | None = None
        self.deadline = time.monotonic() + LOAD_S
        try:
            self.connection.send_bytes(spec)
        except OSError:  # it is dead already; whoever reads from it next finds out
            pass

    def kill(self, grace_s: float = 0.0) -> int:
        """End the process and its children, leaving it `grace_s` to end by itself; its exit status."""
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.connection.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        return self.process.returncode


class Pool:
    """Runs one verifier on many items, in up to `workers` processes that start when first needed and are kept.

    Args:
        spec: the verifier.
        workers: processes at most.
        timeout_s: seconds one item may take.
        log: file that what the verifier prints is appended to; None is this process's standard error.
    """

    def __init__(self, spec: VerifierSpec, *, workers: int, timeout_s: float, log: Path | None = None) -> None:
        self.spec, self.workers, self.timeout_s = spec, workers, timeout_s
        self._payload = pickle.dumps(spec)
        self._log = log.open("ab") if log else None
        self._alive: list[Worker] = []

    def load(self) -> None:
        """Start one worker and wait until it has loaded the verifier. Raises UserError where it cannot."""
        if not self._alive:
            self._alive.append(Worker(self._payload, self._log))
        first = self._alive[0]
        while not first.loaded:
            wait([first.connection], max(0.0, first.deadline - time.monotonic()))
            self._step(first, [])

    def run(self, items: Sequence[RewardItem]) -> list[Verdict]:
        """A verdict for each item, in order; one that took too long or ended its worker has a problem.

        Raises:
            UserError: the verifier cannot be loaded.
            RunFailed: it could be loaded before, and now cannot.
        """
        verdicts: list[Verdict | None] = [None] * len(items)
        todo = deque(range(len(items)))
        self._drop_dead()
        while any(v is None for v in verdicts):
            while len(self._alive) < min(self.workers, len(todo) + sum(w.item is not None for w in self._alive)):
                self._alive.append(Worker(self._payload, self._log))
            for worker in list(self._alive):
                if worker.loaded and worker.item is None and todo:
                    self._give(worker, todo, items, verdicts)
            busy = {w.connection: w for w in self._alive if w.item is not None or not w.loaded}
            left = min((w.deadline for w in busy.values()), default=0.0) - time.monotonic()
            wait(list(busy), max(0.0, left))
            for worker in busy.values():
                self._step(worker, verdicts)
        return [v for v in verdicts if v is not None]

    def close(self) -> None:
        """End all workers."""
        for worker in self._alive:
            worker.kill()
        self._alive = []
        if self._log:
            self._log.close()
            self._log = None

    def _drop_dead(self) -> None:
        for worker in [w for w in self._alive if w.process.poll() is not None]:
            self._remove(worker)

    def _remove(self, worker: Worker, grace_s: float = 0.0) -> int:
        self._alive.remove(worker)
        return worker.kill(grace_s)

    def _give(
        self, worker: Worker, todo: deque[int], items: Sequence[RewardItem], verdicts: list[Verdict | None]
    ) -> None:
        index = todo[0]
        try:
            message = self._dumps(items[index])
        except Exception as e:
            verdicts[todo.popleft()] = failed(f"could not be given its record: {describe_exception(e)}")
            return
        try:
            worker.connection.send_bytes(message)
        except OSError:  # it died between items: not this item's doing
            self._remove(worker)
            return
        todo.popleft()
        worker.item, worker.deadline = index, time.monotonic() + self.timeout_s

    def _dumps(self, item: RewardItem) -> bytes:
        if not self.spec.pickled:
            return pickle.dumps(item)
        from ray import cloudpickle  # a record given through Python may hold classes of the main script

        return cloudpickle.dumps(item)

    def _step(self, worker: Worker, verdicts: list[Verdict | None]) -> None:
        """Take a worker's answer if there is one, or its life if it is late."""
        if _readable(worker.connection):
            try:
                answer = worker.connection.recv()
            except (EOFError, OSError):
                code = self._remove(worker, grace_s=1.0)
                self._lost(worker, f"ended its process ({_exit_words(code)})", verdicts)
                return
            if worker.loaded:
                assert worker.item is not None
                verdicts[worker.item] = Verdict(*answer)
                worker.item = None
            elif answer:
                self._remove(worker)
                raise UserError(*answer)
            else:
                worker.loaded = True
        elif time.monotonic() >= worker.deadline:
            limit = self.timeout_s if worker.loaded else LOAD_S
            self._remove(worker)
            self._lost(worker, f"gave no answer within {limit:g} s and was killed", verdicts)

    def _lost(self, worker: Worker, problem: str, verdicts: list[Verdict | None]) -> None:
        if not worker.loaded:
            raise RunFailed(
                "reward.load",
                f"the verifier {self.spec.name} {problem} while it was loaded",
                "What it printed stands in the log or above.",
                "run its module alone to see why",
            )
        if worker.item is not None:
            verdicts[worker.item] = failed(problem)


def _readable(connection: Connection) -> bool:
    try:
        return connection.poll()
    except OSError:
        return True  # reset: recv will tell


def _exit_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
