"""The codec in PyTorch's own operations: what a CPU runs, and what the fused kernels must equal bit for bit.

Shapes are those of `fused`, whose functions have the same names; each also returns a flag for what is not finite. On a CPU a
tensor is taken in parts whose intermediates stay in its cache: encoding is several times as fast.
"""

from __future__ import annotations

from functools import lru_cache

import torch

_CPU_BLOCKS = 1 << 13  # MXFP4 blocks in one part
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TINY = 2.0**-126  # the smallest normal float32
_EXPONENT = 0x7F800000  # exponent bits of a float32, and the bits of infinity


def powers(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """E8M0 bytes as numbers of `dtype`, exactly; 255 is NaN."""
    return scales.view(torch.float8_e8m0fnu).to(dtype)


def _ceil_exponent(amax: torch.Tensor, shift: int, mantissa: int) -> torch.Tensor:
    """int32 E8M0 byte of the smallest power of two p with amax <= p * L, for L = 2**shift * (1 + mantissa / 2**23).

    amax: int32, the bits of an fp32.
    """
    carry = 0x7FFFFF - mantissa  # reaches the exponent if amax's mantissa is above that of L
    return ((amax + carry) >> 23).sub_(shift).clamp_(min=0)


def _inverse(exponent: torch.Tensor) -> torch.Tensor:
    """fp32 1 / 2**(exponent - 127), a normal number for every scale an encoder chooses."""
    return ((254 - exponent) << 23).view(torch.float32)


def _any_non_finite(values: torch.Tensor) -> torch.Tensor:
    return ~torch.isfinite(values).all()


def _parts(tensor: torch.Tensor, size: int) -> list[slice]:
    """Slices of `size` rows on a CPU, else one."""
    count = tensor.shape[0]
    step = max(count, 1) if tensor.is_cuda else size
    return [slice(start, start + step) for start in range(0, count, step)]


@lru_cache(maxsize=8)
def _four_values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[65536, 4]: the values of two bytes read as one little-endian number."""
    values = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=dtype, device=device)
    pair = torch.arange(1 << 16, device=device)
    return torch.stack([values[(pair >> shift) & 15] for shift in (0, 4, 8, 12)], 1)


def mxfp4_decode(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype):
    """uint8 [N, 16], uint8 [N] -> dtype [N, 32]."""
    if packed.storage_offset() % 2:  # two bytes are read as one number
        packed = packed.clone()
    index = packed.view(torch.uint16).to(torch.int32).view(-1)
    out = _four_values(dtype, packed.device).index_select(0, index).view(-1, 32)
    out.mul_(powers(scales, dtype)[:, None])
    if not packed.is_cuda and not bool((scales >= 253).any()):  # below, even 6 stays finite
        return out, torch.tensor(False)
    return out, _any_non_finite(out)


def mxfp4_encode(blocks: torch.Tensor):
    """bf16 or fp32 [N, 32] -> uint8 [N, 16], uint8 [N]."""
    packed = torch.empty(len(blocks), 16, dtype=torch.uint8, device=blocks.device)
    scales = torch.empty(len(blocks), dtype=torch.uint8, device=blocks.device)
    flag = torch.zeros((), dtype=torch.bool, device=blocks.device)
    for part in _parts(blocks, _CPU_BLOCKS):
        w = blocks[part].to(torch.float32, copy=True)
        bits = w.view(torch.int32)  # one tensor under two names, of magnitudes from here on
        sign = bits >> 31
        bits &= 0x7FFFFFFF
        amax = bits.amax(1)
        exponent = _ceil_exponent(amax, 2, 0x400000)
        w *= _inverse(exponent)[:, None]
        # Adding 2**22 times the power of two below leaves one bit of the mantissa, rounded by the addition itself.
        power = (bits & _EXPONENT).clamp_(min=127 << 23)
        w += (power + (22 << 23)).view(torch.float32)
        bits += power >> 22
        bits -= 127 << 1
        bits &= 7
        bits |= sign & 8
        pairs = bits.view(torch.int64)
        packed[part] = pairs | (pairs >> 28)  # the low byte counts
        scales[part] = exponent
        flag |= (amax >= _EXPONENT).any()
    return packed, scales, flag


def fp8_decode(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype):
    """float8_e4m3fn [M, K], fp32 [ceil(M/128), ceil(K/128)] -> dtype [M, K]."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    flag = torch.zeros((), dtype=torch.bool, device=weight.device)
    columns = scales.repeat_interleave(128, 1)[:, : weight.shape[1]]
    for part in _parts(weight, 128):
        scale = columns.repeat_interleave(128, 0)[: len(weight)] if weight.is_cuda else columns[part.start // 128]
        out[part] = weight[part].float() * scale
        flag |= _any_non_finite(out[part])
    return out, flag


def fp8_encode(weight: torch.Tensor, e8m0: bool):
    """bf16 or fp32 [M, K] -> float8_e4m3fn [M, K], scales [ceil(M/128), ceil(K/128)] as float8_e8m0fnu or fp32."""
    m, k = weight.shape
    rows, columns = -(-m // 128), -(-k // 128)
    values = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(rows, columns, dtype=torch.uint8 if e8m0 else torch.float32, device=weight.device)
    flag = torch.zeros((), dtype=torch.bool, device=weight.device)
    for part in _parts(weight, 128):
        w, here = weight[part], slice(part.start // 128, -(-part.stop // 128))
        length, height = len(w), min(len(w), 128)  # one row of blocks need not be filled up
        w = torch.nn.functional.pad(w, (0, -k % 128, 0, -length % height)).float()
        w = w.view(-(-length // height), height, columns, 128)
        amax = w.abs().amax((1, 3))
        flag |= _any_non_finite(amax)
        if e8m0:
            exponent = _ceil_exponent(amax.view(torch.int32), 8, 0x600000)
            w = w * _inverse(exponent)[:, None, :, None]
            scales[here] = exponent
        else:
            scale = amax / torch.full_like(amax, 448)  # by a plain number, a GPU multiplies with its inverse
            scales[here] = scale.clamp_(min=_TINY)
            w = w / scale[:, None, :, None]
        values[part] = w.flatten(2).flatten(0, 1)[:length, :k]
    return values, scales.view(torch.float8_e8m0fnu) if e8m0 else scales, flag
