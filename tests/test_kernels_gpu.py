"""The Triton kernels of training on a GPU, at the sizes they are meant for, against float64 and plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from tests import experts_cases, hyper_cases, logprob_cases
from tests.attention_cases import blocks, check, choices, draw, errors
from tests.tiny_v4 import tiny_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ratio, top_k", [(0, 0), (4, 0), (4, 60), (128, 0)])
@pytest.mark.parametrize("heads, d, rope, window", [(128, 512, 32, 128), (24, 128, 16, 33)])
@pytest.mark.parametrize("lengths", [(1,), (127, 128, 129), (300, 1, 77, 420)], ids=str)
def test_attention_errs_no_more_than_twice_plain_bf16(lengths, heads, d, rope, window, ratio, top_k):
    check(errors(draw(lengths, heads, d, rope, window, ratio, top_k, torch.bfloat16, "cuda", seed=len(lengths))))


@pytest.mark.parametrize("lengths, k", [((3000, 700, 9), 64), ((4200, 4500), 1024), ((20000,), 512)], ids=str)
@pytest.mark.parametrize("heads, d", [(64, 64), (16, 256)])
def test_choices_are_those_of_a_stable_sort(lengths, k, heads, d):
    assert choices(lengths, 4, k, heads, d, torch.bfloat16, "cuda") > 100


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_block_is_near_the_plain_one(layer):
    """Where no choice is to be made, so that rounding is all."""
    arch = DeepseekV4Arch.from_dict(
        tiny_config(head_dim=128, qk_rope_head_dim=32, index_n_heads=16, index_head_dim=32, index_topk=64)
    )
    pairs = zip(
        *(blocks(b, arch, layer, (90, 1, 130), torch.bfloat16, "cuda") for b in ("triton", "plain")), strict=True
    )
    for found, wanted in pairs:
        assert float((found - wanted).float().norm()) < 0.03 * float(wanted.float().norm())


@pytest.mark.parametrize("vocabulary, chunk", [(129280, 100), (5003, 1024)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_err_no_more_than_twice_plain_bf16(chunk, vocabulary, temperature):
    found = logprob_cases.errors(300, vocabulary, 512, chunk, temperature, torch.bfloat16, "cuda")
    check(found)


@pytest.mark.parametrize("tokens, width", [(1, 64), (333, 7168), (1000, 400)])
def test_hyper_connections_err_no_more_than_twice_plain_bf16(tokens, width):
    check(hyper_cases.errors(tokens, width, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("rows, width", [(1, 128), (1000, 512), (333, 7168)])
def test_norms_err_no_more_than_twice_plain_bf16(rows, width):
    check(hyper_cases.norm_errors(rows, width, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("counts", [(100, 0, 37, 256), (0, 0), (1,)], ids=str)
def test_experts_err_no_more_than_twice_plain_bf16(counts):
    found = experts_cases.errors(counts, 512, 1100, torch.bfloat16, "cuda")
    if sum(counts):
        check(found)
