"""What `make quickstart` does, measured: accuracy gained, mismatch, time and memory, for several seeds in one go.

    .venv/bin/python benchmarks/quickstart.py --seeds 1 2 3

Writes benchmarks/results/quickstart.json. Memory is the proportional set size (shared pages counted once) of every process
that the command starts, sampled every half second; the largest sum is kept.
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
from importlib.metadata import version
from pathlib import Path

import psutil

from moe_rl.bench.process import proportional_gib

RESULTS = Path(__file__).parent / "results" / "quickstart.json"


def watch(command: list[str]) -> tuple[float, float]:
    """Run a command to its end; seconds and peak memory of its process tree in GiB."""
    start, peak = time.perf_counter(), 0.0
    child = psutil.Popen(command)
    while child.poll() is None:
        try:
            peak = max(peak, proportional_gib([child, *child.children(recursive=True)]))
        except psutil.Error:
            pass
        time.sleep(0.5)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    return time.perf_counter() - start, peak


def summary(run_dir: Path) -> dict:
    """The figures that the run is judged by, from its metrics."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    accuracy = [row["reward/accuracy"] for row in rows]
    evals = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    return {
        "steps": len(rows),
        "accuracy_first_10": sum(accuracy[:10]) / 10,
        "accuracy_last_10": sum(accuracy[-10:]) / 10,
        "eval_first": evals[0],
        "eval_last": evals[-1],
        "pearson_min": min(row["mismatch/pearson_prob"] for row in rows),
        "logprob_abs_max": max(row["mismatch/logprob_abs_max"] for row in rows),
        "step_seconds_median": sorted(row["time/step"] for row in rows)[len(rows) // 2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("overrides", nargs="*", help="key=value, as for moe-rl train")
    a = parser.parse_args()
    runs = {}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in a.seeds:
            run_dir = Path(scratch) / f"seed{seed}"
            command = [str(Path(sys.executable).parent / "moe-rl"), "train", "dsv4-tiny", f"trainer.seed={seed}"]
            seconds, peak = watch([*command, *a.overrides, "--run-dir", str(run_dir)])
            runs[f"seed {seed}"] = {**summary(run_dir), "seconds": round(seconds, 1), "peak_gib": round(peak, 2)}
            print(json.dumps(runs[f"seed {seed}"], indent=1), flush=True)
    revision = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    result = {
        "command": " ".join(["python benchmarks/quickstart.py --seeds", *map(str, a.seeds), *a.overrides]),
        "revision": subprocess.run(revision, capture_output=True, text=True).stdout.strip(),
        "hardware": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "memory_gib": psutil.virtual_memory().total // 2**30,
        },
        "versions": {name: version(name) for name in ("torch", "megatron-core", "transformers", "ray")},
        "runs": runs,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
