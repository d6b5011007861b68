"""Group-relative advantages: a completion is judged against the others of its own prompt."""

from __future__ import annotations

from typing import NamedTuple

import torch

EPS = 1e-6


class GroupAdvantages(NamedTuple):
    """`values` float32 [groups * n], 0 for a masked sample; `zero_variance_groups` counts groups that teach nothing."""

    values: torch.Tensor
    zero_variance_groups: int


def group_advantages(
    rewards: torch.Tensor, n: int, mode: str = "group_std", valid: torch.Tensor | None = None
) -> GroupAdvantages:
    """Advantage of each sample over its group.

    With m the mean and s the standard deviation over the *valid* samples of a group,

        group_mean:  a_i = r_i - m
        group_std:   a_i = (r_i - m) / (s + 1e-6)

    s is the sample standard deviation (division by count - 1), the one verl and TRL use, so that a learning rate or a
    clip range found there means the same here. Worked: rewards (1, 0, 0, 0): m = 1/4, s = sqrt((9 + 3) / 16 / 3) = 1/2,
    a = (3/2, -1/2, -1/2, -1/2). A group of two, (1, 0): s = 1/sqrt(2), a = (0.7071, -0.7071).

    Groups whose valid rewards are all equal, and groups with fewer than two valid samples, get exactly 0 (not the
    rounding of r - m over 1e-6) and are counted: their completions move nothing.

    Args:
        rewards: any real dtype, [groups * n], the n samples of a prompt side by side.
        n: group size, at least 2.
        mode: ``group_std`` or ``group_mean``.
        valid: bool [groups * n]; False leaves a sample (aborted, or without a reward) out of m and s.

    Raises:
        ValueError: sizes or mode do not fit, or a valid reward is not finite.
    """
    if mode not in ("group_std", "group_mean"):
        raise ValueError(f"advantage {mode!r} is neither group_std nor group_mean")
    if n < 2 or rewards.dim() != 1 or rewards.numel() % n:
        raise ValueError(f"{tuple(rewards.shape)} rewards do not make groups of {n}; a group needs two or more")
    mask = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.bool()
    if mask.shape != rewards.shape:
        raise ValueError(f"valid has shape {tuple(mask.shape)}, rewards {tuple(rewards.shape)}")
    if not torch.isfinite(rewards[mask]).all():
        raise ValueError("a valid reward is not finite")

    m = mask.view(-1, n)
    r = torch.where(m, rewards.view(-1, n).double(), 0.0)
    count = m.sum(1, keepdim=True)
    centred = torch.where(m, r - r.sum(1, keepdim=True) / count.clamp(min=1), 0.0)
    highest = torch.where(m, r, -torch.inf).amax(1, keepdim=True)
    lowest = torch.where(m, r, torch.inf).amin(1, keepdim=True)
    flat = (count < 2) | (highest == lowest)
    if mode == "group_std":
        std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        centred = centred / (std + EPS)
    values = torch.where(flat, 0.0, centred).flatten().float()
    return GroupAdvantages(values, int(flat.sum()))
