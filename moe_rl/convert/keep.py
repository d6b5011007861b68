"""Blocks that nobody changed keep the scale, and so the bytes, that the released checkpoint gave them.

A block's values do not determine its scale: codes up to 3 under a scale are the same numbers as codes up to 6 under
half of it, and float32 scales are rounded away by bf16. So an encoder alone cannot bring back the released bytes. Where
the released scale is known, the codes that give exactly the values at hand are read off; if there are none, the block
has changed and is the encoder's.
"""

from __future__ import annotations

import torch

from moe_rl.models.codec import BLOCK, MX

_CHUNK = 1 << 12  # MXFP4 blocks at a time: what is computed on the way stays in the cache
_WORD = {torch.bfloat16: (torch.int16, 7), torch.float32: (torch.int32, 23)}  # and bits of the mantissa


def released_mxfp4(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The MXFP4 codes of `values` [M, K] (bf16 or fp32) under given E8M0 `scales` [M, K/32].

    Returns:
        packed uint8 [M, K/2], and bool [M, K/32]: the blocks that these codes give exactly. The others' are arbitrary.
    """
    blocks, bytes_ = values.contiguous().view(-1, MX), scales.view(torch.uint8).reshape(-1)
    packed = torch.empty(len(blocks), MX // 2, dtype=torch.uint8)
    same = torch.empty(len(blocks), dtype=torch.bool)
    for at in range(0, len(blocks), _CHUNK):
        part = slice(at, at + _CHUNK)
        packed[part], same[part] = _codes(blocks[part], bytes_[part])
    # Half of these scales is no normal number: look at 2**16 times the values instead, which is exact.
    small = (bytes_ < 2).nonzero()[:, 0]
    if len(small):
        packed[small], same[small] = _codes(blocks[small].float() * 2.0**16, bytes_[small] + 16)
    return packed.view(values.shape[0], -1), same.view(scales.shape)


def _codes(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for blocks [N, 32] under scales uint8 [N] of 2 and more.

    Counted in half binades from half the scale on, 0.5 is number 0, and 1, 1.5, 2, 3, 4, 6 are numbers 2 to 7: their
    codes.
    """
    word, mantissa = _WORD[blocks.dtype]
    top, half = torch.iinfo(word).bits - 1, 1 << mantissa - 1
    bits = blocks.view(word)
    magnitude = bits & torch.iinfo(word).max
    # Masks by sign-extending shifts, and results in place: torch's comparisons on a CPU cost five times a shift
    nonzero = (-magnitude).bitwise_right_shift_(top)
    number = magnitude.sub_((scales.to(word) - 1 << mantissa)[:, None]).bitwise_and_(nonzero)  # times `half`
    # Numbers outside 0 to 7, bits of the mantissa that no code has, and number 1, which alone becomes negative here
    off = (number ^ half).sub_(half).bitwise_or_(number).bitwise_and_(~(7 * half)).view(torch.int64)
    while off.shape[1] > 1:
        middle = off.shape[1] // 2
        off = off[:, :middle] | off[:, middle:]
    codes = torch.maximum(number, nonzero.bitwise_and_(half), out=number).bitwise_right_shift_(mantissa - 1)
    codes |= torch.bitwise_right_shift(bits, top - 3, out=nonzero).bitwise_and_(8)
    pairs = codes.to(torch.uint8).view(torch.int16)
    return ((pairs & 15) | (pairs >> 4 & 0xF0)).to(torch.uint8), off[:, 0] == 0


def released_fp8(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for FP8: scales E8M0 or float32 [ceil(M/128), ceil(K/128)]; codes float8_e4m3fn [M, K], blocks bool."""
    codes = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
    same = torch.empty(scales.shape, dtype=torch.bool)
    columns = values.shape[1]
    for row, scale in enumerate(scales.float()):
        rows = slice(row * BLOCK, (row + 1) * BLOCK)
        factors = scale.repeat_interleave(BLOCK)[:columns]
        codes[rows] = (values[rows].float() / factors).to(torch.float8_e4m3fn)
        differ = ((codes[rows].float() * factors).to(values.dtype) != values[rows]).any(0)
        padded = torch.nn.functional.pad(differ, (0, len(scale) * BLOCK - columns))
        same[row] = ~padded.view(-1, BLOCK).any(1)
    return codes, same


def spread(blocks: torch.Tensor, shape: torch.Size, rows: int, columns: int) -> torch.Tensor:
    """A value for each block as a value for each element of a matrix of `shape`, `rows` x `columns` to a block."""
    return blocks.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]
