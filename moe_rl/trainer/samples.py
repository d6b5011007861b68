"""A step's samples, and their shape as the engine takes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moe_rl.data import Record
from moe_rl.rollout.engine import Completion
from moe_rl.trainer.worker import Rows, Sequences


@dataclass
class Sample:
    """One completion of one prompt and all that the step learns about it.

    `logprobs`, `entropy` and `reference` are the trainer's, float32 [R], one number per response token, `correction` the
    importance weights of their loss. `routes` are the experts to replay, integers [L-1, layers, k].
    `valid` is False for a sample that must not teach: aborted, or without a reward.
    """

    record: Record
    completion: Completion
    text: str
    reward: float = math.nan
    accuracy: float = math.nan
    valid: bool = True
    error: str = ""
    advantage: float = 0.0
    logprobs: np.ndarray | None = None
    entropy: np.ndarray | None = None
    reference: np.ndarray | None = None
    correction: np.ndarray | None = None
    routes: np.ndarray | None = None

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and response, int32 [L]."""
        return np.concatenate([np.asarray(self.record.prompt_tokens, np.int32), self.completion.tokens])

    @property
    def response(self) -> slice:
        """Where the response's numbers stand in an array [L-1] that speaks of tokens 1 .. L-1."""
        start = len(self.record.prompt_tokens) - 1
        return slice(start, start + len(self.completion.tokens))

    @property
    def length(self) -> int:
        return len(self.record.prompt_tokens) + len(self.completion.tokens)

    @property
    def aborted(self) -> bool:
        return self.completion.finish_reason == "aborted"

    def spread(self, values: np.ndarray | float) -> np.ndarray:
        """Response values float32 [R] (or one number for all) in an array [L-1], 0 at the prompt."""
        row = np.zeros(self.length - 1, np.float32)
        row[self.response] = values
        return row


def scored(samples: Sequence[Sample]) -> Sequences:
    """The samples' tokens, to be scored."""
    return Sequences([s.tokens for s in samples], {}, _routes(samples))


def _routes(samples: Sequence[Sample]) -> list[np.ndarray | None] | None:
    return [s.routes for s in samples] if any(s.routes is not None for s in samples) else None


def trained(samples: Sequence[Sample], weights: Sequence[float], sampled: bool = False) -> Sequences:
    """The samples with all that the loss reads; `weights[i]` is that of each response token of sample i
    before its correction. The old log-probs are the trainer's, or with `sampled` the rollout's."""
    fields: dict[str, Callable[[Sample, float], np.ndarray | float]] = {
        "mask": lambda s, w: float(s.valid),
        "weight": lambda s, w: w if s.correction is None else w * s.correction,
        "advantage": lambda s, w: s.advantage,
        "old_logprob": lambda s, w: s.completion.logprobs if sampled else 0.0 if s.logprobs is None else s.logprobs,
        "reference_logprob": lambda s, w: s.reference if s.reference is not None else 0.0,
    }
    rows = {n: [s.spread(value(s, w)) for s, w in zip(samples, weights, strict=True)] for n, value in fields.items()}
    return Sequences([s.tokens for s in samples], rows, _routes(samples))


def keep_rows(samples: Sequence[Sample], rows: Rows) -> None:
    """Leave the trainer's log-probs and entropies, by the samples' places, in the samples."""
    for i, (logprobs, entropy) in rows.items():
        s = samples[i]
        s.logprobs, s.entropy = logprobs[s.response], None if entropy is None else entropy[s.response]


def merged(ranks: Sequence[Mapping[int, np.ndarray]]) -> dict[int, np.ndarray]:
    """The choices of all layers, from those that each rank recorded."""
    found: dict[int, np.ndarray] = {}
    for routes in ranks:
        for i, route in routes.items():
            found[i] = np.maximum(found[i], route) if i in found else route
    return found
