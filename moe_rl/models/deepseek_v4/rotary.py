"""Interleaved rotary embedding on the trailing channels of a head, plain or stretched by YaRN (arXiv:2309.00071)."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from moe_rl.models.deepseek_v4.arch import Rope
from moe_rl.models.packed import PackedSequences


def inverse_frequencies(rope: Rope) -> torch.Tensor:
    """Radians per position of each channel pair, float32 [dim / 2].

    YaRN divides the slow pairs by `factor`, keeps the fast ones, and ramps linearly between the pairs that turn
    `beta_fast` and `beta_slow` times within the original context.
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    frequencies = 1.0 / rope.theta**exponents
    if not rope.yarn:
        return frequencies

    def pair_that_turns(times: float) -> float:
        wavelength_ratio = rope.original_max_positions / (times * 2 * math.pi)
        return rope.dim * math.log(wavelength_ratio) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low if high != low else 0.001
    slow = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / rope.factor * slow + frequencies * (1 - slow)


@lru_cache
def _frequencies(rope: Rope, device: torch.device) -> torch.Tensor:
    """`inverse_frequencies`, copied to a device once."""
    return inverse_frequencies(rope).to(device)


def _table(rope: Rope, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[:, None].float() * _frequencies(rope, positions.device)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def token_table(rope: Rope, packed: PackedSequences) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines at the tokens' positions, float32 [T, dim / 2] each."""
    return packed.cached((rope, 0), lambda: _table(rope, packed.positions))


def window_table(rope: Rope, packed: PackedSequences, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines at the position of each window's first token, float32 [N, dim / 2] each."""
    return packed.cached((rope, ratio), lambda: _table(rope, packed.windows(ratio).index * ratio))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the last 2r channels of x [..., d] by the angles of cos, sin [..., r] (float32 inside, dtype of x kept).

    Channels 2i and 2i+1 of that tail form pair i; a negated `sin` turns back.
    """
    width = 2 * cos.shape[-1]
    head, tail = x[..., :-width], x[..., -width:].float()
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((head, turned.to(x.dtype)), dim=-1)
