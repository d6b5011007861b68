"""The planner's memory against what one training process takes, phase by phase: optimizer modes, lengths, recompute.

    python3 benchmarks/planner_memory.py --device cuda --size full --budget-s 240 --out OUT/planner_memory.json
    python3 benchmarks/planner_memory.py --runs --out benchmarks/results/planner_memory_cpu.json

Each case is a process of its own: it builds an engine of a V4-style model (weights drawn from a seed), scores, updates,
saves and resumes, and notes for each phase the most that torch had allocated on the GPU and the most that the process had
resident on the host. Beside that stands what `moe-rl plan` says of the same configuration: no number of a case enters the
formula that it is held against. The result is written after every case.

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
SIZES = {"tiny": TINY, "full": FULL}
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


CASES = {
    "plain-1024": case(512, 2, 4),
    "plain-1024-kept": case(512, 2, 4, **OFF),
    "plain-4096": case(4096, 1, 2),
    "plain-2048-kept": case(2048, 1, 2, **OFF),
    "aware-bf16-moments-8192": case(8192, 1, 2, **AWARE, **{"optimizer.moment_dtype": "bf16"}),
    "offload-2048": case(2048, 1, 2, **{"optimizer.offload_fraction": 1.0}),
    "aware-offload-4096": case(2048, 2, 4, **AWARE, **{"optimizer.offload_fraction": 1.0}),
    "aware-offload-half-1024-kept": case(1024, 1, 2, **AWARE, **OFF, **{"optimizer.offload_fraction": 0.5}),
    "bf16-grads-reference-2048": case(
        2048, 1, 2, **{"optimizer.grad_dtype": "bf16", "algorithm.kl": "k3", "engine.logprob_chunk": 512}
    ),
}
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


def measure(a: argparse.Namespace, keys: dict[str, Any], work: Path) -> dict[str, Any]:
    """Peaks of each phase in bytes, in this process."""
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

    found = {"built": _now(a.device)}
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
    found["parameters"] = sum(p.numel() for chunk in engine.chunks for p in chunk.parameters())
    engine.close()
    return found


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
    others = ("contexts", "rollout weights", "kv cache")
    return {
        phase: {
            "gpu": {k: v for k, v in stage.gpu[phase].items() if k not in others},
            "host": process | dict(stage.host[phase]),
        }
        for phase in PHASES
    }


def compare(result: dict[str, Any]) -> None:
    """Adds `ratio` (predicted / measured) by place and phase."""
    result["ratio"] = {
        place: {
            phase: sum(result["predicted"][phase][place].values()) / result["measured"][phase][place]
            for phase in PHASES
            if result["measured"][phase][place]
        }
        for place in ("gpu", "host")
    }


def run_one(a: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        (work / "model").mkdir()
        (work / "model" / "config.json").write_text(json.dumps(COMMON | SIZES[a.size]))
        keys = CASES[a.case]
        result = {"keys": keys, "predicted": predict(a, keys, work), "measured": measure(a, keys, work)}
        compare(result)
        a.out.write_text(json.dumps(result))


def run_all(a: argparse.Namespace) -> None:
    """The cases, `--parallel` at a time; what is not done when the budget ends is left out."""
    end, waiting, running = time.monotonic() + a.budget_s, list(a.cases or CASES), {}
    result = {"command": " ".join(sys.argv), "hardware": _hardware(a.device), "versions": _versions(), "cases": {}}
    with tempfile.TemporaryDirectory() as directory:
        while waiting or running:
            while waiting and len(running) < a.parallel and time.monotonic() < end:
                name = waiting.pop(0)
                out = Path(directory) / f"{name}.json"
                command = [sys.executable, __file__, "--case", name, "--out", str(out), "--device", a.device]
                log = (Path(directory) / f"{name}.log").open("w")
                more = ["--size", a.size, "--dtype", a.dtype]
                running[name] = subprocess.Popen([*command, *more], stdout=log, stderr=subprocess.STDOUT), out
            for name, (process, out) in list(running.items()):
                if process.poll() is None and time.monotonic() < end:
                    continue
                process.kill()
                process.wait()
                del running[name]
                log_tail = out.with_suffix(".log").read_text()[-2000:]
                result["cases"][name] = json.loads(out.read_text()) if out.exists() else {"failed": log_tail}
                _write(a.out, result)
            if time.monotonic() >= end:
                waiting.clear()
            time.sleep(0.2)
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
    result = {key: source[key] for key in ("command", "hardware", "versions")} | {"source": "benchmarks/optimizers.py"}
    result["cases"] = {}
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        (work / "model").mkdir()
        (work / "model" / "config.json").write_text(json.dumps(COMMON | FULL))
        for name, keys in MODES.items():
            found, said = source["curves"][name], predict(a, case(512, 1, 2, **OFF, **keys), work)
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
            lines.append(f"{name:<32}failed: {case_result['failed'].strip().splitlines()[-1:]}")
            continue
        for place in ("gpu", "host"):
            cells = []
            for phase in PHASES:
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
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--size", default="full", choices=SIZES)
    parser.add_argument("--cases", nargs="*", choices=CASES, help="default: all")
    parser.add_argument("--parallel", type=int, default=3, help="cases at a time; each may take 30 GB of host memory")
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--against", type=Path, help="results of benchmarks/optimizers.py to hold the planner against")
    parser.add_argument("--runs", action="store_true", help="whole runs of dsv4-tiny on a CPU")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    a = parser.parse_args()
    against(a) if a.against else run_runs(a) if a.runs else run_one(a) if a.case else run_all(a)


if __name__ == "__main__":
    main()
