"""`moe-rl doctor --refit`: the weights updated twice without training. Nothing may change: no digest, no log-prob."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from moe_rl.config import Config
from moe_rl.errors import RunFailed
from moe_rl.trainer.canary import Canary
from moe_rl.trainer.inputs import read_inputs
from moe_rl.trainer.placement import Cluster, RolloutGroup, TrainerGroup, WeightSync

REPEATS = 3  # scorings of the same weights: how far log-probs move by themselves where kernels are not deterministic
UPDATES = 2


@dataclass(frozen=True)
class State:
    """What is compared: digests by tensor of the trainer and of each replica, log-probs of each replica [repeats, tokens]."""

    trainer: Mapping[str, int]
    rollouts: Mapping[str, Mapping[str, int]]
    logprobs: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Refit:
    """What was found. `noise` is the largest |Δ log-prob| between scorings of the same weights, `moved` that between the
    first weights and the refitted ones; `canary` holds the metrics ``sync/canary_*`` after each update."""

    replicas: int
    tensors: int
    bytes_moved: int
    noise: float
    moved: float
    canary: list[dict[str, float]]

    def lines(self) -> list[str]:
        """For people."""
        last = ", ".join(f"{k.removeprefix('sync/canary_')} {v:.3g}" for k, v in self.canary[-1].items())
        return [
            f"{UPDATES} updates without training left all {self.tensors} tensors of {self.replicas} replica(s) as they were"
            f" ({self.bytes_moved:,} bytes each time)",
            f"log-probs moved by {self.moved:.3g}, between two scorings of the same weights by {self.noise:.3g}",
            f"trainer against rollouts: {last}",
        ]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def refit(config: Config) -> Refit:
    """Start the trainer and rollouts of a run, give the rollouts their weights, and then twice again.

    Raises:
        UserError: the input is wrong; nothing has started.
        RunFailed: a tensor or a log-prob changed (all named), or a gate of the canary was passed.
    """
    with tempfile.TemporaryDirectory(prefix="moe_rl_refit_") as scratch:
        inputs = read_inputs(config, Path(scratch))
        config.trainer.canary_sequences = max(1, config.trainer.canary_sequences)
        with Cluster(config, Path(scratch)) as cluster:
            trainer, rollout = TrainerGroup(cluster, inputs.facts, train=False), RolloutGroup(cluster)
            trainer.start()
            rollout.start()
            canary, sync = Canary(config, inputs.records, trainer, rollout), WeightSync(trainer, rollout)
            states, checks, moved = [], [], 0
            for version in range(1 + UPDATES):
                moved = sync.push(version)
                checks.append(canary.check())
                scores = [canary.log_probs()[1] for _ in range(REPEATS)]
                logprobs = {name: torch.stack([s[name] for s in scores]) for name in rollout.names}
                states.append(State(trainer.digest(), rollout.digests(), logprobs))
    noise = max(_spread(rows, rows) for state in states for rows in state.logprobs.values())
    problems = [p for version, state in enumerate(states[1:], 1) for p in changes(states[0], state, noise, version)]
    if problems:
        raise RunFailed(
            "doctor.refit",
            "an update without training changed the model:\n    " + "\n    ".join(problems),
            "Every update of a run would do the same to what it trains.",
            "Report it with the versions that `moe-rl doctor` prints; do not train with this engine and these kernels.",
        )
    largest = max(_spread(states[0].logprobs[n], s.logprobs[n]) for s in states[1:] for n in s.logprobs)
    return Refit(len(rollout.names), len(states[0].trainer), moved, noise, largest, checks)


def changes(first: State, now: State, noise: float, version: int) -> list[str]:
    """What is not as it was, in words. Log-probs may move by twice `noise`, digests not at all."""
    out = []
    sides = {"the trainer": (first.trainer, now.trainer)}
    sides |= {name: (first.rollouts[name], now.rollouts[name]) for name in first.rollouts}
    for side, (before, after) in sides.items():
        names = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
        if names:
            out.append(f"update {version}: {len(names)} tensors of {side} changed: {', '.join(names)}")
    for name, rows in first.logprobs.items():
        moved = _spread(rows, now.logprobs[name])
        if not moved <= 2 * noise:
            out.append(
                f"update {version}: log-probs of {name} moved by {moved:.3g}; by themselves they do by {noise:.3g}"
            )
    return out


def _spread(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest |Δ| of a token between any row of a and any of b, float [repeats, tokens]."""
    return float((a[:, None] - b[None]).abs().max())
