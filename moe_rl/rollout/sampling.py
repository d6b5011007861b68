"""Sampling whose every draw is a function of (request seed, token index), whatever else is in the batch.

A token is drawn by the Gumbel-max trick (Gumbel 1954): argmax over the vocabulary of logits / temperature + g, with g
independent standard Gumbel noise, is distributed as softmax(logits / temperature).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_SMALLEST = 2.0**-54  # half a step of the uniform numbers: keeps log(0) away


def gumbel_noise(seed: int, index: int, size: int) -> np.ndarray:
    """float64 [size] standard Gumbel noise for token `index` of the request with this 64-bit seed.

    Philox (Salmon et al. 2011) is keyed by the seed and its 256-bit counter starts at index * 2**192, so streams of
    different tokens never meet.
    """
    bits = np.random.Philox(key=seed, counter=[0, 0, 0, index])
    uniform = np.random.Generator(bits).random(size)
    return -np.log(-np.log(np.maximum(uniform, _SMALLEST)))


def sample(
    logits: torch.Tensor, seeds: Sequence[int], index: int, temperatures: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw token number `index` of each row.

    Args:
        logits: float [rows, vocabulary].
        seeds: 64-bit seed of each row.
        index: how many tokens the rows have sampled already.
        temperatures: of each row; 0 takes the most likely token.

    Returns:
        Tokens, int64 [rows]; and their natural log-probs, float32 [rows], under softmax(logits / temperature), or under
        softmax(logits) where the temperature is 0.
    """
    vocabulary = logits.shape[-1]
    divisors = torch.tensor([t if t > 0 else 1.0 for t in temperatures], dtype=torch.float32, device=logits.device)
    scaled = logits.float() / divisors[:, None]
    noise = np.zeros((len(seeds), vocabulary))
    for row, (seed, temperature) in enumerate(zip(seeds, temperatures, strict=True)):
        if temperature > 0:
            noise[row] = gumbel_noise(seed, index, vocabulary)
    tokens = (scaled.double() + torch.from_numpy(noise).to(scaled.device)).argmax(-1)
    logprobs = scaled.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return tokens, logprobs
