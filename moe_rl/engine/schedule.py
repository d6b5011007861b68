"""The learning rate as a pure function of the optimizer step, so that a resumed run continues it exactly."""

from __future__ import annotations

import math

from moe_rl.config import Config


def learning_rate(step: int, *, peak: float, floor: float, shape: str, warmup_steps: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (0-based).

    It rises linearly over `warmup_steps` (step 0 takes peak / warmup_steps), then is constant at `peak` or falls to
    `floor`, along a line or half a cosine, which it reaches at the last of `total_steps` and keeps after it.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if shape == "constant":
        return peak
    past = min(1.0, (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps))
    fraction = 1.0 - past if shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * past))
    return floor + (peak - floor) * fraction


def scheduled_rate(config: Config, step: int) -> float:
    """The rate of optimizer step `step` of a run: `trainer.steps` times the optimizer steps of a batch are the whole."""
    o, a = config.optimizer, config.algorithm
    return learning_rate(
        step,
        peak=o.lr,
        floor=o.min_lr,
        shape=o.schedule,
        warmup_steps=o.warmup_steps,
        total_steps=config.trainer.steps * a.minibatches * a.epochs,
    )
