"""The planner's memory against what one training process takes, phase by phase: optimizer modes, lengths, recompute.

    python3 benchmarks/planner_memory.py --size half --parallel 6 --budget-s 300 --out OUT/planner_memory.json    # on a GPU
    python3 benchmarks/planner_memory.py --device cpu --size small --parallel 1 --out OUT/planner_memory_cpu.json
    python3 benchmarks/planner_memory.py --runs --out benchmarks/results/planner_memory_cpu.json

Each case is a process of its own: it builds an engine of a V4-style model (weights drawn from a seed), scores, updates,
saves and resumes, and notes for each phase the most that torch had allocated on the GPU and the most that the process had
resident on the host. Beside that stands what `moe-rl plan` says of the same configuration: no number of a case enters the
formula that it is held against. The result is written after every case, a case's own after every phase: what is cut off when
the budget ends keeps the phases that it has, and says so.

With --runs the cases are whole runs of dsv4-tiny on a CPU, `moe-rl train` with its rollout process beside the trainer's ranks,
and what is held against the plan is what the run itself wrote into plan.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TINY = dict(vocab_size=4096, hidden_size=256, moe_intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
            head_dim=64, qk_rope_head_dim=16, q_lora_rank=64, o_groups=2, o_lora_rank=64, n_routed_experts=8,
            num_experts_per_tok=2, compress_ratios=[0, 4, 16, 4], num_hash_layers=1, index_n_heads=4,
            index_head_dim=32, index_topk=8, sliding_window=64)  # fmt: skip
FULL = dict(vocab_size=32768, hidden_size=1536, moe_intermediate_size=768, num_hidden_layers=10, num_attention_heads=16,
            head_dim=128, qk_rope_head_dim=64, q_lora_rank=512, o_groups=4, o_lora_rank=256, n_routed_experts=24,
            num_experts_per_tok=4, compress_ratios=[0, 0, 4, 128, 4, 128, 4, 128, 4, 128], num_hash_layers=2,
            index_n_heads=16, index_head_dim=64, index_topk=64, sliding_window=128)  # fmt: skip
COMMON = dict(model_type="deepseek_v4", num_key_value_heads=1, n_shared_experts=1, routed_scaling_factor=1.5,
              swiglu_limit=10.0, hc_mult=4, hc_sinkhorn_iters=20, initializer_range=0.02, max_position_embeddings=16384,
              rope_theta=10000.0, compress_rope_theta=160000.0)  # fmt: skip
HALF = FULL | dict(hidden_size=1024, moe_intermediate_size=512, num_hidden_layers=8, n_routed_experts=20, q_lora_rank=384,
                   compress_ratios=FULL["compress_ratios"][:8])  # fmt: skip
SMALL = HALF | dict(vocab_size=8192, hidden_size=512, moe_intermediate_size=256, n_routed_experts=16, num_attention_heads=8,
                    head_dim=64, qk_rope_head_dim=16, q_lora_rank=128, o_lora_rank=64, index_n_heads=4)  # fmt: skip
SIZES = {"tiny": TINY, "small": SMALL, "half": HALF, "full": FULL}
AWARE = {"optimizer.precision_aware": True, "optimizer.grad_dtype": "bf16"}
OFF = {"engine.recompute": "off"}


def case(length: int, fit: int, count: int, **keys: Any) -> dict[str, Any]:
    """`count` sequences of `length` tokens a step, `fit` of them in a micro-batch."""
    shape = {
        "data.max_prompt": 16,
        "rollout.max_response": length - 16,
        "engine.max_tokens_per_micro_batch": length * fit,
        "rollout.n": 2,
        "data.prompts_per_step": count // 2,
    }
    return shape | keys


HALF_AWAY, AWAY = ({"optimizer.offload_fraction": share} for share in (0.5, 1.0))
REFERENCE = {"algorithm.kl": "k3"}
GPU_CASES = {
    "plain-1024": case(512, 2, 4),
    "plain-1024-kept": case(512, 2, 4, **OFF),
    "plain-4096": case(4096, 1, 2),
    "plain-2048-kept": case(2048, 1, 2, **OFF),
    "aware-bf16-moments-8192": case(8192, 1, 2, **AWARE, **{"optimizer.moment_dtype": "bf16"}),
    "offload-2048": case(2048, 1, 2, **AWAY),
    "offload-half-1024": case(1024, 1, 2, **HALF_AWAY),
    "aware-2048": case(2048, 1, 2, **{"optimizer.precision_aware": True}),
    "aware-bf16-moments-1024-kept": case(512, 2, 4, **AWARE, **OFF, **{"optimizer.moment_dtype": "bf16"}),
    "aware-offload-4096": case(2048, 2, 4, **AWARE, **AWAY),
    "aware-offload-half-1024-kept": case(1024, 1, 2, **AWARE, **OFF, **HALF_AWAY),
    "bf16-grads-reference-2048": case(
        2048, 1, 2, **REFERENCE, **{"optimizer.grad_dtype": "bf16", "engine.logprob_chunk": 512}
    ),
}
CPU_CASES = {  # fp32, in which there are no precision-aware optimizer and no bf16 buffers
    "cpu-512": case(256, 2, 4),
    "cpu-512-kept": case(256, 2, 4, **OFF),
    "cpu-1024": case(1024, 1, 2),
    "cpu-1024-kept": case(512, 2, 4, **OFF),
    "cpu-offload-512": case(256, 2, 4, **AWAY),
    "cpu-offload-half-512": case(512, 1, 2, **HALF_AWAY),
    "cpu-offload-512-kept": case(256, 2, 4, **AWAY, **OFF),
    "cpu-reference-512": case(256, 2, 4, **REFERENCE),
    "cpu-reference-offload-256": case(256, 1, 2, **REFERENCE, **AWAY),
    "cpu-1024-small-chunks": case(1024, 1, 2, **{"engine.attention_chunk": 64, "engine.logprob_chunk": 128}),
    "cpu-512-same-layout": case(512, 1, 2, **{"checkpoint.optimizer_format": "same_layout"}),
    "cpu-256-weights-alone": case(256, 1, 2, **{"checkpoint.contents": "[model,extra]"}),
}
DEFAULT_HEAP = "cpu-512-default-heap"  # the others on a CPU give freed blocks from 1 MiB on back to the system
CPU_CASES[DEFAULT_HEAP] = CPU_CASES["cpu-512"]
HEAP = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
CASES = GPU_CASES | CPU_CASES
RUNS = {
    "dsv4-tiny": [],
    "dsv4-tiny one rank, kept activations": ["layout.pp=1", "layout.ep=1", "cluster.gpus_per_node=1", "engine.recompute=off"],
    "dsv4-tiny longer responses": ["rollout.max_response=96", "engine.max_tokens_per_micro_batch=2048"],
    "dsv4-tiny offloaded, two ranks": [
        "optimizer.offload_fraction=1", "layout.pp=1", "cluster.gpus_per_node=2", "rollout.replicas=2"],
    "dsv4-tiny with a reference": ["algorithm.kl=k3", "layout.pp=1", "layout.ep=1", "cluster.gpus_per_node=2"],
}  # fmt: skip
PHASES = ("log_prob", "update", "save", "resume")


def configuration(a: argparse.Namespace, keys: dict[str, Any], model: Path) -> Any:
    from moe_rl.config import load_config

    fixed = {"model.path": model, "engine.device": a.device, "engine.dtype": a.dtype, "cluster.gpus_per_node": 1}
    return load_config(None, [f"{k}={v}" for k, v in (fixed | keys).items()])


def measure(a: argparse.Namespace, keys: dict[str, Any], work: Path) -> Iterator[dict[str, Any]]:
    """Peaks of each phase in bytes, in this process: what is known after each."""
    import numpy as np

    if a.device == "cpu":
        from moe_patches import cpu

        cpu.install()
    from moe_rl.engine import memory
    from moe_rl.engine.batch import MicroBatch
    from moe_rl.engine.engine import Engine

    config = configuration(a, keys, work / "model")
    reference = config.algorithm.kl != "none"
    meeting = f"file://{work}/meeting"
    engine = Engine.create(config, 0, 1, meeting, random_init=True, reference=reference)
    length = config.data.max_prompt + config.rollout.max_response
    fit = config.engine.max_tokens_per_micro_batch // length
    count = config.data.prompts_per_step * config.rollout.n // fit
    vocab = SIZES[a.size]["vocab_size"]

    def batches(step: int) -> list[Any]:
        rng = np.random.default_rng(step)
        weight = [{"weight": np.full(length - 1, 1 / (length * fit * count))}] * fit
        return [MicroBatch.pack(list(rng.integers(0, vocab, (fit, length))), weight) for _ in range(count)]

    def loss(logprobs: Any, entropy: Any, fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return -(logprobs * fields["weight"]).sum(), {}

    parameters = sum(p.numel() for chunk in engine.chunks for p in chunk.parameters())
    found = {"built": _now(a.device), "parameters": parameters}
    work_of = {
        "log_prob": lambda: engine.log_probs(batches(0), temperature=1.0, entropy=True),
        "update": lambda: [engine.update(batches(step), loss, temperature=1.0) for step in range(3)],
        "save": lambda: engine.save(work / "saved"),
        "resume": lambda: engine.load(work / "saved"),
    }
    for phase in PHASES:
        start, before = time.perf_counter(), _now(a.device)
        peak = memory.Peak()
        work_of[phase]()
        peak.stop()
        found[phase] = {
            "host": before["host"] + peak.host,
            "gpu": before["gpu"] + peak.gpu,
            "seconds": time.perf_counter() - start,
        }
        yield found
    engine.close()


def _now(device: str) -> dict[str, int]:
    import torch

    from moe_rl.engine import memory

    return {"host": memory.resident_bytes(), "gpu": torch.cuda.memory_allocated() if device == "cuda" else 0}


def predict(a: argparse.Namespace, keys: dict[str, Any], work: Path) -> dict[str, Any]:
    """What the planner says of the case: bytes by phase and item, of the trainer alone."""
    from moe_rl.models.family import read_facts
    from moe_rl.planner.memory import TRAINER_ON_CPU, TRAINER_ON_GPU
    from moe_rl.planner.plan import Plan

    config = configuration(a, keys, work / "model")
    stage = Plan.of(config, read_facts(config.model.path)).memory.stages[0]
    process = {"process": TRAINER_ON_GPU if a.device == "cuda" else TRAINER_ON_CPU}
    others = ("contexts", "rollout weights", "kv cache", "rollout reload")
    heap = () if HEAP.items() - os.environ.items() else ("kept by malloc",)
    return {
        phase: {
            "gpu": {k: v for k, v in stage.gpu[phase].items() if k not in others},
            "host": process | {k: v for k, v in stage.host[phase].items() if k not in heap},
        }
        for phase in PHASES
    }


def compare(result: dict[str, Any]) -> None:
    """Adds `ratio` (predicted / measured) by place and phase."""
    result["ratio"] = {
        place: {
            phase: sum(result["predicted"][phase][place].values()) / result["measured"][phase][place]
            for phase in PHASES
            if result["measured"].get(phase, {}).get(place)
        }
        for place in ("gpu", "host")
    }


def run_one(a: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        (work / "model").mkdir()
        (work / "model" / "config.json").write_text(json.dumps(COMMON | SIZES[a.size]))
        keys = CASES[a.case]
        result: dict[str, Any] = {"keys": keys, "predicted": predict(a, keys, work)}
        for result["measured"] in measure(a, keys, work):
            compare(result)
            _write(a.out, result)


def run_all(a: argparse.Namespace) -> None:
    """The cases, `--parallel` at a time; what is not done when the budget ends is left out."""
    own = GPU_CASES if a.device == "cuda" else CPU_CASES
    end, waiting, running = time.monotonic() + a.budget_s, list(a.cases or own), {}
    result = {"command": " ".join(sys.argv), "hardware": _hardware(a.device), "versions": _versions(), "cases": {}}
    with tempfile.TemporaryDirectory() as directory:
        while waiting or running:
            while waiting and len(running) < a.parallel and time.monotonic() < end:
                name = waiting.pop(0)
                out = Path(directory) / f"{name}.json"
                command = [
                    sys.executable,
                    __file__,
                    "--case",
                    name,
                    "--out",
                    str(out),
                    "--device",
                    a.device,
                    "--size",
                    a.size,
                ]
                log = (Path(directory) / f"{name}.log").open("w")
                env = os.environ | (HEAP if a.device == "cpu" and name != DEFAULT_HEAP else {})
                running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env), out
            for name, (process, out) in list(running.items()):
                if process.poll() is None and time.monotonic() < end:
                    continue
                cut = process.poll() is None
                process.kill()
                code = process.wait()
                del running[name]
                found = result["cases"][name] = json.loads(out.read_text()) if out.exists() else {}
                if code:
                    log_tail = out.with_suffix(".log").read_text()[-2000:]
                    found["failed"] = "cut off: the budget was spent" if cut else f"exit code {code}: {log_tail}"
                _write(a.out, result)
            if time.monotonic() >= end:
                result["not started"], waiting = waiting or result.get("not started", []), []
            time.sleep(0.2)
    _write(a.out, result)
    print(table(result))


def run_runs(a: argparse.Namespace) -> None:
    """Whole runs, one after the other."""
    result = {"command": " ".join(sys.argv), "hardware": _hardware("cpu"), "versions": _versions(), "runs": {}}
    common = ["trainer.steps=3", "trainer.validate_every=0", "trainer.seed=1"]
    for name, keys in RUNS.items():
        with tempfile.TemporaryDirectory() as directory:
            run = Path(directory) / "run"
            command = [sys.executable, "-m", "moe_rl.cli", "train", "dsv4-tiny", *common, *keys, "--run-dir", str(run)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                result["runs"][name] = {"keys": keys, "failed": (done.stdout + done.stderr)[-2000:]}
            else:
                phases = json.loads((run / "plan.json").read_text())["phases"]
                host = {p: v["host_gib"] | {"ratio": v["host_gib"]["planned"] / v["host_gib"]["measured"]}
                        for p, v in phases.items()}  # fmt: skip
                workers = json.loads((run / "measured.json").read_text())["phases"]["update"]["workers_gib"]
                result["runs"][name] = {"keys": keys, "host_gib": host, "workers_gib": workers}
                print(f"{name:<40}" + "  ".join(f"{p} {v['ratio']:.3f}" for p, v in host.items()), flush=True)
        _write(a.out, result)


MODES = {  # of benchmarks/optimizers.py
    "fp32-states": {},
    "bf16-grads": {"optimizer.grad_dtype": "bf16"},
    "aware": {"optimizer.precision_aware": True},
    "aware-bf16-moments": AWARE | {"optimizer.moment_dtype": "bf16"},
    "offload": {"optimizer.offload_fraction": 1.0},
    "offload-half": {"optimizer.offload_fraction": 0.5},
    "aware-offload": AWARE | {"optimizer.offload_fraction": 1.0},
    "aware-offload-half": AWARE | {"optimizer.offload_fraction": 0.5},
}


def against(a: argparse.Namespace) -> None:
    """The planner against what benchmarks/optimizers.py measured: GPU peak and resident host bytes after updates, and both
    peaks of a load in the reshardable format; one sequence of 512 tokens a micro-batch, nothing recomputed."""
    source = json.loads(a.against.read_text())
    runs = source["runs"].values()
    run = max(runs, key=lambda run: sum("resumes" in found for found in run.get("cases", {}).values()))
    result = {key: source[key] for key in ("hardware", "versions")} | {
        "source": str(a.against),
        "command": run["command"],
    }
    result["cases"] = {}
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        (work / "model").mkdir()
        (work / "model" / "config.json").write_text(json.dumps(COMMON | FULL))
        for name, keys in MODES.items():
            found, said = run["cases"][name], predict(a, case(512, 1, 2, **OFF, **keys), work)
            sums = {phase: {where: sum(items.values()) for where, items in said[phase].items()} for phase in said}
            trained = found["trained"]
            rows = {
                "update gpu": (sums["update"]["gpu"], trained["gpu_peak_allocated"]),
                "update host": (sums["update"]["host"], trained["host_rss"]),
            }
            if load := found.get("resumes", {}).get("reshardable", {}).get("load"):
                rows["resume gpu"] = sums["resume"]["gpu"], trained["gpu_allocated"] + load["gpu_peak_gib"] * 2**30
                rows["resume host"] = sums["resume"]["host"], trained["host_rss"] + load["host_peak_gib"] * 2**30
            result["cases"][name] = {
                row: {"predicted": p, "measured": m, "ratio": p / m} for row, (p, m) in rows.items()
            }
            print(
                f"{name:<20}"
                + "  ".join(f"{row} {p / 1e9:.2f}/{m / 1e9:.2f} {p / m:.3f}" for row, (p, m) in rows.items())
            )
    _write(a.out, result)


def table(result: dict[str, Any]) -> str:
    lines = [f"{'case':<32}{'':<6}" + "".join(f"{phase:>24}" for phase in PHASES)]
    for name, case_result in result["cases"].items():
        if "failed" in case_result:
            lines.append(f"{name:<32}{case_result['failed'].strip().splitlines()[-1][-120:]}")
        for place in ("gpu", "host") if "measured" in case_result else ():
            cells = []
            for phase in (phase for phase in PHASES if phase in case_result["measured"]):
                measured = case_result["measured"][phase][place]
                said = sum(case_result["predicted"][phase][place].values())
                cells.append(f"{said / 1e9:8.3f}/{measured / 1e9:7.3f} {said / measured if measured else 0:6.3f}")
            lines.append(f"{name:<32}{place:<6}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join([*lines, "predicted / measured, GB, and their ratio"])


def _write(path: Path, result: dict[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(part, path)


def _hardware(device: str) -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = {"machine": platform.machine(), "cores": os.cpu_count(), "memory_gib": round(memory, 1)}
    if device == "cuda":
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return found


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "megatron-core", "transformer_engine"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--size", default="full", choices=SIZES)
    parser.add_argument("--cases", nargs="*", choices=CASES, help="default: all")
    parser.add_argument("--parallel", type=int, default=3, help="cases at a time; each may take 30 GB of host memory")
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--against", type=Path, help="results of benchmarks/optimizers.py to hold the planner against")
    parser.add_argument("--runs", action="store_true", help="whole runs of dsv4-tiny on a CPU")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    a = parser.parse_args()
    a.dtype = "bf16" if a.device == "cuda" else "fp32"
    against(a) if a.against else run_runs(a) if a.runs else run_one(a) if a.case else run_all(a)


if __name__ == "__main__":
    main()
