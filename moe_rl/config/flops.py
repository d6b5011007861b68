"""Floating-point operations of training on a sequence, from a model's facts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from .facts import LayerWidths, ModelFacts

_INTEGER = 8  # bytes of a value of the integer buffers, which nothing is multiplied with


@dataclass(frozen=True)
class Flops:
    """Of forward and backward, without what is computed a second time.

    A weight costs 6 for each token that meets it (2 forward, 4 backward), a frozen one 2; a token meets `top_k` experts of
    a layer, and no weight of the embedding. Attention costs 6 for each multiplication of a (query, key) pair that is not
    masked; the indexer, which is frozen, 2 for each of a (query, entry) pair, where a query has to choose at all.
    """

    token: float
    layers: tuple[LayerWidths, ...]

    @classmethod
    def of(cls, facts: ModelFacts) -> Flops:
        met = (t for t in facts.tensors if t.place != "embedding" and t.bytes != _INTEGER)
        token = sum((6.0 if t.trained else 2.0) * t.numel * (facts.top_k if t.expert else 1) for t in met)
        return cls(token, facts.layers)

    def sequence(self, length: int) -> float:
        """Of one sequence of `length` tokens."""
        total = self.token * length
        for w in self.layers:
            closed = summed(length, w.ratio, length) if w.ratio else 0
            seen = summed(length, w.ratio, w.chosen) if w.ratio and w.chosen else closed
            near = summed(length, 1, w.window + 1 if w.chunked else length)
            total += 6.0 * (w.pair_work - w.index_work) * (near + seen)
            if w.chosen and length // max(1, w.ratio) > w.chosen:
                total += 2.0 * w.index_work * closed
        return total


def summed(length: int, ratio: int, most: int) -> int:
    """The sum of min(p // ratio, most) over p = 1 .. length."""
    steps = min(length // ratio, most)
    partial = ratio * steps * (steps - 1) // 2
    return partial + steps * (length - ratio * steps + 1)
