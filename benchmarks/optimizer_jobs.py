"""What benchmarks/optimizers.py does in the process of one case: curve and resumes, times, faults."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SMALL = dict(vocab_size=512, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
             head_dim=32, qk_rope_head_dim=16, q_lora_rank=32, o_groups=2, o_lora_rank=16, n_routed_experts=4,
             num_experts_per_tok=2, compress_ratios=[0, 4, 16, 4], num_hash_layers=1, index_n_heads=16,
             index_head_dim=16, index_topk=8, sliding_window=16)  # fmt: skip
FULL = dict(vocab_size=32768, hidden_size=1536, moe_intermediate_size=768, num_hidden_layers=10, num_attention_heads=16,
            head_dim=128, qk_rope_head_dim=64, q_lora_rank=512, o_groups=4, o_lora_rank=256, n_routed_experts=24,
            num_experts_per_tok=4, compress_ratios=[0, 0, 4, 128, 4, 128, 4, 128, 4, 128], num_hash_layers=2,
            index_n_heads=16, index_head_dim=64, index_topk=64, sliding_window=128)  # fmt: skip
# The rate is what lets the loss fall by a fifth to a third in 30 steps
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"model": SMALL, "length": 48, "sequences": 2, "rate": 1e-3, "vocabulary": 64},
    "small": {
        "model": SMALL | {"vocab_size": 8192, "hidden_size": 128},
        "length": 256,
        "sequences": 2,
        "rate": 6e-4,
        "vocabulary": 256,
    },
    "full": {"model": FULL, "length": 512, "sequences": 2, "rate": 6e-5, "vocabulary": 256},
}
COMMON = dict(model_type="deepseek_v4", num_key_value_heads=1, n_shared_experts=1, routed_scaling_factor=1.5,
              swiglu_limit=10.0, hc_mult=4, hc_sinkhorn_iters=20, initializer_range=0.02, max_position_embeddings=4096,
              rope_theta=10000.0, compress_rope_theta=160000.0)  # fmt: skip
# Steps in which the rate rises to its own; that are not timed; that are compared after a load (a wrong first step after
# it shows in the second loss, a wrong second in the third)
WARM_UP, UNTIMED, AFTER = 5, 3, 3


class Bench:
    """An engine with generated data."""

    def __init__(self, a: argparse.Namespace, keys: dict[str, Any], work: Path, disable: tuple[str, ...] = ()) -> None:
        import numpy as np

        from moe_rl.config.schema import Config
        from moe_rl.engine.engine import Engine

        model = work / "model"
        if not model.exists():
            model.mkdir()
            (model / "config.json").write_text(json.dumps(COMMON | SIZES[a.size]["model"]))
        config = Config()
        config.model.path, config.engine.device, config.engine.dtype = str(model), a.device, "bf16"
        config.engine.recompute, config.cluster.gpus_per_node = "off", 1
        config.optimizer.lr, config.optimizer.clip_grad = SIZES[a.size]["rate"], 1e9  # the norm alone, nothing clipped
        config.optimizer.schedule, config.optimizer.warmup_steps = "constant", WARM_UP
        config.patches.disable = list(disable)
        for name, value in keys.items():
            section, key = name.split("__")
            assert hasattr(getattr(config, section), key), name
            setattr(getattr(config, section), key, value)
        self.np, self.size, self.device = np, SIZES[a.size], a.device
        meeting = f"file://{tempfile.mkdtemp(dir=work)}/meeting"
        self.engine = Engine.create(config, 0, 1, meeting, random_init=True)
        self.step_seconds: list[float] = []

    def batch(self, step: int) -> list[Any]:
        """A micro-batch for each sequence of a step: the next token is one of four functions of the last."""
        from moe_rl.engine.batch import MicroBatch

        np, length, count = self.np, self.size["length"], self.size["sequences"]
        rng = np.random.default_rng(step)
        vocabulary = self.size["vocabulary"]  # of all tokens: which these are is learned first
        rows = [[int(rng.integers(vocabulary))] for _ in range(count)]
        for row in rows:
            for jump in rng.integers(0, 4, length - 1):
                row.append((5 * row[-1] + 17 + int(jump)) % vocabulary)
        weight = np.full(length - 1, 1 / (count * (length - 1)))
        return [MicroBatch.pack([np.array(row)], [{"weight": weight}], [i]) for i, row in enumerate(rows)]

    def update(self, step: int, **options: Any) -> Any:
        def loss(logprobs: Any, entropy: Any, fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return -(logprobs * fields["weight"]).sum(), {}

        return self.engine.update(self.batch(step), loss, temperature=1.0, **options)

    def time_optimizer(self) -> None:
        """From now on note the seconds of each optimizer step, the device's work included."""
        step = self.engine.optimizer.step

        def timed() -> Any:
            self.synchronise()
            start = time.perf_counter()
            result = step()
            self.synchronise()
            self.step_seconds.append(time.perf_counter() - start)
            return result

        self.engine.optimizer.step = timed

    def synchronise(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def formula(self, pinned_rounding: bool) -> dict[str, Any]:
        """Bytes by item, from the sizes of the optimizer's shards."""
        from dataclasses import replace

        from moe_rl.planner.optimizer_memory import OptimizerMode, Shard, optimizer_memory

        total: dict[str, dict[str, int]] = {"gpu": {}, "gpu_step": {}, "host": {}}
        mode = replace(OptimizerMode.of(self.engine.config), pinned_rounding=pinned_rounding)
        for part in self.engine.optimizer.chained_optimizers:
            native = {id(shard) for group in part.shard_fp32_groups for shard in group}
            sizes = [(p.numel(), id(p) in native) for group in part.optimizer.param_groups for p in group["params"]]
            memory = optimizer_memory([Shard(n, n, fp32) for n, fp32 in sizes], mode)
            for where, items in total.items():
                for item, size in getattr(memory, where).items():
                    items[item] = items.get(item, 0) + size
        return total

    def digests(self) -> dict[str, int]:
        """Of every weight and every optimizer state."""
        import torch

        from moe_rl.models.digest import digest_all

        tensors = {}
        for i, part in enumerate(self.engine.optimizer.chained_optimizers):
            offloaded = getattr(part.optimizer, "gpu_params_map_cpu_copy", None)
            for j, group in enumerate(part.optimizer.param_groups):
                for k, param in enumerate(group["params"]):
                    for name, value in part.optimizer.state[param].items():
                        # FusedAdam never looks at the master that it made of a native-fp32 parameter
                        unread = name == "master_param" and value.dtype == param.dtype
                        unread |= name == "step" and offloaded is not None and param not in offloaded  # left by a load
                        if torch.is_tensor(value) and not unread:
                            value = value.view(torch.int16) if value.dtype == torch.uint16 else value
                            tensors[f"optimizer {i}.{j}.{k}.{name}"] = value.detach().reshape(-1)
        return self.engine.digest() | digest_all(tensors)


def snapshot(device: str) -> dict[str, Any]:
    """Bytes of this process now: resident on the host, allocated on the device, pinned."""
    import psutil
    import torch

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    taken = {"host_rss": psutil.Process().memory_info().rss}
    if device == "cuda":
        torch.cuda.synchronize()
        stats = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
        taken |= {
            "gpu_allocated": torch.cuda.memory_allocated(),
            "gpu_peak_allocated": torch.cuda.max_memory_allocated(),
            "gpu_peak_reserved": torch.cuda.max_memory_reserved(),
            "pinned": {k: v for k, v in stats.items() if "bytes" in k and k.endswith("current")},
        }
    return taken


def measured(bench: Bench, a: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Losses, bytes and step times of so many steps."""
    built = snapshot(a.device)
    bench.time_optimizer()
    losses, seconds = [], []
    for step in range(steps):
        start = time.perf_counter()
        losses.append(bench.update(step).loss)
        bench.synchronise()
        seconds.append(time.perf_counter() - start)
    offloaded = [
        param.numel()
        for part in bench.engine.optimizer.chained_optimizers
        for param in getattr(part.optimizer, "gpu_params_map_cpu_copy", {})
    ]
    weights = [p for chunk in bench.engine.chunks for p in chunk.parameters()]
    rounding = "pinned_max_round" not in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return {
        "parameters": sum(p.numel() for p in weights),
        "native_fp32_parameters": sum(p.numel() for p in weights if p.element_size() == 4),
        "offloaded_parameters": sum(offloaded),
        "losses": losses,
        "step_seconds": statistics.median(seconds[min(UNTIMED, steps - 1) :]),
        "optimizer_seconds": statistics.median(bench.step_seconds[min(UNTIMED, steps - 1) :]),
        "built": built,
        "trained": snapshot(a.device),
        "formula": bench.formula(rounding),
    }


def deterministic(on: bool) -> None:
    """Kernels that repeat to the bit, where there are some."""
    import torch

    torch.use_deterministic_algorithms(on, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def curve(a: argparse.Namespace, keys: dict[str, Any], work: Path) -> dict[str, Any]:
    """Loss curve and bytes of one case; then it is saved and resumed in both formats."""
    deterministic(not a.undeterministic)
    start = time.perf_counter()
    bench = Bench(a, keys, work)
    result = {"build_seconds": time.perf_counter() - start} | measured(bench, a, a.steps)
    result["resumes"] = {}
    for i, kind in enumerate(a.resume):
        answer(a, result)  # what is known, in case that time runs out
        bench.engine.config.checkpoint.optimizer_format = kind
        result["resumes"][kind] = resume(bench, a, work / kind, a.steps + AFTER * i)
    return result


def resume(bench: Bench, a: argparse.Namespace, directory: Path, step: int) -> dict[str, Any]:
    """Save, go on some steps, which leaves all else than was saved; load, and go the same steps again."""
    before, seconds = snapshot(a.device), {}

    def timed(name: str, what: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = what()
        bench.synchronise()
        seconds[name] = time.perf_counter() - start
        return result

    timed("save", lambda: bench.engine.save(directory))
    peak = snapshot(a.device).get("gpu_peak_allocated", 0) - before.get("gpu_peak_allocated", 0)
    saved = timed("digests", bench.digests)
    steps = range(step, step + AFTER)
    went_on = timed("steps", lambda: [bench.update(s).loss for s in steps])
    left = sum(value != saved.get(name) for name, value in bench.digests().items())
    nbytes = sum(f.stat().st_size for f in directory.rglob("*") if f.is_file())
    report = timed("load", lambda: bench.engine.load(directory))
    shutil.rmtree(directory)
    loaded = bench.digests()
    wrong = sorted(name for name in saved if loaded.get(name) != saved[name])
    return {
        "digests": len(saved),
        "digests_that_had_changed": left,
        "digests_wrong": len(wrong),
        "named_wrong": wrong[:5],
        "losses_saved": went_on,
        "losses_loaded": [bench.update(s).loss for s in steps],
        "bytes": nbytes,
        "seconds": seconds,
        "gpu_peak_above_by_save": peak,
        "load": report,
    }


def timed(a: argparse.Namespace, keys: dict[str, Any], work: Path) -> dict[str, Any]:
    """Bytes and step times of one case, and where the time of one optimizer step goes."""
    bench = Bench(a, keys, work)
    step = bench.engine.optimizer.step
    result = measured(bench, a, a.steps)
    answer(a, result)
    bench.engine.optimizer.step = profiled = Profiled(step, a.device)
    bench.update(a.steps)
    return result | {"profile": profiled.table}


class Profiled:
    """An optimizer step under torch's profiler; `table` has its events, longest first."""

    def __init__(self, step: Callable[[], Any], device: str) -> None:
        self.step, self.device = step, device
        self.table: dict[str, Any] = {}

    def __call__(self) -> Any:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device == "cuda")
        with profile(activities=activities) as recorded:
            start = time.perf_counter()
            result = self.step()
            if self.device == "cuda":
                torch.cuda.synchronize()
            self.table["seconds"] = time.perf_counter() - start
        events = recorded.key_averages()
        for name in ("self_cpu_time_total", "self_device_time_total"):
            ranked = sorted(events, key=lambda event: -getattr(event, name))[:20]
            self.table[name.removesuffix("_total")] = [
                {"event": e.key[:120], "calls": e.count, "seconds": round(getattr(e, name) / 1e6, 6)}
                for e in ranked if getattr(e, name) > 0
            ]  # fmt: skip
        return result


def answer(a: argparse.Namespace, result: dict[str, Any]) -> None:
    """Hand over what is known."""
    (a.work / "answer.tmp").write_text(json.dumps(result))
    os.replace(a.work / "answer.tmp", a.work / "answer.json")


def fault(a: argparse.Namespace, keys: dict[str, Any], work: Path) -> dict[str, Any]:
    """Checks that a mode passes with every patch, each by itself, with `a.disable` left out."""
    found: dict[str, Any] = {}

    def check(name: str, what: Callable[[], Any]) -> None:
        try:
            found[name] = what()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

    def norm() -> str:
        reported = bench.update(0, lr=0.0).grad_norm
        squares = sum(float(p.main_grad.double().square().sum()) for c in bench.engine.chunks for p in c.parameters()
                      if p.requires_grad and hasattr(p, "main_grad"))  # fmt: skip
        error = abs(reported - squares**0.5) / squares**0.5
        return "ok" if error < 1e-3 else f"gradient norm {reported:.6g}, in float64 {squares**0.5:.6g}"

    def native() -> dict[str, Any]:
        return {n: p.detach().clone() for c in bench.engine.chunks for n, p in c.named_parameters()
                if p.element_size() == 4 and p.requires_grad}  # fmt: skip

    def moves() -> str:
        before = native()
        bench.update(1)
        still = [n for n, p in native().items() if bool((p == before[n]).all())]
        return "ok" if not still else f"{len(still)} of {len(before)} native-fp32 parameters never move"

    def weights_alone() -> str:
        bench.engine.save(work / "weights", contents=["model", "extra"])
        saved = bench.engine.digest()
        bench.update(2)
        bench.engine.load(work / "weights")
        bench.update(3, lr=0.0)
        differ = sum(v != saved[n] for n, v in bench.engine.digest().items())
        return (
            "ok" if not differ else f"{differ} of {len(saved)} weights are not the loaded ones after a step at rate 0"
        )

    def whole() -> str:
        bench.engine.save(work / "whole")
        saved, expected = bench.digests(), [bench.update(step).loss for step in range(4, 4 + AFTER)]
        bench.engine.load(work / "whole")
        found_now = bench.digests()
        wrong = sum(found_now.get(n) != v for n, v in saved.items())
        got = [bench.update(step).loss for step in range(4, 4 + AFTER)]
        if wrong or any(abs(x - y) > 1e-5 * abs(y) for x, y in zip(got, expected, strict=True)):
            return f"{wrong} of {len(saved)} weights and states differ, losses {got} for {expected}"
        return "ok"

    deterministic(True)
    try:
        bench = Bench(a, keys, work, tuple(a.disable))
    except Exception as error:
        return {"build": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    for name, what in {"norm": norm, "moves": moves, "weights alone": weights_alone, "resume": whole}.items():
        check(name, what)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=("curve", "timed", "fault"))
    parser.add_argument("--keys", type=json.loads, required=True, help="section__key: value, JSON")
    parser.add_argument("--work", type=Path, required=True, help="where answer.json goes")
    parser.add_argument("--device", required=True)
    parser.add_argument("--size", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--resume", nargs="*", default=[])
    parser.add_argument("--disable", nargs="*", default=[])
    parser.add_argument("--undeterministic", action="store_true")
    a = parser.parse_args()
    answer(a, {"curve": curve, "timed": timed, "fault": fault}[a.job](a, a.keys, a.work))


if __name__ == "__main__":
    main()
