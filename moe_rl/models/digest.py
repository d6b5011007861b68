"""A 64-bit fingerprint of a tensor's bits, computed where the tensor lives.

Elements are read as signed words of at most 32 bits (8-byte elements as two), each is multiplied by a pseudo-random
odd weight of its position, and the products are added modulo 2**64. A weight is odd, so no single changed word can go
unseen; it is pseudo-random in the position, so two words that changed places go unseen with a chance of about 2**-32.
The dtype and the shape are hashed in. What the bits mean plays no part: 0.0 and -0.0 differ, NaN payloads count.

The weight of word i is table[i % CHUNK] * chunk_weight(i // CHUNK): one table fits a cache and serves every tensor.
The sum over a block of a tensor, weighted by positions in the whole, is its share of the digest: the shares of blocks
that tile the tensor add up to it (`block_sums`, `whole_digest`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from moe_rl.models.weights import Part

CHUNK = 1 << 16  # words under one table
_BLOCK = 16 * CHUNK  # words in flight at a time: 8 MiB of products
_MASK = (1 << 64) - 1
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_TABLE_SEED, _CHUNK_SEED = 0x6D6F655F726C, 0x64696765737473


def mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) on uint64, elementwise."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def odd_weights(seed: int, start: int, count: int) -> np.ndarray:
    """uint64 [count]: the odd pseudo-random weights of positions `start` to `start + count - 1`."""
    with np.errstate(over="ignore"):
        positions = np.arange(start, start + count, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
    return mix64(positions ^ np.uint64(seed)) | np.uint64(1)


@lru_cache(maxsize=16)
def _table(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(odd_weights(_TABLE_SEED, 0, CHUNK).view(np.int64)).to(device)


def header(dtype: str, shape: Iterable[int]) -> int:
    """The part of a digest that dtype (torch's name, "bfloat16") and shape contribute."""
    text = f"{dtype}{list(shape)}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """int64 scalar on the tensor's device: the sum over its words, wrapping as int64 does."""
    flat = tensor.detach().reshape(-1)
    words = flat.view(_WORDS[tensor.element_size()])
    table = _table(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _BLOCK):
        block = words[start : start + _BLOCK].to(torch.int64)
        full = block.numel() // CHUNK
        count = -(-block.numel() // CHUNK)
        weights = odd_weights(_CHUNK_SEED, start // CHUNK, count).view(np.int64)
        chunk_weights = torch.from_numpy(weights).to(tensor.device)
        if full:
            sums = (block[: full * CHUNK].view(full, CHUNK) * table).sum(1)
            total += (sums * chunk_weights[:full]).sum()
        if count > full:
            rest = block[full * CHUNK :]
            total += (rest * table[: rest.numel()]).sum() * chunk_weights[full]
    return total


def _block_sum(block: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """`_weighted_sum` over a block of a tensor of `shape` that begins at `start`, by the words' places in the tensor."""
    table, per_element = _table(block.device), max(1, block.element_size() // 4)
    total = torch.zeros((), dtype=torch.int64, device=block.device)
    rows = max(1, _BLOCK // math.prod(block.shape[1:]))
    for first in range(0, len(block), rows):
        piece = block.detach()[first : first + rows]
        places = torch.zeros((), dtype=torch.int64, device=block.device)
        for axis, size in enumerate(piece.shape):
            begin = start[axis] + (first if axis == 0 else 0)
            along = torch.arange(begin, begin + size, device=block.device)
            places = places.unsqueeze(-1) * shape[axis] + along
        places = places.reshape(-1, 1) * per_element + torch.arange(per_element, device=block.device)
        words = piece.reshape(-1).view(_WORDS[block.element_size()]).to(torch.int64)
        low, high = int(places[0, 0]) // CHUNK, int(places[-1, -1]) // CHUNK
        chunks = torch.from_numpy(odd_weights(_CHUNK_SEED, low, high - low + 1).view(np.int64)).to(block.device)
        places = places.reshape(-1)
        total += (words * table[places % CHUNK] * chunks[places // CHUNK - low]).sum()
    return total


def block_sums(parts: Sequence[Part]) -> list[int]:
    """The share in [0, 2**64) of each block in its tensor's digest; one transfer per device, whatever their number."""
    by_device: dict[torch.device, list[int]] = {}
    for i, part in enumerate(parts):
        by_device.setdefault(part.view.device, []).append(i)
    sums = [0] * len(parts)
    for indices in by_device.values():
        values = torch.stack(
            [_weighted_sum(p.view) if p.is_whole else _block_sum(*p) for p in map(parts.__getitem__, indices)]
        )
        for i, value in zip(indices, values.tolist(), strict=True):
            sums[i] = value & _MASK
    return sums


def whole_digest(dtype: str, shape: Iterable[int], sums: Iterable[int]) -> int:
    """The digest in [0, 2**64) of a tensor of torch's `dtype` name, from the shares of the blocks that tile it."""
    return (header(dtype, shape) + sum(sums)) & _MASK


def digest_all(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Name -> digest in [0, 2**64) of each tensor; one transfer per device, whatever their number.

    Any strides: elements count in their logical order, a view and its contiguous copy have one digest.
    """
    sums = block_sums([Part(t, (0,) * t.dim(), tuple(t.shape)) for t in tensors.values()])
    return {
        name: whole_digest(str(tensor.dtype).removeprefix("torch."), tensor.shape, [share])
        for (name, tensor), share in zip(tensors.items(), sums, strict=True)
    }


def digest(tensor: torch.Tensor) -> int:
    """Digest in [0, 2**64) of one tensor; see `digest_all`, which is faster for many."""
    return digest_all({"": tensor})[""]
