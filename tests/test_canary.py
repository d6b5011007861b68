"""The canary, the refit's comparison and the corrections: real engines, and faults that each must find."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_rl.cli import run
from moe_rl.config import Config
from moe_rl.errors import RunFailed
from moe_rl.grpo.batching import micro_batches
from moe_rl.grpo.corrections import KINDS, correction
from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from moe_rl.models.deepseek_v4.weights import weight_table
from moe_rl.models.weights import whole_parts
from moe_rl.reshard.transport import pack
from moe_rl.rollout.engine import Completion
from moe_rl.rollout.transformers_engine import TransformersEngine
from moe_rl.trainer.canary import Canary, canary_sequences
from moe_rl.trainer.refit import State, changes
from moe_rl.trainer.samples import Sample, trained
from tests.small_v4 import model_config, write_model

RECORDS = [SimpleNamespace(prompt_tokens=tuple(range(i, i + n))) for i, n in ((3, 5), (20, 2), (40, 9))]


class Side:
    """A trainer and rollouts as the canary sees them, whose weights are those of real engines in this process."""

    def __init__(self, trainer: TransformersEngine, **replicas: TransformersEngine) -> None:
        self.trainer, self.replicas = trainer, replicas

    def cuts(self, lengths):
        return micro_batches(lengths, 128, 1)

    def log_probs(self, batch, cuts, *, temperature):
        assert temperature == 1.0 and sorted(i for rank in cuts for cut in rank for i in cut.indices) == [0, 1, 2, 3]
        return {i: (row, None) for i, row in enumerate(self.trainer.score(batch.tokens))}

    def score(self, sequences):
        return {name: engine.score(sequences) for name, engine in self.replicas.items()}


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    made = {}
    for name, spec in weight_table(DeepseekV4Arch.from_dict(model_config())).expected().items():
        integer = spec.dtype == "int32"
        made[name] = torch.randint(0, 4, spec.shape) if integer else torch.randn(spec.shape) * 0.3
    return made


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    path = write_model(tmp_path_factory.mktemp("canary") / "model")

    def make(seed: int = 1) -> TransformersEngine:
        engine, values = TransformersEngine(path), weights(seed)
        parts, dtypes = whole_parts(values), {h.name: h.dtype for h in engine.holdings(0)}
        packets = pack(parts, [parts[n][0].box(n) for n in values], dtypes, version=0, source=0)
        engine.receive(packets, 0, values)
        return engine

    return make


def canary(trainer, **replicas) -> Canary:
    side = Side(trainer, **replicas)
    return Canary(Config(), RECORDS, side, side)


def test_sequences_are_the_prompts_end_to_end():
    first, second = canary_sequences(RECORDS, 2, 10)
    assert first.tolist() == [3, 4, 5, 6, 7, 20, 21, 40, 41, 42] and second.tolist()[:7] == [43, 44, 45, 46, 47, 48, 3]
    assert first.dtype == np.int32 and canary_sequences(RECORDS, 0, 10) == []


def test_equal_weights_pass_and_a_replica_that_computes_otherwise_is_named(engine_of):
    trainer, good, bad = engine_of(), engine_of(), engine_of()
    found = canary(trainer, rollout_0=good, rollout_1=bad).check()
    assert found["sync/canary_pearson_prob"] == pytest.approx(1.0) and found["sync/canary_logprob_abs_max"] < 1e-5
    before, digests = good.score(canary_sequences(RECORDS, 4, 64)), bad.digests()
    assert digests == good.digests() == trainer.digests()
    bad._receiver._parts["layers.1.attn.attn_sink"][0].view.zero_()  # a tensor that an update did not refresh
    stale = canary(trainer, rollout_0=good, rollout_1=bad)
    assert stale.check()["sync/canary_logprob_abs_max"] > 1e-3  # seen, though no gate of the defaults is passed
    stale.config.trainer.gates.canary_logprob_max = 1e-4
    with pytest.raises(RunFailed, match="canary_logprob_abs_max of rollout_1 .* trainer.gates.canary_logprob_max"):
        stale.check()
    assert {n for n, d in bad.digests().items() if d != digests[n]} == {"layers.1.attn.attn_sink"}
    with pytest.raises(RunFailed, match="of rollout_0 is .* below trainer.gates.canary_pearson_min"):
        canary(trainer, rollout_0=engine_of(seed=2), rollout_1=good).check()
    bad._receiver._parts["norm.weight"][0].view.fill_(math.nan)
    with pytest.raises(RunFailed, match="canary_pearson_prob of rollout_1 is nan"):
        canary(trainer, rollout_0=good, rollout_1=bad).check()
    both = canary(
        trainer,
        rollout_0=SimpleNamespace(
            score=lambda rows: [*good.score(rows[:1]), *bad.score(rows[1:2]), *good.score(rows[2:])]
        ),
    )
    both.config.rollout.dp = 3
    with pytest.raises(RunFailed, match="pearson_prob of rollout_0, data-parallel rank 1, is nan"):
        both.check()
    # the refit's comparison names the same
    rows = {"rollout_0": torch.from_numpy(np.concatenate(before))[None]}
    first = State(digests, {"rollout_0": digests}, rows)
    assert changes(first, first, 0.0, 1) == []
    now = replace(first, rollouts={"rollout_0": bad.digests()}, logprobs={"rollout_0": rows["rollout_0"] + 0.5})
    tensors, moved = changes(first, now, 0.2, 2)
    assert tensors == "update 2: 2 tensors of rollout_0 changed: layers.1.attn.attn_sink, norm.weight"
    assert "moved by 0.5" in moved and changes(first, now, 0.3, 2) == [tensors]


def test_an_engine_without_weights_scores_nothing(tmp_path):
    engine = TransformersEngine(write_model(tmp_path / "model"))
    with pytest.raises(RunFailed, match="no weights"):
        engine.score([np.arange(4)])


@pytest.mark.parametrize("kind", KINDS)
def test_corrections_are_their_definition(kind):
    rng = np.random.default_rng(1)
    p, q, lengths, cap = rng.normal(-2, 0.5, 12), rng.normal(-2, 0.5, 12), [5, 0, 1, 6], 1.5
    found = correction(kind, torch.tensor(p), torch.tensor(q), torch.tensor(lengths), cap)
    start, wanted, cut = 0, [], []
    for n in lengths:
        ratios = [math.exp(a - b) for a, b in zip(p[start : start + n], q[start : start + n], strict=True)]
        if kind.startswith("sequence"):
            ratios = [math.prod(ratios)] * n
        start += n
        inside = [r <= cap if kind.endswith("truncate") else 1 / cap <= r <= cap for r in ratios]
        wanted += [min(r, cap) if kind.endswith("truncate") else float(i) for r, i in zip(ratios, inside, strict=True)]
        cut += [not i for i in inside]
    np.testing.assert_allclose(found.weights.numpy(), wanted, rtol=1e-6)
    assert found.cut.tolist() == cut and any(cut) and not all(cut)
    metrics, w = found.metrics(), np.array(wanted)
    assert metrics["correction/cut_frac"] == pytest.approx(np.mean(cut))
    assert metrics["correction/weight_mean"] == pytest.approx(w.mean(), rel=1e-6)
    assert metrics["correction/effective_frac"] == pytest.approx(w.sum() ** 2 / (12 * (w**2).sum()), rel=1e-6)
    with pytest.raises(ValueError):
        correction("token", torch.tensor(p), torch.tensor(q), torch.tensor(lengths), cap)
    with pytest.raises(ValueError):
        correction(kind, torch.tensor(p), torch.tensor(q), torch.tensor([12, 1]), cap)


def test_uncut_weights_turn_the_rollouts_expectation_into_the_trainers():
    """Over all tokens of a small vocabulary: E_q[w grad log p] = E_p[grad log p A], exactly."""
    logits = torch.randn(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    q = torch.randn(7, generator=torch.Generator().manual_seed(2), dtype=torch.float64).log_softmax(0)
    advantage = torch.arange(7.0, dtype=torch.float64)
    p = logits.log_softmax(0)
    weights = correction("token_truncate", p, q, torch.tensor([7]), 1e6).weights.double()
    (mine,) = torch.autograd.grad((q.exp() * weights * advantage * p).sum(), logits, retain_graph=True)
    (true,) = torch.autograd.grad((p.detach().exp() * advantage * p).sum(), logits)
    torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-6)


def test_the_loss_is_given_the_corrected_weights():
    completion = Completion(0, np.array([5, 6], np.int32), np.zeros(2, np.float32), "length", 0)
    samples = [Sample(SimpleNamespace(prompt_tokens=(1, 2)), completion, "") for _ in range(2)]
    samples[1].correction = np.array([0.5, 2.0], np.float32)
    fields = trained(samples, [0.25, 0.25]).fields
    assert [row.tolist() for row in fields["weight"]] == [[0.0, 0.25, 0.25], [0.0, 0.125, 0.5]]
    assert [row.tolist() for row in fields["mask"]] == [[0.0, 1.0, 1.0]] * 2


VLLM = ["qwen3-moe-tiny", "rollout.engine=vllm", "layout.tp=1", "layout.ep=1", "cluster.gpus_per_node=1"]


@pytest.mark.slow
@pytest.mark.parametrize("replicas, recipe", [(2, ["dsv4-tiny", "rollout.replicas=2"]), (1, VLLM)])
def test_doctor_refits_a_recipe(replicas, recipe, capfd):
    assert run(["doctor", "--refit", *recipe, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["replicas"] == replicas and found["moved"] == found["noise"] == 0.0 and found["tensors"] > 50
    assert [c["sync/canary_pearson_prob"] for c in found["canary"]] == pytest.approx([1.0] * 3, abs=1e-6)
