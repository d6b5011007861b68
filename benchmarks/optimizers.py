"""Every way to hold the optimizer on one GPU: loss curves, bytes against the formula, step times, exact resumes, and what
fails without the patches.

    python3 benchmarks/optimizers.py --out results.json            # on a GPU with Transformer Engine
    python3 benchmarks/optimizers.py --device cpu --size tiny      # the same program, small, anywhere

A case is a process of its own. The model is a DeepSeek-V4 of about 1e9 parameters (bf16, with native-fp32 ones among
them), its weights drawn from a seed, trained on generated sequences whose next token is one of four. Host bytes are
those of the process beyond the process of the case `fp32-states`, which keeps nothing on the host.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
AWARE, BF16_GRADS = {"optimizer__precision_aware": True}, {"optimizer__grad_dtype": "bf16"}
OFFLOAD, HALF = {"optimizer__offload_fraction": 1.0}, {"optimizer__offload_fraction": 0.5}
BASELINE = "fp32-states"
CASES: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "bf16-grads": BF16_GRADS,
    "aware": AWARE,
    "aware-bf16-moments": {**AWARE, **BF16_GRADS, "optimizer__moment_dtype": "bf16"},
    "offload": OFFLOAD,
    "offload-half": HALF,
    "aware-offload": {**AWARE, **OFFLOAD, **BF16_GRADS},
    "aware-offload-half": {**AWARE, **HALF, **BF16_GRADS},
}
# The same bytes with pinned blocks of the size that was asked for, where this torch has the switch
EXACT_PINNED = "pinned_max_round_threshold_mb:1"
VARIANTS = {
    "offload-exact-pinned": ("offload", EXACT_PINNED),
    "aware-offload-exact-pinned": ("aware-offload", EXACT_PINNED),
}

# patch -> the mode in which its fault shows
FAULTS = {
    "no_grad_main_params": HALF,
    "dtype_safe_gradients": {**AWARE, **BF16_GRADS},
    "hybrid_masters": HALF,
    "optimizer_states": HALF,
    "hybrid_reload": OFFLOAD,
    "hybrid_gradients": {**AWARE, **BF16_GRADS, "optimizer__offload_fraction": 0.3},
    "fused_masters": AWARE,
}
NEEDS_FUSED = {"aware", "aware-bf16-moments", "dtype_safe_gradients", "fused_masters"}

SMALL = dict(vocab_size=512, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
             head_dim=32, qk_rope_head_dim=16, q_lora_rank=32, o_groups=2, o_lora_rank=16, n_routed_experts=4,
             num_experts_per_tok=2, compress_ratios=[0, 4, 16, 4], num_hash_layers=1, index_n_heads=16,
             index_head_dim=16, index_topk=8, sliding_window=16)  # fmt: skip
FULL = dict(vocab_size=32768, hidden_size=1536, moe_intermediate_size=768, num_hidden_layers=10, num_attention_heads=16,
            head_dim=128, qk_rope_head_dim=64, q_lora_rank=512, o_groups=4, o_lora_rank=256, n_routed_experts=24,
            num_experts_per_tok=4, compress_ratios=[0, 0, 4, 128, 4, 128, 4, 128, 4, 128], num_hash_layers=2,
            index_n_heads=16, index_head_dim=64, index_topk=64, sliding_window=128)  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"model": SMALL, "length": 48, "sequences": 2},
    "full": {"model": FULL, "length": 512, "sequences": 2},
}
COMMON = dict(model_type="deepseek_v4", num_key_value_heads=1, n_shared_experts=1, routed_scaling_factor=1.5,
              swiglu_limit=10.0, hc_mult=4, hc_sinkhorn_iters=20, initializer_range=0.02, max_position_embeddings=4096,
              rope_theta=10000.0, compress_rope_theta=160000.0)  # fmt: skip
RATE, WARM_UP = 5e-4, 3  # learning rate; steps that are not timed


# ------------------------------------------------------------------------------------------- inside a case's process
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
        config.optimizer.lr, config.optimizer.clip_grad = RATE, 1e9  # the norm is computed and nothing is clipped
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
        """The micro-batch of a step: the next token is one of four functions of the last."""
        from moe_rl.engine.batch import MicroBatch

        np, length, count = self.np, self.size["length"], self.size["sequences"]
        rng = np.random.default_rng(step)
        vocabulary = 256  # of all tokens: few enough to be learned in the steps that are measured
        rows = [[int(rng.integers(vocabulary))] for _ in range(count)]
        for row in rows:
            for jump in rng.integers(0, 4, length - 1):
                row.append((5 * row[-1] + 17 + int(jump)) % vocabulary)
        weight = np.full(length - 1, 1 / (count * (length - 1)))
        ids = list(range(count))
        return [MicroBatch.pack([np.array(row) for row in rows], [{"weight": weight}] * count, ids)]

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
            for j, group in enumerate(part.optimizer.param_groups):
                for k, param in enumerate(group["params"]):
                    for name, value in part.optimizer.state[param].items():
                        # FusedAdam never looks at the master that it made of a native-fp32 parameter
                        if torch.is_tensor(value) and not (name == "master_param" and value.dtype == param.dtype):
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


def train(a: argparse.Namespace, keys: dict[str, Any], work: Path) -> dict[str, Any]:
    """Loss curve, bytes and step times of one case."""
    bench = Bench(a, keys, work)
    built = snapshot(a.device)
    bench.time_optimizer()
    losses, seconds = [], []
    for step in range(a.steps):
        start = time.perf_counter()
        losses.append(bench.update(step).loss)
        bench.synchronise()
        seconds.append(time.perf_counter() - start)
    offloaded = [
        param.numel()
        for part in bench.engine.optimizer.chained_optimizers
        for param in getattr(part.optimizer, "gpu_params_map_cpu_copy", {})
    ]
    parameters = sum(p.numel() for chunk in bench.engine.chunks for p in chunk.parameters())
    native = sum(p.numel() for c in bench.engine.chunks for p in c.parameters() if p.element_size() == 4)
    rounding = "pinned_max_round" not in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return {
        "parameters": parameters,
        "native_fp32_parameters": native,
        "offloaded_parameters": sum(offloaded),
        "losses": losses,
        "step_seconds": statistics.median(seconds[min(WARM_UP, a.steps - 1) :]),
        "optimizer_seconds": statistics.median(bench.step_seconds[min(WARM_UP, a.steps - 1) :]),
        "built": built,
        "trained": snapshot(a.device),
        "formula": bench.formula(rounding),
    }


def resume(a: argparse.Namespace, keys: dict[str, Any], work: Path) -> dict[str, Any]:
    """Save, go on; load into an engine that stepped elsewhere, go on: digests and losses on both sides."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    bench = Bench(a, keys, work)
    for step in range(2):
        bench.update(step)
    before = snapshot(a.device)
    start = time.perf_counter()
    bench.engine.save(work / "saved")
    seconds = {"save": time.perf_counter() - start}
    peaks = {"save": snapshot(a.device).get("gpu_peak_allocated", 0) - before.get("gpu_peak_allocated", 0)}
    saved = bench.digests()
    went_on = [bench.update(step).loss for step in (2, 3)]
    bench.engine.close()
    del bench
    gc.collect()
    runs = []
    for _ in range(2):  # the second tells whether a step repeats at all
        again = Bench(a, keys, work)
        again.update(7)
        start = time.perf_counter()
        again.engine.load(work / "saved")
        seconds["load"] = time.perf_counter() - start
        loaded = again.digests()
        wrong = sorted(name for name in saved if loaded.get(name) != saved[name])
        runs.append({"wrong": wrong, "losses": [again.update(step).loss for step in (2, 3)]})
        again.engine.close()
        del again
        gc.collect()
        if runs[0]["losses"] == went_on:
            break
    return {
        "digests": len(saved),
        "digests_wrong": runs[0]["wrong"][:5],
        "losses_saved": went_on,
        "losses_loaded": [run["losses"] for run in runs],
        "bytes": sum(f.stat().st_size for f in (work / "saved").rglob("*") if f.is_file()),
        "seconds": seconds,
        "gpu_peak_above": peaks,
    }


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
        saved, expected = bench.digests(), bench.update(4).loss
        bench.update(5)
        bench.engine.load(work / "whole")
        found_now = bench.digests()  # a load also notes steps where FusedAdam keeps none
        wrong = sum(found_now.get(n) != v for n, v in saved.items())
        got = bench.update(4).loss
        if wrong or abs(got - expected) > 1e-3 * abs(expected):
            return f"{wrong} of {len(saved)} weights and states differ, next loss {got:.6g} for {expected:.6g}"
        return "ok"

    try:
        bench = Bench(a, keys, work, tuple(a.disable))
    except Exception as error:
        return {"build": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    for name, what in {"norm": norm, "moves": moves, "weights alone": weights_alone, "resume": whole}.items():
        check(name, what)
    return found


# -------------------------------------------------------------------------------------------------------- the driver
def run(
    a: argparse.Namespace, job: str, case: str, keys: dict[str, Any], timeout: float, **more: Any
) -> dict[str, Any]:
    """A case in a process and a directory of its own; what it returned, or how it died."""
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHDYNAMO_DISABLE": "1"}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'patches'}:{os.environ.get('PYTHONPATH', '')}"
    if more.get("allocator"):
        environment["PYTORCH_CUDA_ALLOC_CONF"] = more["allocator"]
    with tempfile.TemporaryDirectory(prefix="optimizers-") as directory:
        answer = Path(directory) / "answer.json"
        command = [sys.executable, __file__, "--job", job, "--keys", json.dumps(keys), "--work", directory]
        command += ["--device", a.device, "--size", more.get("size", a.size), "--steps", str(a.steps)]
        command += ["--disable", *more["disable"]] if more.get("disable") else []
        start = time.perf_counter()
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"died": f"no answer in {timeout:.0f} s"}
        took = round(time.perf_counter() - start, 1)
        print(f"  {job} {case}: {took} s", file=sys.stderr, flush=True)
        if answer.exists():
            return json.loads(answer.read_text()) | {"process_seconds": took}
        return {"died": f"exit {done.returncode}: {' '.join(done.stderr[-600:].split())}"}


def pcie(device: str) -> dict[str, float]:
    """GB/s of copies between pinned or ordinary host memory and the device; empty without one."""
    if device != "cuda":
        return {}
    import torch

    size, rates = 1 << 30, {}
    on_device = torch.empty(size, dtype=torch.uint8, device="cuda")
    for kind in ("pinned", "pageable"):
        host = torch.ones(size, dtype=torch.uint8, pin_memory=kind == "pinned")
        for name, target, source in (("h2d", on_device, host), ("d2h", host, on_device)):
            seconds = []
            for _ in range(5):
                torch.cuda.synchronize()
                start = time.perf_counter()
                target.copy_(source)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
            rates[f"{name}_{kind}"] = round(size / statistics.median(seconds) / 1e9, 2)
    return rates


def judge(result: dict[str, Any], baseline: dict[str, Any], keys: dict[str, Any], rates: dict[str, float]) -> None:
    """Add to a case's result what it is judged by: loss deviation, measured against computed bytes, PCIe time."""
    losses = zip(result["losses"], baseline["losses"], strict=True)
    result["loss_deviation_max"] = max(abs(x - y) / abs(y) for x, y in losses)
    n, trained = result["parameters"], result["trained"]
    gpu, host = (sum(result["formula"][where].values()) for where in ("gpu", "host"))
    if "gpu_allocated" in trained:
        measured = trained["gpu_allocated"]
        result["gpu_bytes_per_parameter"] = {"measured": measured / n, "formula": gpu / n, "ratio": measured / gpu}
    extra = trained["host_rss"] - baseline["trained"]["host_rss"]
    result["host_bytes_per_parameter"] = {"measured": extra / n, "formula": host / n}
    if host:
        result["host_bytes_per_parameter"]["ratio"] = extra / host
    if rates:
        down = result["offloaded_parameters"] * (2 if keys.get("optimizer__grad_dtype") == "bf16" else 4)
        up = result["offloaded_parameters"] * (2 if keys.get("optimizer__precision_aware") else 4)
        result["pcie"] = {
            "bytes_down": down,
            "bytes_up": up,
            "seconds_at_pinned_rate": down / rates["d2h_pinned"] / 1e9 + up / rates["h2d_pinned"] / 1e9,
            "optimizer_seconds_beyond_baseline": result["optimizer_seconds"] - baseline["optimizer_seconds"],
        }


def measure(a: argparse.Namespace) -> dict[str, Any]:
    """All parts, in this order: PCIe, curves, faults, resumes as long as `--budget` lasts."""
    began, result = time.monotonic(), {"pcie_gb_per_s": pcie(a.device)}
    fused = a.device == "cuda"
    cases = {n: k for n, k in CASES.items() if (fused or n not in NEEDS_FUSED) and (not a.cases or n in a.cases)}
    parts = set(a.parts)
    if "train" in parts:
        found = result["cases"] = {}
        variants = VARIANTS if fused and not a.cases else {}
        for name in [*cases, *variants]:
            mode, allocator = variants.get(name, (name, ""))
            found[name] = run(a, "train", name, CASES[mode], 200, allocator=allocator)
            if "died" not in found[name] and "died" not in found[BASELINE]:
                judge(found[name], found[BASELINE], CASES[mode], result["pcie_gb_per_s"])
            store(a, result)
    if "faults" in parts:
        jobs = {(n, off): k for n, k in FAULTS.items() if fused or n not in NEEDS_FUSED for off in (False, True)}
        with ThreadPoolExecutor(a.parallel) as pool:
            answers = {
                key: pool.submit(run, a, "fault", " ".join(map(str, key)), keys, 200, size="tiny",
                                 disable=[key[0]] if key[1] else [])
                for key, keys in jobs.items()
            }  # fmt: skip
            result["faults"] = {
                name: {"with_patch": answers[name, False].result(), "without": answers[name, True].result()}
                for name, off in jobs if not off
            }  # fmt: skip
    if "resume" in parts:
        result["resumes"] = {}
        with ThreadPoolExecutor(a.resumes) as pool:

            def one(name: str) -> dict[str, Any]:
                left = a.budget - (time.monotonic() - began)
                return run(a, "resume", name, cases[name], left) if left > 60 else {"died": "no time was left"}

            result["resumes"] = dict(zip(cases, pool.map(one, cases), strict=True))
    return result


def store(a: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write what is known so far."""
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps(a.about | result, indent=1) + "\n")


def table(result: dict[str, Any]) -> str:
    """The figures that matter, a line each."""
    lines = []
    for name, case in result.get("cases", {}).items():
        if "died" in case:
            lines.append(f"{name:28} {case['died'][:160]}")
            continue
        gpu, host = case.get("gpu_bytes_per_parameter", {}), case["host_bytes_per_parameter"]
        lines.append(
            f"{name:28} loss {case['losses'][0]:.4f} -> {case['losses'][-1]:.4f} off {case['loss_deviation_max']:.2e}"
            f"  gpu {gpu.get('measured', 0):.3f}/{gpu.get('formula', 0):.3f}"
            f"  host {host['measured']:.3f}/{host['formula']:.3f}"
            f"  step {case['step_seconds']:.3f} s optimizer {case['optimizer_seconds']:.3f} s"
            f" pcie {case.get('pcie', {}).get('seconds_at_pinned_rate', 0):.3f} s"
        )
    for name, sides in result.get("faults", {}).items():
        lines.append(f"{name:22} with:    {json.dumps(sides['with_patch'])[:230]}")
        lines.append(f"{'':22} without: {json.dumps(sides['without'])[:330]}")
    for name, case in result.get("resumes", {}).items():
        if "died" in case:
            lines.append(f"resume {name:22} {case['died'][:200]}")
            continue
        lines.append(
            f"resume {name:22} {case['digests']} digests, wrong {case['digests_wrong']}; next losses"
            f" {case['losses_saved']} / {case['losses_loaded']}; {case['bytes'] / 2**30:.2f} GiB,"
            f" save {case['seconds']['save']:.1f} s, load {case['seconds']['load']:.1f} s"
        )
    return "\n".join(lines)


def about(a: argparse.Namespace) -> dict[str, Any]:
    """Versions, hardware and command."""
    from importlib.metadata import PackageNotFoundError, version

    import psutil

    versions = {}
    for name in ("torch", "megatron-core", "transformer_engine"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    hardware = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": psutil.virtual_memory().total >> 30,
    }
    if a.device == "cuda":
        import torch

        hardware |= {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
    return {"command": f"python3 benchmarks/optimizers.py {a.arguments}", "versions": versions, "hardware": hardware}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--size", default="full", choices=tuple(SIZES))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--parts", nargs="+", default=["train", "faults", "resume"])
    parser.add_argument("--cases", nargs="*", default=[], help="only these")
    parser.add_argument("--parallel", type=int, default=6, help="processes at a time where nothing is timed")
    parser.add_argument("--resumes", type=int, default=2, help="resumes at a time; each may take 50 GiB of host memory")
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which no resume is started")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "optimizers.json")
    parser.add_argument("--job", choices=("train", "resume", "fault"), help=argparse.SUPPRESS)
    parser.add_argument("--keys", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--disable", nargs="*", default=[], help=argparse.SUPPRESS)
    a = parser.parse_args()
    a.arguments = " ".join(sys.argv[1:])
    if a.job:
        answer = {"train": train, "resume": resume, "fault": fault}[a.job](a, json.loads(a.keys), a.work)
        (a.work / "answer.json").write_text(json.dumps(answer))
        return
    a.about = about(a)
    result = measure(a)
    store(a, result)
    print(table(result))


if __name__ == "__main__":
    main()
