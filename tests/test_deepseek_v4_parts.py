"""The parts of DeepSeek-V4 one by one, against hand-worked numbers, plain formulas or transformers' modules."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn import functional as F
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from moe_rl.errors import UserError
from moe_rl.models.deepseek_v4.arch import HEAVY, SLIDING, SPARSE, DeepseekV4Arch
from moe_rl.models.deepseek_v4.hyper import sinkhorn
from moe_rl.models.deepseek_v4.rotary import inverse_frequencies, rotate
from moe_rl.models.family import get_family, read_facts
from moe_rl.models.logprobs import label_logprobs
from moe_rl.models.packed import PackedSequences
from tests.tiny_v4 import tiny_config

FLASH_YARN = dict(type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536)


# --- packing
def test_windows_of_a_pack_by_hand():
    packed = PackedSequences.from_lengths([5, 1, 4])
    assert packed.total == 10 and packed.cu_seqlens.tolist() == [0, 5, 6, 10]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3]
    assert packed.sequence_ids.tolist() == [0, 0, 0, 0, 0, 1, 2, 2, 2, 2]
    w = packed.windows(2)
    assert w.tokens.tolist() == [[0, 1], [2, 3], [6, 7], [8, 9]]
    assert w.sequence.tolist() == [0, 0, 2, 2] and w.index.tolist() == [0, 1, 0, 1]
    assert w.first.tolist() == [0, 2, 2, 4] and w.count == 4
    assert packed.windows(2) is w


def test_visible_windows_by_hand():
    packed = PackedSequences.from_lengths([5, 1, 4])
    assert packed.visible_windows(0, 1, 2) == (0, 0, 0)  # token 0 has closed no window
    assert packed.visible_windows(0, 4, 2) == (0, 2, 2)
    assert packed.visible_windows(4, 8, 2) == (0, 3, 2)  # from sequence 0 to the first window of sequence 2
    assert packed.visible_windows(5, 6, 2) == (2, 2, 0)


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_empty_sequences_are_refused(lengths):
    with pytest.raises(UserError, match="batch.empty"):
        PackedSequences.from_lengths(lengths)


# --- rotary
@pytest.mark.parametrize(
    "scaling", [None, FLASH_YARN, FLASH_YARN | {"original_max_position_embeddings": 64, "factor": 4}]
)
def test_frequencies_match_transformers(scaling):
    config = tiny_config(head_dim=512, qk_rope_head_dim=64, index_head_dim=128, rope_scaling=scaling)
    arch = DeepseekV4Arch.from_dict(config)
    theirs = hf.DeepseekV4RotaryEmbedding(DeepseekV4Config(**{k: v for k, v in config.items() if v is not None}))
    assert torch.allclose(inverse_frequencies(arch.main_rope), theirs.main_inv_freq, rtol=1e-6, atol=0)
    assert torch.allclose(inverse_frequencies(arch.compress_rope), theirs.compress_inv_freq, rtol=1e-6, atol=0)
    assert arch.compress_rope.attention_factor == theirs.compress_attention_scaling == 1.0


def test_attention_factor_as_transformers_writes_it():
    yarn = FLASH_YARN | {"rope_theta": 160000.0}
    nested = {"main": {"rope_type": "default", "rope_theta": 10000.0}, "compress": yarn}
    arch = DeepseekV4Arch.from_dict(tiny_config(rope_parameters=nested))
    assert arch.compress_rope.attention_factor == pytest.approx(0.1 * math.log(16) + 1)
    nested["compress"] = yarn | {"attention_factor": 1.0}
    assert DeepseekV4Arch.from_dict(tiny_config(rope_parameters=nested)).compress_rope.attention_factor == 1.0


def test_rotation_by_hand_and_back():
    x = torch.tensor([[9.0, 1.0, 0.0, 0.0, 2.0]])[:, :5]
    quarter = (torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]]))  # 90 degrees for both pairs
    turned = rotate(x, *quarter)
    assert turned.tolist() == [[9.0, 0.0, 1.0, -2.0, 0.0]]
    assert rotate(turned, quarter[0], -quarter[1]).tolist() == x.tolist()


# --- log-probs
@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_label_logprobs_match_the_plain_formula(chunk, temperature):
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(13, 6, generator=g), torch.randn(17, 6, generator=g)
    labels, up = torch.randint(0, 17, (13,), generator=g), torch.randn(13, generator=g)
    grads = []
    for chunked in (False, True):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if chunked:
            logp, entropy = label_logprobs(h, w, labels, temperature, chunk, True)
            assert not torch.autograd.grad(logp.sum(), h, retain_graph=True)[0].isnan().any()
            assert torch.equal(label_logprobs(h, w, labels, temperature, chunk, False)[0], logp)
        else:
            every = (h @ w.t() / temperature).log_softmax(-1)
            logp, entropy = every[range(13), labels], -(every.exp() * every).sum(-1)
        grads.append([logp.detach(), entropy.detach(), *torch.autograd.grad((logp * up).sum(), (h, w))])
    for plain, ours in zip(*grads, strict=True):
        assert torch.allclose(plain, ours, atol=2e-6)


def test_label_logprobs_gradient_numerically():
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 3, generator=g, dtype=torch.float64)
    weight = torch.randn(4, 3, generator=g, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 0])
    step = 1e-3  # the logits are float32 inside
    h = hidden.clone().requires_grad_()
    grad = torch.autograd.grad(label_logprobs(h, weight, labels, 0.7, 2, False).sum(), h)[0]
    for i, j in ((0, 0), (3, 2)):
        shift = torch.zeros_like(hidden)
        shift[i, j] = step
        up, down = (label_logprobs(hidden + s, weight, labels, 0.7, 2, False).sum() for s in (shift, -shift))
        assert float(up - down) / (2 * step) == pytest.approx(float(grad[i, j]), abs=2e-3)


# --- hyper, routing
def test_sinkhorn_makes_rows_and_columns_sum_to_one():
    matrix = sinkhorn(torch.rand(5, 4, 4, generator=torch.Generator().manual_seed(0)) + 0.1, 50, 1e-6)
    assert torch.allclose(matrix.sum(-1), torch.ones(5, 4), atol=1e-4)
    assert torch.allclose(matrix.sum(-2), torch.ones(5, 4), atol=1e-4)


def test_one_sinkhorn_iteration_by_hand():
    assert sinkhorn(torch.tensor([[1.0, 3.0], [1.0, 1.0]]), 1, 0.0).tolist() == [[0.5, 0.75], [0.5, 0.25]]


@pytest.mark.parametrize("top_k", [1, 3])
def test_routing_weights_match_transformers(megatron_world, top_k):
    from moe_rl.models.deepseek_v4.moe import route

    router = hf.DeepseekV4TopKRouter(DeepseekV4Config(**tiny_config(num_experts_per_tok=top_k)))
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.normal_(generator=g)
        router.e_score_correction_bias.normal_(generator=g)
        logits, weights, indices = router(torch.randn(20, 32, generator=g))
        probs, chosen = route(
            logits, 1.5, lambda s: (s + router.e_score_correction_bias).topk(top_k, sorted=False).indices
        )
    assert torch.equal(chosen, torch.zeros(20, 8).scatter(1, indices, 1).bool())
    assert torch.allclose(probs, torch.zeros(20, 8).scatter(1, indices, weights), atol=1e-6)


def test_hash_routing_by_hand(megatron_world):
    from moe_rl.models.deepseek_v4.moe import route

    logits = torch.tensor([[0.0, 50.0, -3.0]])
    probs, chosen = route(logits, 2.0, torch.tensor([[2, 0]]))
    a, b = math.sqrt(math.log(2)), math.sqrt(math.log1p(math.exp(-3)))
    assert chosen.tolist() == [[True, False, True]]
    assert probs[0].tolist() == pytest.approx([2 * a / (a + b), 0, 2 * b / (a + b)], rel=1e-6)


def test_balanced_table(megatron_world):
    from moe_rl.models.deepseek_v4.build import balanced_table

    table = balanced_table(8 * 25, 8, 3, torch.Generator().manual_seed(0))
    assert all(len(set(row)) == 3 for row in table.tolist())
    assert torch.bincount(table.flatten(), minlength=8).tolist() == [75] * 8
    assert len({tuple(row) for row in table.tolist()}) > 100
    assert len(balanced_table(13, 8, 8, torch.Generator().manual_seed(0))) == 13


# --- architecture
def test_both_spellings_of_one_model_are_one_architecture(tmp_path):
    released = tiny_config(
        compress_ratios=[0, 4, 128, 4], layer_types=None, compress_rates=None, rope_scaling=FLASH_YARN
    )
    given = {k: v for k, v in released.items() if v is not None}
    DeepseekV4Config(**given).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "compress_ratios" not in written and "rope_scaling" not in written
    assert DeepseekV4Arch.from_dict(written) == DeepseekV4Arch.from_dict(given)


def test_kinds_and_ratios():
    arch = DeepseekV4Arch.from_dict(
        tiny_config(layer_types=None, compress_rates=None, compress_ratios=[0, 4, 16, 128, 4])
    )
    assert arch.attention_kinds == (SLIDING, SPARSE, HEAVY, HEAVY), "entries past the last layer are not decoder layers"
    assert arch.compress_ratios == (0, 4, 16, 128) and arch.hash_layers == (0, 1)
    arch = DeepseekV4Arch.from_dict(
        tiny_config(layer_types=None, compress_rates={SPARSE: 8, HEAVY: 4}, compress_ratios=[0, 8, 4, 8])
    )
    assert arch.attention_kinds == (SLIDING, SPARSE, HEAVY, SPARSE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head_dim": None}, "head_dim"),
        ({"o_groups": 3}, "o_groups 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ({"layer_types": ["full_attention"] * 4}, "full_attention"),
        ({"layer_types": [SLIDING]}, "layer_types has 1 entries for 4 layers"),
        ({"compress_ratios": [0, 4, 8, 0]}, "layer 3"),
        ({"num_hash_layers": None}, "num_hash_layers"),
        ({"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        ({"n_shared_experts": 2}, "n_shared_experts=2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "linear"),
        ({"rope_scaling": {"type": "yarn"}}, "YaRN"),
        ({"index_topk": 0}, "index_topk"),
        ({"qk_rope_head_dim": 3}, "rotary width 3"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"o_groups": 0}, "o_groups is 0"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5"),
        ({"num_nextn_predict_layers": "a"}, "num_nextn_predict_layers is 'a'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"swiglu_limit": "a"}, "swiglu_limit is 'a'"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters is 0"),
        ({"layer_types": 3}, "layer_types is 3"),
        ({"compress_ratios": [0, 4, [8], 0]}, "a compress ratio is [8]"),
        ({"compress_rates": {SPARSE: 2.5}}, "a compress ratio is 2.5"),
        ({"rope_scaling": 3}, "rope_scaling is 3"),
        ({"rope_scaling": {"type": "yarn", "factor": "x"}}, "factor is 'x'"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused(change, said):
    with pytest.raises(UserError, match="model.config") as caught:
        DeepseekV4Arch.from_dict(tiny_config(**change))
    assert said in str(caught.value)


# --- facts
def test_facts_of_a_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    assert read_facts(tmp_path).tokenizer_vocab is None
    tokenizer = {"model": {"vocab": {"a": 0, "b": 5}}, "added_tokens": [{"id": 9, "content": "</s>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    facts = read_facts(tmp_path)
    assert (facts.family, facts.num_layers, facts.hash_layers) == ("deepseek_v4", 4, (0, 1))
    assert (facts.vocab_size, facts.num_experts, facts.top_k, facts.num_heads) == (61, 8, 2, 4)
    assert (facts.hidden_size, facts.max_positions, facts.tokenizer_vocab) == (32, 256, 10)
    assert not facts.supports_tp and "key-value head" in facts.tp_reason and facts.path == str(tmp_path)


def test_wrong_directories_are_refused(tmp_path):
    with pytest.raises(UserError, match="model.path"):
        read_facts(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        read_facts(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="llama"):
        read_facts(tmp_path)
    with pytest.raises(UserError, match="known families"):
        get_family("gpt5")


def test_facts_need_no_torch(tmp_path):
    import subprocess
    import sys

    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    read = f"from moe_rl.models.family import read_facts; read_facts({str(tmp_path)!r})"
    code = f"import sys; {read}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_functional_reference_of_the_clamp(megatron_world):
    """megatron-core's expert with our options is down(silu(min(gate, limit)) * clamp(up, +-limit))."""
    from tests.v4_oracle import make_pair, parity_config

    pair = make_pair(parity_config([0], swiglu_limit=0.1, num_hash_layers=0))
    expert = pair.ours.layers["0"].mlp.experts.local_experts[0]
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    gate, up = (x @ expert.linear_fc1.weight.t()).chunk(2, -1)
    assert float(gate.max()) > 0.1 and float(up.abs().max()) > 0.1
    want = (F.silu(gate.clamp(max=0.1)) * up.clamp(-0.1, 0.1)) @ expert.linear_fc2.weight.t()
    assert torch.allclose(expert(x)[0], want, atol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_equal_index_scores_are_chosen_alike_in_any_company(k: int) -> None:
    """Rectified scores tie at 0 often; which of them is taken must not depend on what else lies in the row."""
    from moe_rl.models.deepseek_v4.attention import _top

    generator = torch.Generator().manual_seed(k)
    scores = torch.randn(400, 9, generator=generator).relu()
    allowed = torch.rand(400, 9, generator=generator) < 0.8
    alone = _top(scores, allowed, k)
    wide = torch.cat([torch.ones(400, 30), scores, torch.ones(400, 50)], 1)
    wide_allowed = torch.cat([torch.zeros(400, 30), allowed, torch.zeros(400, 50)], 1).bool()
    packed = _top(wide, wide_allowed, k) & wide_allowed
    assert packed[:, 30:39].equal(alone & allowed)
    assert not packed[:, :30].any() and not packed[:, 39:].any()
    assert (alone & allowed).sum(1).equal(allowed.sum(1).clamp(max=k))
