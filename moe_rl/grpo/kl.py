"""Estimates of KL(policy || reference) from tokens the policy sampled (Schulman, "Approximating KL divergence", 2020).

With x sampled from the policy p, r the reference and d = log p(x) - log r(x):

    k1 = d                       unbiased, signed, noisy
    k2 = d^2 / 2                 biased in value; E[grad k2] = E[d grad log p] = grad KL(p || r) exactly
    k3 = exp(-d) - 1 + d         unbiased, never negative; E[grad k3] = -E_r[grad log p] = grad KL(r || p)

E[grad k1] = E[grad log p] = 0, so k1 as a loss does nothing on average: it acts in the reward, where the policy
gradient multiplies it with grad log p. k2 and k3 act in the loss; k3's gradient is that of the other direction, which
agrees with k2's to first order in d.
"""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0  # bounds exp(-d) in k3; a token 5e8 times likelier under the reference is not told apart further


def k1(logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
    """d for each token, nats; any shape, float."""
    return logp - ref_logp


def k2(logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
    """d^2 / 2 for each token, nats; gradient flows into `logp`."""
    return 0.5 * (logp - ref_logp.detach()).square()


def k3(logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
    """exp(-d) - 1 + d for each token, nats, >= 0; gradient flows into `logp`."""
    d = (logp - ref_logp.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-d) + d


def loss_term(kind: str, logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
    """The per-token KL of the loss, float [T]: `kind` is ``k2`` or ``k3``.

    Raises:
        ValueError: another kind; k1 belongs in the reward.
    """
    if kind == "k2":
        return k2(logp, ref_logp)
    if kind == "k3":
        return k3(logp, ref_logp)
    raise ValueError(f"{kind!r} is no KL term of the loss; k2 and k3 are, k1 acts in the reward")


def penalised_rewards(
    rewards: torch.Tensor, logp: torch.Tensor, ref_logp: torch.Tensor, lengths: torch.Tensor, coef: float
) -> torch.Tensor:
    """Rewards less coef times the k1 of the whole response: r_s - coef * sum over its tokens of (log p - log r).

    The sum is an unbiased estimate of the KL between the two distributions over responses. It is taken before the
    group statistics, so that the advantages hold it. Worked: reward 1, two tokens with d = 0.5 and -0.1, coef 0.1:
    1 - 0.1 * 0.4 = 0.96.

    Args:
        rewards: [N].
        logp, ref_logp: response tokens of all samples end to end, [sum of lengths]; no gradient is kept.
        lengths: response tokens of each sample, int [N]; 0 is allowed and leaves that reward alone.
        coef: weight of the penalty per nat.

    Returns:
        float64 [N].

    Raises:
        ValueError: sizes differ.
    """
    lengths = lengths.to(logp.device)
    if lengths.shape != rewards.shape or logp.shape != ref_logp.shape or int(lengths.sum()) != logp.numel():
        raise ValueError(f"{rewards.numel()} rewards, {int(lengths.sum())} tokens by length, {logp.numel()} log-probs")
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=logp.device), lengths)
    d = k1(logp.detach().double(), ref_logp.detach().double())
    totals = torch.zeros(len(lengths), dtype=torch.float64, device=logp.device).index_add_(0, sample, d)
    return rewards.double() - coef * totals.to(rewards.device)
