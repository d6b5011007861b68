"""The codec's kernels on a GPU against PyTorch's own operations on the CPU and there: bit for bit, and without waiting."""

from __future__ import annotations

import math

import pytest
import torch

from moe_rl.errors import UserError
from moe_rl.models import codec
from tests.codec_cases import agree, assert_same_bits
from tests.test_codec import every_mxfp4_byte

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_bits_are_those_of_the_cpu(kind):
    from moe_rl.models.codec import fused, plain

    assert agree({"fused": fused, "plain": plain}[kind], plain, "cuda", size=20) > 10**7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_mxfp4_byte_under_every_scale_that_fits(dtype):
    packed, scales = (t[: 253 * 272] for t in every_mxfp4_byte())
    values = codec.mxfp4_decode(packed.cuda(), scales[:, None].cuda(), dtype)
    assert_same_bits([values], [codec.mxfp4_decode(packed, scales[:, None], dtype)])
    assert_same_bits(codec.mxfp4_encode(values), codec.mxfp4_encode(values.cpu()))


@pytest.mark.parametrize("e8m0", [True, False], ids=["e8m0", "fp32"])
def test_every_bf16_under_every_largest_value_of_an_fp8_block(e8m0):
    from moe_rl.models.codec import fused, plain

    values = torch.arange(1 << 15, dtype=torch.int16, device="cuda")
    signs = (values % 3 == 0).to(torch.int16) << 15
    for top in torch.arange(0x7F80, dtype=torch.int16, device="cuda").split(2048):
        bits = torch.minimum(values.expand(len(top), -1), top[:, None])
        bits[:, :: 1 << 14] = top[:, None]  # a row is two blocks
        weight = (bits | signs).view(torch.bfloat16).view(-1, 128)
        assert_same_bits(fused.fp8_encode(weight, e8m0)[:2], plain.fp8_encode(weight, e8m0)[:2])


def test_batches_of_experts_and_views():
    weight = torch.randn(5, 96, 256, device="cuda").bfloat16()
    for w in (weight, weight[1:, 3:70], weight.transpose(1, 2)[:, :, :64], weight.view(-1)[1:65].view(2, 32)):
        assert_same_bits(codec.mxfp4_encode(w), codec.mxfp4_encode(w.cpu()))
    for w in (weight[0].T, weight[0, :, 1:], weight.view(-1)[1:65].view(2, 32)):
        assert_same_bits(codec.fp8_encode(w), codec.fp8_encode(w.cpu()))
    assert codec.fp8_decode(*codec.fp8_encode(weight[0, :0])).shape == (0, 256)


def test_checks_wait_for_the_device_once():
    checks = codec.NonFinite()
    weight = torch.randn(256, 256, device="cuda").bfloat16()
    codec.mxfp4_encode(weight)  # compiled
    bad = weight.clone()
    bad[200, 7] = math.nan
    torch.cuda.set_sync_debug_mode("error")
    try:
        for name, w in (("good", weight), ("bad", bad)):
            codec.mxfp4_decode(*codec.mxfp4_encode(w, name=name, checks=checks), name=name, checks=checks)
            for kind in ("e8m0", "fp32"):
                codec.fp8_encode(w, scale_dtype=kind, name=f"{name}.{kind}", checks=checks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(UserError, match="not finite in bad, bad.e8m0, bad.fp32") as caught:
        checks.raise_if_any()
    assert "good" not in str(caught.value)
