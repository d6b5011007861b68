"""Every switch of the algorithm through real runs: metrics recomputed by hand from the samples a run leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.short_runs import PROMPTS, N, Result, initial_logprobs, short_run

pytestmark = pytest.mark.slow

COEF, TEMPERATURE = 0.5, 1.7
MANY = ["algorithm.kl=k3", "algorithm.minibatches=2", "algorithm.epochs=2", "algorithm.clip_low=0.01"]
MANY += ["algorithm.clip_high=0.02", "optimizer.lr=1e-3", "optimizer.warmup_steps=8", "trainer.seed=5"]


def uneven(completion: str, answer: str) -> float:
    """A reward that differs within every group."""
    return sum(map(ord, completion)) % 7 / 3


def by_group(samples: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([s[name] for s in samples], dtype=np.float64).reshape(PROMPTS, N)


def advantages(rewards: np.ndarray, mode: str) -> np.ndarray:
    """[groups, n], from the definition."""
    centred = rewards - rewards.mean(1, keepdims=True)
    if mode == "group_std":
        centred = centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    return np.where(np.ptp(rewards, axis=1, keepdims=True) == 0, 0.0, centred)


def token_weights(lengths: np.ndarray, aggregation: str) -> np.ndarray:
    """The weight of each token of each sample."""
    return 1.0 / lengths.sum() if aggregation == "token_mean" else 1.0 / (len(lengths) * lengths)


def check_step(result: Result, step: int, kl: str, advantage: str, aggregation: str) -> None:
    """One update per step: the ratio is 1, so the loss is -sum(weight * advantage) and the KL of the loss."""
    samples, metrics = result.samples[step - 1], result.metrics[step - 1]
    lengths = np.array([len(s["tokens"]) for s in samples])
    policy = [np.array(s["trainer_logprobs"]) for s in samples]
    d = [p - r for p, r in zip(policy, initial_logprobs(samples, TEMPERATURE), strict=True)]
    assert any(len(set(group)) > 1 for group in lengths.reshape(PROMPTS, N))  # or the aggregations could not differ
    rewards = by_group(samples, "reward")
    if kl == "k1":
        rewards = rewards - COEF * np.array([x.sum() for x in d]).reshape(rewards.shape)
    np.testing.assert_allclose(by_group(samples, "advantage"), advantages(rewards, advantage), atol=2e-4)
    weights = token_weights(lengths, aggregation) * np.ones(len(lengths))
    loss = -(weights * lengths * by_group(samples, "advantage").ravel()).sum()
    if kl in ("k2", "k3"):
        terms = [x**2 / 2 if kl == "k2" else np.expm1(-x) + x for x in d]
        loss += COEF * sum(w * t.sum() for w, t in zip(weights, terms, strict=True))
    assert metrics["actor/loss"] == pytest.approx(loss, abs=1e-5)
    flat = np.concatenate(d)
    estimate = flat if kl == "k1" else np.expm1(-flat) + flat
    if step == 1:
        assert metrics["kl/reference"] == 0.0  # the reference, in the trainer's layout, is the policy bit for bit
    else:
        assert metrics["kl/reference"] == pytest.approx(estimate.mean(), rel=1e-3, abs=1e-6)
        assert abs(metrics["kl/reference"]) > 1e-5
    assert metrics["mismatch/logprob_abs_max"] < 1e-4
    assert metrics["actor/clip_frac"] == 0.0 and metrics["kl/old"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("kl", "advantage", "aggregation"),
    [
        ("k1", "group_mean", "token_mean"),
        ("k2", "group_std", "token_mean"),
        ("k3", "group_std", "sequence_mean"),
    ],
)
def test_kl_advantage_and_aggregation(kl: str, advantage: str, aggregation: str, tmp_path: Path):
    overrides = [f"algorithm.kl={kl}", f"algorithm.kl_coef={COEF}", f"algorithm.advantage={advantage}"]
    overrides += [f"algorithm.aggregation={aggregation}", "optimizer.lr=1e-3"]
    overrides += [f"rollout.temperature={TEMPERATURE}"]
    result = short_run(tmp_path / "run", *overrides, reward=uneven)
    assert result.code == 0 and len(result.metrics) == 2
    for step in (1, 2):
        check_step(result, step, kl, advantage, aggregation)


def test_dual_clip(tmp_path: Path):
    """With the other clips out of reach, the second epoch's ratios meet the dual clip alone."""
    overrides = ["algorithm.epochs=2", "algorithm.clip_low=1", "algorithm.clip_high=1e6", "trainer.steps=1"]
    [metrics] = short_run(tmp_path / "run", *overrides, "optimizer.lr=1e-3", "algorithm.dual_clip=1.001").metrics
    assert metrics["kl/old"] != 0.0 and metrics["actor/clip_frac"] > 0.0


@pytest.mark.exhaustive
def test_the_updates_own_log_probs_are_those_from_before_it(tmp_path: Path):
    """One optimizer step a batch: the same run to the bit, a forward pass cheaper."""
    few = ["algorithm.kl=k3", "optimizer.lr=1e-3", "rollout.temperature=1.3", "trainer.gates.pearson_min=0.99"]
    plain, own = (
        short_run(tmp_path / mode, *few, f"algorithm.old_logprobs={mode}", reward=uneven)
        for mode in ("recompute", "update")
    )
    assert plain.samples == own.samples
    kinds = ("actor/", "kl/", "mismatch/", "reward/")
    for a, b in zip(plain.metrics, own.metrics, strict=True):
        assert {k: v for k, v in a.items() if k.startswith(kinds)} == {
            k: v for k, v in b.items() if k.startswith(kinds)
        }


@pytest.mark.exhaustive
def test_the_rollouts_log_probs_as_the_old_ones(tmp_path: Path):
    """Two optimizer steps: the first one's log-probs, of the weights that sampled, are compared with the rollout's."""
    plain, own = (
        short_run(
            tmp_path / mode,
            "algorithm.minibatches=2",
            "trainer.steps=1",
            "optimizer.lr=1e-3",
            f"algorithm.old_logprobs={mode}",
        )
        for mode in ("recompute", "rollout")
    )
    scored = [s for s in own.samples[0] if s["trainer_logprobs"] is not None]
    assert len(scored) == PROMPTS * N // 2 and "time/log_prob" not in own.metrics[0]
    before = {(s["prompt_id"], tuple(s["tokens"])): s["trainer_logprobs"] for s in plain.samples[0]}
    for s in scored:
        np.testing.assert_allclose(s["trainer_logprobs"], before[s["prompt_id"], tuple(s["tokens"])], atol=1e-5)
    assert own.metrics[0]["mismatch/logprob_abs_max"] < 1e-4
    for name in ("actor/loss", "actor/grad_norm", "kl/old"):
        assert own.metrics[0][name] == pytest.approx(plain.metrics[0][name], rel=1e-3, abs=1e-5), name


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Two minibatches, two epochs, narrow clips and k3 in one process."""
    return short_run(tmp_path_factory.mktemp("many") / "run", *MANY)


def test_minibatches_and_epochs(many: Result):
    for metrics in many.metrics:
        assert metrics["kl/old"] > 1e-6 and 0.0 < metrics["actor/clip_frac"] < 1.0
    # 2 minibatches * 2 epochs are 4 optimizer steps: the rate is half way up the warm-up of 8, then at its peak
    assert [m["actor/lr"] for m in many.metrics] == pytest.approx([0.5e-3, 1e-3])
    assert [m["weight_version"] for m in many.metrics] == [0, 1]
    assert many.metrics[0]["kl/reference"] == 0.0 and many.metrics[1]["kl/reference"] > 1e-5


def same_run(a: Result, b: Result) -> None:
    for x, y in zip(a.samples, b.samples, strict=True):
        np.testing.assert_allclose(by_group(x, "advantage"), by_group(y, "advantage"), atol=1e-5)
    for x, y in zip(a.metrics, b.metrics, strict=True):
        assert x["actor/loss"] == pytest.approx(y["actor/loss"], abs=1e-5)
        assert x["actor/grad_norm"] == pytest.approx(y["actor/grad_norm"], rel=1e-4)
        assert x["kl/reference"] == pytest.approx(y["kl/reference"], rel=1e-3, abs=1e-9)
        for name in ("actor/clip_frac", "actor/lr", "reward/mean", "response/length_mean"):
            assert x[name] == pytest.approx(y[name], abs=1e-9), name


@pytest.mark.parametrize(
    "layout",
    [
        ["layout.pp=2", "layout.ep=2", "cluster.gpus_per_node=4"],
        ["layout.pp=2", "layout.vpp=2", "layout.ep=1", "cluster.gpus_per_node=2", "rollout.replicas=2"],
    ],
    ids=["PP2xEP2", "VPP2 and two replicas"],
)
def test_neither_layout_nor_replicas_change_anything(many: Result, layout: list[str], tmp_path: Path):
    cut = "engine.max_tokens_per_micro_batch=64"  # several micro-batches in flight
    other = short_run(tmp_path / "run", *MANY, cut, layout=layout)
    assert [[s["tokens"] for s in step] for step in other.samples] == [[s["tokens"] for s in x] for x in many.samples]
    same_run(many, other)
