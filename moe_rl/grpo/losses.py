"""The clipped policy loss, token by token."""

from __future__ import annotations

from typing import NamedTuple

import torch

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 is clipped by any sane range; without a bound exp overflows and inf * 0 is NaN


class PolicyLoss(NamedTuple):
    """`loss` float [T], with gradient; `clipped` bool [T], True where a clip cut the gradient off."""

    loss: torch.Tensor
    clipped: torch.Tensor


def policy_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
) -> PolicyLoss:
    """PPO's clipped loss with separate bounds and the dual clip, for each token.

    With rho = exp(logp - old_logp) and a the advantage of the token's sample,

        l = max(-a rho, -a clip(rho, 1 - clip_low, 1 + clip_high))
        l = min(l, -a dual_clip)        where a < 0 and dual_clip > 0

    The maximum removes the incentive to leave the range further in the direction that a rewards (Schulman et al. 2017).
    For a < 0 it leaves l unbounded as rho grows; the dual clip bounds it (Ye et al. 2020, eq. 5). Unequal bounds are
    DAPO's clip-higher (Yu et al. 2025). At rho = 1 the gradient of l in logp is -a: the plain policy gradient.

    Args:
        logp: log-probs of the sampled tokens under the policy in training, float [T].
        old_logp: the same under the policy before this batch's first update, [T]; no gradient flows into it.
        advantages: [T].
        clip_low, clip_high: at least 0.
        dual_clip: above 1, or 0 for none.

    Raises:
        ValueError: shapes differ, or a bound makes no sense.
    """
    if not logp.shape == old_logp.shape == advantages.shape:
        raise ValueError(f"shapes differ: {tuple(logp.shape)}, {tuple(old_logp.shape)}, {tuple(advantages.shape)}")
    if clip_low < 0 or clip_high < 0 or (dual_clip != 0 and dual_clip <= 1):
        raise ValueError(f"clip_low={clip_low}, clip_high={clip_high} must be >= 0 and dual_clip={dual_clip} > 1 or 0")
    ratio = torch.exp((logp - old_logp.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    advantages = advantages.detach()
    free = -advantages * ratio
    bound = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(free, bound)
    clipped = bound > free
    if dual_clip:
        ceiling = -advantages * dual_clip
        cut = (advantages < 0) & (loss > ceiling)
        loss = torch.where(cut, ceiling, loss)
        clipped = clipped | cut
    return PolicyLoss(loss, clipped)
