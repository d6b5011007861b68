"""The codec's kernels on a GPU against its copy bandwidth and against PyTorch's own operations, in one run.

    python3 benchmarks/codec.py --out results.json     # on a GPU
    python3 benchmarks/codec.py --device cpu           # the same program, tiny, its kernels interpreted

Shapes are those of DeepSeek-V4-Pro: 48 routed experts (one of 8 expert-parallel ranks) as MXFP4, large linears as FP8. Bandwidth
is bytes read plus bytes written, by the median of CUDA events; a larger buffer than the L2 cache is overwritten before each
launch, which also keeps the launch itself out of the time. First everything is compared bit for bit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

GOAL = 0.6  # of copy bandwidth, for both encoders
SHAPES = {
    "mxfp4 48 experts w1": (48, 3072, 7168),
    "mxfp4 48 experts w2": (48, 7168, 3072),
    "fp8 wq_b": (65536, 1536),
    "fp8 wo_b": (7168, 16384),
    "fp8 16 shared w1": (16 * 3072, 7168),
}
TINY = {"mxfp4 2 experts": (2, 32, 64), "fp8 odd": (130, 200)}
SWEEP = {  # kernel -> (MXFP4 blocks or rows per program, warps)
    "mxfp4_encode": [(32, 4), (64, 2), (64, 4), (128, 4), (128, 8), (256, 4), (256, 8)],
    "mxfp4_decode": [(32, 4), (64, 2), (64, 4), (128, 4), (128, 8), (256, 8)],
    "fp8_encode": [(128, 4), (128, 8), (128, 16)],
    "fp8_decode": [(8, 4), (16, 4), (32, 4), (32, 8), (64, 8), (128, 8)],
}


class Clock:
    """Times calls on one device."""

    def __init__(self, device: str, repeats: int) -> None:
        import torch

        self.torch, self.gpu, self.repeats = torch, device == "cuda", repeats
        self.flush = torch.empty(1 << 29, dtype=torch.uint8, device=device) if self.gpu else None

    def seconds(self, call: Callable[[], object], repeats: int = 0) -> float:
        """Median of `repeats` runs after three that do not count."""
        repeats = repeats or self.repeats
        times = [self._once(call) for _ in range(3 + repeats)][3:]
        if not self.gpu:
            return statistics.median(times)
        self.torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) / 1e3 for start, end in times)

    def _once(self, call: Callable[[], object]) -> Any:
        if not self.gpu:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        begin.record()
        call()
        end.record()
        return begin, end


def cases(shape: tuple[int, ...], device: str) -> dict[str, tuple[str, Callable, Callable, int]]:
    """Label -> (kernel, fused call taking a launch, plain call, bytes read and written), their bits compared."""
    import torch

    from moe_rl.models.codec import fused, plain
    from tests.codec_cases import assert_same_bits

    draw = torch.Generator(device).manual_seed(1)
    weight = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=draw)
    found: dict[str, tuple[str, Callable, Callable, int]] = {}

    def add(label: str, kernel: str, *inputs: Any) -> list:
        fast, slow = getattr(fused, kernel), getattr(plain, kernel)
        *got, flag = fast(*inputs)
        *wanted, _ = slow(*inputs)
        assert not flag
        for a, b in zip(got, wanted, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"{label}: the two differ"
        moved = sum(t.nbytes for t in (*inputs, *got) if isinstance(t, torch.Tensor))
        found[label] = (kernel, lambda launch=None: fast(*inputs, launch=launch), lambda: slow(*inputs), moved)
        return got

    if len(shape) == 3:
        packed, scales = add("encode", "mxfp4_encode", weight.view(-1, 32))
        (values,) = add("decode", "mxfp4_decode", packed, scales, torch.bfloat16)
    else:
        codes, scales = add("encode e8m0", "fp8_encode", weight, True)
        (values,) = add("decode e8m0", "fp8_decode", codes, scales.float(), torch.bfloat16)
        again = fused.fp8_encode(values, True)
        assert_same_bits([fused.fp8_decode(again[0], again[1].float(), torch.bfloat16)[0]], [values])
        add("encode fp32", "fp8_encode", weight, False)
    return found


def copy_rate(clock: Clock, device: str) -> float:
    """Bytes read and written per second by a copy of 2 GiB (128 KiB on a CPU) within the device."""
    import torch

    source = torch.zeros(1 << 30 if clock.gpu else 1 << 16, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock.seconds(lambda: target.copy_(source))


def sweep(clock: Clock, kernel: str, call: Callable, moved: int) -> dict[str, float]:
    """GB/s of each launch of SWEEP, best first."""
    rates = {
        f"{tile}x{warps}": moved / clock.seconds(lambda t=tile, w=warps: call((t, w)), 10)
        for tile, warps in SWEEP[kernel]
    }
    return {name: round(rate / 1e9, 1) for name, rate in sorted(rates.items(), key=lambda item: -item[1])}


def compare(clock: Clock, copy: float, what: str, fast: Callable, slow: Callable, moved: int) -> dict[str, Any]:
    """One line of the table: `moved` bytes by the kernel, by plain PyTorch, and against the copy's bytes per second."""
    fused_s, plain_s = clock.seconds(fast), clock.seconds(slow, 5)
    row = {
        "what": what,
        "bytes": moved,
        "fused_gbps": round(moved / fused_s / 1e9, 1),
        "plain_gbps": round(moved / plain_s / 1e9, 1),
        "of_copy": round(moved / fused_s / copy, 3),
        "over_plain": round(plain_s / fused_s, 2),
    }
    print(
        f"{what:32} {row['fused_gbps']:8.1f} GB/s {row['of_copy']:6.1%} of copy, {row['over_plain']:6.1f} x plain",
        flush=True,
    )
    return row


def measure(device: str, repeats: int) -> dict[str, Any]:
    from moe_rl.models.codec import fused, plain
    from tests.codec_cases import agree

    clock = Clock(device, repeats)
    compared = agree(fused, plain, device, size=20 if clock.gpu else 1)
    copy = copy_rate(clock, device)
    print(f"copy {copy / 1e9:.0f} GB/s; {compared:,} adversarial values equal bit for bit", flush=True)
    rows, sweeps = [], {}
    for name, shape in (SHAPES if clock.gpu else TINY).items():
        for label, (kernel, fast, slow, moved) in cases(shape, device).items():
            if kernel not in sweeps and clock.gpu:
                sweeps[kernel] = sweep(clock, kernel, fast, moved)
            rows.append(compare(clock, copy, f"{name} {label}", fast, slow, moved))
    for kernel, rates in sweeps.items():
        print(
            f"{kernel}: runs {'x'.join(map(str, fused.LAUNCH[kernel]))}; "
            + ", ".join(f"{k} {v}" for k, v in rates.items())
        )
    least: dict[str, float] = {}
    for row in rows:
        if "encode" in row["what"]:
            words = row["what"].split()
            encoder = " ".join([words[0], *words[words.index("encode") + 1 :]])
            least[encoder] = min(least.get(encoder, math.inf), row["of_copy"])
    return {
        "copy_gbps": round(copy / 1e9, 1),
        "goal_of_copy": GOAL,
        "least_of_copy": least,
        "compared": compared,
        "shapes": SHAPES if clock.gpu else TINY,
        "rows": rows,
        "sweep_gbps": sweeps,
        "launch": fused.LAUNCH,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "codec.json")
    a = parser.parse_args()
    if a.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
    import torch

    start = time.perf_counter()
    result = measure(a.device, a.repeats if a.device == "cuda" else 1)
    revision = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    record = {
        "command": " ".join(["python3", "benchmarks/codec.py", *sys.argv[1:]]),
        "revision": subprocess.run(revision, capture_output=True, text=True).stdout.strip() or None,
        "hardware": torch.cuda.get_device_name() if a.device == "cuda" else platform.processor() or platform.machine(),
        "versions": {n: importlib.metadata.version(n) for n in ("torch", "triton")} | {"cuda": torch.version.cuda},
        "seconds": round(time.perf_counter() - start, 1),
        **result,
    }
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"least of copy {result['least_of_copy']}, goal {GOAL}; {record['seconds']} s; {a.out}")


if __name__ == "__main__":
    main()
