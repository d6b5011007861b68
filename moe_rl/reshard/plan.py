"""Which trainer rank sends which blocks of which tensors to which rollout receiver. Torch-free.

The plan joins what trainer ranks own with what receivers hold. A block that several ranks own (data-parallel copies)
is sent by one of them to each receiver: copies are spread so that sources send about the same number of bytes, and so
that no rank talks to more peers than that takes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from moe_rl.errors import RunFailed
from moe_rl.models.weights import Box
from moe_rl.models.wire import BLOCKS, cut_inside, is_integer, wire_bytes
from moe_rl.units import size_text

SLACK = 1.02  # how far an owner may pass its equal part for a sender that is nearer or a peer already

_DIFFER = "differ between the ranks that own them"


class Owned(NamedTuple):
    """What a trainer rank has of the tensor `name` of `shape`: the block `box`, or all of it; `dtype` is a short name ("fp32")."""

    rank: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box | None = None


class Held(NamedTuple):
    """What a receiver (a rollout worker, numbered from 0) must be given of the tensor `name` of `shape`, in the form that
    it keeps it in: the block `box`, or all of it. `dtype` is a short name, or one of `wire.BLOCKS` for codes and scales."""

    receiver: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box | None = None

    @property
    def nbytes(self) -> int:
        return wire_bytes(self.dtype, _box(self).start, _box(self).extent)


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
    topology: Topology | None = None

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
            f"{len(self.sources)} trainer ranks send {size_text(self.nbytes)} to {len(received)} receivers in one update\n"
            f"  a rank sends {range_text(sent.values())} to {peers_text([source_peers[r] for r in sent])} receivers\n"
            f"  a receiver takes {range_text(received.values())} from {peers_text(receiver_peers.values())} ranks"
        )


class Cargo(NamedTuple):
    """A block on its way: in which form it travels, and the shape of the whole tensor."""

    box: Box
    form: str
    shape: tuple[int, ...]


class Bundle(NamedTuple):
    """Blocks that one source makes once, for all of `receivers`, which take them in the same form. `round` orders bundles:
    in a round no source and no receiver has a second one, so that who goes through its own in this order never waits
    for one that waits for it."""

    round: int
    source: int
    receivers: tuple[int, ...]
    cargo: tuple[Cargo, ...]


def in_bundles(plan: Plan, held: Sequence[Share]) -> tuple[Bundle, ...]:
    """A plan's transfers by what is the same for several receivers, in order of rounds and sources."""
    forms: dict[int, dict[str, tuple[tuple[int, ...], str]]] = {}
    for share in held:
        forms |= dict.fromkeys(share.ranks, {name: (shape, dtype) for name, shape, dtype, _ in share.tensors})
    wanted: dict[tuple[int, Cargo], list[int]] = defaultdict(list)
    for source, receiver, boxes, _ in plan.transfers:
        here = forms[receiver]
        for box in boxes:
            shape, form = here[box.name]
            wanted[source, Cargo(box, form, shape)].append(receiver)
    cargo: dict[tuple[int, tuple[int, ...]], list[Cargo]] = defaultdict(list)
    for (source, item), takers in wanted.items():
        cargo[source, tuple(takers)].append(item)
    sizes = {key: sum(wire_bytes(c.form, c.box.start, c.box.extent) for c in items) for key, items in cargo.items()}
    busy: Counter[tuple[str, int]] = Counter()  # of each side's ranks the rounds that are taken, a bit each
    out = []
    for source, receivers in sorted(cargo, key=lambda key: (-sizes[key] * len(key[1]), key)):
        ends = [("source", source), *(("receiver", r) for r in receivers)]
        taken = 0
        for end in ends:
            taken |= busy[end]
        first = (~taken & (taken + 1)).bit_length() - 1
        for end in ends:
            busy[end] |= 1 << first
        out.append(Bundle(first, source, receivers, tuple(sorted(cargo[source, receivers]))))
    return tuple(sorted(out))


def range_text(values: Collection[int]) -> str:
    low, high = min(values, default=0), max(values, default=0)
    return size_text(low) if low == high else f"{size_text(low)} to {size_text(high)}"


def peers_text(values: Collection[int]) -> str:
    low, high = min(values, default=0), max(values, default=0)
    return str(low) if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class Topology:
    """Where ranks stand: `per_node` of each side on a node, in order. Colocated, trainer rank r and receiver r share a GPU;
    else the two sides have nodes of their own."""

    per_node: int = 8
    colocated: bool = True

    def near(self, source: int, receiver: int) -> int:
        """2 on one GPU, 1 on one node (NVLink), 0 over the network."""
        if not self.colocated or source // self.per_node != receiver // self.per_node:
            return 0
        return 1 + (source == receiver)


class Share(NamedTuple):
    """Ranks (of one side) that hold exactly the same: data-parallel copies of a trainer's share, or a receiver of each
    replica. `tensors` are (name, shape, dtype, block), sorted."""

    ranks: tuple[int, ...]
    tensors: tuple[tuple[str, tuple[int, ...], str, Box], ...]


def shares(items: Iterable[Owned | Held]) -> list[Share]:
    """What each rank lists, as few shares as there are different lists. A full-size model has millions of (rank, tensor)
    pairs and a few hundred shares."""
    lists: dict[int, list[tuple[str, tuple[int, ...], str, Box]]] = defaultdict(list)
    for item in items:
        lists[item[0]].append((item.name, item.shape, item.dtype, _box(item)))
    ranks: dict[tuple[tuple[str, tuple[int, ...], str, Box], ...], list[int]] = defaultdict(list)
    for rank in sorted(lists):
        ranks[tuple(sorted(lists.pop(rank)))].append(rank)
    return [Share(tuple(having), tensors) for tensors, having in ranks.items()]


def make_plan(owned: Iterable[Owned], held: Iterable[Held], topology: Topology | None = None) -> Plan:
    """Join the two sides; the result does not depend on the order of the arguments. See :func:`plan_shares`."""
    return plan_shares(shares(owned), shares(held), topology)


def plan_shares(owned: Sequence[Share], held: Sequence[Share], topology: Topology | None = None) -> Plan:
    """Who sends what to whom.

    Every element of a held block comes exactly once, from a rank that owns it: a block travels as its intersections with
    the owned ones. Blocks with the same owners are dealt out together, those with few possible senders first, so that
    those with many level the loads out: with at least as many receivers as owners, a receiver gets them all from one of
    these owners; with fewer, the owners share the blocks of each receiver. Among owners that would not pass their equal
    part by more than `SLACK`, one on the receiver's own GPU or node comes first, then one that sends to it already.

    Raises:
        RunFailed: tensors that no rank owns (or not all of), that no receiver holds, that differ in shape or kind of dtype,
            or that one side lists twice; blocks to encode whose edge shares a scale. All of them are named.
    """
    groups = _join(owned, held)
    load: Counter[int] = Counter()
    sends: dict[tuple[int, int], list[_Pieces]] = defaultdict(list)
    for ranks, bundles in sorted(groups.items(), key=lambda item: (len(item[0]), item[0])):
        receivers = sorted((-b.nbytes, r, b) for share, b in bundles.items() for r in held[share].ranks)
        parts = max(1, len(ranks) // len(receivers))
        total = sum(load[rank] for rank in ranks) - sum(size for size, *_ in receivers)
        limit = SLACK * total / len(ranks)
        for size, receiver, bundle in receivers:
            if parts == 1:
                rates = []
                for rank in ranks:
                    over, near = load[rank] - size > limit, topology.near(rank, receiver) if topology else 0
                    rates.append((over, -near, over or (rank, receiver) not in sends, load[rank], rank))
                source = min(rates)[-1]
                load[source] -= size
                sends[source, receiver].append(bundle)
                continue
            chosen = sorted(ranks, key=lambda rank: (load[rank], rank))[:parts]
            for piece, nbytes in sorted(bundle.pieces, key=lambda p: (-p[1], p[0])):
                source = min(chosen, key=lambda rank: (load[rank], rank))
                load[source] += nbytes
                sends[source, receiver].append(_Pieces([(piece, nbytes)]))
    joined: dict[tuple[int, ...], tuple[Box, ...]] = {}  # replicas get the same blocks: one tuple for all of them

    def boxes(parts: list[_Pieces]) -> tuple[Box, ...]:
        key = tuple(map(id, parts))
        if key not in joined:
            joined[key] = tuple(sorted(box for part in parts for box, _ in part.pieces))
        return joined[key]

    transfers = tuple(
        Transfer(source, receiver, boxes(parts), sum(part.nbytes for part in parts))
        for (source, receiver), parts in sorted(sends.items(), key=lambda item: item[0])
    )
    return Plan(transfers, tuple(sorted(rank for share in owned for rank in share.ranks)), topology)


class _Pieces:
    """Blocks that travel together, with the bytes of each."""

    def __init__(self, pieces: list[tuple[Box, int]]) -> None:
        self.pieces = pieces

    @cached_property
    def nbytes(self) -> int:
        return sum(size for _, size in self.pieces)

    def __lt__(self, other: object) -> bool:
        return False  # in a sort by size and receiver it never decides


def _join(owned: Sequence[Share], held: Sequence[Share]) -> dict[tuple[int, ...], dict[int, _Pieces]]:
    """Owning ranks -> number of a share of receivers -> the blocks that these ranks own and those receivers hold."""
    blocks = _check(owned, held)
    ranks_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    groups: dict[tuple[int, ...], dict[int, _Pieces]] = defaultdict(dict)
    shared: list[str] = []
    for i, share in enumerate(held):
        for name, shape, dtype, wanted in share.tensors:
            for block, having in blocks[name].items():
                piece = wanted if wanted == block else wanted & block
                if not piece.numel:
                    continue
                if dtype in BLOCKS and (where := cut_inside(dtype, piece, shape)):
                    shared.append(f"{where} ({dtype})")
                key = tuple(having)
                if key not in ranks_of:
                    ranks_of[key] = tuple(sorted(rank for k in key for rank in owned[k].ranks))
                pieces = groups[ranks_of[key]].setdefault(i, _Pieces([])).pieces
                pieces.append((piece, wire_bytes(dtype, piece.start, piece.extent)))
    if shared:
        raise RunFailed(
            "reshard.blocks",
            f"{len(shared)} blocks cannot be encoded where they are:\n    " + "\n    ".join(shared),
            "Values under one scale lie on two ranks, or go to two, and neither knows the scale.",
            "Use a smaller layout.tp, layout.etp or rollout.tp.",
        )
    return groups


def _check(owned: Sequence[Share], held: Sequence[Share]) -> dict[str, dict[Box, list[int]]]:
    """Numbers of the shares that own each block of each name, or one error for everything that does not join."""
    owners: dict[str, dict[Box, list[int]]] = defaultdict(dict)
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    problems: dict[str, list[str]] = defaultdict(list)
    for i, share in enumerate(owned):
        for name, shape, dtype, box in share.tensors:
            if shapes.setdefault(name, (shape, dtype)) != (shape, dtype):
                problems[_DIFFER].append(name)
            having = owners[name].setdefault(box, [])
            if having[-1:] == [i]:
                problems[f"are listed twice by rank {share.ranks[0]}"].append(name)
            having.append(i)
    for name, blocks in owners.items():
        if not _tile(list(blocks), math.prod(shapes[name][0])) and name not in problems[_DIFFER]:
            problems["are owned in blocks that leave gaps or overlap"].append(name)
    seen: set[str] = set()
    for share in held:
        receiver, last = share.ranks[0], Box("", (), ())
        for name, shape, dtype, box in share.tensors:
            source = shapes.get(name)
            if source is None:
                problems[f"are held by receiver {receiver} and owned by no rank"].append(name)
                continue
            seen.add(name)
            if source[0] != shape:
                problems[f"have another shape at receiver {receiver}"].append(
                    f"{name} ({list(source[0])} and {list(shape)})"
                )
                continue
            if is_integer(source[1]) != is_integer(dtype):
                problems[f"have another kind of dtype at receiver {receiver}"].append(
                    f"{name} ({source[1]} and {dtype})"
                )
            if last.name == name and (last & box).numel:
                problems[f"are listed twice by receiver {receiver}"].append(name)
            last = box
    unheld = sorted(owners.keys() - seen)
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
    return owners


def _tile(boxes: list[Box], numel: int) -> bool:
    """Whether disjoint blocks make up a tensor of `numel` elements."""
    apart = all(not (a & b).numel for i, a in enumerate(boxes) for b in boxes[:i])
    return apart and sum(box.numel for box in boxes) == numel
