"""Process groups of one trainer rank: tensor, pipeline, expert and data parallelism through megatron-core."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moe_rl.config import Config
from moe_rl.config.facts import ModelFacts
from moe_rl.config.layout import resolve_stages
from moe_rl.config.layout_rules import layout_problems
from moe_rl.config.problem import raise_all
from moe_rl.errors import UserError
from moe_rl.models.weights import Shard


@dataclass(frozen=True)
class Parallel:
    """Where this rank stands. Sizes count ranks; `stages` is the expanded layout string (``Ettt|ttL``).

    `dp` is the data-parallel size of the dense parameters, `edp` that of the experts: with expert parallelism the data
    ranks hold different experts, so ``edp = world / (pp * ep * etp)``. `groups` is megatron's collection of process
    groups.
    """

    rank: int
    world: int
    tp: int
    pp: int
    vpp: int
    ep: int
    etp: int
    dp: int
    edp: int
    tp_rank: int
    pp_rank: int
    ep_rank: int
    dp_rank: int
    edp_rank: int
    etp_rank: int
    stages: str
    device: torch.device
    groups: Any

    @property
    def is_first(self) -> bool:
        """This rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """This rank holds the output layer, and so sees log-probs and losses."""
        return self.pp_rank == self.pp - 1

    @property
    def shard(self) -> Shard:
        """This rank's share of the tensors of its stage."""
        return Shard(self.ep_rank, self.ep, self.tp_rank, self.tp, self.etp_rank, self.etp)

    def describe(self) -> dict[str, Any]:
        """The layout as plain values: equal on all ranks, comparable between runs."""
        return {name: getattr(self, name) for name in ("world", "tp", "pp", "vpp", "ep", "etp", "dp", "stages")}


def pick_device(name: str) -> torch.device:
    """``cpu``, ``cuda`` or ``auto`` (cuda where a GPU is present) as a device; raises UserError if there is no GPU."""
    present = torch.cuda.is_available()
    if name == "cuda" and not present:
        raise UserError(
            "engine.device",
            "engine.device is cuda, but torch finds no GPU",
            "The driver is missing, or this torch was built without CUDA.",
            "Set engine.device=cpu, or run where a GPU is visible.",
        )
    return torch.device("cuda" if name == "cuda" or (name == "auto" and present) else "cpu")


def check_layout(config: Config, facts: ModelFacts, world: int) -> str:
    """The expanded stages of a layout that fits `world` ranks and the model.

    Raises:
        UserError: the sizes do not multiply out, the family cannot do tensor parallelism, or the stages do not fit.
    """
    raise_all(layout_problems(config, facts, world))
    layout = config.layout
    return resolve_stages(
        layout.stages, facts.num_layers, facts.hash_layers, layout.pp, layout.vpp, layout.pin_hash_layers
    )


def init_distributed(config: Config, facts: ModelFacts, rank: int, world: int, address: str) -> Parallel:
    """Join the trainer's `world` ranks at `address` (``host:port``, or a torch init URL) and build every group.

    On a CPU this installs the device shim and limits torch to one thread; collectives run over gloo there and over
    NCCL on GPUs. A collective that waits longer than `engine.distributed_timeout_s` raises.

    Raises:
        UserError: the layout fits neither model nor ranks, the port is taken, or there is no GPU where one is asked for.
    """
    stages = check_layout(config, facts, world)
    device = pick_device(config.engine.device)
    if device.type == "cpu":
        from moe_patches import cpu

        cpu.install()
        torch.set_num_threads(1)
    else:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=config.engine.distributed_timeout_s)
    _join("gloo" if device.type == "cpu" else "nccl", rank, world, address, timeout)
    return _build_groups(config, rank, world, stages, device)


def _join(backend: str, rank: int, world: int, address: str, timeout: datetime.timedelta) -> None:
    url = address if "://" in address else f"tcp://{address}"
    try:
        dist.init_process_group(backend, init_method=url, rank=rank, world_size=world, timeout=timeout)
    except dist.DistNetworkError as error:
        raise UserError(
            "cluster.port",
            f"trainer rank {rank} cannot open or reach {url}: {str(error).splitlines()[0]}",
            "The port is in use by another program, or the host cannot be reached.",
            "Set cluster.port to a free port, or to 0 to have one picked.",
        ) from error


def _build_groups(config: Config, rank: int, world: int, stages: str, device: torch.device) -> Parallel:
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    layout = config.layout
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=config.engine.distributed_timeout_s / 60,  # type: ignore[arg-type]
        create_gloo_process_groups=True,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(config.trainer.seed)
    return Parallel(
        rank=rank,
        world=world,
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp,
        ep=layout.ep,
        etp=layout.etp,
        dp=mpu.get_data_parallel_world_size(),
        edp=mpu.get_expert_data_parallel_world_size(),
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        ep_rank=mpu.get_expert_model_parallel_rank(),
        dp_rank=mpu.get_data_parallel_rank(),
        edp_rank=mpu.get_expert_data_parallel_rank(),
        etp_rank=mpu.get_expert_tensor_parallel_rank(),
        stages=stages,
        device=device,
        groups=ProcessGroupCollection.use_mpu_process_groups(),
    )


def destroy() -> None:
    """Leave all groups; the process may then join others."""
    from megatron.core import parallel_state as mpu

    mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
