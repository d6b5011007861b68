"""The embedded rollout engine: its log-probs against plain scoring, its sampling against the distribution."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from moe_rl.config.schema import Config
from moe_rl.errors import RunFailed, UserError
from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from moe_rl.models.deepseek_v4.transformers_model import build_transformers_model, transformers_config
from moe_rl.models.deepseek_v4.weights import transformers_views, weight_table
from moe_rl.models.weights import whole_parts
from moe_rl.reshard.transport import pack
from moe_rl.rollout.engine import Request, sample_seed
from moe_rl.rollout.sampling import gumbel_noise, sample
from moe_rl.rollout.transformers_engine import TransformersEngine
from tests.tiny_v4 import HEAVY, SLIDING, SPARSE, randomise, tiny_config

# With few index heads two entries often score exactly 0 (every head rectified) and the pick between them is arbitrary.
CONFIG = tiny_config(index_n_heads=32)
ARCH = DeepseekV4Arch.from_dict(CONFIG)
LENGTHS = (5, 9, 9, 3, 17, 5, 1, 9)  # across the windows of 4 and 8 tokens and the sliding window of 6


def make_weights(seed=2):
    specs = weight_table(ARCH).expected()
    weights = {n: torch.empty(s.shape, dtype=torch.int64 if s.dtype == "int32" else None) for n, s in specs.items()}
    randomise(weights, seed, scale=0.1)
    weights["head.weight"] *= 4  # far from uniform, with the end of sequence now and then
    return weights


WEIGHTS = make_weights()


def push(engine, weights=WEIGHTS, version=0):
    engine.receive(packets(engine, weights, weights, version), version, weights)


def packets(engine, weights, names, version):
    parts, dtypes = whole_parts(weights), {h.name: h.dtype for h in engine.holdings(0)}
    boxes = [parts[name][0].box(name) for name in names]
    return pack(parts, boxes, dtypes, version=version, source=0, limit=20_000)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.fixture(scope="module")
def engine(path):
    engine = TransformersEngine(path, batch_size=5)
    push(engine)
    return engine


@pytest.fixture(scope="module")
def oracle(engine):
    """The same weights in a model of its own, in float64, with transformers' plain loop over experts."""
    model = build_transformers_model(CONFIG, ARCH, dtype=torch.float32)
    model.set_experts_implementation("eager")
    views = transformers_views(model, ARCH)
    for name, value in WEIGHTS.items():
        views[name].copy_(value)
    return model.double()


def make_requests(lengths=LENGTHS, copies=3, max_tokens=12, temperature=1.0):
    generator = np.random.default_rng(4)
    prompts = [tuple(generator.integers(0, 61, n).tolist()) for n in lengths]
    return [
        Request(i * copies + k, prompt, sample_seed(1, 0, i, k), max_tokens, temperature)
        for i, prompt in enumerate(prompts)
        for k in range(copies)
    ]


def scored_alone(oracle, request, tokens, temperature):
    """Log-probs of a completion by one forward of its sequence alone, without a cache."""
    sequence = torch.tensor([[*request.prompt, *tokens.tolist()]])
    with torch.no_grad():
        logits = oracle(sequence, use_cache=False).logits[0, len(request.prompt) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.from_numpy(tokens.astype(np.int64))[:, None])[:, 0].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sequence_scored_alone(engine, oracle, temperature):
    requests = make_requests(temperature=temperature)
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        assert completion.id == request.id and completion.weight_version == 0
        assert completion.tokens.dtype == np.int32 and completion.logprobs.dtype == np.float32
        assert len(completion.tokens) == len(completion.logprobs) > 0
        alone = scored_alone(oracle, request, completion.tokens, temperature)
        np.testing.assert_allclose(completion.logprobs, alone, atol=1e-5)


def test_neither_order_nor_batch_size_nor_company_changes_a_completion(path, engine):
    requests = make_requests()
    first = engine.generate(requests)
    shuffled = [requests[i] for i in np.random.default_rng(0).permutation(len(requests))]
    again = {c.id: c for c in engine.generate(shuffled)}
    large = TransformersEngine(path, batch_size=64)
    push(large)
    assert len({c.tokens.tobytes() for c in first}) > len(first) // 2
    for completion, other in zip(first, large.generate(requests), strict=True):
        for same in (other, again[completion.id]):
            assert same.tokens.tolist() == completion.tokens.tolist()
            assert same.finish_reason == completion.finish_reason
            np.testing.assert_allclose(same.logprobs, completion.logprobs, atol=1e-5)
    [alone] = engine.generate(requests[7:8])
    assert alone.tokens.tolist() == first[7].tokens.tolist()


def test_another_seed_gives_another_completion(engine):
    [request] = make_requests(lengths=(9,), copies=1)
    seeds = [Request(i, request.prompt, seed, 12, 1.0) for i, seed in enumerate((1, 2, 2))]
    a, b, c = engine.generate(seeds)
    assert a.tokens.tolist() != b.tokens.tolist() == c.tokens.tolist()


def test_a_shorter_limit_gives_a_prefix(engine):
    requests = make_requests(copies=1)
    limits = [1 + i % 5 for i in range(len(requests))]
    short = [Request(r.id, r.prompt, r.seed, n, 1.0) for r, n in zip(requests, limits, strict=True)]
    for whole, part, limit in zip(engine.generate(requests), engine.generate(short), limits, strict=True):
        assert part.tokens.tolist() == whole.tokens[:limit].tolist()


def test_an_end_of_sequence_stops_and_is_kept(engine):
    completions = engine.generate(make_requests(lengths=(1, 17, 6), copies=10))
    reasons = {c.finish_reason for c in completions}
    assert reasons == {"stop", "length"}
    for completion in completions:
        ends = np.flatnonzero(completion.tokens == 1).tolist()
        if completion.finish_reason == "stop":
            assert ends == [len(completion.tokens) - 1]
        else:
            assert not ends and len(completion.tokens) == 12


def test_several_ends_of_sequence_from_the_generation_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(3, 40))}))
    engine = TransformersEngine(tmp_path)
    push(engine)
    for completion in engine.generate(make_requests(copies=1)):
        assert all(not 3 <= t < 40 for t in completion.tokens[:-1])
        assert (completion.finish_reason == "stop") == (3 <= completion.tokens[-1] < 40)


def test_temperature_zero_is_greedy(engine, oracle):
    requests = make_requests(copies=1, max_tokens=6, temperature=0.0)
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        sequence = list(request.prompt)
        for token in completion.tokens.tolist():
            with torch.no_grad():
                assert token == oracle(torch.tensor([sequence]), use_cache=False).logits[0, -1].argmax().item()
            sequence.append(token)
        alone = scored_alone(oracle, request, completion.tokens, 1.0)
        np.testing.assert_allclose(completion.logprobs, alone, atol=1e-5)


def test_temperatures_may_differ_within_a_batch(engine):
    [request] = make_requests(lengths=(9,), copies=1)
    mixed = [Request(i, request.prompt, 5, 12, t) for i, t in enumerate((0.0, 1.0, 0.3))]
    alone = [engine.generate([r])[0] for r in mixed]
    for a, b in zip(engine.generate(mixed), alone, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


# The sampler itself


def test_the_sampler_draws_from_the_softmax():
    """Chi-square of 40,000 draws over 12 tokens; the probabilities are written out independently of the sampler."""
    logits = torch.tensor([2.0, -1.0, 0.0, 0.5, 1.5, -3.0, 0.1, 1.9, -0.4, 0.0, -6.0, 1.0])
    temperature, rows, rounds = 0.8, 4000, 10
    weights = [math.exp(x / temperature) for x in logits.tolist()]
    probabilities = np.array(weights) / sum(weights)
    counts = np.zeros(12)
    for index in range(rounds):
        seeds = [sample_seed(0, 0, i, 0) for i in range(rows)]
        tokens, logprobs = sample(logits.expand(rows, -1), seeds, index, [temperature] * rows)
        counts += np.bincount(tokens.numpy(), minlength=12)
        np.testing.assert_allclose(logprobs.numpy(), np.log(probabilities)[tokens.numpy()], atol=1e-5)
    expected = probabilities * rows * rounds
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 31.3  # 99.9 % point of chi-square with 11 degrees of freedom


def test_draws_of_successive_tokens_are_independent():
    """Two tokens of probability one half each: the four pairs of successive draws come equally often."""
    seeds = [sample_seed(3, 1, i, 2) for i in range(8000)]
    logits = torch.zeros(8000, 2)
    first, second = (sample(logits, seeds, index, [1.0] * 8000)[0] for index in (0, 1))
    counts = torch.bincount(2 * first + second, minlength=4).double()
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 16.3  # 99.9 % point, 3 degrees of freedom


def test_noise_is_a_function_of_seed_and_index():
    assert np.array_equal(gumbel_noise(2**64 - 1, 5, 100), gumbel_noise(2**64 - 1, 5, 100))
    streams = [gumbel_noise(seed, index, 100) for seed in (1, 2) for index in (0, 1, 2)]
    assert len({s.tobytes() for s in streams}) == 6
    assert np.array_equal(gumbel_noise(7, 3, 50), gumbel_noise(7, 3, 100)[:50])
    values = gumbel_noise(1, 0, 200_000)
    assert abs(values.mean() - np.euler_gamma) < 0.01 and abs(values.var() - math.pi**2 / 6) < 0.03


def test_sample_seeds_are_64_bit_and_do_not_repeat():
    seeds = {sample_seed(a, b, c, d) for a in range(3) for b in range(8) for c in range(30) for d in range(8)}
    assert len(seeds) == 3 * 8 * 30 * 8 and max(seeds) > 2**63 and all(0 <= s < 2**64 for s in seeds)
    assert sample_seed(1, 11, 1, 1) != sample_seed(11, 1, 1, 1) != sample_seed(1, 1, 11, 1)
    assert (
        sample_seed(1, 2, 3, 4) == 18374276246372963665
    )  # recorded: a run resumed under another version must not drift


# Weights


def test_before_the_first_weights_everything_is_poison_and_nothing_is_generated(path):
    engine = TransformersEngine(path)
    views = transformers_views(engine._model, ARCH)
    assert all(v.isnan().all() if v.is_floating_point() else (v == -1).all() for v in views.values())
    assert engine.weight_version == -1
    with pytest.raises(RunFailed, match="no weights"):
        engine.generate(make_requests())


def test_a_failed_update_shuts_the_engine_until_the_next_whole_one(path):
    engine = TransformersEngine(path)
    push(engine, version=3)
    assert engine.weight_version == 3
    names = [n for n in WEIGHTS if n != "layers.2.ffn.experts.5.w2.weight"]
    with pytest.raises(RunFailed, match=r"1 tensors never arrived: layers.2.ffn.experts.5.w2.weight"):
        engine.receive(packets(engine, WEIGHTS, names, 4), 4, WEIGHTS)
    with pytest.raises(RunFailed, match="no weights"):
        engine.generate(make_requests())
    push(engine, version=4)
    assert {c.weight_version for c in engine.generate(make_requests(lengths=(5,)))} == {4}


def test_new_weights_change_what_is_sampled(path, engine):
    other = TransformersEngine(path)
    push(other, make_weights(seed=3), version=1)
    requests = make_requests(lengths=(5,), copies=8)
    a, b = engine.generate(requests), other.generate(requests)
    assert [c.tokens.tolist() for c in a] != [c.tokens.tolist() for c in b]
    push(other, WEIGHTS, version=2)
    assert [c.tokens.tolist() for c in a] == [c.tokens.tolist() for c in other.generate(requests)]


def test_logits_that_are_not_numbers_name_the_requests(path):
    engine = TransformersEngine(path)
    push(engine, WEIGHTS | {"norm.weight": torch.full((32,), torch.inf)})
    with pytest.raises(RunFailed, match=r"not numbers for requests \[0\]"):
        engine.generate(make_requests(lengths=(5,), copies=1))


def test_holdings_are_the_live_dtypes(path):
    held = {h.name: (h.shape, h.dtype) for h in TransformersEngine(path, dtype="bf16").holdings(5)}
    specs = weight_table(ARCH).expected()
    assert {n: shape for n, (shape, _) in held.items()} == {n: s.shape for n, s in specs.items()}
    wanted = {n: "int64" if s.dtype == "int32" else s.dtype for n, s in specs.items()}
    assert {n: dtype for n, (_, dtype) in held.items()} == wanted


def test_bf16_generates_close_to_fp32(path, oracle):
    engine = TransformersEngine(path, dtype="bf16")
    push(engine)
    requests = make_requests(copies=1, max_tokens=2)
    gaps = [
        np.abs(c.logprobs - scored_alone(oracle, r, c.tokens, 1.0)).max()
        for r, c in zip(requests, engine.generate(requests), strict=True)
    ]
    assert 1e-5 < np.median(gaps) < 0.2


# Time and input


def test_what_time_cuts_short_is_aborted(path):
    engine = TransformersEngine(path, batch_size=4, timeout_s=0.0)
    push(engine)
    completions = engine.generate(make_requests(lengths=(5, 9)))
    assert {c.finish_reason for c in completions} == {"aborted"}
    assert all(len(c.tokens) == 0 for c in completions)


def test_a_deadline_within_a_batch_keeps_what_was_sampled(path, engine, monkeypatch):
    import moe_rl.rollout.transformers_engine as module

    slow = TransformersEngine(path, timeout_s=100.0)
    push(slow)
    ticks = iter([0.0, 1.0, 2.0, 3.0, 200.0, 300.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(ticks))
    requests = make_requests(lengths=(9,), copies=8)
    cut = slow.generate(requests)
    assert "aborted" in {c.finish_reason for c in cut}
    for part, whole in zip(cut, engine.generate(requests), strict=True):
        assert part.tokens.tolist() == whole.tokens[:3].tolist()
        assert (part.finish_reason == "aborted") == (len(whole.tokens) > 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ()}, "request 8 needs a prompt"),
        ({"max_tokens": 0}, "request 8 needs"),
        ({"prompt": (3, 61)}, "request 8 has token 61, the model has 61"),
        ({"max_tokens": 260}, "request 8 would reach 262 tokens, the model has 256"),
        ({"temperature": -1.0}, "request 8 has temperature -1.0"),
        ({"temperature": math.nan}, "request 8 has temperature nan"),
    ],
)
def test_impossible_requests_are_refused(engine, change, message):
    fields = dict(id=8, prompt=(3, 4), seed=1, max_tokens=3, temperature=1.0) | change
    with pytest.raises(UserError, match=message):
        engine.generate([Request(**fields)])


def test_no_requests_no_completions(engine):
    assert engine.generate([]) == []


def test_from_config(path):
    config = Config()
    config.model.path, config.engine.device, config.engine.dtype = str(path), "cpu", "fp32"
    config.rollout.batch_size = 7
    engine = TransformersEngine.from_config(config)
    push(engine)
    assert engine.eos_ids == (1,) and torch.get_num_threads() == 1
    assert len(list(engine._batches(make_requests(lengths=(4,), copies=15)))) == 3


# transformers' configuration from either spelling


def test_both_spellings_give_the_configuration_that_transformers_reads(path):
    from transformers import AutoConfig

    theirs = AutoConfig.from_pretrained(path).to_dict() | {"_name_or_path": ""}
    released = {k: v for k, v in CONFIG.items() if k not in ("layer_types", "compress_rates")}
    for config in (CONFIG, released):
        arch = DeepseekV4Arch.from_dict(config)
        assert transformers_config(config, arch).to_dict() == theirs


def test_ratios_that_transformers_cannot_express_are_refused():
    config = tiny_config(
        layer_types=[SLIDING, SPARSE, HEAVY, HEAVY], compress_ratios=[0, 4, 8, 16], compress_rates=None
    )
    with pytest.raises(UserError, match=r"ratios \[8, 16\]"):
        transformers_config(config, DeepseekV4Arch.from_dict(config))
