"""Which trainer rank sends which tensors to which rollout receiver. Torch-free.

The plan joins what trainer ranks own with what receivers hold. A tensor that several ranks own (data-parallel copies)
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
from moe_rl.models.weights import DTYPES


class Owned(NamedTuple):
    """A tensor that a trainer rank has whole; `dtype` is a short name ("fp32")."""

    rank: int
    name: str
    shape: tuple[int, ...]
    dtype: str


class Held(NamedTuple):
    """A tensor that a receiver (a rollout worker, numbered from 0) must be given, in the dtype that it keeps it in."""

    receiver: int
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].size


class Transfer(NamedTuple):
    """What one rank sends to one receiver; `nbytes` in the receiver's dtypes."""

    source: int
    receiver: int
    names: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """All transfers of a weight update, in order of source and receiver. `sources` counts ranks with nothing to send too."""

    transfers: tuple[Transfer, ...]
    sources: tuple[int, ...]

    @cached_property
    def names(self) -> dict[int, tuple[str, ...]]:
        """Receiver -> every name that it is sent, sorted."""
        out: dict[int, list[str]] = defaultdict(list)
        for transfer in self.transfers:
            out[transfer.receiver] += transfer.names
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

    Every held tensor comes exactly once, from a rank that owns it. Tensors with the same owners are dealt out together:
    with at least as many receivers as owners, a receiver gets them all from one of these owners; with fewer, the
    owners share the tensors of each receiver.

    Raises:
        RunFailed: tensors that no rank owns, that no receiver holds, that differ in shape or kind of dtype, or that one
            side lists twice; all of them are named.
    """
    owners, holders = _check(list(owned), list(held))
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in sorted(holders):
        groups[tuple(owners[name])].append(name)
    load: Counter[int] = Counter()
    sends: dict[tuple[int, int], list[Held]] = defaultdict(list)
    # Tensors with few possible senders first: those with many then level the loads out.
    for ranks, names in sorted(groups.items(), key=lambda item: (len(item[0]), item[0])):
        by_receiver: dict[int, list[Held]] = defaultdict(list)
        for name in names:
            for tensor in holders[name]:
                by_receiver[tensor.receiver].append(tensor)
        parts = max(1, len(ranks) // len(by_receiver))
        sizes = {receiver: sum(t.nbytes for t in tensors) for receiver, tensors in by_receiver.items()}
        for receiver in sorted(by_receiver, key=lambda r: (-sizes[r], r)):
            chosen = sorted(ranks, key=lambda rank: (load[rank], rank))[:parts]
            for tensor in sorted(by_receiver[receiver], key=lambda t: (-t.nbytes, t.name)):
                source = min(chosen, key=lambda rank: (load[rank], rank))
                load[source] += tensor.nbytes
                sends[source, receiver].append(tensor)
    transfers = tuple(
        Transfer(source, receiver, tuple(sorted(t.name for t in tensors)), sum(t.nbytes for t in tensors))
        for (source, receiver), tensors in sorted(sends.items())
    )
    return Plan(transfers, tuple(sorted({rank for ranks in owners.values() for rank in ranks})))


def _check(owned: list[Owned], held: list[Held]) -> tuple[dict[str, list[int]], Mapping[str, list[Held]]]:
    """Owning ranks and holdings of each name, or one error for everything that does not join."""
    owners: dict[str, list[int]] = defaultdict(list)
    shapes: dict[str, Owned] = {}
    problems: dict[str, list[str]] = defaultdict(list)
    for own in sorted(owned):
        first = shapes.setdefault(own.name, own)
        if (own.shape, own.dtype) != (first.shape, first.dtype):
            problems["differ between the ranks that own them"].append(own.name)
        if owners[own.name][-1:] == [own.rank]:
            problems[f"are listed twice by rank {own.rank}"].append(own.name)
        owners[own.name].append(own.rank)
    holders: dict[str, list[Held]] = defaultdict(list)
    for tensor in sorted(held):
        source = shapes.get(tensor.name)
        if source is None:
            problems[f"are held by receiver {tensor.receiver} and owned by no rank"].append(tensor.name)
            continue
        if source.shape != tensor.shape:
            shape = f"{tensor.name} ({list(source.shape)} and {list(tensor.shape)})"
            problems[f"have another shape at receiver {tensor.receiver}"].append(shape)
        if DTYPES[source.dtype].integer != DTYPES[tensor.dtype].integer:
            kinds = f"{tensor.name} ({source.dtype} and {tensor.dtype})"
            problems[f"have another kind of dtype at receiver {tensor.receiver}"].append(kinds)
        if holders[tensor.name] and holders[tensor.name][-1].receiver == tensor.receiver:
            problems[f"are listed twice by receiver {tensor.receiver}"].append(tensor.name)
        holders[tensor.name].append(tensor)
    unheld = sorted(owners.keys() - holders.keys())
    if unheld:
        problems["are owned and held by no receiver"] += unheld
    if problems:
        lines = [f"{len(names)} tensors {kind}: {', '.join(names)}" for kind, names in problems.items()]
        raise RunFailed(
            "reshard.plan",
            "the trainer's weights and the rollouts' do not match:\n    " + "\n    ".join(lines),
            "an update would leave a rollout with weights that are not the trainer's",
        )
    return owners, holders
