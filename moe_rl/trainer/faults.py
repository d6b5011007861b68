"""Waiting for the workers, and telling which of them ended the run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util import list_named_actors

from moe_rl.errors import MoeRLError, RunFailed
from moe_rl.rollout.engine import ENGINE_LOST

POLL_S = 1.0
# When one rank dies its peers fail too, over the closed connection and often first: wait this long for the death itself
GRACE_S = 5.0
REGISTER_S = 1.0  # a death is in Ray's register well before this
TAIL_LINES = 15
_COLOUR = re.compile(r"\x1b\[\d+m")


class WorkersLost(RunFailed):
    """`workers` died, answer no more, or lost the engine below them: another process may take their place."""

    workers: tuple[str, ...] = ()

    @classmethod
    def of(cls, workers: Iterable[str], rule: str, what: str, why: str, fix: str, *, log_tail: str) -> WorkersLost:
        """The other arguments are RunFailed's."""
        lost = cls(rule, what, why, fix, log_tail)
        lost.workers = tuple(workers)
        return lost


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last `lines` lines of a log, indented; what is wrong with the file if it cannot be read."""
    try:
        return "\n".join("    " + line for line in log.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"    ({log}: {error.strerror})"


def collect(calls: Mapping[str, Any], logs: Mapping[str, Path], *, timeout_s: float, doing: str) -> dict[str, Any]:
    """The results of all `calls` (worker name -> object reference), or the one fault that explains the failure.

    Every worker in `logs` is watched, those without a call too, and a dead one is named before the others that failed
    because of it.

    Args:
        logs: the log of each worker that is watched, by the name of its actor.
        doing: what the calls do, to be read after "while".

    Raises:
        UserError: a worker refused its input.
        WorkersLost: workers died, gave no answer in `timeout_s` seconds or lost their engine; with their names and a log tail.
        RunFailed: a worker raised.
    """
    names = {reference: name for name, reference in calls.items()}
    waiting, results = list(names), {}
    faults: dict[str, Exception] = {}
    dead: list[str] = []
    deadline = time.monotonic() + timeout_s
    while waiting or faults:
        left = deadline - time.monotonic()
        ready, waiting = ray.wait(waiting, timeout=max(0.0, min(POLL_S, left))) if waiting else ([], [])
        for reference in ready:
            try:
                results[names[reference]] = ray.get(reference)
            except Exception as error:
                faults[names[reference]] = error
                explained = not waiting or isinstance(_cause(error), MoeRLError)
                deadline = min(deadline, time.monotonic() + (REGISTER_S if explained else GRACE_S))
        if faults or not ready:
            dead = missing(logs)
            if dead or left <= 0:
                break
            time.sleep(0.0 if waiting else 0.05)
    if dead:
        raise _died(dead, faults, logs, doing)
    if faults:
        raise _raised(faults, logs, doing)
    if waiting:
        raise _silent([names[reference] for reference in waiting], logs, timeout_s, doing)
    return results


def missing(workers: Iterable[str]) -> list[str]:
    """Those of the workers that are dead: Ray's register of actors forgets the name of one when its process ends."""
    living = set(list_named_actors())
    return [name for name in workers if name not in living]


def _cause(error: Exception) -> Exception:
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error


def _died(dead: list[str], faults: Mapping[str, Exception], logs: Mapping[str, Path], doing: str) -> WorkersLost:
    why = "Its process was killed or crashed; out of memory is the common cause."
    text = str(faults.get(dead[0], ""))
    if "creation task" in text:  # it never came to life: no log tells why
        why = text.strip().splitlines()[-1]
    return WorkersLost.of(
        dead,
        "worker.died",
        f"{' and '.join(dead)} died while {doing}",
        why,
        f"See {logs[dead[0]]}, then run the same command again: it resumes from the last checkpoint.",
        log_tail=tail(logs[dead[0]]),
    )


def _raised(faults: Mapping[str, Exception], logs: Mapping[str, Path], doing: str) -> MoeRLError:
    """The message of one fault, ours before others; another's traceback goes to its worker's log."""
    causes = {name: _cause(error) for name, error in faults.items()}
    lost = {
        name: cause for name, cause in causes.items() if isinstance(cause, MoeRLError) and cause.rule == ENGINE_LOST
    }
    for name, cause in causes.items():
        if isinstance(cause, MoeRLError) and name not in lost:
            return cause
    for name, cause in lost.items():
        return WorkersLost.of(
            lost, cause.rule, f"{name}: {cause.what} while {doing}", cause.why, cause.fix, log_tail=tail(logs[name])
        )
    name, cause = next(iter(causes.items()))
    try:
        with logs[name].open("a") as log:  # Ray hands an exception to the driver and does not print it
            log.write(_COLOUR.sub("", f"{faults[name]}\n"))
    except OSError:
        pass
    return RunFailed(
        "worker.raised",
        f"{name} failed while {doing}: {type(cause).__name__}: {cause}",
        "",
        f"See {logs[name]} for the traceback.",
        log_tail=tail(logs[name]),
    )


def _silent(silent: list[str], logs: Mapping[str, Path], timeout_s: float, doing: str) -> WorkersLost:
    return WorkersLost.of(
        silent,
        "worker.silent",
        f"no answer from {', '.join(silent)} in {timeout_s:.0f} s while {doing}",
        "A collective hangs or the work is larger than the limit allows.",
        "See the logs of these workers; raise engine.distributed_timeout_s or rollout.timeout_s if they were working.",
        log_tail=tail(logs[silent[0]]),
    )
