"""The receiving end of a weight update: copy into the live model, then prove that all of it arrived."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from moe_rl.errors import RunFailed
from moe_rl.models.digest import block_sums
from moe_rl.models.weights import Box, Part, Parts, dtype_name, torch_dtype
from moe_rl.models.wire import Stored, stored, stored_names
from moe_rl.reshard.plan import Held
from moe_rl.reshard.transport import ALIGNMENT, Item, Packet, unpack


class Receiver:
    """Puts packets into the live tensors of one model and keeps the books of each update.

    `version` is that of the last update that was proven whole, or -1: before the first, and from the first packet of
    an update until `finish` has proven it. What serves requests must look at it.
    """

    def __init__(self, parts: Parts, held: Sequence[Held] = ()) -> None:
        """`parts`: name of a checkpoint's tensor -> live blocks, the whole of what this receiver holds. `held`, where weights
        are kept encoded, declares them (see `place`): a weight's codes and scales are tensors of their own in `parts`."""
        self._parts = dict(parts)
        self._held = tuple(held)
        self._forms = {h.name: h.dtype for h in held}
        self._staged: dict[str, list[Item]] = {}
        self._pending: int | None = None
        self._last = -1
        self._proven: set[str] = set()
        self.version = -1

    def holdings(self, receiver: int) -> list[Held]:
        """What this end must be given, read from the live model; `receiver` is its number in the plan."""
        if self._held:
            return [h._replace(receiver=receiver) for h in self._held]
        return [
            Held(receiver, name, part.shape, dtype_name(part.view), part.box(name))
            for name, parts in self._parts.items()
            for part in parts
        ]

    def digests(self) -> dict[str, int]:
        """Name -> share in [0, 2**64) of the digest (`block_sums`) of what is held, from the live tensors."""
        parts = [(name, part) for name, held in self._parts.items() for part in held]
        sums = dict.fromkeys(self._parts, 0)
        for (name, _), share in zip(parts, block_sums([part for _, part in parts]), strict=True):
            sums[name] = (sums[name] + share) % (1 << 64)
        return sums

    def stage(self, packet: Packet) -> None:
        """Copy a packet's tensors into the live model. The first packet of a version begins an update.

        Raises:
            RunFailed: the packet is of an older version, or its tensors are unknown, arrived before, or of another
                shape or dtype (all named). Nothing of such a packet is copied, and the update cannot be finished.
        """
        if packet.version <= self._last or (self._pending is not None and packet.version < self._pending):
            newest = max(self._last, self._pending or 0)
            names = ", ".join(item.name for item in packet.items)
            raise self._fail(f"weights of version {packet.version} arrived after version {newest}: {names}")
        if packet.version != self._pending:
            self._staged, self._pending = {}, packet.version
            if self.version == -1:  # an update before this one was begun and never proven
                self._proven.clear()
        self.version = -1
        try:
            tensors = list(unpack(packet))
        except RunFailed as fault:
            raise self._fail(fault.what) from None
        problems = self._problems(packet.items)
        if problems:
            raise self._fail(f"version {packet.version} from rank {packet.source}: {'; '.join(problems)}")
        with torch.no_grad():
            for item, tensor in tensors:
                part = self._part(item.box)
                assert part is not None
                part.within(item.box).copy_(tensor)
                self._staged.setdefault(item.name, []).append(item)

    def _part(self, box: Box) -> Part | None:
        """The live block in which a box lies."""
        return next((part for part in self._parts[box.name] if part.holds(box)), None)

    def _problems(self, items: Iterable[Item]) -> list[str]:
        problems = []
        seen = {name: [item.box for item in staged] for name, staged in self._staged.items()}
        for item in items:
            if item.name not in self._parts:
                problems.append(f"{item.name} is not held here")
                continue
            part, before = self._part(item.box), seen.setdefault(item.name, [])
            if part is None or dtype_name(part.view) != item.dtype:
                here = " and ".join(f"{dtype_name(p.view)} {list(p.view.shape)}" for p in self._parts[item.name])
                problems.append(f"{item.name} is {item.dtype} {list(item.shape)}, here {here}")
                continue
            if any((item.box & box).numel for box in before):
                problems.append(f"{item.name} arrived twice")
            before.append(item.box)
        return problems

    def finish(self, version: int, names: Iterable[str]) -> None:
        """Prove update `version` whole: each of `names` arrived once, nothing else did, every bit is in place.

        Digests are recomputed from the live model after the last copy, so a copy that went elsewhere, a view that is
        no view and two names that share memory are seen too. The first update, and the first after a failed one, must
        bring every tensor; a later one may leave out what did not change.

        Raises:
            RunFailed: with every tensor at fault; `version` stays -1 until a later update is proven.
        """
        wanted = {tensor for name in names for tensor in stored_names(name, self._forms.get(name, ""))}
        problems = []
        if version != self._pending:
            problems.append(f"packets of version {self._pending} were staged")
        problems += _named("never arrived", wanted - self._staged.keys())
        problems += _named("were not in the plan", self._staged.keys() - wanted)
        problems += _named("have not been received since the start or the last fault", self._unproven(wanted))
        problems += _named("arrived in part", [name for name in self._staged if self._missing(name)])
        problems += _named("differ from what was sent", self._changed())
        if problems:
            raise self._fail(f"weight version {version} is not whole: {'; '.join(problems)}")
        self._proven |= wanted
        self._staged, self._pending = {}, None
        self.version = self._last = version

    def _unproven(self, wanted: set[str]) -> set[str]:
        return self._parts.keys() - self._proven - wanted

    def _missing(self, name: str) -> int:
        """Elements of a staged tensor that did not come (blocks that came do not overlap)."""
        return sum(p.view.numel() for p in self._parts[name]) - sum(item.box.numel for item in self._staged[name])

    def _changed(self) -> list[str]:
        """Staged tensors whose live blocks have another digest than what was sent of them."""
        live = dict.fromkeys(self._staged, 0)
        parts = [(name, part) for name in live for part in self._parts[name]]
        for (name, _), share in zip(parts, block_sums([part for _, part in parts]), strict=True):
            live[name] += share
        sent = {name: sum(item.digest for item in items) for name, items in self._staged.items()}
        return [name for name in live if (live[name] - sent[name]) % (1 << 64)]

    def _fail(self, what: str) -> RunFailed:
        """Forget the update, trust no tensor any more, and word the error."""
        self._staged, self._pending, self.version = {}, None, -1
        self._proven.clear()
        return RunFailed(
            "reshard.receive", what, "the rollout would sample from weights that are not the trainer's", "send it again"
        )


class Place(NamedTuple):
    """A tensor of a checkpoint in a buffer: the weight that it belongs to, what it is, its first byte."""

    weight: str
    tensor: Stored
    offset: int

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of `buffer`, uint8 [bytes]."""
        _, (_, _, extent), _ = self.tensor
        dtype = torch_dtype(self.tensor.dtype)
        return buffer[self.offset : self.offset + self.tensor.nbytes].view(dtype).view(extent)


def place(held: Iterable[Held], alignment: int = ALIGNMENT) -> tuple[list[Place], int]:
    """Where each tensor of what is held lies in one buffer, in checkpoint layout, and the buffer's bytes."""
    places, offset = [], 0
    for h in held:
        box = h.box or Box(h.name, (0,) * len(h.shape), h.shape)
        for tensor in stored(h.dtype, box, h.shape):
            places.append(Place(h.name, tensor, offset))
            offset += -(-tensor.nbytes // alignment) * alignment
    return places, offset


def placed_parts(places: Iterable[Place], buffer: torch.Tensor) -> dict[str, list[Part]]:
    """The blocks of a `Receiver` that stages into `buffer`."""
    parts: dict[str, list[Part]] = {}
    for p in places:
        parts.setdefault(p.tensor.box.name, []).append(Part(p.within(buffer), p.tensor.box.start, p.tensor.shape))
    return parts


def _named(what: str, names: Iterable[str]) -> list[str]:
    names = sorted(names)
    return [f"{len(names)} tensors {what}: {', '.join(names)}"] if names else []
