"""Importance weights for what is left of the mismatch between the engine that sampled and the trainer.

The tokens were drawn from the rollout's policy q; the loss is meant for the trainer's policy p before the update. With
rho = p / q for each token, or its product over a response, E_q[rho g] = E_p[g] for any g of the tokens. Cut at `cap` the
weights have bounded variance and a bias that the share of cut ones tells of (truncated importance sampling, Ionides 2008).
Masking leaves out what the two sides disagree on by more than `cap` either way, and weighs the rest alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

KINDS = ("token_truncate", "sequence_truncate", "token_mask", "sequence_mask")
MAX_LOG_RATIO = 20.0


class Correction(NamedTuple):
    """`weights` float32 [tokens], to be multiplied with each token's loss; `cut` bool [tokens], truncated or left out."""

    weights: torch.Tensor
    cut: torch.Tensor

    def metrics(self) -> dict[str, float]:
        """The metrics ``correction/*`` over all response tokens; {} where there is none."""
        w = self.weights.double()
        if not w.numel():
            return {}
        square = float(w.square().sum())
        return {
            "correction/weight_mean": float(w.mean()),
            "correction/cut_frac": float(self.cut.double().mean()),
            "correction/effective_frac": float(w.sum()) ** 2 / (len(w) * square) if square else 0.0,
        }


def correction(
    kind: str, trainer_logp: torch.Tensor, rollout_logp: torch.Tensor, lengths: torch.Tensor, cap: float
) -> Correction:
    """The weight of every response token.

    Args:
        kind: of `KINDS`. ``token_*`` takes the ratio of each token, ``sequence_*`` that of the whole response for each of
            its tokens; ``*_truncate`` weighs by min(ratio, cap), ``*_mask`` by 1 within [1 / cap, cap] and else by 0.
        trainer_logp, rollout_logp: float [tokens], natural log at the sampling temperature, samples end to end.
        lengths: response tokens of each sample, int [samples]; 0 is allowed.
        cap: above 1.

    Raises:
        ValueError: another kind, a cap that is not above 1, or sizes that differ.
    """
    if kind not in KINDS or cap <= 1:
        raise ValueError(f"kind {kind!r} is one of {', '.join(KINDS)}, and cap {cap} above 1")
    if trainer_logp.shape != rollout_logp.shape or int(lengths.sum()) != trainer_logp.numel():
        raise ValueError(f"{trainer_logp.numel()} and {rollout_logp.numel()} log-probs, {int(lengths.sum())} tokens")
    log_ratio = trainer_logp.detach().double() - rollout_logp.detach().double()
    if kind.startswith("sequence"):
        sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        log_ratio = torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, sample, log_ratio)[sample]
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if kind.endswith("truncate"):
        return Correction(ratio.clamp(max=cap).float(), ratio > cap)
    outside = (ratio > cap) | (ratio < 1 / cap)
    return Correction((~outside).float(), outside)
