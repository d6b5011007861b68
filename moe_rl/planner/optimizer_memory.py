"""Bytes of weights, gradients and Adam's state on one rank, by device and item. Imports no torch.

The items follow megatron-core 0.19.2 (optimizer/distrib_optimizer.py, cpu_offloading/hybrid_optimizer.py) and
Transformer Engine's FusedAdam; benchmarks/optimizers.py holds them against what an H200 and its host measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_rl.config import Config

STAGED = 2  # gradients on their way to the host at a time


@dataclass(frozen=True)
class Shard:
    """A parameter on one rank: its values, how many of them the rank's optimizer owns, and whether it is kept in fp32
    (bf16 otherwise)."""

    numel: int
    owned: int
    fp32: bool = False


@dataclass(frozen=True)
class OptimizerMode:
    """How a run holds its optimizer. Bytes are those of one value of a bf16 parameter; fp32 ones have fp32 throughout."""

    precision_aware: bool = False
    offload_fraction: float = 0.0
    grad_bytes: int = 4
    moment_bytes: int = 4
    pinned_rounding: bool = True

    @classmethod
    def of(cls, config: Config) -> OptimizerMode:
        """The mode that a configuration asks for."""
        o, size = config.optimizer, {"fp32": 4, "bf16": 2}
        return cls(o.precision_aware, o.offload_fraction, size[o.grad_dtype], size[o.moment_dtype])


@dataclass
class OptimizerMemory:
    """Bytes by item: `gpu` and `host` stay allocated, `gpu_step` is added for the length of an optimizer step."""

    gpu: dict[str, int] = field(default_factory=dict)
    gpu_step: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)


def optimizer_memory(shards: Sequence[Shard], mode: OptimizerMode) -> OptimizerMemory:
    """What `shards`, in the order of the optimizer's parameter groups, take under `mode`.

    The offloaded ones are the first of them, until their values reach the fraction of all: a parameter goes whole.
    """
    offloaded, kept = split_offloaded(shards, mode.offload_fraction)
    hybrid = mode.offload_fraction > 0
    gpu = {
        "weights": sum(s.numel * (4 if s.fp32 else 2) for s in shards),
        "gradients": sum(s.numel * (4 if s.fp32 else mode.grad_bytes) for s in shards),
    }
    copies = 0  # fp32 gradients of bf16 ones, while the optimizer steps
    if not mode.precision_aware:
        gpu["masters"] = sum(4 * s.owned for s in shards if not s.fp32)
        gpu["moments"] = sum(8 * s.owned for s in kept)
        copies = sum(4 * s.owned for s in shards if not s.fp32)
    elif hybrid:
        gpu["masters"] = sum(4 * s.owned for s in kept if not s.fp32)
        gpu["moments"] = sum(8 * s.owned for s in kept)
        copies = sum(4 * s.owned for s in kept if not s.fp32)
    else:  # of a bf16 parameter's master FusedAdam stores the 16 bits that the parameter lacks
        gpu["masters"] = sum((4 if s.fp32 else 2) * s.owned for s in shards)
        gpu["moments"] = sum(2 * mode.moment_bytes * s.owned for s in shards)
    return OptimizerMemory(gpu, {"fp32 gradients": copies if mode.grad_bytes == 2 else 0}, _host(offloaded, mode))


def _host(offloaded: Sequence[Shard], mode: OptimizerMode) -> dict[str, int]:
    """Host bytes of offloaded shards. A precision-aware master is a copy made by `float()`, in ordinary memory; other
    masters are pinned, tensor by tensor, and PyTorch rounds a pinned block up to a power of two. Gradients pass through
    two pinned buffers of the largest's size (the patch `hybrid_staging`). Precision-aware, each bf16 shard is first pinned in
    bf16, one after the other: PyTorch keeps a freed block, one of each size, until a tensor of that size asks for it."""
    host = {"masters": 0, "moments": 0, "pinned rounding": 0, "gradient staging": 0, "pinned left over": 0}
    sizes = []
    block = power_of_two if mode.pinned_rounding else int
    left = {block(2 * shard.owned) for shard in offloaded if mode.precision_aware and shard.owned and not shard.fp32}
    for shard in offloaded:
        size = 4 * shard.owned
        host["masters"] += size
        host["moments"] += 2 * size
        sizes.append(size)
        if shard.fp32 or not mode.precision_aware:
            host["pinned rounding"] += block(size) - size
            left.discard(block(size))
    if sizes:
        host["gradient staging"] = STAGED * block(max(sizes))
    host["pinned left over"] = sum(left)
    return host


def split_offloaded(shards: Sequence[Shard], fraction: float) -> tuple[list[Shard], list[Shard]]:
    """The shards that an offloading optimizer updates on the CPU, and the others; both in their order."""
    threshold = fraction * sum(s.owned for s in shards)
    offloaded: list[Shard] = []
    kept: list[Shard] = []
    taken = 0
    for shard in shards:
        if taken < threshold:
            offloaded.append(shard)
            taken += shard.owned
        else:
            kept.append(shard)
    return offloaded, kept


def power_of_two(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << max(size - 1, 0).bit_length()
