"""DeepSeek-V4's attention kernels on a GPU, at the sizes they are meant for, against float64 and plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from tests.attention_cases import blocks, check, choices, draw, errors
from tests.tiny_v4 import tiny_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ratio, top_k", [(0, 0), (4, 0), (4, 1), (4, 60), (128, 0)])
@pytest.mark.parametrize("lengths", [(1,), (127, 128, 129), (300, 1, 77, 420)], ids=str)
@pytest.mark.parametrize("heads, d, rope, window", [(128, 512, 32, 128), (64, 512, 32, 3), (24, 128, 16, 33)])
def test_errors_are_those_of_plain_bf16(lengths, heads, d, rope, window, ratio, top_k):
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
