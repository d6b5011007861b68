"""Process groups for tests: of one rank in this process, or a function on N ranks, each a process of its own."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import shutil
import traceback
from collections.abc import Callable
from typing import Any

from moe_rl.config.host import free_port

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def lone_rank() -> None:
    """gloo, megatron-core's process groups and the CPU shim for a world of one rank, in this process."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    from moe_patches import cpu

    if dist.is_initialized():
        return
    torch.set_num_threads(1)
    cpu.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def _child(fn: Callable, rank: int, world: int, port: int, args: tuple, results: Any) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    try:
        results.put((rank, True, fn(rank, world, port, *args)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise SystemExit(1) from None


def run_ranks(fn: Callable, world: int, *args: Any, timeout: float = 300.0) -> list[Any]:
    """`fn(rank, world, port, *args)` on `world` processes; a list of the results in rank order.

    The processes fork from a server that has torch and megatron-core imported already, so that a
    launch costs milliseconds and not the ten seconds of an import.

    Raises:
        RuntimeError: a rank raised, died or ran past `timeout` seconds.
    """
    if shutil.which("nvidia-smi"):  # CUDA cannot be used in a fork of a process that has touched it
        ctx: Any = mp.get_context("spawn")
    else:
        ctx = mp.get_context("forkserver")
        ctx.set_forkserver_preload(["tests.preload"])
    results = ctx.Queue()
    port = free_port()
    procs = [ctx.Process(target=_child, args=(fn, r, world, port, args, results), daemon=True) for r in range(world)]
    for p in procs:
        p.start()
    out: dict[int, Any] = {}
    try:
        while len(out) < world:
            try:
                rank, ok, value = results.get(timeout=timeout)
            except queue.Empty:
                raise RuntimeError(
                    f"ranks {sorted(set(range(world)) - set(out))} gave no answer in {timeout} s"
                ) from None
            if not ok:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            out[rank] = value
    finally:
        for p in procs:
            p.join(timeout=5 if len(out) == world else 0.1)
            if p.is_alive():
                p.kill()
    return [out[r] for r in range(world)]
