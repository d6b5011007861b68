"""How far the trainer's log-probs of the sampled tokens lie from those the rollout engine sampled them with."""

from __future__ import annotations

import torch

CONSTANT = 1e-4  # spread of probabilities below which a correlation would measure rounding alone
MAX_LOG_RATIO = 20.0
KEYS = ("mismatch/pearson_prob", "mismatch/k3_kl", "mismatch/logprob_abs_max")


def mismatch(trainer_logp: torch.Tensor, rollout_logp: torch.Tensor) -> dict[str, float]:
    """The metrics ``mismatch/*`` over response tokens.

    With q the rollout's and p the trainer's probability of each token (the rollout sampled it):

        pearson_prob     correlation of p and q over the tokens, 1 where the engines agree
        k3_kl            mean of exp(log p - log q) - 1 - (log p - log q): estimates KL(rollout || trainer), nats
        logprob_abs_max  largest |log p - log q|, nats

    Correlation has no value where a vector is constant (a policy sure of every token). If the standard deviation of p
    or of q is below 1e-4 it is set to 1.0 when p and q differ by at most 1e-4 everywhere, and to 0.0 otherwise.

    Args:
        trainer_logp, rollout_logp: float, [tokens], natural log, of the response tokens of samples that count,
            end to end, both at the sampling temperature.

    Returns:
        The three keys, or an empty dict where there is no token. A log-prob that is not finite gives NaN in all.

    Raises:
        ValueError: the sizes differ.
    """
    if trainer_logp.shape != rollout_logp.shape or trainer_logp.dim() != 1:
        raise ValueError(f"{tuple(trainer_logp.shape)} trainer and {tuple(rollout_logp.shape)} rollout log-probs")
    if trainer_logp.numel() == 0:
        return {}
    p_log, q_log = trainer_logp.detach().double(), rollout_logp.detach().double()
    delta = p_log - q_log
    if not torch.isfinite(delta).all():
        return dict.fromkeys(KEYS, float("nan"))
    bounded = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "mismatch/pearson_prob": pearson(p_log.exp(), q_log.exp()),
        "mismatch/k3_kl": float((torch.expm1(bounded) - bounded).mean()),
        "mismatch/logprob_abs_max": float(delta.abs().max()),
    }


def pearson(p: torch.Tensor, q: torch.Tensor) -> float:
    """Correlation of two vectors of probabilities, float64 [tokens]; see :func:`mismatch` for constant ones."""
    dp, dq = p - p.mean(), q - q.mean()
    if min(float(dp.square().mean().sqrt()), float(dq.square().mean().sqrt())) < CONSTANT:
        return 1.0 if float((p - q).abs().max()) <= CONSTANT else 0.0
    r = (dp * dq).sum() / (dp.square().sum() * dq.square().sum()).sqrt()
    return min(1.0, max(-1.0, float(r)))
