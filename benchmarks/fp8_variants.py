"""Kernels for the FP8 encoder side by side on one GPU, each held against `plain` bit for bit before it is timed.

    python3 benchmarks/fp8_variants.py --budget-s 90 --out OUT/fp8_variants.json
    python3 benchmarks/fp8_variants.py --device cpu       # the kernels interpreted, tiny, nothing timed

`words` holds a block in registers as words of two bf16; `twice` reads it strip by strip, and again from the cache. HARD: the
processor's own rounding to FP8 and one Newton step for a float32 scale; else integer operations and IEEE division. EXACT:
no edge in the matrix. Programs go along rows, or (down) columns of blocks. The last number of a name is the warps, a number before it the registers or the rows of a strip.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
PARSER.add_argument("--budget-s", type=float, default=90)
PARSER.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "fp8_variants.json")
if __name__ == "__main__":
    ARGS = PARSER.parse_args()
    if ARGS.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from moe_rl.models.codec import fused, plain  # noqa: E402
from moe_rl.models.codec.fused import _code  # noqa: E402


@triton.jit
def _soft(y):
    bits = y.to(tl.int32, bitcast=True)
    return _code((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), bits >> 24, 3, -6, 128)


@triton.jit
def _encode(word, scale, lift, inverse, E8M0: tl.constexpr, HARD: tl.constexpr):
    low = (word << 16).to(tl.float32, bitcast=True)
    high = (word & -65536).to(tl.float32, bitcast=True)
    if E8M0:
        low *= inverse
        high *= inverse
    elif HARD:  # the lift keeps the remainder of the division exact where x is small
        low *= lift
        high *= lift
        first = low * inverse
        low = tl.fma(tl.fma(-first, scale, low), inverse, first)
        second = high * inverse
        high = tl.fma(tl.fma(-second, scale, high), inverse, second)
    else:
        low = tl.div_rn(low, scale)
        high = tl.div_rn(high, scale)
    if HARD:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low, high], dtype=tl.uint16, is_pure=True, pack=1
        )
    return (_soft(low) | (_soft(high) << 8)).to(tl.uint16)


@triton.jit
def _largest(word):
    low = (word << 16) & 0x7FFFFFFF
    return tl.max(tl.max(tl.maximum(word & 0x7FFFFFFF, low), axis=1), axis=0) & 0x7FFF0000


@triton.jit
def _scale(amax, scales, place, E8M0: tl.constexpr, HARD: tl.constexpr):
    """Stores the scale; returns it lifted, the lift, and its inverse."""
    if E8M0:
        exponent = tl.maximum(((amax + 0x1FFFFF) >> 23) - 8, 0)
        tl.store(scales + place, exponent.to(tl.uint8))
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        return inverse, inverse, inverse
    else:
        scale = tl.maximum(tl.div_rn(amax.to(tl.float32, bitcast=True), 448.0), 1.1754943508222875e-38)
        tl.store(scales + place, scale)
        lift = tl.where(amax < (64 << 23), 1.8446744073709552e19, 1.0)
        if HARD:
            scale *= lift
        return scale, lift, tl.div_rn(1.0, scale)


@triton.jit
def _place(ACROSS: tl.constexpr):
    """Row and column of a program's block, and how many columns there are."""
    if ACROSS:
        return tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    else:
        return tl.program_id(0), tl.program_id(1), tl.num_programs(1)


@triton.jit
def _words(
    weight,
    values,
    scales,
    flag,
    m,
    k,
    E8M0: tl.constexpr,
    HARD: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """weight: int32 [m, k] of two bf16 each; values: uint16; a program encodes 128 rows of 64 words."""
    down, across, width = _place(ACROSS)
    start = down.to(tl.int64) * 128 * k + across * 64
    row = tl.arange(0, 128)[:, None]
    column = tl.arange(0, 64)[None, :]
    offsets = row * k + column
    here = (row < m - down * 128) & (column < k - across * 64)
    if EXACT:
        word = tl.load(weight + start + offsets)
    else:
        word = tl.load(weight + start + offsets, mask=here, other=0)
    amax = _largest(word)
    place = down * width + across
    scale, lift, inverse = _scale(amax, scales, place, E8M0, HARD)
    codes = _encode(word, scale, lift, inverse, E8M0, HARD)
    if EXACT:
        tl.store(values + start + offsets, codes)
    else:
        tl.store(values + start + offsets, codes, mask=here)
    tl.store(flag, 1, mask=amax >= 0x7F800000)


@triton.jit
def _twice(
    weight,
    values,
    scales,
    flag,
    m,
    k,
    E8M0: tl.constexpr,
    HARD: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """As `_words`, by strips of ROWS rows, each read a second time."""
    down, across, width = _place(ACROSS)
    start = down.to(tl.int64) * 128 * k + across * 64
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, 64)[None, :]
    amax = 0
    for strip in tl.static_range(0, 128, ROWS):
        offsets = (row + strip) * k + column
        here = (row + strip < m - down * 128) & (column < k - across * 64)
        word = tl.load(weight + start + offsets, mask=here, other=0)
        if strip == 0:
            most = tl.maximum(word & 0x7FFFFFFF, (word << 16) & 0x7FFFFFFF)
        else:
            most = tl.maximum(most, tl.maximum(word & 0x7FFFFFFF, (word << 16) & 0x7FFFFFFF))
    amax = tl.max(tl.max(most, axis=1), axis=0) & 0x7FFF0000
    place = down * width + across
    scale, lift, inverse = _scale(amax, scales, place, E8M0, HARD)
    for strip in tl.range(0, 128, ROWS):
        offsets = (row + strip) * k + column
        here = (row + strip < m - down * 128) & (column < k - across * 64)
        word = tl.load(weight + start + offsets, mask=here, other=0)
        codes = _encode(word, scale, lift, inverse, E8M0, HARD)
        tl.store(values + start + offsets, codes, mask=here)
    tl.store(flag, 1, mask=amax >= 0x7F800000)


def call(kernel, weight, e8m0, hard, exact, rows, warps, across=True, **options):
    m, k = weight.shape
    grid = (triton.cdiv(m, 128), triton.cdiv(k, 128))
    values = torch.empty(m, k, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(grid, dtype=torch.uint8 if e8m0 else torch.float32, device=weight.device)
    flag = torch.zeros((), dtype=torch.int32, device=weight.device)
    kernel[grid[::-1] if across else grid](
        weight.view(torch.int32),
        values.view(torch.uint16),
        scales,
        flag,
        m,
        k // 2,
        E8M0=e8m0,
        HARD=hard,
        EXACT=exact,
        ROWS=rows,
        ACROSS=across,
        num_warps=warps,
        **options,
    )
    return values.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu) if e8m0 else scales, flag


def variants(hard: bool) -> dict:
    """Name -> function of a weight and whether its scales are E8M0."""
    found = {f"now 128x{w}": (lambda x, e, w=w: fused.fp8_encode(x, e, (128, w))) for w in (4, 8)}

    def add(name, kernel, exact, rows, warps, h=hard, **options):
        found[name] = lambda x, e: call(kernel, x, e, h, exact, rows, warps, **options)

    for warps in (4, 8, 16, 32):
        add(f"words {warps}", _words, False, 128, warps)
    for warps in (8, 16):
        add(f"words down {warps}", _words, False, 128, warps, across=False)
        add(f"words exact {warps}", _words, True, 128, warps)
        add(f"words soft {warps}", _words, False, 128, warps, h=False)
    for warps, most in ((4, 128), (8, 80), (8, 64), (16, 40)):
        add(f"words regs {most} {warps}", _words, False, 128, warps, **({"maxnreg": most} if hard else {}))
    for rows, warps in ((32, 4), (32, 8), (64, 8), (64, 4)):
        add(f"twice {rows} {warps}", _twice, False, rows, warps)
    return found


def edges(device: str) -> list[torch.Tensor]:
    """Weights [M, K], K even: adversarial values in blocks of all magnitudes, and edges that fill no block."""
    from tests.codec_cases import adversarial

    flat = adversarial(torch.bfloat16, 300 if device == "cpu" else 6000).view(-1)
    found = []
    for shape in ((128, 256), (130, 300), (3, 2), (257, 1274)):
        index = torch.arange(shape[0] * shape[1]) * 7919 % len(flat)
        draw = torch.Generator().manual_seed(shape[1])
        usual = torch.randn(shape, generator=draw) * torch.randint(-22, 9, shape, generator=draw).float().exp2()
        found += [flat[index].view(shape), usual.bfloat16(), (usual * 2.0**-118).bfloat16()]
    return [w.to(device) for w in found]


def every_pair(device: str) -> torch.Tensor:
    """[32640 * 128, 256]: a row of two blocks for each magnitude of bf16, with all magnitudes up to it: 2.1 GB."""
    top = torch.arange(0x7F80, dtype=torch.int16, device=device)
    x = torch.arange(1 << 15, dtype=torch.int16, device=device).expand(len(top), -1)
    x = torch.minimum(x, top[:, None])
    x[:, 0] = top  # both blocks have the largest
    return x.view(-1, 2, 128, 128).transpose(1, 2).reshape(-1, 256).view(torch.bfloat16)


def equal(got, wanted) -> bool:
    same = all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(got[:2], wanted[:2], strict=True)
    )
    return same and bool(got[2]) == bool(wanted[2])


def seconds(function, flush, repeats: int = 15) -> float:
    pairs = []
    for _ in range(3 + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        function()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) / 1e3 for a, b in pairs[3:])[repeats // 2]


def main() -> None:
    device, begun = ARGS.device, time.perf_counter()
    gpu = device == "cuda"
    tests = edges(device)
    rows: list[dict] = []
    record = {"device": torch.cuda.get_device_name() if gpu else "cpu", "torch": torch.__version__, "rows": rows}
    wanted = {e: [plain.fp8_encode(w, e) for w in tests] for e in (True, False)}
    copy, pairs, pair_wanted, shapes = 1.0, None, {}, {}
    if gpu:
        flush = torch.empty(1 << 29, dtype=torch.uint8, device=device)
        source = torch.zeros(1 << 30, dtype=torch.bfloat16, device=device)
        target = torch.empty_like(source)
        copy = 2 * source.nbytes / seconds(lambda: target.copy_(source), flush)
        record["copy_gbps"] = round(copy / 1e9, 1)
        print(f"copy {copy / 1e9:.0f} GB/s", flush=True)
        pairs = every_pair(device)
        for e in (True, False):
            parts = [plain.fp8_encode(p, e) for p in pairs.split(1 << 17)]
            pair_wanted[e] = (torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]), parts[0][2])
        draw = torch.Generator(device).manual_seed(1)
        for shape in ((65536, 1536), (7168, 16384), (49152, 7168)):
            shapes[shape] = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=draw)
    for name, function in variants(gpu).items():
        for e8m0 in (True, False):
            row: dict = {"variant": name, "scales": "e8m0" if e8m0 else "fp32"}
            if time.perf_counter() - begun > ARGS.budget_s:
                print("budget spent", flush=True)
                return
            try:
                use = [
                    i for i, w in enumerate(tests) if "exact" not in name or not (w.shape[0] % 128 or w.shape[1] % 128)
                ]
                row["equal"] = all(equal(function(tests[i], e8m0), wanted[e8m0][i]) for i in use)
                if gpu:
                    row["equal_every_pair"] = equal(function(pairs, e8m0), pair_wanted[e8m0])
                    for shape, weight in shapes.items():
                        moved = weight.nbytes + weight.numel() + weight.numel() // 16384 * (1 if e8m0 else 4)
                        rate = moved / seconds(partial(function, weight, e8m0), flush)
                        row["x".join(map(str, shape))] = [round(rate / 1e9, 1), round(rate / copy, 3)]
            except Exception as error:  # the other variants count
                row["error"] = f"{type(error).__name__}: {error}"[:300]
                traceback.print_exc()
            rows.append(row)
            print(json.dumps(row), flush=True)
            ARGS.out.parent.mkdir(parents=True, exist_ok=True)
            ARGS.out.write_text(json.dumps(record, indent=1) + "\n")
    for scales in ("e8m0", "fp32"):
        print(f"--- {scales}: least of copy over the shapes")
        good = [r for r in rows if r["scales"] == scales and "error" not in r]
        least = {r["variant"]: min((v[1] for v in r.values() if isinstance(v, list)), default=0) for r in good}
        for r in sorted(good, key=lambda r: -least[r["variant"]]):
            print(f"{r['variant']:20} {least[r['variant']]:6.1%}  equal {r['equal']} {r.get('equal_every_pair')}")
    print(f"{time.perf_counter() - begun:.0f} s; {ARGS.out}")


if __name__ == "__main__":
    main()
