"""The codec against exact arithmetic, over every byte under every scale, and against other people's decoders."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_rl.errors import UserError
from moe_rl.models import codec
from moe_rl.models.codec import plain
from tests.codec_cases import E2M1, E4M3, adversarial, assert_same_bits, encode_block, encode_block_fp32

ROOT = Path(__file__).parent.parent
DTYPES = (torch.bfloat16, torch.float32)
VALUES4 = np.array([float(v) for v in E2M1] + [-float(v) for v in E2M1])
VALUES8 = np.array([float(v) for v in E4M3] + [math.nan] + [-float(v) for v in E4M3] + [math.nan])
FINITE8 = np.array([b for b in range(256) if b & 127 != 127], np.uint8)


def signed_zero_equal(got: torch.Tensor, wanted: np.ndarray) -> bool:
    found = got.double().numpy()
    return bool(np.array_equal(found, wanted) and np.array_equal(np.signbit(found), np.signbit(wanted)))


# --- MXFP4 ------------------------------------------------------------------------------------------------------------


def every_mxfp4_byte() -> tuple[torch.Tensor, torch.Tensor]:
    """[255 * 272, 16] and [255 * 272]: under each scale 16 blocks that hold all bytes, and 256 blocks of one byte each."""
    bytes_ = torch.arange(256, dtype=torch.uint8)
    blocks = torch.cat([bytes_.view(16, 16), bytes_[:, None].expand(256, 16)])
    scales = torch.arange(255, dtype=torch.uint8)
    return blocks.repeat(255, 1), scales.repeat_interleave(272)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_mxfp4_byte_under_every_scale(dtype):
    packed, scales = every_mxfp4_byte()
    nibbles = torch.stack([packed & 15, packed >> 4], 2).view(-1, 32).numpy()
    wanted = np.ldexp(VALUES4[nibbles], scales.numpy().astype(np.int32)[:, None] - 127)
    fits = (np.abs(wanted) < 2.0**128).all(1)  # 2, 3, 4 and 6 overflow under the two largest scales
    assert (~fits).sum() == 2 * 16 + (256 - 64) + (256 - 144)
    with pytest.raises(UserError, match="not finite in w"):
        codec.mxfp4_decode(packed, scales[:, None], dtype, name="w")
    packed, scales, nibbles = packed[fits], scales[fits][:, None], nibbles[fits]
    values = codec.mxfp4_decode(packed, scales, dtype)
    assert signed_zero_equal(values, wanted[fits])

    packed2, scales2 = codec.mxfp4_encode(values)
    assert_same_bits([codec.mxfp4_decode(packed2, scales2, dtype)], [values])
    largest = torch.from_numpy((nibbles & 7).max(1))
    normal = (largest >= 6) | (scales[:, 0] == 0)
    same = (scales2 == scales)[:, 0] & (packed2 == packed).all(1)
    assert torch.equal(same, normal)
    assert bool((scales2 <= scales).all())
    assert bool((scales2[largest == 0] == 0).all())


def test_mxfp4_scale_of_nan_is_refused_by_name():
    packed = torch.zeros(4, 32, dtype=torch.int8)
    scales = torch.full((4, 2), 127, dtype=torch.uint8)
    scales[2, 1] = 255
    with pytest.raises(UserError, match=r"layers.3.ffn.experts.17.w1 \[codec.non_finite\]"):
        codec.mxfp4_decode(packed, scales.view(torch.float8_e8m0fnu), name="layers.3.ffn.experts.17.w1")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mxfp4_encoder_is_exact_arithmetic(dtype):
    blocks = adversarial(dtype, blocks=60)
    packed, scales = codec.mxfp4_encode(blocks)
    codes = torch.stack([packed & 15, packed >> 4], 2).view(-1, 32).tolist()
    for values, byte, found in zip(blocks.tolist(), scales[:, 0].tolist(), codes, strict=True):
        assert encode_block(values, E2M1, 8) == (byte, found), values


def test_mxfp4_error_is_half_a_step():
    """No value loses more than half the distance to its neighbours: nothing is clamped."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    packed, scales = codec.mxfp4_encode(weight)
    unit = scales.float().sub(127).exp2().repeat_interleave(32, 1)
    step = torch.where(weight.abs() / unit > 4, 2, torch.where(weight.abs() / unit > 2, 1, 0.5))
    assert bool(((codec.mxfp4_decode(packed, scales, torch.float32) - weight).abs() <= step / 2 * unit).all())


def test_mxfp4_keeps_leading_axes_and_takes_any_strides():
    weight = torch.randn(3, 64, 5, generator=torch.Generator().manual_seed(2)).transpose(1, 2)
    packed, scales = codec.mxfp4_encode(weight)
    assert packed.shape == (3, 5, 32) and scales.shape == (3, 5, 2)
    assert_same_bits(codec.mxfp4_encode(weight.contiguous()), (packed, scales))
    odd = torch.empty(packed.numel() + 1, dtype=torch.uint8)[1:].view(packed.shape).copy_(packed)
    assert_same_bits([codec.mxfp4_decode(odd, scales)], [codec.mxfp4_decode(packed.view(torch.int8), scales)])
    assert codec.mxfp4_decode(packed, scales).shape == (3, 5, 64)


def test_inputs_are_left_alone():
    for dtype in DTYPES:
        weight = torch.randn(64, 64, dtype=dtype, generator=torch.Generator().manual_seed(3)).requires_grad_()
        before = weight.detach().clone()
        assert not any(t.requires_grad for t in (*codec.mxfp4_encode(weight), *codec.fp8_encode(weight)))
        assert_same_bits([weight.detach()], [before])


def test_empty_weights():
    for shape in ((0, 64), (4, 0)):
        packed, scales = codec.mxfp4_encode(torch.empty(shape))
        assert codec.mxfp4_decode(packed, scales).shape == shape
        values, blocks = codec.fp8_encode(torch.empty(shape))
        assert codec.fp8_decode(values, blocks).shape == shape


# --- FP8 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_fp8_byte_under_every_scale(dtype):
    """Each block holds one byte and zeros: [1, 128] under each of 255 scales, so that every block is its own case."""
    codes = torch.zeros(255, 254, 128, dtype=torch.uint8)
    codes[:, :, 5] = torch.from_numpy(FINITE8)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 254).contiguous()
    exact = np.ldexp(VALUES8[FINITE8], np.arange(255, dtype=np.int32)[:, None] - 127)
    wanted = torch.from_numpy(exact).to(torch.float32).to(dtype).double().numpy()  # fp32 holds each exactly
    assert (wanted[3:] == exact[3:])[np.isfinite(wanted[3:])].all()  # bf16 does, too, but for bytes 0 to 2
    fits = torch.from_numpy(np.isfinite(wanted))
    assert bool(fits[:247].all()) and not bool(fits[254].all())
    with pytest.raises(UserError, match="not finite in w"):
        codec.fp8_decode(codes.view(1, -1).view(torch.float8_e4m3fn), scales.view(1, -1), dtype, name="w")

    codes, scales = codes[fits].view(1, -1), scales[fits].view(1, -1)
    values = codec.fp8_decode(codes.view(torch.float8_e4m3fn), scales, dtype)
    assert signed_zero_equal(values[0, 5::128], wanted[fits.numpy()])
    codes2, scales2 = codec.fp8_encode(values)
    assert_same_bits([codec.fp8_decode(codes2, scales2, dtype)], [values])
    normal = codes[0, 5::128] & 127 > 0x76  # above 224
    same = (scales2.view(torch.uint8) == scales)[0] & (codes2.view(torch.uint8) == codes)[0, 5::128]
    assert bool(same[normal].all()) and not bool(same[~normal & (scales[0] > 16)].any())


@pytest.mark.parametrize("shape", [(128, 128), (130, 257), (1, 1), (3, 129)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_encoder_is_exact_arithmetic(dtype, shape):
    flat = adversarial(dtype, blocks=20).view(-1)
    weight = flat[torch.arange(shape[0] * shape[1]) * 6007 % len(flat)].view(shape)
    weight[:, :128] = torch.randn(shape[0], min(128, shape[1]), generator=torch.Generator().manual_seed(4)).to(dtype)
    for name, reference in (("e8m0", lambda v: encode_block(v, E4M3, 128)), ("fp32", encode_block_fp32)):
        codes, scales = codec.fp8_encode(weight, scale_dtype=name)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = (slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
                scale, wanted = reference(weight[block].flatten().tolist())
                assert codes.view(torch.uint8)[block].flatten().tolist() == wanted
                assert (scales.view(torch.uint8) if name == "e8m0" else scales)[i, j].item() == scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_with_float32_scales_settles_after_one_pass(dtype):
    draw = torch.Generator().manual_seed(5)
    weight = torch.randn(300, 200, generator=draw) * 0.02
    codes, scales = codec.fp8_encode(weight, scale_dtype="fp32")
    codes2, scales2 = codec.fp8_encode(codec.fp8_decode(codes, scales, dtype), scale_dtype="fp32")
    assert_same_bits([codes2], [codes])
    assert bool(((scales2 / scales - 1).abs() <= (2.0**-8 if dtype == torch.bfloat16 else 2.0**-22)).all())
    assert_same_bits(codec.fp8_encode(codec.fp8_decode(codes2, scales2, dtype), scale_dtype="fp32"), [codes2, scales2])


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("encode", [codec.mxfp4_encode, codec.fp8_encode])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_finite_weights_are_refused_by_name(encode, bad, dtype):
    weight = torch.zeros(130, 160, dtype=dtype)
    weight[129, 159] = bad
    with pytest.raises(UserError, match=r"not finite in layers.0.attn.wkv \[codec.non_finite\]"):
        encode(weight, name="layers.0.attn.wkv")


def test_checks_are_put_off_and_name_all():
    checks = codec.NonFinite()
    good, bad = torch.ones(32, 32), torch.full((32, 32), math.nan)
    for index in range(12):
        codec.mxfp4_encode(bad if index % 4 else good, name=f"w{index}", checks=checks)
    values, scales = codec.fp8_encode(good, name="good", checks=checks)
    codec.fp8_decode(values, scales, name="good", checks=checks)
    with pytest.raises(UserError, match="w1, w2, w3, w5, w6, w7, w9, w10 and 1 more"):
        checks.raise_if_any()
    checks.raise_if_any()  # settled


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fp8_nan_codes_are_refused(code):
    codes = torch.zeros(2, 200, dtype=torch.uint8)
    codes[1, 199] = code
    with pytest.raises(UserError, match="not finite in w"):
        codec.fp8_decode(codes.view(torch.float8_e4m3fn), torch.ones(1, 2), name="w")


def test_what_does_not_fit_is_refused_by_name():
    u8, e8m0, fp8 = torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn
    cases = [
        lambda: codec.mxfp4_decode(torch.zeros(4, 32, dtype=u8), torch.zeros(4, 1, dtype=u8), name="w"),
        lambda: codec.mxfp4_decode(torch.zeros(4, 8, dtype=u8), torch.zeros(4, 1, dtype=u8), name="w"),
        lambda: codec.mxfp4_decode(torch.zeros(4, 16, dtype=u8), torch.zeros(1, 1, dtype=u8), name="w"),
        lambda: codec.mxfp4_decode(torch.zeros(4, 16, dtype=u8), torch.zeros(4, 1), name="w"),
        lambda: codec.mxfp4_decode(torch.zeros(4, 16), torch.zeros(4, 1, dtype=u8), name="w"),
        lambda: codec.mxfp4_decode(torch.zeros(4, 16, dtype=u8), torch.zeros(4, 1, dtype=u8), torch.half, name="w"),
        lambda: codec.mxfp4_decode(torch.zeros((), dtype=u8), torch.zeros((), dtype=u8), name="w"),
        lambda: codec.mxfp4_encode(torch.zeros(4, 33), name="w"),
        lambda: codec.mxfp4_encode(torch.zeros(()), name="w"),
        lambda: codec.mxfp4_encode(torch.zeros(4, 32, dtype=torch.half), name="w"),
        lambda: codec.fp8_decode(torch.zeros(129, 4).to(fp8), torch.zeros(1, 1), name="w"),
        lambda: codec.fp8_decode(torch.zeros(128).to(fp8), torch.zeros(1), name="w"),
        lambda: codec.fp8_decode(torch.zeros(4, 4), torch.zeros(1, 1), name="w"),
        lambda: codec.fp8_decode(torch.zeros(4, 4).to(fp8), torch.zeros(1, 1).bfloat16(), name="w"),
        lambda: codec.fp8_decode(torch.zeros(4, 4).to(fp8), torch.ones(1, 1).to(e8m0), torch.half, name="w"),
        lambda: codec.fp8_encode(torch.zeros(4), name="w"),
        lambda: codec.fp8_encode(torch.zeros(2, 4, 4), name="w"),
        lambda: codec.fp8_encode(torch.zeros(4, 4, dtype=torch.double), name="w"),
    ]
    for index, case in enumerate(cases):
        with pytest.raises(UserError, match=r"^w: .*\[codec.geometry\]"):
            case()
            pytest.fail(f"case {index} passed")
    with pytest.raises(ValueError, match="scale_dtype"):
        codec.fp8_encode(torch.zeros(4, 4), scale_dtype="bf16")


# --- others -----------------------------------------------------------------------------------------------------------


def test_transformers_decodes_the_same_mxfp4():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed, scales = every_mxfp4_byte()
    part = (scales > 8) & (scales < 247)  # it takes powers of two in the result's dtype
    packed, scales = packed[part], scales[part]
    ours = codec.mxfp4_decode(packed.view(1, -1, 16), scales.view(1, -1, 1))
    theirs = convert_moe_packed_tensors(packed.view(1, -1, 1, 16), scales.view(1, -1, 1))
    assert_same_bits([theirs.transpose(1, 2)], [ours])
    dequantize = Fp8Dequantize(None)._dequantize_one
    assert_same_bits([dequantize(packed.view(torch.int8), scales[:, None], torch.bfloat16)], [ours[0]])


def test_transformers_encodes_and_decodes_the_same_fp8():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    draw = torch.Generator().manual_seed(6)
    weight = torch.randn(256, 384, generator=draw) * torch.randn(256, 1, generator=draw).exp()
    config = SimpleNamespace(scale_fmt="ue8m0", weight_block_size=(128, 128))
    theirs = Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one("w.weight", weight)
    codes, scales = codec.fp8_encode(weight)
    assert_same_bits([codes, scales], [theirs["w.weight"], theirs["w.weight_scale_inv"]])
    for kind in ("e8m0", "fp32"):
        codes, scales = codec.fp8_encode(weight, scale_dtype=kind)
        decoded = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
        assert_same_bits([codec.fp8_decode(codes, scales)], [decoded])


MODELOPT = """
import sys, torch
from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
weight, packed, scales = torch.load(sys.argv[1])
theirs, their_scales = MXFP4QTensor.quantize(weight, 32)
assert torch.equal(their_scales.view(scales.shape), scales), "scales"
assert torch.equal(theirs._quantized_data, packed), "bytes"
mine = MXFP4QTensor(weight.shape, torch.bfloat16, packed)
torch.save(mine.dequantize(torch.bfloat16, scale=scales, block_sizes=[32]), sys.argv[1])
"""


@pytest.mark.slow
def test_modelopt_encodes_and_decodes_the_same_mxfp4(tmp_path):
    """In a process of its own: it imports megatron-core. Random fp32 only: halves it rounds down, and +0.0 to code 8."""
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(8)) * 0.02
    packed, scales = codec.mxfp4_encode(weight)
    torch.save((weight, packed, scales), tmp_path / "w.pt")
    done = subprocess.run([sys.executable, "-c", MODELOPT, tmp_path / "w.pt"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert_same_bits([torch.load(tmp_path / "w.pt")], [codec.mxfp4_decode(packed, scales)])


def test_fused_kernels_interpreted_by_the_benchmark(tmp_path):
    """Triton's interpreter runs the kernels; the benchmark first compares them with `plain` on adversarial tensors."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "benchmarks/codec.py",
        "--device",
        "cpu",
        "--out",
        tmp_path / "codec.json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "codec.json").read_text())
    assert record["compared"] > 2 * 10**6
    assert [row["what"].split()[0] for row in record["rows"]] == ["mxfp4"] * 2 + ["fp8"] * 3
    assert [row["bytes"] for row in record["rows"]] == [
        10368,
        10368,
        78004,
        78016,
        78016,
    ]  # in and out: bf16, codes, scales


def test_parts_change_nothing():
    """A CPU's parts against the whole at once."""
    weight = torch.randn(3 * plain._CPU_BLOCKS // 2, 32, generator=torch.Generator().manual_seed(9)).bfloat16()
    half = len(weight) // 2
    first, second = plain.mxfp4_encode(weight[:half]), plain.mxfp4_encode(weight[half:])
    assert_same_bits(
        plain.mxfp4_encode(weight)[:2], [torch.cat([a, b]) for a, b in zip(first[:2], second[:2], strict=True)]
    )
