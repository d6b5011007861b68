"""Blocks that nobody changed keep the scale, and so the bytes, that the released checkpoint gave them.

A block's values do not determine its scale: codes up to 3 under a scale are the same numbers as codes up to 6 under
half of it, and float32 scales are rounded away by bf16. So an encoder alone cannot bring back the released bytes. Where
the released scale is known, the codes that give exactly the values at hand are read off; if there are none, the block
has changed and is the encoder's.
"""

from __future__ import annotations

import numpy as np
import torch

from moe_rl.models.codec import BLOCK, MX

_CHUNK = 1 << 12  # MXFP4 blocks at a time: what is computed on the way stays in the cache
_WORD = {torch.bfloat16: (np.int16, 7), torch.float32: (np.int32, 23)}  # and bits of the mantissa
_FP8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num_(0.0).numpy()  # no NaN is kept


def released_mxfp4(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The MXFP4 codes of `values` [M, K] (bf16 or fp32) under given E8M0 `scales` [M, K/32].

    Returns:
        packed uint8 [M, K/2], and bool [M, K/32]: the blocks that these codes give exactly. The others' are arbitrary.
    """
    blocks, bytes_ = values.contiguous().view(-1, MX), scales.view(torch.uint8).reshape(-1)
    packed, same = _codes(blocks, bytes_)
    # Half of these scales is no normal number: look at 2**16 times the values instead, which is exact.
    small = (bytes_ < 2).nonzero()[:, 0]
    if len(small):
        packed[small], same[small] = _codes(blocks[small].float() * 2.0**16, bytes_[small] + 16)
    return packed.view(values.shape[0], -1), same.view(scales.shape)


def _codes(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for blocks [N, 32] under scales uint8 [N] of 2 and more.

    Counted in half binades from half the scale on, 0.5 is number 0, and 1, 1.5, 2, 3, 4, 6 are numbers 2 to 7: their
    codes. In numpy: on pieces that fit in the cache its calls cost half of torch's.
    """
    word, mantissa = _WORD[blocks.dtype]
    top, half = 8 * word().itemsize - 1, 1 << mantissa - 1
    bits = blocks.view(torch.int16 if word is np.int16 else torch.int32).numpy()
    lowest = (scales.numpy().astype(word) - 1 << mantissa)[:, None]
    packed = np.empty((len(blocks), MX // 2), dtype=np.uint8)
    same = np.ones(len(blocks), dtype=bool)
    number, nonzero, off = (np.empty((min(len(blocks), _CHUNK), MX), dtype=word) for _ in range(3))
    for at in range(0, len(blocks), _CHUNK):
        part = slice(at, at + _CHUNK)
        one = bits[part]
        number, nonzero, off = number[: len(one)], nonzero[: len(one)], off[: len(one)]
        np.bitwise_and(one, np.iinfo(word).max, out=number)
        np.right_shift(np.negative(number, out=nonzero), top, out=nonzero)  # all bits set, or none
        np.subtract(number, lowest[part], out=number)
        np.bitwise_and(number, nonzero, out=number)  # now times `half`
        # Numbers outside 0 to 7, bits of the mantissa that no code has, and number 1, which alone becomes negative here
        np.subtract(np.bitwise_xor(number, half, out=off), half, out=off)
        np.bitwise_and(np.bitwise_or(off, number, out=off), ~(7 * half), out=off)
        if np.bitwise_or.reduce(off.reshape(-1).view(np.int64)):
            same[part] = np.bitwise_or.reduce(off.view(np.int64), axis=1) == 0
        np.maximum(number, np.bitwise_and(nonzero, half, out=nonzero), out=number)
        np.right_shift(number, mantissa - 1, out=number)
        sign = np.bitwise_and(np.right_shift(one, top - 3, out=nonzero), 8, out=nonzero)
        pairs = np.bitwise_or(number, sign, out=number).astype(np.uint8).view(np.uint16)
        packed[part] = pairs | pairs >> 4  # the low byte of these
    return torch.from_numpy(packed), torch.from_numpy(same)


def released_fp8(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for FP8: scales E8M0 or float32 [ceil(M/128), ceil(K/128)]; codes float8_e4m3fn [M, K], blocks bool."""
    codes = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
    same = torch.empty(scales.shape, dtype=torch.bool)
    columns, word = values.shape[1], torch.int16 if values.dtype == torch.bfloat16 else torch.int32
    for row, scale in enumerate(scales.float()):
        rows = slice(row * BLOCK, (row + 1) * BLOCK)
        factors = scale.repeat_interleave(BLOCK)[:columns]
        codes[rows] = (values[rows].float() / factors).to(torch.float8_e4m3fn)
        decoded = torch.from_numpy(_FP8.take(codes[rows].view(torch.uint8).numpy())).mul_(factors).to(values.dtype)
        # Bits are compared: a zero keeps its sign, and torch compares floats on a CPU at a tenth of the speed
        differ = np.bitwise_or.reduce(decoded.view(word).numpy() ^ values[rows].view(word).numpy(), axis=0)
        padded = np.pad(differ, (0, len(scale) * BLOCK - columns))
        same[row] = torch.from_numpy(np.bitwise_or.reduce(padded.reshape(-1, BLOCK), axis=1) == 0)
    return codes, same


def spread(blocks: torch.Tensor, shape: torch.Size, rows: int, columns: int) -> torch.Tensor:
    """A value for each block as a value for each element of a matrix of `shape`, `rows` x `columns` to a block."""
    return blocks.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]
