"""The codec's kernels: each reads its input once and writes its output once. `plain` is their reference, bit for bit.

Only integer operations, multiplications by powers of two, IEEE division and one rounding addition are used: none depends on
how a compiler contracts or approximates. Where a GPU rounds to FP8 itself, the FP8 encoder lets it, and divides by a fused
multiply-add. Imported for tensors on a GPU alone; TRITON_INTERPRET=1 runs the kernels on a CPU, which does neither.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# (MXFP4 blocks or rows per program, warps), within 3 % of the best in the sweep of benchmarks/results/codec.json (H200)
LAUNCH = {"mxfp4_encode": (128, 4), "mxfp4_decode": (128, 4), "fp8_encode": (128, 4), "fp8_decode": (32, 4)}


@triton.jit
def _code(y, sign, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, SIGN: tl.constexpr):
    """Code of y (fp32, y >= 0) in a small float of MANTISSA bits and lowest exponent LOWEST; nearest, ties to even.

    `sign` holds the sign in the bit of value SIGN, and anything elsewhere.

    Adding 2**(23 - MANTISSA) times the power of two below y leaves MANTISSA bits, rounded by the addition itself.
    """
    power = tl.maximum(y.to(tl.int32, bitcast=True) & 0x7F800000, (127 + LOWEST) << 23)
    magic = (power + ((23 - MANTISSA) << 23)).to(tl.float32, bitcast=True)
    steps = (y + magic).to(tl.int32, bitcast=True) + (power >> (23 - MANTISSA)) - ((127 + LOWEST) << MANTISSA)
    return (steps & (SIGN - 1)) | (sign & SIGN)


@triton.jit
def _halves(word, WIDE: tl.constexpr):
    """The fp32 bits, in int32, of the two values in a word: int32 of two bf16, or (WIDE) int64 of two fp32."""
    if WIDE:
        return word.to(tl.int32), (word >> 32).to(tl.int32)
    else:
        return word << 16, word & -65536


@triton.jit
def _mxfp4_code(bits, inverse):
    """E2M1 code of fp32 `bits` times the power of two `inverse`."""
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    return _code(magnitude * inverse, bits >> 28, 1, 0, 8)


@triton.jit
def _mxfp4_encode(words, packed, scales, flag, count, WIDE: tl.constexpr, TILE: tl.constexpr):
    """words: two values each, int32 of bf16 or (WIDE) int64 of fp32 [count, 16]; a program encodes TILE blocks."""
    start = tl.program_id(0).to(tl.int64) * TILE
    block = tl.arange(0, TILE)
    here = block < count - start
    offsets = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    word = tl.load(words + start * 16 + offsets, mask=here[:, None], other=0)
    low, high = _halves(word, WIDE)
    amax = tl.max(tl.maximum(low & 0x7FFFFFFF, high & 0x7FFFFFFF), axis=1)
    exponent = tl.maximum(((amax + 0x3FFFFF) >> 23) - 2, 0)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    codes = _mxfp4_code(low, inverse) | (_mxfp4_code(high, inverse) << 4)
    tl.store(packed + start * 16 + offsets, codes.to(tl.uint8), mask=here[:, None])
    tl.store(scales + start + block, exponent.to(tl.uint8), mask=here)
    tl.store(flag + tl.zeros([TILE], tl.int32), 1, mask=amax >= 0x7F800000)


@triton.jit
def _mxfp4_value(nibble, scale):
    """fp32 bits of an E2M1 code (an int32 of four bits) times `scale`."""
    # The code's exponent and mantissa as those of an fp32 are the value times 2**-126, subnormal 0.5 included.
    magnitude = ((nibble & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37 * scale
    return magnitude.to(tl.int32, bitcast=True) | ((nibble & 8) << 28)


@triton.jit
def _mxfp4_decode(packed, scales, words, flag, count, WIDE: tl.constexpr, TILE: tl.constexpr):
    """The inverse of `_mxfp4_encode`, in the same shapes."""
    start = tl.program_id(0).to(tl.int64) * TILE
    block = tl.arange(0, TILE)
    here = block < count - start
    offsets = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    byte = tl.load(packed + start * 16 + offsets, mask=here[:, None], other=0).to(tl.int32)
    exponent = tl.load(scales + start + block, mask=here, other=0).to(tl.int32)
    power = tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)[
        :, None
    ]  # 2**-127 is subnormal
    low = _mxfp4_value(byte & 15, power)
    high = _mxfp4_value(byte >> 4, power)
    if WIDE:
        word = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    else:
        word = (high & -65536) | ((low >> 16) & 0xFFFF)
    tl.store(words + start * 16 + offsets, word, mask=here[:, None])
    largest = tl.max(tl.maximum(low & 0x7FFFFFFF, high & 0x7FFFFFFF), axis=1)
    tl.store(flag + tl.zeros([TILE], tl.int32), 1, mask=largest >= 0x7F800000)


@triton.jit
def _fp8_code(y):
    """E4M3 code of y (fp32) in an int32, by integer operations."""
    bits = y.to(tl.int32, bitcast=True)
    return _code((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), bits >> 24, 3, -6, 128)


@triton.jit
def _quotient(x, scale, inverse):
    """x / scale as IEEE division rounds it, for x of a bf16's precision and a quotient that is no subnormal.

    Every pair of mantissas was tried. An exact zero times a negative number leaves the sign of -0.0.
    """
    first = x * inverse
    return tl.fma(tl.fma(first, scale, -x), -inverse, first)


@triton.jit
def _fp8_encode(
    words,
    values,
    scales,
    flag,
    m,
    k,
    WIDE: tl.constexpr,
    E8M0: tl.constexpr,
    HARDWARE: tl.constexpr,
    TILE: tl.constexpr,
):
    """words: two values each, int32 of bf16 or (WIDE) int64 of fp32 [m, k]; a program encodes a block of TILE x TILE values.

    values: uint16 [m, k], two codes each; scales: uint8 (E8M0) or fp32. HARDWARE: the processor rounds to FP8. A block stays
    in registers as words: as numbers it would fill them, and no other program could load meanwhile.
    """
    start = tl.program_id(1).to(tl.int64) * TILE * k + tl.program_id(0) * (TILE // 2)
    row = tl.arange(0, TILE)[:, None]
    column = tl.arange(0, TILE // 2)[None, :]
    here = (row < m - tl.program_id(1) * TILE) & (column < k - tl.program_id(0) * (TILE // 2))
    offsets = row * k + column
    word = tl.load(words + start + offsets, mask=here, other=0)
    low, high = _halves(word, WIDE)
    amax = tl.max(tl.max(tl.maximum(low & 0x7FFFFFFF, high & 0x7FFFFFFF), axis=1), axis=0)
    place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    low = low.to(tl.float32, bitcast=True)
    high = high.to(tl.float32, bitcast=True)
    if E8M0:
        exponent = tl.maximum(((amax + 0x1FFFFF) >> 23) - 8, 0)
        tl.store(scales + place, exponent.to(tl.uint8))
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        low *= inverse
        high *= inverse
    else:
        scale = tl.maximum(tl.div_rn(amax.to(tl.float32, bitcast=True), 448.0), 1.1754943508222875e-38)
        tl.store(scales + place, scale)
        if HARDWARE and not WIDE:
            lift = tl.where(amax < (64 << 23), 1.8446744073709552e19, 1.0)  # else the remainder could be subnormal
            scale *= lift
            inverse = tl.div_rn(1.0, scale)
            low = _quotient(low * lift, scale, inverse)
            high = _quotient(high * lift, scale, inverse)
        else:
            low = tl.div_rn(low, scale)
            high = tl.div_rn(high, scale)
    if HARDWARE:
        codes = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low, high], dtype=tl.uint16, is_pure=True, pack=1
        )
    else:
        codes = (_fp8_code(low) | (_fp8_code(high) << 8)).to(tl.uint16)
    tl.store(values + start + offsets, codes, mask=here)
    tl.store(flag, 1, mask=amax >= 0x7F800000)


@triton.jit
def _fp8_decode(values, scales, weight, flag, m, k, WIDE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """values: uint8 [m, k]; scales: fp32; a program decodes ROWS rows of one block of TILE columns. weight: as above."""
    start = tl.program_id(1).to(tl.int64) * ROWS * k + tl.program_id(0) * TILE
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, TILE)[None, :]
    here = (row < m - tl.program_id(1) * ROWS) & (column < k - tl.program_id(0) * TILE)
    offsets = row * k + column
    byte = tl.load(values + start + offsets, mask=here, other=0).to(tl.int32)
    scale = tl.load(scales + (tl.program_id(1) * ROWS // TILE) * tl.num_programs(0) + tl.program_id(0))
    # The code's exponent and mantissa as those of an fp32 are the value times 2**-120, subnormals included.
    small = (((byte & 0x7F) << 20) | ((byte & 0x80) << 24)).to(tl.float32, bitcast=True)
    bits = (small * 1.329227995784916e36 * scale).to(tl.int32, bitcast=True)
    if WIDE:
        tl.store(weight + start + offsets, bits, mask=here)
        beyond = 0x7F800000
    else:  # to the nearest bf16, ties to even
        tl.store(weight + start + offsets, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16), mask=here)
        beyond = 0x7F7F8000
    bad = ((byte & 0x7F) == 0x7F) | ((bits & 0x7FFFFFFF) >= beyond)
    tl.store(flag, 1, mask=tl.max(tl.max(bad.to(tl.int32), axis=1), axis=0) > 0)


def _flag(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int32, device=tensor.device)


def _wide(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of bf16 or fp32 as int16 or int32: the interpreter's own bf16 truncates."""
    return tensor.view(torch.int32 if _wide(tensor) else torch.int16)


def _pairs(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of bf16 or fp32 [N, K], K even, as words of two values: int32 or int64 [N, K/2]."""
    return tensor.view(torch.int64 if _wide(tensor) else torch.int32)


def _rounds_to_fp8(device: torch.device) -> bool:
    """Whether kernels there may use the processor's conversion to FP8, which compute capability 8.9 brought."""
    compiled = isinstance(_fp8_encode, triton.JITFunction)  # and not interpreted
    return compiled and torch.cuda.get_device_capability(device) >= (8, 9)


def mxfp4_encode(blocks: torch.Tensor, launch: tuple[int, int] | None = None):
    """bf16 or fp32 [N, 32] -> uint8 [N, 16], uint8 [N], int32 flag; `launch` overrides LAUNCH."""
    tile, warps = launch or LAUNCH["mxfp4_encode"]
    count = blocks.shape[0]
    if blocks.storage_offset() % 2:  # two values are read as one word
        blocks = blocks.clone()
    packed = torch.empty(count, 16, dtype=torch.uint8, device=blocks.device)
    scales = torch.empty(count, dtype=torch.uint8, device=blocks.device)
    flag = _flag(blocks)
    if count:
        with torch.cuda.device_of(blocks):
            grid = (triton.cdiv(count, tile),)
            _mxfp4_encode[grid](
                _pairs(blocks), packed, scales, flag, count, WIDE=_wide(blocks), TILE=tile, num_warps=warps
            )
    return packed, scales, flag


def mxfp4_decode(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, launch: tuple[int, int] | None = None):
    """uint8 [N, 16], uint8 [N] -> dtype [N, 32], int32 flag."""
    tile, warps = launch or LAUNCH["mxfp4_decode"]
    count = packed.shape[0]
    out = torch.empty(count, 32, dtype=dtype, device=packed.device)
    flag = _flag(packed)
    if count:
        with torch.cuda.device_of(packed):
            grid = (triton.cdiv(count, tile),)
            _mxfp4_decode[grid](packed, scales, _pairs(out), flag, count, WIDE=_wide(out), TILE=tile, num_warps=warps)
    return out, flag


def fp8_encode(weight: torch.Tensor, e8m0: bool, launch: tuple[int, int] | None = None):
    """bf16 or fp32 [M, K] -> float8_e4m3fn [M, K], scales as float8_e8m0fnu (`e8m0`) or fp32, int32 flag."""
    tile, warps = launch or LAUNCH["fp8_encode"]
    m, k = weight.shape
    if k % 2:  # two values are read as one word
        values, scales, flag = fp8_encode(torch.nn.functional.pad(weight, (0, 1)), e8m0, launch)
        return values[:, :k].contiguous(), scales, flag
    if weight.storage_offset() % 2:
        weight = weight.clone()
    blocks = (triton.cdiv(m, tile), triton.cdiv(k, tile))
    values = torch.empty(m, k, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(blocks, dtype=torch.uint8 if e8m0 else torch.float32, device=weight.device)
    flag = _flag(weight)
    if values.numel():
        kind = dict(WIDE=_wide(weight), E8M0=e8m0, HARDWARE=_rounds_to_fp8(weight.device), TILE=tile)
        with torch.cuda.device_of(weight):
            _fp8_encode[blocks[::-1]](
                _pairs(weight), values.view(torch.uint16), scales, flag, m, k // 2, **kind, num_warps=warps
            )
    return values.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu) if e8m0 else scales, flag


def fp8_decode(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, launch: tuple[int, int] | None = None):
    """float8_e4m3fn [M, K], fp32 [ceil(M/128), ceil(K/128)] -> dtype [M, K], int32 flag."""
    rows, warps = launch or LAUNCH["fp8_decode"]
    m, k = weight.shape
    out = torch.empty(m, k, dtype=dtype, device=weight.device)
    flag = _flag(weight)
    if out.numel():
        with torch.cuda.device_of(weight):
            grid = (scales.shape[1], triton.cdiv(m, rows))
            codes, words = weight.view(torch.uint8), _bits(out)
            _fp8_decode[grid](codes, scales, words, flag, m, k, WIDE=_wide(out), ROWS=rows, TILE=128, num_warps=warps)
    return out, flag
