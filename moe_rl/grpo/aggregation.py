"""From losses of tokens to the loss of a minibatch, by global counts.

Each response token of sample s gets a weight w_s that depends on the whole minibatch and on nothing else, and

    L = sum over s of w_s * (sum over its response tokens of l)

A sum has no parts: however the samples are cut over micro-batches, ranks and packs, summing (not averaging) what each
part contributes gives the same L and the same gradient.

    token_mean     w_s = 1 / (tokens of all valid samples)
    sequence_mean  w_s = 1 / (number of valid samples * tokens of s)

Worked, valid lengths (1, 3): token_mean 1/4 each; sequence_mean 1/2 for the lone token, 1/6 for each of the three.
"""

from __future__ import annotations

import torch

MODES = ("token_mean", "sequence_mean")


def sample_weights(lengths: torch.Tensor, mode: str = "token_mean", valid: torch.Tensor | None = None) -> torch.Tensor:
    """The weight w_s of each response token of sample s.

    Args:
        lengths: response tokens of every sample of the minibatch, over all ranks, int [N].
        mode: ``token_mean`` or ``sequence_mean``.
        valid: bool [N]; False (aborted, or without a reward) gives weight 0 and leaves the sample out of the counts.

    Returns:
        float64 [N]; all 0 where no token counts.

    Raises:
        ValueError: unknown mode, or a negative length.
    """
    if mode not in MODES:
        raise ValueError(f"aggregation {mode!r} is none of {', '.join(MODES)}")
    if (lengths < 0).any():
        raise ValueError("a length is negative")
    counted = lengths > 0 if valid is None else (lengths > 0) & valid.bool()
    tokens = torch.where(counted, lengths, 0).double()
    if mode == "token_mean":
        weight = torch.ones_like(tokens) / tokens.sum().clamp(min=1)
    else:
        weight = 1 / (counted.sum().clamp(min=1) * tokens.clamp(min=1))
    return torch.where(counted, weight, 0.0)


def token_weights(lengths: torch.Tensor, mode: str = "token_mean", valid: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`sample_weights` written out per token: float64 [sum of lengths], the samples' tokens end to end."""
    return torch.repeat_interleave(sample_weights(lengths, mode, valid), lengths)
