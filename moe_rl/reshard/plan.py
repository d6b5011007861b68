"""Which trainer rank sends which blocks of which tensors to which rollout receiver. Torch-free.

The plan joins what trainer ranks own with what receivers hold. A block that several ranks own (data-parallel copies)
is sent by one of them to each receiver: copies are spread so that sources send about the same number of bytes, and so
that no rank talks to more peers than that takes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from moe_rl.errors import RunFailed
from moe_rl.models.weights import DTYPES, Box

_DIFFER = "differ between the ranks that own them"


class Owned(NamedTuple):
    """What a trainer rank has of the tensor `name` of `shape`: the block `box`, or all of it; `dtype` is a short name ("fp32")."""

    rank: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box | None = None


class Held(NamedTuple):
    """What a receiver (a rollout worker, numbered from 0) must be given of the tensor `name` of `shape`, in the dtype that
    it keeps it in: the block `box`, or all of it."""

    receiver: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box | None = None

    @property
    def nbytes(self) -> int:
        return _box(self).numel * DTYPES[self.dtype].size


def _box(item: Owned | Held) -> Box:
    return item.box or Box(item.name, (0,) * len(item.shape), item.shape)


class Transfer(NamedTuple):
    """What one rank sends to one receiver; `nbytes` in the receiver's dtypes."""

    source: int
    receiver: int
    boxes: tuple[Box, ...]
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """All transfers of a weight update, in order of source and receiver. `sources` counts ranks with nothing to send too."""

    transfers: tuple[Transfer, ...]
    sources: tuple[int, ...]

    @cached_property
    def names(self) -> dict[int, tuple[str, ...]]:
        """Receiver -> every name that it is sent, sorted."""
        out: dict[int, set[str]] = defaultdict(set)
        for transfer in self.transfers:
            out[transfer.receiver].update(box.name for box in transfer.boxes)
        return {receiver: tuple(sorted(names)) for receiver, names in sorted(out.items())}

    def of_source(self, rank: int) -> tuple[Transfer, ...]:
        return tuple(t for t in self.transfers if t.source == rank)

    @property
    def nbytes(self) -> int:
        """Bytes that one update moves, over all receivers."""
        return sum(t.nbytes for t in self.transfers)

    def summary(self) -> str:
        """A few lines for people: bytes and number of peers of each side."""
        sent = dict.fromkeys(self.sources, 0)
        received: Counter[int] = Counter()
        for t in self.transfers:
            sent[t.source] += t.nbytes
            received[t.receiver] += t.nbytes
        source_peers = Counter(t.source for t in self.transfers)
        receiver_peers = Counter(t.receiver for t in self.transfers)
        return (
            f"{len(self.sources)} trainer ranks send {_size(self.nbytes)} to {len(received)} receivers in one update\n"
            f"  a rank sends {_range(list(sent.values()))} to {_peers([source_peers[r] for r in sent])} receivers\n"
            f"  a receiver takes {_range(list(received.values()))} from {_peers(list(receiver_peers.values()))} ranks"
        )


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _range(values: list[int]) -> str:
    low, high = min(values, default=0), max(values, default=0)
    return _size(low) if low == high else f"{_size(low)} to {_size(high)}"


def _peers(values: list[int]) -> str:
    low, high = min(values, default=0), max(values, default=0)
    return str(low) if low == high else f"{low} to {high}"


def make_plan(owned: Iterable[Owned], held: Iterable[Held]) -> Plan:
    """Join the two sides; the result does not depend on the order of the arguments.

    Every element of a held block comes exactly once, from a rank that owns it: a block travels as its intersections with
    the owned ones. Blocks with the same owners are dealt out together: with at least as many receivers as owners, a
    receiver gets them all from one of these owners; with fewer, the owners share the blocks of each receiver.

    Raises:
        RunFailed: tensors that no rank owns (or not all of), that no receiver holds, that differ in shape or kind of dtype,
            or that one side lists twice; all of them are named.
    """
    owners, holders = _check(list(owned), list(held))
    groups: dict[tuple[int, ...], list[tuple[int, Box, int]]] = defaultdict(list)  # receiver, block, bytes
    for name in sorted(holders):
        for tensor in holders[name]:
            for block, having in owners[name].items():
                if (piece := _box(tensor) & block).numel:
                    size = piece.numel * DTYPES[tensor.dtype].size
                    groups[tuple(having)].append((tensor.receiver, piece, size))
    load: Counter[int] = Counter()
    sends: dict[tuple[int, int], dict[Box, int]] = defaultdict(dict)
    # Blocks with few possible senders first: those with many then level the loads out.
    for ranks, pieces in sorted(groups.items(), key=lambda item: (len(item[0]), item[0])):
        by_receiver: dict[int, list[tuple[int, Box]]] = defaultdict(list)
        for receiver, piece, size in pieces:
            by_receiver[receiver].append((-size, piece))
        parts = max(1, len(ranks) // len(by_receiver))
        sizes = {receiver: sum(size for size, _ in mine) for receiver, mine in by_receiver.items()}
        for receiver in sorted(by_receiver, key=lambda r: (sizes[r], r)):
            chosen = sorted(ranks, key=lambda rank: (load[rank], rank))[:parts]
            for size, piece in sorted(by_receiver[receiver]):
                source = min(chosen, key=lambda rank: (load[rank], rank))
                load[source] -= size
                sends[source, receiver][piece] = -size
    transfers = tuple(
        Transfer(source, receiver, tuple(sorted(sizes)), sum(sizes.values()))
        for (source, receiver), sizes in sorted(sends.items())
    )
    sources = {rank for blocks in owners.values() for having in blocks.values() for rank in having}
    return Plan(transfers, tuple(sorted(sources)))


def _check(owned: list[Owned], held: list[Held]) -> tuple[dict[str, dict[Box, list[int]]], Mapping[str, list[Held]]]:
    """Owning ranks of each block and holdings of each name, or one error for everything that does not join."""
    owners: dict[str, dict[Box, list[int]]] = defaultdict(dict)
    shapes: dict[str, Owned] = {}
    problems: dict[str, list[str]] = defaultdict(list)
    for own in sorted(owned, key=lambda o: (o.rank, o.name, _box(o))):
        first = shapes.setdefault(own.name, own)
        if (own.shape, own.dtype) != (first.shape, first.dtype):
            problems[_DIFFER].append(own.name)
        ranks = owners[own.name].setdefault(_box(own), [])
        if ranks[-1:] == [own.rank]:
            problems[f"are listed twice by rank {own.rank}"].append(own.name)
        ranks.append(own.rank)
    for name, blocks in owners.items():
        if not _tile(list(blocks), math.prod(shapes[name].shape)) and name not in problems[_DIFFER]:
            problems["are owned in blocks that leave gaps or overlap"].append(name)
    holders: dict[str, list[Held]] = defaultdict(list)
    for tensor in sorted(held, key=lambda h: (h.receiver, h.name, _box(h))):
        source = shapes.get(tensor.name)
        if source is None:
            problems[f"are held by receiver {tensor.receiver} and owned by no rank"].append(tensor.name)
            continue
        if source.shape != tensor.shape:
            shape = f"{tensor.name} ({list(source.shape)} and {list(tensor.shape)})"
            problems[f"have another shape at receiver {tensor.receiver}"].append(shape)
            continue
        if DTYPES[source.dtype].integer != DTYPES[tensor.dtype].integer:
            kinds = f"{tensor.name} ({source.dtype} and {tensor.dtype})"
            problems[f"have another kind of dtype at receiver {tensor.receiver}"].append(kinds)
        if any(h.receiver == tensor.receiver and (_box(h) & _box(tensor)).numel for h in holders[tensor.name][-1:]):
            problems[f"are listed twice by receiver {tensor.receiver}"].append(tensor.name)
        holders[tensor.name].append(tensor)
    unheld = sorted(owners.keys() - {tensor.name for tensor in held})
    if unheld:
        problems["are owned and held by no receiver"] += unheld
    problems = {kind: names for kind, names in problems.items() if names}
    if problems:
        lines = [f"{len(names)} tensors {kind}: {', '.join(names)}" for kind, names in problems.items()]
        raise RunFailed(
            "reshard.plan",
            "the trainer's weights and the rollouts' do not match:\n    " + "\n    ".join(lines),
            "an update would leave a rollout with weights that are not the trainer's",
        )
    return owners, holders


def _tile(boxes: list[Box], numel: int) -> bool:
    """Whether disjoint blocks make up a tensor of `numel` elements."""
    apart = all(not (a & b).numel for i, a in enumerate(boxes) for b in boxes[:i])
    return apart and sum(box.numel for box in boxes) == numel
