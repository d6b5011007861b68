"""Codes under a given scale, against looking every value up among all the values that the scale has."""

from __future__ import annotations

import pytest
import torch

from moe_rl.convert.keep import released_fp8, released_mxfp4

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DTYPES = [torch.bfloat16, torch.float32]


def looked_up(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `released_mxfp4` promises, a value at a time: codes uint8 [M, K] (0 where there is none), blocks bool."""
    codes, found = torch.zeros(values.shape, dtype=torch.uint8), torch.ones(scales.shape, dtype=torch.bool)
    for m, row in enumerate(values.double().tolist()):
        for k, value in enumerate(row):
            scale = 2.0 ** (int(scales[m, k // 32]) - 127)
            hits = [code for code, unit in enumerate(E2M1) if unit * scale == abs(value)]
            if hits:
                codes[m, k] = hits[0] | (8 if torch.signbit(values[m, k]) else 0)
            else:
                found[m, k // 32] = False
    return codes, found


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_codes_are_those_that_give_the_values(dtype: torch.dtype) -> None:
    """Every code under scales from the least to the largest, zeros of both signs, and in every other row one odd value:
    between two codes, beyond the largest, below the least, a quarter of the scale, not finite."""
    generator = torch.Generator().manual_seed(3)
    rows, blocks = 96, 4
    low = 2 if dtype == torch.bfloat16 else 0
    scales = torch.randint(low, 252, (rows, blocks), generator=generator, dtype=torch.uint8)
    scales[0], scales[1] = torch.tensor([0, 1, 2, 3]), torch.tensor([249, 250, 251, 251])
    unit = torch.tensor(E2M1)[torch.randint(0, 8, (rows, blocks * 32), generator=generator)].double()
    unit *= torch.randint(0, 2, unit.shape, generator=generator) * 2 - 1
    unit[2] = 0.0
    factor = torch.pow(2.0, scales.double() - 127).repeat_interleave(32, 1)
    odd = [0.75, 2.5, 12.0, 0.25, 2.0**-20, float("inf"), float("nan"), 1.0 + 2**-7, 5.0]
    for row in range(3, rows, 2):
        unit[row, 5 + row % 100] = odd[row // 2 % len(odd)]
    values = (unit * factor).to(dtype)
    assert len(values) > 2 and values.isfinite().sum() < values.numel()

    packed, same = released_mxfp4(values, scales)
    codes, found = looked_up(values, scales)
    assert torch.equal(same, found) and 0 < int(found.sum()) < found.numel()
    expected = codes[:, ::2] | codes[:, 1::2] << 4  # the low nibble first
    kept = found.repeat_interleave(16, 1)
    assert torch.equal(packed[kept], expected[kept])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exact", [True, False], ids=["e8m0", "float32"])
def test_fp8_codes_are_those_that_give_the_values(dtype: torch.dtype, exact: bool) -> None:
    """All finite codes in a matrix of odd size, and one block each with a value between two codes, beyond the largest, NaN."""
    shape, generator = (300, 200), torch.Generator().manual_seed(5)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0x80  # a negative zero in place of NaN
    scales = torch.pow(2.0, torch.randint(-20, 20, (3, 2), generator=generator).float())
    if not exact:
        scales *= 1.0 + torch.rand(scales.shape, generator=generator)
    factor = scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    values = (codes.view(torch.float8_e4m3fn).float() * factor).to(dtype)
    values[130, 3] = factor[130, 3] * 1.0626  # between 1 and 1.125
    values[260, 150] = factor[260, 150] * 600.0
    values[1, 199] = (
        torch.tensor(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    )  # the NaN that a code has

    given = scales.to(torch.float8_e8m0fnu) if exact else scales
    found, same = released_fp8(values, given)
    assert same.tolist() == [[True, False], [False, True], [True, False]]
    kept = same.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    assert torch.equal(found.view(torch.uint8)[kept], codes[kept])
