"""The GRPO step, readable top to bottom: prompts, rollouts, rewards, log-probs, advantages, update, new weights."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from moe_rl.config import Config
from moe_rl.data import Cursor, Record
from moe_rl.errors import RunFailed
from moe_rl.grpo.advantages import group_advantages
from moe_rl.grpo.aggregation import sample_weights
from moe_rl.grpo.batching import minibatches
from moe_rl.grpo.corrections import correction
from moe_rl.grpo.kl import k1, k3, penalised_rewards
from moe_rl.grpo.mismatch import mismatch
from moe_rl.observe.progress import Progress
from moe_rl.rollout.engine import Request, sample_seed
from moe_rl.trainer.canary import Canary
from moe_rl.trainer.placement import RolloutGroup, TrainerGroup, WeightSync
from moe_rl.trainer.samples import Sample, keep_rows, merged, scored, trained
from moe_rl.trainer.state import RunState
from moe_rl.trainer.worker import OptimizerStep

VALIDATION = 0  # the step that validation's seeds are drawn for: training counts from 1


class Loop:
    """One run's steps over workers that are already started and hold the weights of `state`.

    It is blind to the engine kind, the transport and where anything runs; `verify` turns completions into rewards.
    """

    def __init__(
        self,
        config: Config,
        state: RunState,
        trainer: TrainerGroup,
        rollout: RolloutGroup,
        sync: WeightSync,
        canary: Canary,
        cursor: Cursor,
        validation: Sequence[Record],
        verify: Any,
        tokenizer: Any,
        progress: Progress,
    ) -> None:
        self.config, self.state = config, state
        self.trainer, self.rollout, self.sync, self.canary = trainer, rollout, sync, canary
        self.cursor, self.validation = cursor, validation
        self.verify, self.tokenizer, self.progress = verify, tokenizer, progress
        self.times: dict[str, float] = {}
        self.measured: dict[str, dict[str, Any]] = {}  # by phase, over all steps: peaks in GiB, seconds

    @contextmanager
    def phase(self, name: str, group: Any = None) -> Iterator[None]:
        """Time a phase, and show it with the worker of `group` that took longest."""
        self.progress.phase(name)
        start = time.perf_counter()
        yield
        self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - start
        if group is not None:
            self.progress.slowest(name, group.seconds)

    def note_phase(self, name: str) -> None:
        """Keep what a phase that just ended took: over the steps the most memory, and the last step's seconds."""
        peaks = self.trainer.phase_peak_gib() | self.rollout.phase_peak_gib()
        held = self.measured.setdefault(name, {"gpu_gib": 0.0, "host_gib": 0.0, "workers_gib": {}})
        held["gpu_gib"] = max(held["gpu_gib"], *(gpu for _, gpu in peaks.values()))
        held["host_gib"] = max(held["host_gib"], sum(host for host, _ in peaks.values()))
        held["workers_gib"] = {w: max(held["workers_gib"].get(w, 0.0), host) for w, (host, _) in peaks.items()}
        held["seconds"] = self.times.get(name, 0.0)

    # -------------------------------------------------------------------------------------------------------- the step
    def step(self) -> tuple[dict[str, Any], list[Sample]]:
        """Run the next step and advance the state; the step's metrics and samples."""
        started, self.times = time.perf_counter(), {}
        step = self.state.step + 1
        metrics: dict[str, Any] = {"step": step, "weight_version": self.state.weight_version}
        metrics |= self.validate(step)

        with self.phase("rollout", self.rollout):
            records = self.cursor.next(self.config.data.prompts_per_step)
            samples = self.generate(records, step, self.config.rollout.n, self.config.rollout.temperature)
        self.note_phase("rollout")
        with self.phase("reward"):
            metrics |= self.judge(samples)
        before = self.config.algorithm.old_logprobs == "recompute"
        if before or self.config.algorithm.kl != "none":
            with self.phase("log_prob", self.trainer):
                self.score(samples)
            self.note_phase("log_prob")
        self.assign_advantages(samples, metrics)
        metrics |= self.compare(samples) | self.correct(samples) if before else {}
        with self.phase("update", self.trainer):
            metrics |= self.update(samples, step)
        self.note_phase("update")
        metrics |= (
            {} if before else self.compare(samples)
        )  # a gate still stops the new weights from leaving the trainer
        with self.phase("sync"):
            moved = self.sync.push(self.state.weight_version)
        self.note_phase("sync")
        with self.phase("canary"):
            metrics |= self.canary.check()

        self.state.step, self.state.samples_seen = step, self.state.samples_seen + len(samples)
        self.state.cursor = self.cursor.state_dict()
        metrics |= self.costs(samples, moved, time.perf_counter() - started)
        return metrics, samples

    def generate(self, records: Sequence[Record], step: int, n: int, temperature: float) -> list[Sample]:
        """`n` completions of each prompt, the samples of a prompt side by side."""
        pairs = [(record, k) for record in records for k in range(n)]
        requests = [
            Request(
                id=i,
                prompt=record.prompt_tokens,
                seed=sample_seed(self.config.trainer.seed, step, record.index, k),
                max_tokens=self.config.rollout.max_response,
                temperature=temperature,
            )
            for i, (record, k) in enumerate(pairs)
        ]
        completions = self.rollout.generate(requests)
        stale = {c.weight_version for c in completions} - {self.state.weight_version}
        if stale:
            raise RunFailed(
                "rollout.stale",
                f"completions of weight version {sorted(stale)} where {self.state.weight_version} was asked for",
                "A replica missed a weight update.",
            )
        samples = []
        for (record, _), completion in zip(pairs, completions, strict=True):
            samples.append(Sample(record, completion, self.tokenizer.decode(completion.tokens.tolist())))
            samples[-1].valid = not samples[-1].aborted
            if self.config.rollout.router_replay == "R3":
                samples[-1].routes = completion.routed_experts
        return samples

    def judge(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Give every sample its reward and accuracy; the metrics of rewards and responses."""
        errors = self.verify(samples)
        judged = [s for s in samples if s.valid]
        if not judged:
            raise RunFailed(
                "reward.none", "no sample of this step has a reward", "All were aborted or failed to verify."
            )
        kept = [s for s in samples if not s.aborted]
        return {
            "reward/mean": float(np.mean([s.reward for s in judged])),
            "reward/accuracy": float(np.mean([s.accuracy for s in judged])),
            "reward/errors": errors,
            "response/length_mean": float(np.mean([len(s.completion.tokens) for s in kept])),
            "response/clip_ratio": float(np.mean([s.completion.finish_reason == "length" for s in kept])),
            "response/aborted_ratio": 1.0 - len(kept) / len(samples),
        }

    def score(self, samples: Sequence[Sample]) -> None:
        """The trainer's log-probs before the update, if not its own are taken; the reference's where KL is asked for."""
        cuts, batch = self.trainer.cuts([s.length for s in samples]), scored(samples)
        temperature = self.config.rollout.temperature
        if self.config.algorithm.old_logprobs == "recompute":
            keep_rows(samples, self.trainer.log_probs(batch, cuts, temperature=temperature, entropy=True))
            for i, routes in merged(self.trainer.routes).items():
                samples[i].routes = routes
        if self.config.algorithm.kl != "none":
            rows = self.trainer.log_probs(batch, cuts, temperature=temperature, reference=True)
            for i, (logprobs, _) in rows.items():
                samples[i].reference = logprobs[samples[i].response]

    def assign_advantages(self, samples: Sequence[Sample], metrics: dict[str, Any]) -> None:
        """Group-relative advantages, with k1 taken off the reward where the algorithm puts it there."""
        algorithm, n = self.config.algorithm, self.config.rollout.n
        valid = torch.tensor([s.valid for s in samples])
        rewards = torch.tensor([s.reward if s.valid else 0.0 for s in samples], dtype=torch.float64)
        if algorithm.kl == "k1":
            lengths = torch.tensor([len(s.completion.tokens) for s in samples])
            rewards = penalised_rewards(
                rewards, _row(samples, "logprobs"), _row(samples, "reference"), lengths, algorithm.kl_coef
            )
        result = group_advantages(rewards, n, algorithm.advantage, valid)
        for sample, value in zip(samples, result.values.tolist(), strict=True):
            sample.advantage = value
        metrics["reward/std_groups_zero"] = result.zero_variance_groups / (len(samples) // n)

    def compare(self, samples: Sequence[Sample]) -> dict[str, float]:
        """How far the trainer's log-probs are from the rollout's, and the policy from its reference, where the weights that
        sampled have scored: everywhere, or in the first optimizer step's samples."""
        kept = [s for s in samples if not s.aborted and s.logprobs is not None]
        if not kept:
            return {}
        sampled = torch.from_numpy(np.concatenate([s.completion.logprobs for s in kept]))
        metrics = mismatch(_row(kept, "logprobs"), sampled)
        pearson, least = metrics["mismatch/pearson_prob"], self.config.trainer.gates.pearson_min
        if least > 0 and not pearson >= least:
            raise RunFailed(
                "gate.pearson",
                f"mismatch/pearson_prob {pearson:.6f} is below trainer.gates.pearson_min {least}",
                "Rollout and trainer no longer compute the same model.",
                "Compare the two on one sequence with `moe-rl score`.",
            )
        if self.config.algorithm.kl != "none":
            estimate = k1 if self.config.algorithm.kl == "k1" else k3
            metrics["kl/reference"] = float(estimate(_row(kept, "logprobs"), _row(kept, "reference")).mean())
        return metrics

    def correct(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Weigh every response token by the ratio of trainer and rollout, as the algorithm asks for."""
        algorithm = self.config.algorithm
        if algorithm.correction == "none":
            return {}
        kept = [s for s in samples if not s.aborted]
        lengths = torch.tensor([len(s.completion.tokens) for s in kept])
        sampled = torch.from_numpy(np.concatenate([s.completion.logprobs for s in kept]))
        found = correction(algorithm.correction, _row(kept, "logprobs"), sampled, lengths, algorithm.correction_cap)
        for sample, weights in zip(kept, found.weights.split(lengths.tolist()), strict=True):
            sample.correction = weights.numpy()
        return found.metrics()

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, Any]:
        """Every optimizer step of this batch: epochs x minibatches, each with the weights of its own counts."""
        algorithm, stats = self.config.algorithm, list[OptimizerStep]()
        temperature, sampled = self.config.rollout.temperature, algorithm.old_logprobs == "rollout"
        for epoch in range(algorithm.epochs):
            seed = sample_seed(self.config.trainer.seed, step, epoch, 0)
            for part in minibatches(len(samples), algorithm.minibatches, group=self.config.rollout.n, seed=seed):
                chosen = [samples[i] for i in part]
                lengths = torch.tensor([len(s.completion.tokens) for s in chosen])
                weights = sample_weights(lengths, algorithm.aggregation, torch.tensor([s.valid for s in chosen]))
                self.check_routes(chosen)
                batch = trained(chosen, weights.tolist(), sampled)
                cuts = self.trainer.cuts([s.length for s in chosen])
                first = algorithm.old_logprobs != "recompute" and not stats
                stats.append(self.trainer.update(batch, cuts, temperature=temperature, scored=first))
                if first:
                    keep_rows(chosen, self.trainer.rows)
        self.state.weight_version += 1
        totals = {name: sum(s.sums[name] for s in stats) for name in stats[0].sums}
        tokens = max(totals["tokens"], 1.0)
        covered = [s.coverage for s in stats if s.coverage is not None]
        return {
            "actor/loss": float(np.mean([s.loss for s in stats])),
            "actor/grad_norm": float(np.mean([s.grad_norm for s in stats])),
            "actor/entropy": totals["entropy"] / tokens,
            "actor/clip_frac": totals["clipped"] / tokens,
            "actor/lr": stats[-1].lr,
            "kl/old": totals["kl_old"] / tokens,
            **({"replay/coverage": min(covered)} if covered else {}),
        }

    def check_routes(self, samples: Sequence[Sample]) -> None:
        """Under router replay each sample that teaches must come with the experts that its tokens took."""
        lacking = [s for s in samples if s.valid and s.routes is None]
        if lacking and self.config.rollout.router_replay != "none":
            raise RunFailed(
                "replay.missing",
                f"{len(lacking)} of {len(samples)} samples came without the experts that their tokens took",
                "The rollout engine did not return them.",
                "rollout.router_replay=R2 records them in the trainer, none trains without.",
            )

    def validate(self, step: int) -> dict[str, float]:
        """Accuracy on held-out prompts, of the weights that sample this step; {} where none is due."""
        trainer = self.config.trainer
        every = trainer.validate_every
        if not every or not self.validation or not (step in (1, trainer.steps) or step % every == 0):
            return {}
        with self.phase("validation", self.rollout):
            records = self.validation[: trainer.validation_prompts]
            temperature = self.config.rollout.validation_temperature
            samples = self.generate(records, VALIDATION, trainer.validation_n, temperature)
            errors = self.verify(samples)
        judged = [s for s in samples if s.valid]
        found = {"eval/errors": float(errors), "eval/samples": float(len(judged))}
        if judged:
            found["eval/accuracy"] = float(np.mean([s.accuracy for s in judged]))
            found["eval/reward"] = float(np.mean([s.reward for s in judged]))
        return found

    def costs(self, samples: Sequence[Sample], moved: int, seconds: float) -> dict[str, Any]:
        """What the step took: seconds by phase, bytes, memory."""
        memory = self.trainer.peak_memory_gib() | self.rollout.peak_memory_gib()
        restarts = sum(self.rollout.restarts.values())
        self.state.wall_s += seconds
        sync = self.times["sync"]
        return {
            "attempt": self.state.attempt,
            **({"rollout/restarts": restarts} if restarts else {}),
            "sync/bytes": moved,
            "sync/seconds": sync,
            "sync/gbps": moved * 8 / sync / 1e9,
            "memory/gpu_peak_gib": max(m["gpu"] for m in memory.values()),
            "memory/gpu_reserved_peak_gib": max(m["gpu_reserved"] for m in memory.values()),
            "memory/host_peak_gib": sum(m["host"] for m in memory.values()),
            "tokens/per_second": sum(s.length for s in samples) / seconds,
            "time/wall": self.state.wall_s,
            "time/step": seconds,
            **{f"time/{name}": value for name, value in self.times.items()},
        }


def _row(samples: Sequence[Sample], name: str) -> torch.Tensor:
    """One float32 tensor of the samples' response values end to end."""
    return torch.from_numpy(np.concatenate([getattr(s, name) for s in samples]))


def sample_lines(step: int, samples: Sequence[Sample], groups: int, n: int) -> list[dict[str, Any]]:
    """The first `groups` samples of a step, one of each group first, as lines for samples.jsonl."""
    order = [g * n + k for k in range(n) for g in range(len(samples) // n)][:groups]
    lines = []
    for i in order:
        s = samples[i]
        lines.append(
            {
                "step": step,
                "prompt_id": s.record.id,
                "prompt": s.record.prompt_text,
                "response": s.text,
                "answer": s.record.answer,
                "reward": None if math.isnan(s.reward) else s.reward,
                "accuracy": None if math.isnan(s.accuracy) else s.accuracy,
                "advantage": s.advantage,
                "finish_reason": s.completion.finish_reason,
                "weight_version": s.completion.weight_version,
                "tokens": s.completion.tokens.tolist(),
                "rollout_logprobs": s.completion.logprobs.tolist(),
                "trainer_logprobs": s.logprobs.tolist() if s.logprobs is not None else None,
                **({"error": s.error} if s.error else {}),
            }
        )
    return lines
