"""Blocks that nobody changed keep the scale that the released checkpoint gave them.

A block's values do not determine its scale: codes up to 3 under a scale are the same numbers as codes up to 6 under half of
it, and float32 scales are rounded away by bf16. So an encoder alone cannot bring back the released bytes. Where the
released scale is known and gives exactly the values at hand, the block is written under it; else the encoder's stands.
"""

from __future__ import annotations

import torch

from moe_rl.models.codec import BLOCK, MX

_CODES = {0.0: 0, 0.5: 1, 1.0: 2, 1.5: 3, 2.0: 4, 3.0: 5, 4.0: 6, 6.0: 7}
_NONE = 255


def _shifted() -> torch.Tensor:
    """uint8 [5, 16]: the code of half, a quarter, ... of a code's value (row: number of halvings, 4 for more), or _NONE."""
    table = torch.full((5, 16), _NONE, dtype=torch.uint8)
    for halvings in range(5):
        for value, code in _CODES.items():
            half = _CODES.get(value / 2**halvings, _NONE) if halvings < 4 or value == 0 else _NONE
            if half != _NONE:
                table[halvings, code], table[halvings, code + 8] = half, half + 8
    return table


_SHIFTED = _shifted()


def keep_mxfp4(
    values: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, released: torch.Tensor, decode
) -> tuple[int, int]:
    """Put the `released` scales (E8M0 bytes [M, K/32]) in place of the encoder's `scales` where they give `values` [M, K].

    `packed` uint8 [M, K/2] and `scales` uint8 are what the encoder made of `values`; both are changed in place. `decode` is
    the codec's. Returns the number of blocks under the released scale, and of all.
    """
    released, flat, codes = released.view(torch.uint8).reshape(-1), scales.view(-1), packed.view(-1, MX // 2)
    at = (released != flat).nonzero()[:, 0]
    if not len(at):
        return len(flat), len(flat)
    halvings = released[at].int() - flat[at].int()
    at, halvings = at[halvings > 0], halvings[halvings > 0].clamp(max=4)
    pairs = codes[at]
    low, high = _SHIFTED[halvings[:, None], pairs.int() & 15], _SHIFTED[halvings[:, None], pairs.int() >> 4]
    decoded = decode(pairs, flat[at, None], values.dtype)
    same = (decoded == values.view(-1, MX)[at]).all(1) & (low != _NONE).all(1) & (high != _NONE).all(1)
    codes[at[same]] = (low | high << 4)[same]
    flat[at[same]] = released[at[same]]
    return int((flat == released).sum()), len(flat)


def keep_fp8(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, released: torch.Tensor
) -> tuple[int, int]:
    """The same for FP8: `values` [M, K], `codes` float8_e4m3fn [M, K], scales E8M0 or float32 [ceil(M/128), ceil(K/128)]."""
    wanted, found = released.float(), scales.float()
    if torch.equal(wanted, found):
        return found.numel(), found.numel()
    rows, columns = values.shape

    def spread(blocks: torch.Tensor) -> torch.Tensor:
        return blocks.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]

    factors = spread(wanted)
    candidates = (values.float() / factors).to(torch.float8_e4m3fn)
    differ = (candidates.float() * factors).to(values.dtype) != values
    pad = (0, found.shape[1] * BLOCK - columns, 0, found.shape[0] * BLOCK - rows)
    blocks = torch.nn.functional.pad(differ.to(torch.uint8), pad).view(found.shape[0], BLOCK, found.shape[1], BLOCK)
    same = blocks.amax((1, 3)) == 0
    mask = spread(same)
    codes.view(torch.uint8)[mask] = candidates.view(torch.uint8)[mask]
    raw = torch.uint8 if scales.dtype != torch.float32 else torch.float32
    scales.view(raw)[same] = released.view(raw)[same]
    return int(same.sum()), same.numel()
