"""DeepSeek-V4 of real layout (FP8 linears, MXFP4 experts, Marlin) trained by GRPO with vLLM on the same GPU.

Not yet run on a GPU. Phases, each a process of its own whose result is written at once:
  start     scripts/make_mini_model.py: the engine learns digit sorting from worked examples, encoded as a release
  grpo      `moe-rl train dsv4-mini`, vLLM rollouts with R3: reward, replay/coverage, agreement of trainer and rollout
  bits      vLLM is given the weights of that run's checkpoints one after the other; after the last every live parameter
            and buffer is held against a vLLM that loaded the checkpoint's own export
  ablation  short runs: weights rounded or not (engine.fake_quant), experts replayed or not

    python benchmarks/vllm_grpo.py [PHASE ...] [--budget-s 550] [--work DIR] [--out $OUT]      one Hopper GPU, vLLM 0.25
    python benchmarks/vllm_grpo.py --tiny [--train-s 20]       a CPU: the same phases, float32, transformers' rollouts

`--work` is kept: phases may be spread over several calls.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "patches")]
from benchmarks.vllm_export import versions  # noqa: E402

PHASES = ("start", "grpo", "bits", "ablation")
SHOWN = ("reward/mean", "eval/accuracy", "replay/coverage", "mismatch/pearson_prob", "mismatch/k3_kl")
SHOWN += ("mismatch/logprob_abs_max", "sync/canary_pearson_prob", "sync/canary_k3_kl", "sync/seconds", "time/step")
ABLATION = {  # name: engine.fake_quant, rollout.router_replay
    "all, R3": ("all", "R3"),
    "experts, R3": ("experts", "R3"),
    "none, R3": ("none", "R3"),
    "all, no replay": ("all", "none"),
}


def on_gpu() -> bool:
    return torch.cuda.is_available()


# ---------------------------------------------------------------------------------------------- phases, each a process
def start(work: Path, seconds: float, tiny: bool) -> dict[str, Any]:
    """The model that GRPO starts from."""
    from scripts.make_mini_model import make

    return make(work / "model", seconds, tiny)


def keys(work: Path, steps: int, fake_quant: str, replay: str) -> list[str]:
    """The command line of a run."""
    both = [
        f"model.path={work / 'model'}",
        f"engine.fake_quant={fake_quant}",
        f"rollout.router_replay={replay}",
        f"trainer.steps={steps}",
        *("cluster.gpus_per_node=1", "trainer.validate_every=0", "trainer.validation_prompts=64"),
        *("checkpoint.keep=4", "observe.tensorboard=false", "rollout.max_restarts=0"),
    ]
    if on_gpu():
        return [*both, "rollout.linear_backend=auto"]
    return [
        *both,
        "rollout.engine=transformers",
        "data.prompts_per_step=4",
        "rollout.n=4",
        "trainer.validation_prompts=16",
    ]


def run(work: Path, name: str, steps: int, fake_quant: str, replay: str) -> dict[str, Any]:
    """One `moe-rl train`; first and last step, worst agreement."""
    directory = work / "runs" / name.replace(", ", "_").replace(" ", "_")
    shutil.rmtree(directory, ignore_errors=True)
    chosen = keys(work, steps, fake_quant, replay)
    command = [sys.executable, "-m", "moe_rl.cli", "train", "dsv4-mini", *chosen, "--run-dir", str(directory)]
    command += [] if on_gpu() else ["--hw", "cpu"]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    file = directory / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    found: dict[str, Any] = {"exit": done.returncode, "seconds": round(time.monotonic() - began, 1), "steps": len(rows)}
    if done.returncode:
        logs = {log.name: log.read_text(errors="replace")[-1500:] for log in (directory / "logs").glob("*.log")}
        found |= {"stderr": done.stderr[-3000:], "logs": logs}
    for name in SHOWN:
        values = [row[name] for row in rows if name in row]
        if values:
            found[name] = {"first": values[0], "last": values[-1], "mean": float(np.mean(values))}
            found[name] |= {"least": min(values), "most": max(values), "median": float(np.median(values))}
    return found


def bits(work: Path) -> dict[str, Any]:
    """Live weights of a vLLM after an update to each checkpoint, against a vLLM that loads the last one's export."""
    from moe_rl.convert.job import convert
    from moe_rl.convert.plan import Request
    from tests.test_vllm_gpu import OPTIONS, _holdings, _live_digests, _receive, packets
    from tests.vllm_process import EngineProcess

    checkpoints = sorted((work / "runs" / "grpo" / "checkpoints").glob("step_*"))
    exports = [work / "model"]
    for path in checkpoints:
        exports.append(work / f"export_{path.name}")
        shutil.rmtree(exports[-1], ignore_errors=True)
        convert(Request(path, exports[-1], "released"), workers=1)
    if not on_gpu():
        return {"exports": [path.name for path in exports]}
    engine = EngineProcess(work / "model", **OPTIONS)
    held, seconds = engine.call(_holdings), []
    for version, path in enumerate(exports):
        sent, began = packets(path, held, version), time.monotonic()
        engine.call(_receive, sent, version)
        seconds.append(round(time.monotonic() - began, 2))
    updated = engine.call(_live_digests)
    engine.close()
    options = {**OPTIONS["options"], "load_format": "auto", "model": str(exports[-1])}
    fresh = EngineProcess(exports[-1], **{**OPTIONS, "options": options})
    expected = fresh.call(_live_digests)
    fresh.close()
    differing = sorted(n for n in updated.keys() | expected.keys() if updated.get(n) != expected.get(n))
    return {"updates": len(exports), "update_seconds": seconds, "tensors": len(expected), "differing": differing}


def ablation(work: Path, end: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Short runs from the same start, until the time is up."""
    for name, choice in ABLATION.items():
        if time.monotonic() > end:
            yield name, {"skipped": "no time was left"}
        else:
            yield name, run(work, name, 3 if on_gpu() else 1, *choice)


# --------------------------------------------------------------------------------------------------------------- driver
def phase(name: str, work: Path, options: argparse.Namespace) -> None:
    """Run one phase in this process; WORK/NAME.json is written after each part."""
    target, end = work / f"{name}.json", time.monotonic() + options.budget_s
    if name == "start":
        found = start(work, options.train_s, options.tiny)
    elif name == "grpo":
        found = run(work, "grpo", 30 if on_gpu() else 2, "all", "R3")
    elif name == "bits":
        found = bits(work)
    else:
        found = {}
        for case, result in ablation(work, end - 100):
            found[case] = result
            target.write_text(json.dumps(found))
    target.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phases", nargs="*", default=list(PHASES))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, default=Path("/tmp/moe_rl_vllm_grpo"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--train-s", type=float, default=120)
    parser.add_argument("--budget-s", type=float, default=550)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "benchmarks" / "results")))
    options = parser.parse_args()
    if unknown := set(options.phases) - set(PHASES):
        parser.error(f"unknown phases {sorted(unknown)}")
    if options.inside:
        phase(options.phases[0], options.work, options)
        return
    end, work = time.monotonic() + options.budget_s, options.work
    if "start" in options.phases:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "what": "GRPO of a DeepSeek-V4 of real layout with vLLM rollouts on the trainer's GPU",
        "command": "python " + " ".join(sys.argv),
        "machine": torch.cuda.get_device_name() if on_gpu() else f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": versions(),
    }
    for name in options.phases:
        began, log = time.monotonic(), work / f"{name}.log"
        (work / f"{name}.json").unlink(missing_ok=True)
        left = max(1.0, end - began)
        command = [sys.executable, __file__, name, "--inside", "--work", str(work), "--train-s", str(options.train_s)]
        command += ["--budget-s", str(left), *(["--tiny"] if options.tiny else [])]
        failed = ""
        try:
            with log.open("w") as file:
                subprocess.run(command, check=True, timeout=left, cwd=ROOT, stdout=file, stderr=file)
        except (subprocess.SubprocessError, OSError) as error:
            failed = str(error)
            print("\n".join(log.read_text(errors="replace").splitlines()[-40:]))
        file = work / f"{name}.json"
        result[name] = {"seconds_of_the_process": round(time.monotonic() - began, 1)}
        result[name] |= {"failed": failed, "log": log.read_text(errors="replace")[-3000:]} if failed else {}
        result[name] |= json.loads(file.read_text()) if file.is_file() else {}
        (options.out / "vllm_grpo.json").write_text(json.dumps(result, indent=1) + "\n")
        print(name, json.dumps(result[name])[:6000], flush=True)
    rows = {"grpo": result.get("grpo", {})} | {f"ablation: {k}": v for k, v in result.get("ablation", {}).items()}
    for name, row in rows.items():
        if isinstance(row, dict):
            shown = [
                f"{k} {row[k]['first']:.5f} -> {row[k]['last']:.5f}" for k in SHOWN if isinstance(row.get(k), dict)
            ]
            print(f"{name:26s}", "  ".join(shown))


if __name__ == "__main__":
    main()
