"""Scoring a batch of completions; a reward that fails is named and counted, and never a zero."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from moe_rl.errors import RunFailed

from .judge import Verdict, judge
from .pool import Pool
from .registry import RewardItem, describe, resolve

SHOWN = 10  # errors listed in one message
MOST_WORKERS = 8


@dataclass(frozen=True)
class RewardError:
    """A completion without a reward: the item's id, the verifier's name, and what went wrong."""

    id: str
    verifier: str
    problem: str

    def __str__(self) -> str:
        return f"sample {self.id}: {self.verifier} {self.problem}"


@dataclass(frozen=True)
class Scores:
    """`rewards` and `accuracies` float64 [N], NaN where `valid` bool [N] is False; one error for each of those."""

    rewards: np.ndarray
    accuracies: np.ndarray
    valid: np.ndarray
    errors: tuple[RewardError, ...]


class BatchScorer:
    """Scores batches with one verifier, over a whole run.

    The shipped verifiers that cannot hang run here. Everything else runs in worker processes (:mod:`.pool`): an item
    past its time costs its worker's life and nothing else.

    Args:
        verifier: a name or a callable, see :func:`.registry.describe`.
        args: further arguments of the verifier.
        timeout_s: seconds one completion may take.
        on_error: ``stop`` raises on the first batch with an error, ``exclude`` returns it with the sample marked.
        workers: worker processes; None is one per core, eight at most.
        log: file for what the verifier prints; None is standard error.
        max_response: tokens of the longest response, to check `args` against.

    Raises:
        UserError: the verifier is unknown, cannot be imported or called as it would be.
    """

    def __init__(
        self,
        verifier: str | Callable[..., Any],
        args: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 10.0,
        on_error: str = "stop",
        workers: int | None = None,
        log: Path | None = None,
        max_response: int | None = None,
    ) -> None:
        if on_error not in ("stop", "exclude"):
            raise ValueError(f"on_error {on_error!r} is neither stop nor exclude")
        spec = describe(verifier, args, max_response)
        self.name, self.on_error = spec.name, on_error
        self._pool: Pool | None = None
        if spec.trusted:
            self._score = resolve(spec)
            return
        workers = workers or min(MOST_WORKERS, os.cpu_count() or 1)
        self._pool = Pool(spec, workers=workers, timeout_s=timeout_s, log=log)
        try:
            self._pool.load()
        except BaseException:
            self.close()
            raise

    def score(self, items: Sequence[RewardItem]) -> Scores:
        """Score a batch.

        Raises:
            RunFailed: a completion has no reward under ``stop``, or none has one under ``exclude``.
        """
        if self._pool:
            try:
                verdicts = self._pool.run(items)
            except BaseException:
                self.close()
                raise
        else:
            verdicts = [judge(self._score, item) for item in items]
        scores = self._collect(items, verdicts)
        if scores.errors and (self.on_error == "stop" or not scores.valid.any()):
            listed = [str(e) for e in scores.errors[:SHOWN]]
            if len(scores.errors) > SHOWN:
                listed.append(f"and {len(scores.errors) - SHOWN} more")
            raise RunFailed(
                "reward.error",
                f"the verifier {self.name} gave no reward for {len(scores.errors)} of {len(items)} completions",
                "\n       ".join(listed),
                "correct the verifier, or leave such samples out with reward.on_error=exclude"
                if self.on_error == "stop"
                else "correct the verifier: no completion of the batch has a reward",
            )
        return scores

    def _collect(self, items: Sequence[RewardItem], verdicts: Sequence[Verdict]) -> Scores:
        errors = [
            RewardError(item.id, self.name, v.problem) for item, v in zip(items, verdicts, strict=True) if v.problem
        ]
        return Scores(
            rewards=np.array([v.reward for v in verdicts], dtype=np.float64),
            accuracies=np.array([v.accuracy for v in verdicts], dtype=np.float64),
            valid=np.array([not v.problem for v in verdicts], dtype=bool),
            errors=tuple(errors),
        )

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if self._pool:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> BatchScorer:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def score_all(
    verifier: str | Callable[..., Any],
    items: Sequence[RewardItem],
    timeout_s: float = 10.0,
    on_error: str = "stop",
    workers: int | None = None,
    args: Mapping[str, Any] | None = None,
) -> Scores:
    """Score one batch; see :class:`BatchScorer`, which keeps its workers between batches."""
    with BatchScorer(verifier, args, timeout_s=timeout_s, on_error=on_error, workers=workers) as scorer:
        return scorer.score(items)
