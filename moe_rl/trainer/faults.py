"""Waiting for the workers, and telling which of them ended the run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError, WorkerCrashedError

from moe_rl.errors import MoeRLError, RunFailed

DEATHS = (RayActorError, WorkerCrashedError)
# When one rank dies its peers fail too, over the closed connection and often first: wait this long for the death itself
GRACE_S = 5.0
TAIL_LINES = 15


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last `lines` lines of a log, indented; what is wrong with the file if it cannot be read."""
    try:
        return "\n".join("    " + line for line in log.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"    ({log}: {error.strerror})"


def collect(calls: Mapping[str, Any], logs: Mapping[str, Path], *, timeout_s: float, doing: str) -> dict[str, Any]:
    """The results of all `calls` (worker name -> object reference), or the one fault that explains the failure.

    A dead process is named before the peers that failed because of it.

    Raises:
        UserError: a worker refused its input.
        RunFailed: a worker died, raised, or gave no answer in `timeout_s` seconds; with its name and log tail.
    """
    names = {reference: name for name, reference in calls.items()}
    waiting, results, faults = list(names), {}, {}
    deadline = time.monotonic() + timeout_s
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        for reference in ready:
            try:
                results[names[reference]] = ray.get(reference)
            except Exception as error:
                faults[names[reference]] = error
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if not ready or any(isinstance(error, DEATHS) for error in faults.values()):
            break
    if faults or waiting:
        raise _explain(faults, [names[reference] for reference in waiting], logs, timeout_s, doing)
    return results


def _explain(
    faults: Mapping[str, Exception], silent: list[str], logs: Mapping[str, Path], timeout_s: float, doing: str
) -> MoeRLError:
    for name, error in faults.items():
        if isinstance(error, DEATHS):
            return RunFailed(
                "worker.died",
                f"{name} died while {doing}",
                "Its process was killed or crashed; out of memory is the common cause.",
                f"See {logs[name]}, then run the same command again: it resumes from the last checkpoint.",
                log_tail=tail(logs[name]),
            )
    for name, error in faults.items():
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, MoeRLError):
            return cause
        if not isinstance(cause, GetTimeoutError):
            return RunFailed(
                "worker.raised",
                f"{name} failed while {doing}: {type(cause).__name__}: {cause}",
                "",
                f"See {logs[name]} for the traceback.",
                log_tail=tail(logs[name]),
            )
    return RunFailed(
        "worker.silent",
        f"no answer from {', '.join(silent)} in {timeout_s:.0f} s while {doing}",
        "A collective hangs or the work is larger than the limit allows.",
        "See the logs of these workers; raise engine.distributed_timeout_s or rollout.timeout_s if they were working.",
        log_tail=tail(logs[silent[0]]) if silent else "",
    )
