"""How a bundle travels: packets of one byte buffer and an index each, made once for all who take them.

The source encodes: a packet holds tensors as the receiver keeps them, codes and block scales where it keeps codes. Which
block lies where in which packet follows from the plan alone, so both ends of a process group know it (`group.py`). Through
an object store such as Ray's a packet goes with its index, its buffer out of band (pickle protocol 5): one copy into shared
memory, and every receiver reads it where it lies.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from moe_rl.errors import RunFailed
from moe_rl.models import codec
from moe_rl.models.digest import block_sums
from moe_rl.models.weights import DTYPES, Box, Part, Parts, torch_dtype
from moe_rl.models.wire import BLOCKS, Stored, stored, wire_bytes
from moe_rl.reshard.plan import Cargo

ALIGNMENT = 64  # bytes: a cache line, and enough for any dtype
PACKET_BYTES = 256 << 20  # a packet is closed before it passes this size


class Item(NamedTuple):
    """One block of a packet: `dtype` is a short name, `offset` and `nbytes` its place in the buffer, `digest` its share in
    the digest of its tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    digest: int
    start: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.name, self.start, self.shape)


@dataclass(frozen=True)
class Packet:
    """Blocks of weight version `version` from trainer rank `source`; `buffer` is uint8 [total bytes], on any device."""

    version: int
    source: int
    items: tuple[Item, ...]
    buffer: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.version, self.source, self.items, self.buffer.cpu().numpy())


def _rebuilt(version: int, source: int, items: tuple[Item, ...], buffer: np.ndarray) -> Packet:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return Packet(version, source, items, torch.from_numpy(buffer))


class Load(NamedTuple):
    """What a packet will hold: cargo, the tensors that each block becomes with their offsets, bytes in all."""

    cargo: tuple[Cargo, ...]
    places: tuple[tuple[tuple[Stored, int], ...], ...]
    nbytes: int

    @property
    def tensors(self) -> int:
        """How many tensors it will hold."""
        return sum(map(len, self.places))


def loads(cargo: Iterable[Cargo], limit: int = PACKET_BYTES) -> Iterator[Load]:
    """Cargo dealt to packets of at most `limit` bytes, by the plan alone. A block that is larger is cut by rows, on the edges
    of its form's blocks; one row of blocks is the least that travels."""
    batch: list[Cargo] = []
    places: list[tuple[tuple[Stored, int], ...]] = []
    offset = 0
    for item in (part for whole in cargo for part in _by_rows(whole, limit)):
        tensors = stored(item.form, item.box, item.shape)
        size = sum(_padded(t.nbytes) for t in tensors)
        if batch and offset + size > limit:
            yield Load(tuple(batch), tuple(places), offset)
            batch, places, offset = [], [], 0
        at = []
        for tensor in tensors:
            at.append((tensor, offset))
            offset += _padded(tensor.nbytes)
        batch.append(item)
        places.append(tuple(at))
    if batch:
        yield Load(tuple(batch), tuple(places), offset)


def _by_rows(cargo: Cargo, limit: int) -> Iterator[Cargo]:
    box, form, shape = cargo
    nbytes = wire_bytes(form, box.start, box.extent)
    if nbytes <= limit or not box.extent:
        yield cargo
        return
    least = BLOCKS.get(form, (1,))[0]
    rows = max(1, math.floor(limit / nbytes * box.extent[0] / least)) * least
    for first in range(0, box.extent[0], rows):
        start = (box.start[0] + first, *box.start[1:])
        yield Cargo(Box(box.name, start, (min(rows, box.extent[0] - first), *box.extent[1:])), form, shape)


def _host(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def pack(
    parts: Parts,
    boxes: Sequence[Box],
    forms: Mapping[str, str],
    *,
    version: int,
    source: int,
    limit: int = PACKET_BYTES,
    buffer: Callable[[int], torch.Tensor] = _host,
) -> Iterator[Packet]:
    """Blocks of `parts` in packets, each in the form `forms[name]` that its receivers keep it in.

    The digest is taken of what travels, after encoding or the change of dtype, on the device of the weights, so the receiver
    can recompute it from its own memory. Packets (see `loads`) are made as they are asked for; `buffer(nbytes)` gives uint8
    [nbytes] to put one into.

    Raises:
        RunFailed: a block that lies in no part, or an integer tensor that does not fit its receiver's dtype.
        UserError: `codec.non_finite` for a weight to encode that holds NaN or infinity.
    """
    found = [(box, next((p for p in parts.get(box.name, ()) if p.holds(box)), None)) for box in boxes]
    absent = [box.name for box, part in found if part is None]
    if absent:
        raise RunFailed("reshard.pack", f"rank {source} was to send tensors it does not own: {', '.join(absent)}")
    for load in loads((Cargo(box, forms[box.name], part.shape) for box, part in found if part), limit):
        checks = codec.NonFinite()
        entries: list[tuple[Stored, int, torch.Tensor]] = []
        for item, places in zip(load.cargo, load.places, strict=True):
            part = next(p for p in parts[item.box.name] if p.holds(item.box))
            tensors = _encoded(part.within(item.box).detach(), item, checks)
            entries += [(t, offset, value) for (t, offset), value in zip(places, tensors, strict=True)]
        checks.raise_if_any()
        digests = block_sums([Part(value, tensor.box.start, tensor.shape) for tensor, _, value in entries])
        items = tuple(
            Item(t.box.name, t.dtype, t.box.extent, offset, t.nbytes, digest, t.box.start)
            for (t, offset, _), digest in zip(entries, digests, strict=True)
        )
        out = buffer(load.nbytes)
        for placed, (_, _, value) in zip(items, entries, strict=True):
            _at(out, placed).copy_(value)
        yield Packet(version, source, items, out)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _encoded(view: torch.Tensor, cargo: Cargo, checks: codec.NonFinite) -> tuple[torch.Tensor, ...]:
    """A block in the form that it travels in: floats encoded or rounded to nearest, integers unchanged in value."""
    form, name = cargo.form, cargo.box.name
    if form == "mxfp4":
        return codec.mxfp4_encode(view, name=name, checks=checks)
    if form in BLOCKS:
        scale = "fp32" if form == "fp8_f32" else "e8m0"
        codes, scales = codec.fp8_encode(view, scale_dtype=scale, name=name, checks=checks)
        return codes.view(torch.uint8), scales if scale == "fp32" else scales.view(torch.uint8)
    wire = view.to(torch_dtype(form))
    if DTYPES[form].integer and not wire.to(view.dtype).equal(view):
        raise RunFailed("reshard.pack", f"{name} holds integers that its receiver's {form} cannot")
    return (wire,)


def _at(buffer: torch.Tensor, item: Item) -> torch.Tensor:
    """An item's block, as a view of the packet's bytes."""
    return buffer[item.offset : item.offset + item.nbytes].view(torch_dtype(item.dtype)).view(item.shape)


def unpack(packet: Packet) -> Iterator[tuple[Item, torch.Tensor]]:
    """The blocks of a packet, as views of its buffer: read them, never write (shared memory is read-only).

    Raises:
        RunFailed: an index entry lies outside the buffer or contradicts its own shape.
    """
    for item in packet.items:
        fits = 0 <= item.offset and item.offset + item.nbytes <= packet.buffer.numel()
        if item.dtype not in DTYPES or item.nbytes != math.prod(item.shape) * DTYPES[item.dtype].size or not fits:
            what = f"the index of a packet from rank {packet.source} is damaged at {item.name}"
            raise RunFailed("reshard.packet", what, "its bytes cannot be told apart")
        yield item, _at(packet.buffer, item)
