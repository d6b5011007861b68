"""A 64-bit fingerprint of a tensor's bits, computed where the tensor lives.

Elements are read as signed words of at most 32 bits (8-byte elements as two), each is multiplied by a pseudo-random
odd weight of its position, and the products are added modulo 2**64. A weight is odd, so no single changed word can go
unseen; it is pseudo-random in the position, so two words that changed places go unseen with a chance of about 2**-32.
The dtype and the shape are hashed in. What the bits mean plays no part: 0.0 and -0.0 differ, NaN payloads count.

The weight of word i is table[i % CHUNK] * chunk_weight(i // CHUNK): one table fits a cache and serves every tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np
import torch

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


def digest_all(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Name -> digest in [0, 2**64) of each tensor; one transfer per device, whatever their number.

    Any strides: elements count in their logical order, a view and its contiguous copy have one digest.
    """
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in tensors.items():
        by_device.setdefault(tensor.device, []).append(name)
    sums: dict[str, int] = {}
    for names in by_device.values():
        values = torch.stack([_weighted_sum(tensors[name]) for name in names]).tolist()
        sums.update(zip(names, values, strict=True))
    return {
        name: (sums[name] + header(str(tensor.dtype).removeprefix("torch."), tensor.shape)) & _MASK
        for name, tensor in tensors.items()
    }


def digest(tensor: torch.Tensor) -> int:
    """Digest in [0, 2**64) of one tensor; see `digest_all`, which is faster for many."""
    return digest_all({"": tensor})[""]
