"""Model chunks of any rank of any layout, in one process: on the meta device, without the rank's peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe_rl.models.options import layout_options
from moe_rl.models.weights import Shard


@dataclass(frozen=True)
class Layout:
    """Sizes of a layout; `stages` is written out (``Ettt|ttL``)."""

    stages: str
    pp: int = 1
    ep: int = 1
    tp: int = 1
    etp: int = 1
    vpp: int = 1


@contextmanager
def single_process() -> Iterator[None]:
    """torch.distributed and megatron-core's groups for a world of this process, over no network; on a CPU with its
    shim.

    Where they are up already they are left as they are.
    """
    if dist.is_initialized():
        yield
        return
    from moe_patches import cpu

    cpu.install()  # before megatron-core is imported: it must not find Transformer Engine
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        from megatron.core import tensor_parallel

        tensor_parallel.model_parallel_cuda_manual_seed(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def _standing(layout: Layout, pp_rank: int, shard: Shard) -> Iterator[None]:
    """megatron-core is told that this process stands there: its groups answer rank and size, and can do nothing else."""
    from megatron.core import parallel_state

    places = {
        "TENSOR_MODEL": (shard.tp_rank, layout.tp),
        "PIPELINE_MODEL": (pp_rank, layout.pp),
        "EXPERT_MODEL": (shard.ep_rank, layout.ep),
        "EXPERT_TENSOR": (shard.etp_rank, layout.etp),
        "EXPERT_TENSOR_AND_MODEL": (shard.ep_rank * layout.etp + shard.etp_rank, layout.ep * layout.etp),
    }
    told: dict[str, Any] = {"_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": layout.vpp if layout.vpp > 1 else None}
    for name, (rank, size) in places.items():
        told[f"_{name}_PARALLEL_GROUP"] = dist.ProcessGroup(rank, size)
        told |= {f"_MPU_{name}_PARALLEL_RANK": rank, f"_MPU_{name}_PARALLEL_WORLD_SIZE": size}
    told = {name: value for name, value in told.items() if hasattr(parallel_state, name)}
    before = {name: getattr(parallel_state, name) for name in told}
    try:
        vars(parallel_state).update(told)
        yield
    finally:
        vars(parallel_state).update(before)


def meta_chunks(
    family: Any, arch: Any, layout: Layout, pp_rank: int = 0, shard: Shard | None = None, dtype: str = "bf16"
) -> list[nn.Module]:
    """The chunks (one per virtual stage) that the rank at those coordinates builds, without storage. Call within
    `single_process`."""
    shard = shard or Shard(ep=layout.ep, tp=layout.tp, etp=layout.etp)
    with _standing(layout, pp_rank, shard), torch.device("meta"):
        config = family.make_transformer_config(arch, **layout_options(layout), dtype=dtype, device="cpu")
        return [
            family.build_chunk(
                arch,
                config,
                pre=pp_rank == 0 and stage == 0,
                post=pp_rank == layout.pp - 1 and stage == layout.vpp - 1,
                vp_stage=stage if layout.vpp > 1 else None,
            )
            for stage in range(layout.vpp)
        ]
