"""Every way to hold the optimizer on one GPU: loss curves, bytes against the formula, exact resumes, step times and where
they go, and what fails without the patches.

    python3 benchmarks/optimizers.py --out results.json            # on a GPU with Transformer Engine
    python3 benchmarks/optimizers.py --device cpu --size tiny      # the same program, small, anywhere

A case is a process of its own. The model is a DeepSeek-V4 of about 1e9 parameters (bf16, with native-fp32 ones among
them), its weights drawn from a seed, trained on generated sequences whose next token is one of four, under deterministic
algorithms where these exist. The curves run side by side, as host memory allows; what is timed runs alone. Host bytes are
those of the process beyond the process of the case `fp32-states`, which keeps nothing on the host.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
AWARE, BF16_GRADS = {"optimizer__precision_aware": True}, {"optimizer__grad_dtype": "bf16"}
OFFLOAD, HALF = {"optimizer__offload_fraction": 1.0}, {"optimizer__offload_fraction": 0.5}
BASELINE = "fp32-states"
CASES: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "aware-offload-half": {**AWARE, **HALF, **BF16_GRADS},
    "offload-half": HALF,
    "bf16-grads": BF16_GRADS,
    "aware": AWARE,
    "aware-offload": {**AWARE, **OFFLOAD, **BF16_GRADS},
    "offload": OFFLOAD,
    "aware-bf16-moments": {**AWARE, **BF16_GRADS, "optimizer__moment_dtype": "bf16"},
}
# The baseline once more, and once with kernels that add in any order: how far equal runs part
REPEATS = {"repeat": {}, "repeat-undeterministic": {"undeterministic": True}}
# Pinned blocks of the size that was asked for, where this torch has the switch
EXACT_PINNED = "pinned_max_round_threshold_mb:1"
VARIANTS = {
    "offload-exact-pinned": ("offload", EXACT_PINNED),
    "aware-offload-exact-pinned": ("aware-offload", EXACT_PINNED),
}
TIMED = ("aware-offload-half", *VARIANTS)

# patch -> the mode in which its fault shows
FAULTS = {
    "no_grad_main_params": HALF,
    "dtype_safe_gradients": {**AWARE, **BF16_GRADS},
    "hybrid_masters": HALF,
    "optimizer_states": HALF,
    "hybrid_reload": OFFLOAD,
    "hybrid_gradients": {**AWARE, **BF16_GRADS, "optimizer__offload_fraction": 0.3},
    "hybrid_step": HALF,
    "fused_masters": AWARE,
}
NEEDS_FUSED = {"aware", "aware-bf16-moments", "dtype_safe_gradients", "fused_masters"}
FORMATS = ("reshardable", "same_layout")
# GiB of host memory that a curve of the full size takes: process, states on the CPU by fraction, checkpoint in memory
PROCESS, STATES, FILES = 4, 22, 14


class Gate:
    """Lets jobs in while the GiB of host memory that they name fit together."""

    def __init__(self, size: float) -> None:
        self.free, self.changed = size, threading.Condition()

    def __call__(self, need: float, job: Any) -> Any:
        with self.changed:
            self.changed.wait_for(lambda: self.free >= need)
            self.free -= need
        try:
            return job()
        finally:
            with self.changed:
                self.free += need
                self.changed.notify_all()


class Driver:
    """Runs the phases; `result` is written to `a.out` after every case."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.a, self.began, self.lock = a, time.monotonic(), threading.Lock()
        self.result: dict[str, Any] = {"pcie_gb_per_s": pcie(a.device)}
        self.fused = a.device == "cuda" or a.fused
        self.cases = {n: k for n, k in CASES.items() if self.fused or n not in NEEDS_FUSED}

    def left(self) -> float:
        return self.a.budget_s - (time.monotonic() - self.began)

    def keep(self, phase: str, name: str, found: dict[str, Any]) -> None:
        """Note what a case gave and write all that is known."""
        with self.lock:
            self.result.setdefault(phase, {})[name] = found
            for key in ("curves", "timed"):
                baseline = self.result.get("curves", {}).get(BASELINE, {})
                for case, one in self.result.get(key, {}).items():
                    if "losses" in one and "losses" in baseline:
                        mode = VARIANTS.get(case, (case,))[0]
                        judge(one, baseline, CASES.get(mode, {}), self.result["pcie_gb_per_s"])
            self.a.out.parent.mkdir(parents=True, exist_ok=True)
            self.a.out.write_text(json.dumps(self.a.about | self.result, indent=1) + "\n")

    def chosen(self, name: str) -> bool:
        return not self.a.cases or name in self.a.cases

    def curves(self) -> None:
        gate = Gate(self.a.host_gib)
        jobs: dict[str, tuple[float, dict[str, Any], dict[str, Any]]] = {}
        for name, keys in self.cases.items():
            need = PROCESS + STATES * keys.get("optimizer__offload_fraction", 0) + FILES
            jobs[name] = (need, keys, {"resume": self.a.resume})
        jobs |= {name: (PROCESS, {}, options) for name, options in REPEATS.items()}

        def one(item: tuple[str, tuple[float, dict[str, Any], dict[str, Any]]]) -> None:
            name, (need, keys, options) = item
            need = min(need, self.a.host_gib)
            self.keep("curves", name, gate(need, lambda: self.run("curve", name, keys, 280, threads=3, **options)))

        with ThreadPoolExecutor(self.a.parallel) as pool:
            list(pool.map(one, ((n, j) for n, j in jobs.items() if self.chosen(n))))

    def timed(self) -> None:
        for name in filter(self.chosen, TIMED):
            mode, allocator = VARIANTS.get(name, (name, ""))
            for case, setting in {name: allocator, mode: ""}.items():  # the mode itself where the switch is not known
                found = self.run("timed", case, CASES[mode], 120, allocator=setting, steps=min(self.a.steps, 7))
                self.keep("timed", case, found)
                if "died" not in found:
                    break

    def faults(self) -> None:
        jobs = {(n, off): k for n, k in FAULTS.items() if self.fused or n not in NEEDS_FUSED for off in (False, True)}

        def one(item: tuple[tuple[str, bool], dict[str, Any]]) -> None:
            (name, off), keys = item
            disable = [name] if off else []
            label = f"{name} {'without' if off else 'with'}"
            self.keep("faults", label, self.run("fault", label, keys, 150, size="tiny", threads=2, disable=disable))

        with ThreadPoolExecutor(self.a.parallel + 1) as pool:
            list(pool.map(one, jobs.items()))

    def run(self, job: str, case: str, keys: dict[str, Any], timeout: float, **more: Any) -> dict[str, Any]:
        """A case in a process and a directory of its own; what it returned, or how it died."""
        a, timeout = self.a, min(timeout, self.left())
        if timeout < 15:
            return {"died": "no time was left"}
        environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHDYNAMO_DISABLE": "1"}
        environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'patches'}:{os.environ.get('PYTHONPATH', '')}"
        if more.get("allocator"):
            environment["PYTORCH_CUDA_ALLOC_CONF"] = more["allocator"]
        if more.get("threads"):
            environment["OMP_NUM_THREADS"] = str(more["threads"])
        with tempfile.TemporaryDirectory(prefix="optimizers-", dir=a.scratch) as directory:
            given = Path(directory) / "answer.json"
            command = [sys.executable, *a.launcher, str(Path(__file__).with_name("optimizer_jobs.py")), job]
            command += ["--keys", json.dumps(keys), "--work", directory, "--device", a.device]
            command += ["--size", more.get("size", a.size), "--steps", str(more.get("steps", a.steps))]
            command += ["--resume", *more.get("resume", []), "--disable", *more.get("disable", [])]
            command += ["--undeterministic"] * more.get("undeterministic", False)
            start = time.perf_counter()
            try:
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
                died = f"exit {done.returncode}: {' '.join(done.stderr[-600:].split())}" if done.returncode else ""
            except subprocess.TimeoutExpired:
                died = f"not done in {timeout:.0f} s"
            took = round(time.perf_counter() - start, 1)
            print(f"  {self.left():.0f} s left: {job} {case} {took} s {died}", file=sys.stderr, flush=True)
            found = json.loads(given.read_text()) if given.exists() else {}
        return found | {"process_seconds": took} | ({"died": died} if died else {})


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
    losses = zip(result["losses"], baseline["losses"], strict=False)  # what is timed takes fewer steps
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
        seconds = down / rates["d2h_pinned"] / 1e9 + up / rates["h2d_pinned"] / 1e9
        result["pcie"] = {"bytes_down": down, "bytes_up": up, "seconds_at_pinned_rate": seconds}


def table(result: dict[str, Any]) -> str:
    """The figures that matter, a line each."""
    lines = []
    for phase in ("curves", "timed"):
        for name, case in result.get(phase, {}).items():
            if "loss_deviation_max" not in case:
                lines.append(f"{phase} {name:26} {case.get('died', '')[:160]}")
                continue
            gpu, host = case.get("gpu_bytes_per_parameter", {}), case["host_bytes_per_parameter"]
            lines.append(
                f"{phase} {name:26} loss {case['losses'][0]:.4f} -> {case['losses'][-1]:.4f}"
                f" off {case['loss_deviation_max']:.2e}  gpu {gpu.get('measured', 0):.3f}/{gpu.get('formula', 0):.3f}"
                f"  host {host['measured']:.3f}/{host['formula']:.3f}"
                f"  step {case['step_seconds']:.3f} s optimizer {case['optimizer_seconds']:.3f} s"
                f" pcie {case.get('pcie', {}).get('seconds_at_pinned_rate', 0):.3f} s {case.get('died', '')[:120]}"
            )
            for kind, one in case.get("resumes", {}).items():
                exact = "equal" if one["losses_saved"] == one["losses_loaded"] else "DIFFER"
                lines.append(
                    f"    {kind:12} {one['digests']} digests ({one['digests_that_had_changed']} had changed),"
                    f" wrong {one['digests_wrong']}; losses {exact} {one['losses_saved'][0]:.6f}"
                    f" {one['losses_loaded'][0]:.6f}; {one['bytes'] / 2**30:.2f} GiB,"
                    f" save {one['seconds']['save']:.1f} s, load {one['seconds']['load']:.1f} s"
                )
            for kind in ("self_cpu_time", "self_device_time"):
                longest = case.get("profile", {}).get(kind, [])[:5]
                lines += [f"    {kind} {e['seconds']:.3f} s {e['calls']:6} x {e['event'][:90]}" for e in longest]
    lines += [f"{name:30} {json.dumps(found)[:330]}" for name, found in sorted(result.get("faults", {}).items())]
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
    gib = psutil.virtual_memory().total >> 30
    hardware = {"machine": platform.machine(), "cores": os.cpu_count(), "memory_gib": gib}
    if a.device == "cuda":
        import torch

        hardware |= {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
    arguments = " ".join(sys.argv[1:])
    return {"command": f"python3 benchmarks/optimizers.py {arguments}", "versions": versions, "hardware": hardware}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--size", default="full", choices=("tiny", "small", "full"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--phases", nargs="+", default=["curves", "timed", "faults"])
    parser.add_argument("--cases", nargs="*", default=[], help="only these")
    parser.add_argument("--resume", nargs="*", default=FORMATS, choices=FORMATS, help="formats saved after the curve")
    parser.add_argument("--parallel", type=int, default=5, help="processes at a time where nothing is timed")
    parser.add_argument("--host-gib", type=float, default=105, help="host memory for curves that run side by side")
    parser.add_argument("--budget-s", type=float, default=3600, help="seconds after which nothing goes on")
    parser.add_argument("--scratch", help="where cases write; by default /dev/shm if it has 60 GiB, else as tempfile")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "optimizers.json")
    parser.add_argument(
        "--launcher", nargs="*", default=[], help="a program that runs the cases (kernels in emulation)"
    )
    a = parser.parse_args()
    shm = Path("/dev/shm")
    if a.scratch is None and shm.is_dir() and shutil.disk_usage(shm).free > 60 << 30:
        a.scratch = str(shm)
    a.fused = bool(a.launcher)
    a.about = about(a) | {"scratch": a.scratch or tempfile.gettempdir()}
    driver = Driver(a)
    for phase in a.phases:
        getattr(driver, phase)()
    print(table(driver.result))


if __name__ == "__main__":
    main()
