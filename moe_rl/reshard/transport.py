"""How a transfer travels: packets of one byte buffer and an index each.

A packet pickles with its buffer out of band (protocol 5), so an object store such as Ray's carries it through shared
memory: one copy into the store, and the receiver reads it where it lies. `ray.put(packet)` and `ray.get(ref)` are all
of that transport; nothing here knows of Ray.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from moe_rl.errors import RunFailed
from moe_rl.models.digest import block_sums
from moe_rl.models.weights import DTYPES, Box, Part, Parts, dtype_name, torch_dtype

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
    """Blocks of weight version `version` from trainer rank `source`; `buffer` is uint8 [total bytes]."""

    version: int
    source: int
    items: tuple[Item, ...]
    buffer: np.ndarray

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


def pack(
    parts: Parts,
    boxes: Sequence[Box],
    dtypes: Mapping[str, str],
    *,
    version: int,
    source: int,
    limit: int = PACKET_BYTES,
) -> Iterator[Packet]:
    """Copy blocks out of `parts` into packets, each in the dtype that its receiver keeps it in (`dtypes[name]`, a short
    name).

    The digest is taken after the change of dtype, so the receiver can recompute it from its own memory. A packet holds at
    least one block and else at most `limit` bytes; packets are made as they are asked for.

    Raises:
        RunFailed: a block that lies in no part, or an integer tensor that does not fit its receiver's dtype.
    """
    found = [(box, next((p for p in parts.get(box.name, ()) if p.holds(box)), None)) for box in boxes]
    absent = [box.name for box, part in found if part is None]
    if absent:
        raise RunFailed("reshard.pack", f"rank {source} was to send tensors it does not own: {', '.join(absent)}")
    batch: list[tuple[str, Part]] = []
    size = 0
    for box, part in found:
        assert part is not None
        tensor = _converted(part.within(box), dtypes[box.name], box.name)
        if batch and size + _padded(tensor.nbytes) > limit:
            yield _packet(batch, version, source)
            batch, size = [], 0
        batch.append((box.name, Part(tensor, box.start, part.shape)))
        size += _padded(tensor.nbytes)
    if batch:
        yield _packet(batch, version, source)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _converted(view: torch.Tensor, dtype: str, name: str) -> torch.Tensor:
    """The tensor in the wire's dtype: floats rounded to nearest, integers unchanged in value."""
    wire = view.detach().to(torch_dtype(dtype))
    if DTYPES[dtype].integer and not wire.to(view.dtype).equal(view):
        raise RunFailed("reshard.pack", f"{name} holds integers that its receiver's {dtype} cannot")
    return wire


def _packet(batch: list[tuple[str, Part]], version: int, source: int) -> Packet:
    digests = block_sums([part for _, part in batch])
    items, offset = [], 0
    for (name, (tensor, start, _)), digest in zip(batch, digests, strict=True):
        items.append(Item(name, dtype_name(tensor), tuple(tensor.shape), offset, tensor.nbytes, digest, start))
        offset += _padded(tensor.nbytes)
    buffer = torch.empty(offset, dtype=torch.uint8)
    for item, (_, part) in zip(items, batch, strict=True):
        _at(buffer, item).copy_(part.view)
    return Packet(version, source, tuple(items), buffer.numpy())


def _at(buffer: torch.Tensor, item: Item) -> torch.Tensor:
    """An item's block, as a view of the packet's bytes."""
    return buffer[item.offset : item.offset + item.nbytes].view(torch_dtype(item.dtype)).view(item.shape)


def unpack(packet: Packet) -> Iterator[tuple[Item, torch.Tensor]]:
    """The blocks of a packet, as views of its buffer: read them, never write (shared memory is read-only).

    Raises:
        RunFailed: an index entry lies outside the buffer or contradicts its own shape.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        buffer = torch.from_numpy(packet.buffer)
    for item in packet.items:
        fits = 0 <= item.offset and item.offset + item.nbytes <= packet.buffer.size
        if item.dtype not in DTYPES or item.nbytes != math.prod(item.shape) * DTYPES[item.dtype].size or not fits:
            what = f"the index of a packet from rank {packet.source} is damaged at {item.name}"
            raise RunFailed("reshard.packet", what, "its bytes cannot be told apart")
        yield item, _at(buffer, item)
