"""Cutting a batch: into minibatches (one optimizer step each), and those into balanced micro-batches. Plain Python.

Everything is a function of its arguments, ties included, so that each rank and each resumed run cuts alike.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatch:
    """Indices into the given lengths, ascending. A filler repeats a sample and must be given weight 0."""

    indices: tuple[int, ...]
    filler: bool = False


def micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    dp: int = 1,
    multiple_of: int = 1,
    cost: Callable[[int], float] = float,
) -> list[list[MicroBatch]]:
    """Cut samples into micro-batches under a token budget, balanced, the same count on every data-parallel rank.

    Longest first, each sample goes to the cheapest micro-batch that has room for it (Graham 1969: where all have, the dearest is
    at most 4/3 of the best possible). The count starts at the least the budget allows and grows by dp * multiple_of until
    all fit. Whole micro-batches are then dealt to ranks the same way, dearest first, so that ranks finish together.

    Each index stands in exactly one micro-batch that is no filler. Where there are fewer samples than slots, fillers
    repeat the shortest sample: every rank must run the same number of micro-batches, or collectives hang.

    Args:
        lengths: tokens of each sample, at least 1; not empty.
        max_tokens: budget of one micro-batch. A longer sample stands alone.
        dp: data-parallel ranks.
        multiple_of: the count per rank is a multiple of this (the pipeline size under an interleaved schedule).
        cost: what a sample of a length takes, above 0 and growing with it (`config.flops`); its tokens by default.

    Returns:
        For each rank its micro-batches, dearest first, fillers last.

    Raises:
        ValueError: an argument is below 1, or `lengths` is empty.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError("lengths must not be empty and each at least 1")
    if min(max_tokens, dp, multiple_of) < 1:
        raise ValueError(f"max_tokens={max_tokens}, dp={dp}, multiple_of={multiple_of} must each be at least 1")
    costs = [cost(length) for length in lengths]
    step = dp * multiple_of
    least = -(-sum(min(length, max_tokens) for length in lengths) // max_tokens)
    slots = -(-least // step) * step
    while (bins := _fill(lengths, costs, max_tokens, slots)) is None:
        slots += step
    packed = [MicroBatch(tuple(sorted(b))) for b in bins if b]
    shortest = min(range(len(lengths)), key=lambda i: (lengths[i], i))
    packed += [MicroBatch((shortest,), filler=True)] * (slots - len(packed))
    return _deal(packed, costs, dp)


def _fill(lengths: Sequence[int], costs: Sequence[float], max_tokens: int, slots: int) -> list[list[int]] | None:
    """Longest-processing-time assignment to `slots` bins, or None where a sample has no room in any."""
    bins: list[list[int]] = [[] for _ in range(slots)]
    loads = [(0.0, b, 0) for b in range(slots)]  # cost, bin, tokens
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        full = []
        while loads and loads[0][2] and loads[0][2] + lengths[i] > max_tokens:
            full.append(heapq.heappop(loads))
        if not loads:
            return None
        load, b, tokens = loads[0]
        bins[b].append(i)
        heapq.heapreplace(loads, (load + costs[i], b, tokens + lengths[i]))
        for entry in full:
            heapq.heappush(loads, entry)
    return bins


def _deal(packed: list[MicroBatch], costs: Sequence[float], dp: int) -> list[list[MicroBatch]]:
    """Deal micro-batches to ranks: dearest first to the rank with least so far that has room for another."""
    sums = {m: sum(costs[i] for i in m.indices) for m in packed}
    room = len(packed) // dp
    ranks: list[list[MicroBatch]] = [[] for _ in range(dp)]
    open_ranks = [(0.0, r) for r in range(dp)]
    for m in sorted(packed, key=lambda m: (m.filler, -sums[m], m.indices)):
        load, r = heapq.heappop(open_ranks)
        ranks[r].append(m)
        if len(ranks[r]) < room:
            heapq.heappush(open_ranks, (load + sums[m], r))
    return ranks


def minibatches(n: int, count: int, *, group: int = 1, seed: int = 0) -> list[list[int]]:
    """Cut n samples into `count` minibatches of equal size, give or take one group; each sample in exactly one.

    Groups (the samples of one prompt, side by side) stay whole and are shuffled by `seed`; with one minibatch the order
    is plain. Pass a seed that tells steps and epochs apart.

    Args:
        n: samples, a multiple of `group`.
        count: minibatches, at most n / group.

    Returns:
        Sample indices of each minibatch, ascending.

    Raises:
        ValueError: the numbers do not fit.
    """
    if group < 1 or count < 1 or n % group or n // group < count:
        raise ValueError(f"{n} samples in groups of {group} do not make {count} minibatches")
    groups = list(range(n // group))
    if count > 1:
        groups.sort(key=lambda g: hashlib.blake2b(f"{seed}/{g}".encode(), digest_size=8).digest())
    cuts = [len(groups) * k // count for k in range(count + 1)]
    return [
        [g * group + i for g in sorted(groups[start:end]) for i in range(group)]
        for start, end in zip(cuts, cuts[1:], strict=False)
    ]
