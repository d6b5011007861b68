"""How fast `moe-rl convert` is, against the same bytes read and written raw by safetensors, in one run on this machine.

A released checkpoint of random codes is made, turned into a dist-checkpoint (PP2 x EP2) and back, by the command
itself. The raw figure reads every tensor of the source by safetensors and writes as many bytes as the target has, in
files of the same size, in one process and in as many as the command uses. All force their files to disk, and have the
page cache drop the source first. Seconds of the command are from its start to its end, Python's imports and the digests
of all files included.

    python benchmarks/convert.py [--gb 8.5] [--workers 2] [--scratch DIR]      needs 6 times as much free disk
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "patches")]
RESULTS = ROOT / "benchmarks" / "results" / "convert.json"


def make_source(path: Path, gigabytes: float) -> None:
    """A checkpoint of DeepSeek-V4-Flash's matrices in eight layers, with as many experts as it takes."""
    from tests.released_v4 import write_released

    sizes = dict(
        hidden_size=4096, moe_intermediate_size=2048, num_attention_heads=64, head_dim=512, qk_rope_head_dim=64
    )
    sizes |= dict(
        q_lora_rank=1024, o_groups=8, o_lora_rank=1024, index_n_heads=64, index_head_dim=128, vocab_size=65536
    )
    layers = [0, 0, 4, 128, 4, 128, 4, 128]
    expert, rest = 3 * 4096 * 2048 * (0.5 + 1 / 32) / 1e9, 2.2
    experts = max(8, round((gigabytes - rest) / expert / (len(layers) + 1) / 4) * 4)
    write_released(
        path,
        shard_bytes=1 << 30,
        num_hidden_layers=len(layers),
        compress_ratios=layers,
        n_routed_experts=experts,
        **sizes,
    )


def weights(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.suffix in (".safetensors", ".distcp"))


def forget(paths: list[Path]) -> None:
    """Have the page cache drop files that are on disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def read_raw(path: Path) -> int:
    """Every tensor of a safetensors file, copied out of it; of another file the bytes."""
    if path.suffix != ".safetensors":
        size = 0
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(64 << 20)
            while got := file.readinto(buffer):
                size += got
        return size
    with safe_open(path, "pt") as reader:
        return sum(reader.get_tensor(name).clone().nbytes for name in reader.keys())


def write_raw(path: Path, size: int) -> int:
    """A safetensors file of `size` bytes in tensors of 64 MiB, forced to disk; it is removed afterwards."""
    block = torch.randint(0, 255, (min(size, 64 << 20),), dtype=torch.uint8)
    count = max(1, size // len(block))
    save_file({str(i): block.clone() for i in range(count)}, path)
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
    path.unlink()
    return count * len(block)


def raw_seconds(source: Path, target: Path, scratch: Path, workers: int) -> float:
    """Reading the weights of `source` and writing what `target` weighs, in files of at most 1 GiB (they are held whole)."""
    forget(weights(source))
    sizes = [min(1 << 30, p.stat().st_size - at) for p in weights(target) for at in range(0, p.stat().st_size, 1 << 30)]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        list(pool.map(abs, range(workers * 4)))  # processes are up, torch imported
        start = time.perf_counter()
        jobs = [pool.submit(read_raw, p) for p in weights(source)]
        jobs += [pool.submit(write_raw, scratch / f"raw{i}.safetensors", size) for i, size in enumerate(sizes)]
        for job in jobs:
            job.result()
        return time.perf_counter() - start


def convert(source: Path, target: Path, workers: int, *options: str) -> dict:
    forget(weights(source))
    command = [sys.executable, "-m", "moe_rl.cli", "convert", str(source), str(target), "--json", *options]
    start = time.perf_counter()
    done = subprocess.run(
        [*command, "--workers", str(workers)], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
    )
    report = json.loads(done.stdout)
    return {
        "seconds": round(time.perf_counter() - start, 1),  # from the command's start to its end
        "peak_gib_of_a_process": round(report["peak_bytes"] / 2**30, 3),
        "blocks_under_their_released_scale": f"{report['blocks_kept']} of {report['blocks']}",
    }


def same_files(first: Path, second: Path) -> bool:
    return all(
        subprocess.run(["cmp", "-s", str(file), str(second / file.name)]).returncode == 0 for file in weights(first)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=8.5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="convert-", dir=options.scratch))
    try:
        source, dist, back = scratch / "released", scratch / "dist", scratch / "back"
        make_source(source, options.gb)
        directions = {}
        for name, a, b, extra in (
            ("released to dist", source, dist, ("--to", "dist", "--layout", "pp=2,ep=2")),
            ("dist to released", dist, back, ("--to", "released")),
        ):
            found = convert(a, b, options.workers, *extra)
            moved = sum(p.stat().st_size for side in (a, b) for p in weights(side))
            raw, together = (raw_seconds(a, b, scratch, n) for n in (1, options.workers))
            found |= {
                "read_gb": round(sum(p.stat().st_size for p in weights(a)) / 1e9, 2),
                "written_gb": round(sum(p.stat().st_size for p in weights(b)) / 1e9, 2),
                "gb_per_s": round(moved / 1e9 / found["seconds"], 3),
                "raw_seconds": round(raw, 1),
                "raw_gb_per_s": round(moved / 1e9 / raw, 3),
                "share_of_raw": round(raw / found["seconds"], 3),
                f"raw_seconds_in_{options.workers}_processes": round(together, 1),
                f"share_of_raw_in_{options.workers}_processes": round(together / found["seconds"], 3),
                "load_of_the_machine": round(os.getloadavg()[0], 1),
            }
            directions[name] = found
            print(name, json.dumps(found), flush=True)
        exact = same_files(source, back)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    result = {
        "what": "moe-rl convert against safetensors reading and writing as many bytes; see benchmarks/convert.py",
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "workers": options.workers,
        "files_byte_identical_after_the_round_trip": exact,
        "directions": directions,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
