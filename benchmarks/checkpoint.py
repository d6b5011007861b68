"""What saving and loading cost: seconds, and peak host memory of a rank above what it held, for each way to do them.

    .venv/bin/python benchmarks/checkpoint.py

Writes benchmarks/results/checkpoint.json. All cases run one after the other in one go, each in processes of its own, on
the CPU; each figure is the median over the repeats, of the rank with most. Ratios compare the alternatives within the
run. `wait_seconds` is what the training waits, `durable_seconds` how long until the checkpoint is whole on disk. As a
bar to compare with, `megatron` holds what megatron-core's own save and load of the same state take.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from tests.distributed import run_ranks
from tests.small_v4 import write_model
from tests.test_checkpoint_memory import SIZES, Mark
from tests.test_optimizer_modes import SAME_LAYOUT, _engine, _steps, mode

RESULTS = Path(__file__).parent / "results" / "checkpoint.json"
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    f"{form} dp{world}": (world, mode("mixed") | keys)
    for form, keys in (("reshardable", {}), ("same_layout", SAME_LAYOUT))
    for world in (1, 2)
}


def timed(action: Any) -> tuple[float, float]:
    """Seconds and peak host bytes of a call."""
    with Mark() as mark:
        start = time.perf_counter()
        action()
        seconds = time.perf_counter() - start
    return seconds, mark.peak


def megatron(engine: Any, directory: str) -> dict[str, list[float]]:
    """Megatron-core's own way with the same state: everything gathered, copied and written at once."""
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    from moe_rl.engine.checkpoint import _AS_IT_LIES, _RESHARDABLE, _model_state

    form = _AS_IT_LIES if engine.config.checkpoint.optimizer_format == "same_layout" else _RESHARDABLE
    if filesystem_async._results_queue is None:  # else a manager process is started, from a daemonic one
        import queue

        filesystem_async._results_queue = queue.Queue()

    def state(loading: bool) -> dict[str, Any]:
        model = _model_state(engine.chunks)
        return {**model, "optimizer": engine.optimizer.sharded_state_dict(model, is_loading=loading, metadata=form)}

    def save() -> None:
        Path(directory).mkdir(exist_ok=True)
        strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), engine.parallel.groups.dp)
        dc.save(state(False), directory, strategy)

    def load() -> None:
        engine.optimizer.load_state_dict(dc.load(state(True), directory)["optimizer"])

    saved = timed(save)
    loaded = timed(load)
    return {"megatron_save_seconds": [saved[0]], "megatron_save_peak": [saved[1]], "megatron_load_peak": [loaded[1]]}


def measure(rank: int, world: int, port: int, path: str, directory: str, keys: Any, repeats: int) -> dict[str, list]:
    """Each repeat of one case, as one rank sees it."""
    engine = _engine(rank, world, f"file://{directory}/meeting", path, keys)
    _steps(engine, 1)
    found: dict[str, list] = {}
    for repeat in range(repeats + 1):  # the first warms up
        gc.collect()
        at = f"{directory}/{repeat}"
        seconds, peak = timed(lambda at=at: engine.save(at, background=False))
        row = {"sync_wait_seconds": seconds, "sync_peak": peak}

        def beside(at: str = at, row: dict = row) -> None:
            start = time.perf_counter()
            engine.save(f"{at}b", background=True)
            row["async_wait_seconds"] = time.perf_counter() - start
            engine.finish_save()
            row["async_durable_seconds"] = time.perf_counter() - start

        row["async_peak"] = timed(beside)[1]
        row["load_seconds"], row["load_peak"] = timed(lambda at=at: engine.load(at))
        row["written"] = Path(at, f"__{rank}_0.distcp").stat().st_size
        row |= {name: values[0] for name, values in megatron(engine, f"{at}m").items()}
        if rank == 0:
            for left in (at, f"{at}b", f"{at}m"):
                shutil.rmtree(left)
        for name, value in row.items() if repeat else ():
            found.setdefault(name, []).append(value)
    engine.close()
    return found


def case(name: str, repeats: int, model: Path) -> dict[str, float]:
    world, keys = CASES[name]
    with tempfile.TemporaryDirectory() as scratch:
        ranks = run_ranks(measure, world, str(model), scratch, keys, repeats)
    rows: dict[str, float] = {}
    for key in ranks[0]:
        value = max(statistics.median(r[key]) for r in ranks)
        memory = key.endswith(("peak", "written"))
        rows[f"{key}_mib" if memory else key] = round(value / 2**20, 1) if memory else round(value, 3)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch) / "model", **SIZES)
        cases = {}
        for name in CASES:
            cases[name] = case(name, a.repeats, model)
            print(name, json.dumps(cases[name], indent=1), flush=True)

    def ratio(key: str, one: str, other: str, other_key: str = "") -> float:
        return round(cases[one][key] / cases[other][other_key or key], 3)

    revision = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    result = {
        "command": f"python benchmarks/checkpoint.py --repeats {a.repeats}",
        "revision": subprocess.run(revision, capture_output=True, text=True).stdout.strip(),
        "hardware": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "memory_gib": psutil.virtual_memory().total // 2**30,
        },
        "versions": {name: version(name) for name in ("torch", "megatron-core")},
        "model": "tests/test_checkpoint_memory.py SIZES, bf16 with native-fp32 parameters, fp32 states",
        "cases": cases,
        "ratios": {
            "wait, async / sync": {n: ratio("async_wait_seconds", n, n, "sync_wait_seconds") for n in cases},
            "peak, async / written": {n: ratio("async_peak_mib", n, n, "written_mib") for n in cases},
            "peak, sync / written": {n: ratio("sync_peak_mib", n, n, "written_mib") for n in cases},
            "sync wait, reshardable / same_layout": {
                f"dp{d}": ratio("sync_wait_seconds", f"reshardable dp{d}", f"same_layout dp{d}") for d in (1, 2)
            },
            "sync wait, dp2 / dp1": {
                f: ratio("sync_wait_seconds", f"{f} dp2", f"{f} dp1") for f in ("reshardable", "same_layout")
            },
            "save peak, ours / megatron-core": {
                n: ratio("sync_peak_mib", n, n, "megatron_save_peak_mib") for n in cases
            },
            "load peak, ours / megatron-core": {
                n: ratio("load_peak_mib", n, n, "megatron_load_peak_mib") for n in cases
            },
            "save seconds, ours / megatron-core": {
                n: ratio("sync_wait_seconds", n, n, "megatron_save_seconds") for n in cases
            },
        },
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
