"""The losses the engine is given: the algorithm's formulas over a micro-batch's fields.

A field holds one number for each position, 0 where there is no response token. `weight` carries the aggregation and the
global counts, so that the loss is a plain sum over tokens, micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_rl.config.schema import AlgorithmConfig
from moe_rl.grpo.kl import loss_term
from moe_rl.grpo.losses import policy_loss

Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


def grpo_loss(algorithm: AlgorithmConfig) -> Callable[..., Result]:
    """The clipped policy loss, with the KL to the reference where it belongs to the loss."""

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, fields: dict[str, torch.Tensor]) -> Result:
        mask, weight = fields["mask"] > 0, fields["weight"]
        logprobs, entropy = torch.where(mask, logprobs, 0.0), torch.where(mask, entropy, 0.0)
        old = logprobs.detach() if algorithm.old_logprobs == "update" else fields["old_logprob"]
        tokens, clipped = policy_loss(
            logprobs,
            old,
            fields["advantage"],
            algorithm.clip_low,
            algorithm.clip_high,
            algorithm.dual_clip,
        )
        sums = {
            "tokens": mask.sum(),
            "clipped": (clipped & mask).sum(),
            "entropy": entropy.sum(),
            "kl_old": torch.where(mask, old - logprobs.detach(), 0.0).sum(),
        }
        if algorithm.kl in ("k2", "k3"):
            tokens = tokens + algorithm.kl_coef * loss_term(algorithm.kl, logprobs, fields["reference_logprob"])
        return (weight * tokens).sum(), sums

    return loss


def supervised_loss(logprobs: torch.Tensor, entropy: torch.Tensor, fields: dict[str, torch.Tensor]) -> Result:
    """Negative log-likelihood of the response, `weight` for each token."""
    return -(fields["weight"] * logprobs).sum(), {"tokens": (fields["mask"] > 0).sum()}
