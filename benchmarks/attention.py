"""DeepSeek-V4's attention on a GPU: the fused kernels against float64, against plain PyTorch, and against the floor.

    python3 benchmarks/attention.py --out results.json     # on a GPU
    python3 benchmarks/attention.py --device cpu           # the same program, tiny, its kernels interpreted

A floor is the longer of two times: the FLOPs at the rate of a large bf16 product, the bytes that must move at the rate of
a copy, both measured in the same run. FLOPs of attention: 4 a channel, head and (query, key) pair forward, 10 backward.
Sizes are DeepSeek-V4-Pro's and, for the lengths, Flash's. The results are written after every case.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PRO = {"heads": 128, "d": 512, "rope": 32, "window": 128}
KINDS = {"sliding": (0, 0), "sparse": (4, 1024), "heavy": (128, 0)}
FORWARDS = [(64, 8, 2), (32, 8, 3), (32, 8, 2)]
BACKWARDS = [(32, 8, 1, 4), (64, 8, 1, 8), (32, 8, 2, 4)]


class Bench:
    """Runs cases one by one within a budget and keeps the record on disk."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        self.torch, self.gpu, self.out = torch, args.device == "cuda", args.out
        self.only = args.only.split(",")
        self.device, self.start, self.budget = args.device, time.perf_counter(), args.budget_s
        self.record: dict[str, Any] = {
            "command": " ".join(["python3", *sys.argv]),
            "revision": _git("describe", "--always", "--dirty"),
            "hardware": torch.cuda.get_device_name() if self.gpu else platform.processor() or platform.machine(),
            "versions": {n: importlib.metadata.version(n) for n in ("torch", "triton")} | {"cuda": torch.version.cuda},
            "cases": {},
        }

    def case(self, name: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Result of `call`, printed and written; a failure is a result too."""
        if name != "ceilings" and not any(word in name for word in self.only):
            return {}
        if time.perf_counter() - self.start > self.budget:
            result: dict[str, Any] = {"skipped": "the time budget was spent"}
        else:
            try:
                result = call()
            except Exception as error:  # the other cases go on
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
        if self.gpu:
            self.torch.cuda.empty_cache()
        self.record["cases"][name] = result
        self.record["seconds"] = round(time.perf_counter() - self.start, 1)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.record, indent=1) + "\n")
        print(f"[{self.record['seconds']:6.1f} s] {name}: {json.dumps(result)}", flush=True)
        return result

    def ms(self, call: Callable[[], object], repeats: int = 5) -> float:
        """Median milliseconds, by CUDA events, after one call that does not count."""
        call()
        times = []
        for _ in range(repeats if self.gpu else 1):
            if self.gpu:
                begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
            else:
                start = time.perf_counter()
                call()
                times.append((time.perf_counter() - start) * 1e3)
        return round(statistics.median(times), 4)

    def peak_gib(self, call: Callable[[], object]) -> float | None:
        """GiB that `call` needs at its peak beyond what is allocated before it."""
        if not self.gpu:
            return None
        self.torch.cuda.synchronize()
        self.torch.cuda.reset_peak_memory_stats()
        before = self.torch.cuda.memory_allocated()
        call()
        return round((self.torch.cuda.max_memory_allocated() - before) / 2**30, 3)

    def ceilings(self) -> dict[str, Any]:
        torch, n = self.torch, 8192 if self.gpu else 64
        a, b = (torch.randn(n, n, device=self.device).to(torch.bfloat16) for _ in range(2))
        source = torch.zeros(1 << 29 if self.gpu else 1 << 12, dtype=torch.bfloat16, device=self.device)
        target = torch.empty_like(source)
        self.flops = 2 * n**3 / self.ms(lambda: a @ b, 20) * 1e3
        self.bytes = 2 * source.nbytes / self.ms(lambda: target.copy_(source), 20) * 1e3
        rates = {"tflops": self.flops / 1e12, "copy_gbps": self.bytes / 1e9, "atomic_gbps": self.atomic_rate() / 1e9}
        return {name: round(rate, 1) for name, rate in rates.items()}

    def atomic_rate(self) -> float:
        """Bytes a second of float32 atomics that add rows of 2 KiB to random rows of a matrix that fits in the L2 cache."""
        torch, rows, many = self.torch, 12800, 1 << 19 if self.gpu else 8
        target = torch.zeros(rows, 512, device=self.device)
        index = torch.randint(0, rows, (many,), device=self.device, dtype=torch.int32)
        kernel = scatter()
        ms = self.ms(lambda: kernel[(many // 8,)](target, index, 8, 512))
        return many * 2048 / ms * 1e3

    def table(self) -> None:
        print(f"{'case':44} {'':10} {'ms':>9} {'of floor':>9}")
        for name, result in self.record["cases"].items():
            for key, value in result.items():
                if isinstance(value, dict) and "ms" in value:
                    print(
                        f"{name:44} {key:24} {value['ms']:9.3f} {value['of_floor']:9.1%} {value.get('peak_gib') or ''}"
                    )

    def floor_ms(self, flops: float, moved: float = 0.0) -> float:
        return max(flops / self.flops, moved / self.bytes) * 1e3


def scatter():
    """A kernel that adds 1 to rows; made when Triton may be imported, which reads then whether it is to interpret."""
    global tl
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(target, index, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        row = tl.load(index + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
        at = row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        tl.atomic_add(target + at, tl.full([ROWS, COLUMNS], 1.0, tl.float32), sem="relaxed")

    return kernel


def _git(*args: str) -> str | None:
    return subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True).stdout.strip() or None


# --- correctness
def correctness(bench: Bench, case: dict[str, Any], forward, backward) -> dict[str, Any]:
    from moe_rl.models.deepseek_v4.fused_attention import Launch
    from tests import attention_cases as cases

    dtype = bench.torch.bfloat16 if bench.gpu else bench.torch.float32
    drawn = cases.draw(**case, dtype=dtype, device=bench.device)
    found = cases.errors(drawn, forward=Launch(*forward), backward=Launch(*backward))
    result = {name: [float(f"{e:.3e}") for e in pair] for name, pair in found.items()}
    return {"plain, fused": result, "ok": all(fast <= 2 * slow for slow, fast in found.values())}


# --- the kernels alone
def kernels(bench: Bench, kind: str, tokens: int, sizes: dict[str, int], launches, top_k: int | None = None):
    """Milliseconds and share of the floor of each launch, forward and backward."""
    from moe_rl.models.deepseek_v4 import fused_attention as fused
    from tests import attention_cases as cases

    torch, (ratio, k) = bench.torch, KINDS[kind]
    dtype = torch.bfloat16 if bench.gpu else torch.float32
    case = cases.draw(
        [tokens], **sizes, ratio=ratio, top_k=k if top_k is None else top_k, dtype=dtype, device=bench.device
    )
    pairs = pairs_of(tokens, sizes["window"], ratio, k if top_k is None else top_k)
    one = case.q.nbytes
    floors = {
        "forward": bench.floor_ms(4 * pairs * sizes["heads"] * sizes["d"], 2 * one),
        "backward": bench.floor_ms(10 * pairs * sizes["heads"] * sizes["d"], 4 * one),
    }
    result: dict[str, Any] = {"pairs": pairs, "floor_ms": {name: round(ms, 3) for name, ms in floors.items()}}
    for name, options in (("forward", launches[0]), ("backward", launches[1])):
        for launch in options:
            try:
                chosen = {name: fused.Launch(*launch)}
                leaves = [t.detach().requires_grad_() for t in (case.q, case.kv, case.sinks)]

                def forward(leaves=leaves, chosen=chosen):
                    return fused.attend(*leaves, case.cos, case.sin, case.seen, cases.EPS, **chosen)

                if name == "forward":
                    with torch.no_grad():
                        ms = bench.ms(forward)
                else:
                    out = forward()
                    ms = bench.ms(lambda: torch.autograd.grad(out, leaves, case.grad, retain_graph=True))  # noqa: B023
                result[f"{name} {launch}"] = {"ms": ms, "of_floor": round(floors[name] / ms, 3)}
            except Exception as error:
                result[f"{name} {launch}"] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    return result


def pairs_of(tokens: int, window: int, ratio: int, top_k: int) -> int:
    """(query, key) pairs of one sequence."""
    near = sum(min(i + 1, window) for i in range(tokens))
    if not ratio:
        return near
    return near + sum(min((i + 1) // ratio, top_k or tokens) for i in range(tokens))


FLEX: list[dict[str, int]] = [
    {},  # its own choice of blocks
    {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_M1": 16, "BLOCK_N1": 32, "BLOCK_M2": 32, "BLOCK_N2": 16, "num_stages": 1},
    {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_M1": 16, "BLOCK_N1": 16, "BLOCK_M2": 16, "BLOCK_N2": 16, "num_stages": 1},
]


def flex(bench: Bench, kind: str, tokens: int, sizes: dict[str, int]) -> dict[str, Any]:
    """PyTorch's FlexAttention over the same keys and mask beside our kernels; sink, norm and rotation are left out of its time."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from moe_rl.models.deepseek_v4 import fused_attention as fused
    from tests import attention_cases as cases

    torch, (ratio, k) = bench.torch, KINDS[kind]
    dtype = torch.bfloat16 if bench.gpu else torch.float32
    case = cases.draw([tokens], **sizes, ratio=ratio, top_k=k, dtype=dtype, device=bench.device)
    allowed = cases.allowed(case)
    blocks = create_block_mask(lambda b, h, i, j: allowed[i, j], None, None, *allowed.shape, device=bench.device)
    pairs = pairs_of(tokens, sizes["window"], ratio, k)
    floor = bench.floor_ms(14 * pairs * sizes["heads"] * sizes["d"])
    result: dict[str, Any] = {"pairs": pairs, "share of blocks that are computed": 1 - float(blocks.sparsity()) / 100}

    def measure(call, leaves, grad) -> dict[str, Any]:
        def both() -> None:
            torch.autograd.grad(call(*leaves), leaves, grad)

        with torch.no_grad():
            forward = bench.ms(lambda: call(*leaves), 3)
        ms = bench.ms(both, 3)
        return {
            "ms": ms,
            "forward_ms": forward,
            "peak_gib": bench.peak_gib(both),
            "of_floor": float(f"{floor / ms:.3g}"),
        }

    ours = [t.detach().requires_grad_() for t in (case.q, case.kv, case.sinks)]
    if bench.gpu:
        result["kernels"] = measure(
            lambda q, kv, sinks: fused.attend(q, kv, sinks, case.cos, case.sin, case.seen, cases.EPS), ours, case.grad
        )
    turned = [t.detach().requires_grad_() for t in (case.q.transpose(0, 1)[None].contiguous(), case.kv[None, None])]
    compiled = torch.compile(flex_attention) if bench.gpu else flex_attention
    for options in FLEX if bench.gpu else FLEX[:1]:

        def attend(q, kv, options=options):
            return compiled(q, kv, kv, block_mask=blocks, enable_gqa=True, kernel_options=options or None)

        name = f"flex {options or 'default'}"
        try:
            result[name] = measure(attend, turned, case.grad.transpose(0, 1)[None].contiguous())
        except Exception as error:
            result[name] = {"error": f"{type(error).__name__}: {str(error)[-300:]}"}
    return result


# --- the layer's attention, projections and all
def released_arch(name: str):
    from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch

    return DeepseekV4Arch.from_dict(json.loads((ROOT / f"moe_rl/assets/models/{name}/config.json").read_text()))


def attention_module(bench: Bench, arch, kind: str, tokens: int, backends=("triton", "plain"), repeats: int = 3):
    """Forward and backward of the whole attention block by backend: time, peak memory, share of the floor, parts."""
    from moe_rl.models.deepseek_v4.attention import Attention
    from moe_rl.models.packed import PackedSequences

    torch, ratio = bench.torch, KINDS[kind][0]
    layer = arch.compress_ratios.index(ratio)
    dtype = torch.bfloat16 if bench.gpu else torch.float32
    packed = PackedSequences.from_lengths([tokens], bench.device)
    pairs = pairs_of(tokens, arch.sliding_window, ratio, arch.index_top_k if kind == "sparse" else 0)
    result: dict[str, Any] = {}
    x = torch.randn(tokens, arch.hidden_size, device=bench.device).to(dtype).requires_grad_()
    for backend in backends:
        try:
            block = Attention(arch, layer, 256, dtype, torch.device(bench.device), backend)
            for p in block.parameters():
                torch.nn.init.normal_(p.data, 0.0, 0.02)
            weights = sum(p.numel() for n, p in block.named_parameters() if p.ndim == 2 and "indexer" not in n)
            flops = 6 * weights * tokens + 14 * pairs * arch.num_heads * arch.head_dim
            if kind == "sparse":
                index = sum(p.numel() for n, p in block.named_parameters() if p.ndim == 2 and "indexer" in n)
                scored = sum((i + 1) // ratio for i in range(tokens))
                flops += 2 * index * tokens + 2 * scored * arch.index_num_heads * arch.index_head_dim

            def both(block=block):
                block(x, packed).backward(x.detach())

            once = 1 if backend == "plain" else repeats
            ms, peak = bench.ms(both, once), bench.peak_gib(both)
            with torch.no_grad():
                forward = bench.ms(lambda: block(x, packed), once)  # noqa: B023
            floor = bench.floor_ms(flops)
            result[backend] = {"ms": ms, "forward_ms": forward, "peak_gib": peak, "of_floor": round(floor / ms, 3)}
            result |= {"floor_ms": round(floor, 3), "tflop": round(flops / 1e12, 3)}
            if backend == "triton":
                result["parts_ms"] = _parts(bench, block, x, packed)
        except Exception as error:
            traceback.print_exc()
            result[backend] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    if all("ms" in result.get(b, {}) for b in ("triton", "plain")):
        result["over_plain"] = round(result["plain"]["ms"] / result["triton"]["ms"], 2)
    return result


def _parts(bench: Bench, block, x, packed) -> dict[str, float]:
    """Forward milliseconds of each part of the block."""
    torch = bench.torch
    with torch.no_grad():
        latent = block.q_a_norm(block.q_a_proj(x))
        queries, keys = block.q_b_proj(latent), block.kv_norm(block.kv_proj(x))
        out = block._attend_fused(queries, keys, x, latent, packed)
        parts = {
            "queries": lambda: block.q_b_proj(block.q_a_norm(block.q_a_proj(x))),
            "attention with entries and choice": lambda: block._attend_fused(queries, keys, x, latent, packed),
            "output": lambda: block.o_b_proj(block.o_a_proj(out)),
        }
        if block.compressor is not None:
            parts["entries"] = lambda: block.compressor.entries(x, packed)
        if getattr(block.compressor, "indexer", None) is not None:
            from moe_rl.models.deepseek_v4.fused_indexer import choose

            parts["choice"] = lambda: choose(block.compressor, x, latent, packed)
        return {name: bench.ms(call, 3) for name, call in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--budget-s", type=float, default=300.0, help="no case starts after this many seconds")
    parser.add_argument("--only", default="", help="cases whose names hold one of these words, divided by commas")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "attention.json")
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
    import torch

    torch.manual_seed(0)
    bench = Bench(args)
    bench.case("ceilings", bench.ceilings)
    if bench.gpu:
        on_gpu(bench)
    else:
        tiny(bench)
    bench.table()


def on_gpu(bench: Bench) -> None:
    from tests import attention_cases as cases

    real = {"heads": 128, "d": 512, "rope": 32, "window": 128, "lengths": (300, 1, 77, 640)}
    for kind, ratio, top_k in (("sparse", 4, 64), ("heavy", 128, 0), ("sliding", 0, 0)):
        case = real | {"ratio": ratio, "top_k": top_k}
        for f, b in zip(FORWARDS, BACKWARDS, strict=True):
            if kind == "sparse" or f == FORWARDS[0]:
                bench.case(f"error {kind} {f} {b}", lambda c=case, f=f, b=b: correctness(bench, c, f, b))
    odd = real | {"heads": 24, "d": 128, "rope": 8, "window": 33, "ratio": 4, "top_k": 9}
    bench.case("error odd sizes", lambda: correctness(bench, odd, FORWARDS[0], BACKWARDS[0]))
    bf16 = bench.torch.bfloat16
    for lengths, k, heads, d in (((3000, 700, 9), 64, 64, 64), ((4200, 4500), 1024, 32, 256)):
        bench.case(
            f"choice {lengths} {k}", lambda a=(lengths, 4, k, heads, d): {"chose": cases.choices(*a, bf16, "cuda")}
        )
    bench.case("kernels sparse", lambda: kernels(bench, "sparse", 10240, PRO, (FORWARDS, BACKWARDS)))
    pro, flash = released_arch("dsv4-pro"), released_arch("dsv4-flash")
    for kind in ("sparse", "heavy"):
        bench.case(f"block {kind} pro 10240", lambda k=kind: attention_module(bench, pro, k, 10240))
    for kind in ("heavy", "sliding"):
        bench.case(f"kernels {kind}", lambda k=kind: kernels(bench, k, 10240, PRO, (FORWARDS[:2], BACKWARDS[:2])))
    for kind in ("heavy", "sparse", "sliding"):
        bench.case(f"flex {kind}", lambda k=kind: flex(bench, k, 10240, PRO))
    for tokens in (512, 2048, 8192, 16384):
        for kind in ("sparse", "heavy"):
            bench.case(f"block {kind} flash {tokens}", lambda k=kind, n=tokens: attention_module(bench, flash, k, n))


def tiny(bench: Bench) -> None:
    from tests import attention_cases as cases

    small = {"heads": 3, "d": 16, "rope": 2, "window": 5}
    case = small | {"lengths": (9, 1, 12), "ratio": 4, "top_k": 1}
    bench.case("error sparse", lambda: correctness(bench, case, (8, 4, 1), (4, 4, 1)))
    bench.case("choice", lambda: {"chose": cases.choices((30, 9), 4, 2, 4, 16, bench.torch.float32, "cpu")})
    bench.case("kernels sparse", lambda: kernels(bench, "sparse", 12, small, ([(8, 4, 1)], [(4, 4, 1)]), top_k=1))
    bench.case("flex heavy", lambda: flex(bench, "heavy", 300, small))
    from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
    from tests.tiny_v4 import tiny_config

    arch = DeepseekV4Arch.from_dict(tiny_config(index_head_dim=16))
    arch = replace(arch, compress_ratios=(0, 4, 128, 4))
    bench.case("block sparse", lambda: attention_module(bench, arch, "sparse", 24))


if __name__ == "__main__":
    main()
