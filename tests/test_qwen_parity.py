"""Our Qwen models against transformers' with the same random weights, in one process: log-probs and gradients in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.errors import RunFailed, UserError
from moe_rl.models.packed import PackedSequences
from moe_rl.models.qwen.arch import QwenArch
from moe_rl.models.qwen.weights import weight_table
from moe_rl.models.weights import Part
from tests.small_qwen import KINDS, model_config, oracle, randomise, token_logprobs, transformers_views

pytestmark = pytest.mark.usefixtures("megatron_world")
LENGTHS = (1, 2, 3, 40, 41, 129)
CASES: dict[str, dict[str, Any]] = {
    "qwen2": model_config("qwen2"),
    "qwen2, own output layer": model_config("qwen2", tie_word_embeddings=False, num_key_value_heads=4),
    "qwen3": model_config("qwen3", num_key_value_heads=1),
    "qwen3, tied": model_config("qwen3", tie_word_embeddings=True, rms_norm_eps=1e-3),
    "moe": model_config("qwen3_moe"),
    "moe, unnormalised": model_config("qwen3_moe", norm_topk_prob=False, num_experts=5, num_experts_per_tok=3),
    "moe, top 1": model_config("qwen3_moe", num_experts_per_tok=1),
    "moe, every second layer": model_config("qwen3_moe", decoder_sparse_step=2),
    "moe, dense layers": model_config("qwen3_moe", mlp_only_layers=[0, 3], tie_word_embeddings=True),
    "transformers' keys": model_config(
        "qwen3_moe", rope_parameters={"rope_type": "default", "rope_theta": 300.0}, rope_theta=None
    ),
}


@dataclass
class Pair:
    config: dict[str, Any]
    theirs: torch.nn.Module
    ours: Any

    @property
    def parts(self) -> dict[str, list[Part]]:
        return weight_table(self.ours.arch).trainer_parts(self.ours)

    def logprobs(self, sequences: Sequence[torch.Tensor], temperature: float = 1.0) -> list[torch.Tensor]:
        """Ours [L-1] of each sequence, all packed into one row."""
        row = torch.cat(list(sequences))
        labels = torch.cat((row[1:], row[:1]))
        lengths = [len(s) for s in sequences]
        out = self.ours(row[None], PackedSequences.from_lengths(lengths), labels[None], temperature, True)
        return [values[:-1] for values in out[0].split(lengths)]


def make_pair(config: dict[str, Any], seed: int, **build: Any) -> Pair:
    from moe_rl.models.qwen.build import build_chunk, make_transformer_config

    arch = QwenArch.from_dict(config)
    theirs = oracle({key: value for key, value in config.items() if value is not None})
    pair = Pair(config, theirs, build_chunk(arch, make_transformer_config(arch, **build)).train())
    with torch.no_grad():
        views = transformers_views(theirs, config)
        randomise(views, seed)
        for name, parts in pair.parts.items():
            for part in parts:
                part.view.copy_(views[name][part.slices])
    return pair


def sequences_of(lengths: Sequence[int], vocab: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]


def deviation(pair: Pair, lengths: Sequence[int], seed: int, temperature: float = 1.0) -> float:
    """Largest deviation of any log-prob: each sequence alone, and all packed in two orders."""
    sequences = sequences_of(lengths, pair.ours.arch.vocab_size, seed)
    with torch.no_grad():
        expected = [token_logprobs(pair.theirs, s, temperature) for s in sequences]
        worst = 0.0
        for order in (*([i] for i in range(len(lengths))), range(len(lengths)), reversed(range(len(lengths)))):
            order = list(order)
            for i, found in zip(order, pair.logprobs([sequences[i] for i in order], temperature), strict=True):
                worst = max([worst, *(found - expected[i]).abs().tolist()])
    return worst


def gradient_deviation(pair: Pair, lengths: Sequence[int], seed: int, floor: float = 1e-6) -> float:
    """Largest ||ours - theirs|| / max(||theirs||, floor ||all||) of any released tensor."""
    sequences = sequences_of(lengths, pair.ours.arch.vocab_size, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    weights = torch.randn(sum(lengths) - len(lengths), generator=generator)
    theirs = torch.cat([token_logprobs(pair.theirs, s) for s in sequences])
    (theirs * weights).sum().backward()
    (torch.cat(pair.logprobs(sequences)) * weights).sum().backward()
    with torch.no_grad():
        for model in (pair.theirs, pair.ours):
            for parameter in model.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    views = transformers_views(pair.theirs, pair.config)
    whole = torch.cat([v.flatten() for v in views.values()]).norm()
    worst = 0.0
    for name, parts in pair.parts.items():
        gap = torch.stack([(part.view - views[name][part.slices]).norm() for part in parts]).norm()
        worst = max(worst, float(gap / torch.maximum(views[name].norm(), floor * whole)))
    return worst


@pytest.mark.parametrize("name", CASES)
def test_log_probs_alone_and_packed(name):
    pair = make_pair(CASES[name], seed=3, logprob_chunk=50)
    assert deviation(pair, LENGTHS, seed=11) < 1e-5
    assert deviation(pair, LENGTHS[2:4], seed=12, temperature=0.7) < 1e-5


@pytest.mark.parametrize("recompute", ["off", "full"])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, recompute):
    # At top 1 the router's gradient is 0 and both sides hold rounding.
    floor = 1e-3 if name == "moe, top 1" else 1e-6
    pair = make_pair(CASES[name], seed=3, logprob_chunk=50, recompute=recompute)
    assert gradient_deviation(pair, LENGTHS, seed=11, floor=floor) < 1e-4


def test_entropy_is_that_of_the_whole_distribution():
    pair = make_pair(CASES["qwen3"], seed=3, logprob_chunk=7)
    (sequence,) = sequences_of([40], 64, seed=1)
    out = pair.ours(sequence[None], PackedSequences.from_lengths([40]), sequence[None], 0.8, True)
    p = (pair.theirs(sequence[None]).logits[0] / 0.8).softmax(-1)
    torch.testing.assert_close(out[1], -(p * p.log()).sum(-1), atol=1e-5, rtol=0)


def test_a_wrong_weight_is_noticed():
    pair = make_pair(CASES["moe"], seed=3)
    with torch.no_grad():
        pair.ours.layers["1"].self_attention.k_layernorm.weight[0] += 0.05
    assert deviation(pair, [40], seed=11) > 1e-5


@st.composite
def configs(draw):
    kind = draw(st.sampled_from(sorted(KINDS)))
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    layers = draw(st.integers(1, 3))
    config = model_config(
        kind,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from([n for n in (1, 2, 3, 6) if heads % n == 0])),
        hidden_size=heads * draw(st.sampled_from([4, 8])),
        head_dim=None if kind == "qwen2" else draw(st.sampled_from([4, 10, 16])),
        intermediate_size=draw(st.integers(3, 40)),
        vocab_size=draw(st.integers(5, 90)),
        rope_theta=draw(st.sampled_from([100.0, 1e6])),
        tie_word_embeddings=draw(st.booleans()),
    )
    if kind == "qwen3_moe":
        experts = draw(st.integers(2, 7))
        config |= {
            "num_experts": experts,
            "num_experts_per_tok": draw(st.integers(1, experts)),
            "moe_intermediate_size": draw(st.integers(2, 20)),
            "norm_topk_prob": draw(st.booleans()),
            "mlp_only_layers": [0] if layers > 1 and draw(st.booleans()) else [],
        }
    build = dict(logprob_chunk=draw(st.integers(1, 40)), recompute=draw(st.sampled_from(["off", "full"])))
    return config, build, draw(st.lists(st.integers(2, 50), min_size=1, max_size=5)), draw(st.integers(0, 10**6))


def check_configs(examples: int) -> None:
    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(configs())
    def check(case) -> None:
        config, build, lengths, seed = case
        pair = make_pair(config, seed, **build)
        assert deviation(pair, lengths, seed + 1) < 1e-4
        assert gradient_deviation(pair, lengths, seed + 1, floor=3e-3) < 1e-4

    check()


def test_any_config():
    check_configs(12)


@pytest.mark.slow
def test_many_configs():
    check_configs(200)


# What config.json may say


@pytest.mark.parametrize(
    "kind, changes, says",
    [
        ("qwen2", {"use_sliding_window": True}, "sliding-window attention"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "sliding-window attention"),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope type 'dynamic'"),
        ("qwen3", {"rope_theta": -1}, "rope_theta is -1"),
        ("qwen3", {"attention_bias": True}, "attention_bias true"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen2", {"hidden_size": None}, "missing hidden_size"),
        ("qwen2", {"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ("qwen2", {"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide 4 heads"),
        ("qwen3", {"head_dim": 15}, "head_dim 15 is odd"),
        ("qwen3_moe", {"num_experts": None}, "missing num_experts"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is not from 1 to num_experts 4"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, "leave no layer with experts"),
        ("qwen3_moe", {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(kind, changes, says):
    with pytest.raises(UserError, match="config.json") as error:
        QwenArch.from_dict(model_config(kind, **changes))
    assert says in str(error.value)


def test_a_tied_checkpoint_may_hold_the_output_layer_once_more(tmp_path):
    from safetensors.torch import save_file

    from moe_rl.models.load import check_released

    table = weight_table(QwenArch.from_dict(CASES["qwen2"]))
    tensors = {name: torch.zeros(spec.shape) for name, spec in table.expected().items()}
    save_file(tensors | {"lm_head.weight": torch.zeros(64, 32)}, tmp_path / "model.safetensors")
    check_released(tmp_path, table)
    save_file(tensors | {"lm_head.bias": torch.zeros(64)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="lm_head.bias"):
        check_released(tmp_path, table)


def test_a_parameter_outside_the_table_is_an_error():
    pair = make_pair(CASES["qwen2"], seed=1)
    pair.ours.layers["0"].mlp.gamma = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(RunFailed, match="0 of the 3 elements of layers.0.mlp.gamma"):
        _ = pair.parts
