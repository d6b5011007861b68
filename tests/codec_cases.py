"""What the codec must give: a reference in exact fractions, adversarial tensors, and the fused kernels against the plain ones."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from types import ModuleType

import numpy as np
import torch

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]  # OCP MX v1.0, FP4: code -> value
E4M3 = [  # OCP OFP8 v1.0: exponent bias 7, three bits of mantissa, code 127 is NaN
    Fraction(mantissa, 8) * Fraction(2) ** -6
    if exponent == 0
    else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    for exponent in range(16)
    for mantissa in range(8)
][:127]


def nearest(value: Fraction, table: Sequence[Fraction]) -> int:
    """Index of the entry closest to a value that is not above the last one; of two equally close ones the even index."""
    above = bisect_left(table, value)
    if above == 0:
        return 0
    below = above - 1
    gap = (value - table[below]) - (table[above] - value)
    return above if gap > 0 or (gap == 0 and above % 2 == 0) else below


def scale_byte(amax: Fraction, largest: int) -> int:
    """The least E8M0 byte whose power of two times `largest` is not below amax."""
    byte = 0
    while amax > largest * Fraction(2) ** (byte - 127):
        byte += 1
    return byte


def encode_block(values: Sequence[float], table: Sequence[Fraction], sign: int) -> tuple[int, list[int]]:
    """E8M0 byte and codes of one block, in exact arithmetic; `sign` is added to the code of a negative value or -0.0."""
    exact = [Fraction(abs(v)) for v in values]
    byte = scale_byte(max(exact), int(table[-1]))
    scale = Fraction(2) ** (byte - 127)
    codes = [
        nearest(x / scale, table) + (sign if math.copysign(1, v) < 0 else 0) for x, v in zip(exact, values, strict=True)
    ]
    return byte, codes


def encode_block_fp32(values: Sequence[float]) -> tuple[np.float32, list[int]]:
    """FP8 with a float32 scale of amax / 448, each operation rounded to float32 as IEEE 754 says."""
    x = np.array(values, np.float32)
    scale = max(np.abs(x).max() / np.float32(448), np.float32(2.0**-126))
    ratios = (np.abs(x) / scale).tolist()
    codes = [nearest(min(Fraction(r), E4M3[-1]), E4M3) for r in ratios]
    return scale, [code + 128 * int(s) for code, s in zip(codes, np.signbit(x), strict=True)]


def adversarial(dtype: torch.dtype, blocks: int = 300) -> torch.Tensor:
    """[N, 32], finite: any bits, every magnitude, halves between codes and their neighbours, zeros, the smallest and largest."""
    draw = torch.Generator().manual_seed(7)
    bits = torch.randint(-(2**31), 2**31, (blocks, 32), generator=draw).to(torch.int32).view(torch.float32)
    spread = (
        torch.randn(blocks, 32, generator=draw) * torch.randint(-148, 126, (blocks, 1), generator=draw).float().exp2()
    )
    table = torch.tensor([float(v) for v in E2M1])
    ties = (table[1:] + table[:-1]) / 2
    near = torch.cat([ties, ties * (1 + 2.0**-7), ties * (1 - 2.0**-8), table, -ties])[:32]
    near[0] = 6.0
    near = near * torch.arange(-134, 125).float().exp2()[:, None]
    tiny = torch.tensor([2.0**-149, -(2.0**-149), 2.0**-133, -(2.0**-126), 0.0, -0.0, 2.0**-130, 1.0]).repeat(4, 4)
    tiny[1:] *= torch.tensor([[0.0], [2.0**-126], [2.0**-100]])
    top = torch.full((2, 32), torch.finfo(torch.bfloat16).max)
    top[1] = -top[1] / 3
    values = torch.cat([bits, spread, near, tiny, top, torch.zeros(1, 32), -torch.zeros(1, 32)]).to(dtype)
    return torch.where(values.isfinite(), values, torch.ones((), dtype=dtype))


def assert_same_bits(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)
        assert torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


def agree(kernel: ModuleType, reference: ModuleType, device: str, size: int = 1) -> int:
    """Kernels on `device` against a reference on the CPU: equal bits, equal flags. Returns the number of values compared."""
    compared = 0
    for dtype in (torch.bfloat16, torch.float32):
        blocks = adversarial(dtype, 300 * size)
        compared += 2 * blocks.numel()
        for bad in (None, math.nan, -math.inf):
            if bad is not None:
                blocks[-5, 17] = bad
            *wanted, flag = reference.mxfp4_encode(blocks)
            *got, found = kernel.mxfp4_encode(blocks.to(device))
            assert bool(found) == bool(flag) == (bad is not None)
            if bad is None:
                assert_same_bits(got, wanted)
                assert_same_bits(kernel.mxfp4_decode(*got, dtype)[:1], reference.mxfp4_decode(*wanted, dtype)[:1])
        for scale, code, refused in ((255, 0, True), (254, 3, False), (254, 4, True), (253, 5, False), (253, 14, True)):
            packed = torch.full((3, 16), code, dtype=torch.uint8)
            scales = torch.tensor([127, 127, scale], dtype=torch.uint8)
            assert bool(kernel.mxfp4_decode(packed.to(device), scales.to(device), dtype)[1]) == refused
        for shape in ((128, 256), (130, 300), (1, 1), (257, 127 * size)):
            flat = adversarial(dtype, 300 * size).view(-1)
            spread = flat[torch.arange(shape[0] * shape[1]) * 7919 % len(flat)].view(shape)
            draw = torch.Generator().manual_seed(shape[1])
            usual = torch.randn(shape, generator=draw) * torch.randint(-22, 9, shape, generator=draw).float().exp2()
            for weight in (spread, usual.to(dtype), (usual * 2.0**-118).to(dtype)):
                compared += 4 * weight.numel()
                for e8m0 in (True, False):
                    compare_fp8(kernel, reference, weight, e8m0, device)
            refuses_fp8(kernel, spread, device)
    return compared


def compare_fp8(kernel: ModuleType, reference: ModuleType, weight: torch.Tensor, e8m0: bool, device: str) -> None:
    *wanted, flag = reference.fp8_encode(weight, e8m0)
    *got, found = kernel.fp8_encode(weight.to(device), e8m0)
    assert not flag and not found
    assert_same_bits(got, wanted)
    values, scales = wanted[0], wanted[1].float()
    *decoded, flag = reference.fp8_decode(values, scales, weight.dtype)
    *again, found = kernel.fp8_decode(values.to(device), scales.to(device), weight.dtype)
    assert bool(flag) == bool(found)  # the largest code times a scale near the top may overflow
    if not flag:
        assert_same_bits(again, decoded)


def refuses_fp8(kernel: ModuleType, weight: torch.Tensor, device: str) -> None:
    weight = weight.clone()
    weight[-1, -1] = math.inf
    assert kernel.fp8_encode(weight.to(device), True)[2]
    for code, scale in ((0x7F, 1.0), (0xFF, 1.0), (1, math.nan), (0x7E, 2.0**120)):
        codes = torch.zeros(weight.shape, dtype=torch.uint8)
        codes[-1, 0] = code
        scales = torch.full([-(-n // 128) for n in weight.shape], scale)
        assert kernel.fp8_decode(codes.view(torch.float8_e4m3fn).to(device), scales.to(device), weight.dtype)[1]
