"""The weight update: what every GPU receives and sends, and how long the busiest link takes. Imports no torch.

Byte by byte it is the plan that runs make (reshard/plan.py): a receiver gets what it holds, once; what the ranks of a stage
own alike they send in equal parts. benchmarks/sync_plan.py makes that plan for all ranks, and a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_rl.config import Config, ModelFacts
from moe_rl.config.facts import TensorSize

from .inventory import Inventory, is_tied_copy
from .rollouts import Rollout, served_bytes

G = 10**9


@dataclass(frozen=True)
class SyncPlan:
    """Bytes of one update: in all, into the GPU that gets most, out of the one that sends most (of stage `stage`).

    `seconds` is the larger of the two over `rate` bytes a second: `link` at `efficiency` of what it can do.
    """

    bytes_total: int
    bytes_per_gpu_max: int
    bytes_out_max: int
    stage: int
    link: str
    rate: float
    efficiency: float
    bytes_out_mean: float

    @property
    def busiest(self) -> int:
        return max(self.bytes_per_gpu_max, self.bytes_out_max)

    @property
    def seconds(self) -> float:
        return self.busiest / self.rate

    def sensitivity(self) -> dict[str, dict[str, float]]:
        """Seconds at half, all and twice the link's rate (GB/s) and at 50, 70 and 90 % of it."""
        full = self.rate / self.efficiency / G
        return {
            f"{rate:g}": {f"{share:g}": self.busiest / (rate * G * share) for share in (0.5, 0.7, 0.9)}
            for rate in (full / 2, full, 2 * full)
        }

    def lines(self) -> list[str]:
        """For people, the arithmetic shown."""
        way = "out of" if self.bytes_out_max > self.bytes_per_gpu_max else "into"
        table = ", ".join(
            f"{rate} GB/s: " + " / ".join(f"{s:.2f}" for s in row.values()) for rate, row in self.sensitivity().items()
        )
        uneven = self.bytes_out_max / self.bytes_out_mean
        balance = (
            f"  stage {self.stage} sends {uneven:.2f} times the mean: only its ranks own its layers, and no rank relays, so that"
            " every byte crosses a link once; layout.pin_hash_layers=false evens out what hash layers make uneven"
        )
        return [
            f"weight update: {self.bytes_total / G:,.1f} GB in all; {self.bytes_per_gpu_max / G:,.2f} GB into a GPU,"
            f" {self.bytes_out_max / G:,.2f} GB out of one of stage {self.stage}",
            f"  {self.busiest / G:,.2f} GB {way} the busiest / ({self.rate / self.efficiency / G:g} GB/s {self.link} *"
            f" {self.efficiency:g}) = {self.seconds:.2f} s, encoding and repacking apart; at 50 / 70 / 90 % of {table} s",
            *([balance] if uneven > 1.1 else []),
        ]


def sync_plan(config: Config, facts: ModelFacts, inventory: Inventory, rollout: Rollout) -> SyncPlan:
    """The update of a layout; GPUs of one node use NVLink, else every byte is taken to cross the network."""
    receivers = rollout.replicas * (rollout.ranks if rollout.vllm else 1)

    def held(t: TensorSize) -> float:
        """Bytes that a receiver holds of a tensor, mean over a replica."""
        if not rollout.vllm:
            size = 2 if config.engine.dtype == "bf16" and not t.fp32 and t.bytes == 2 else max(t.bytes, 4)
            return t.numel * size * (facts.num_experts if t.expert else 1)
        return served_bytes(facts, t, rollout.tp, rollout.dp, rollout.ep)

    stages = [sum(map(held, inventory.tensors(stage))) for stage in inventory.stages]
    copies = {t for stage in inventory.stages for t in inventory.tensors(stage)} if facts.tied else set()
    twice = sum(held(t) for t in copies if t.place == "head" and is_tied_copy(facts, t))
    into, out = sum(stages) - twice, max(stages) * receivers / inventory.width
    one_node = config.cluster.nodes == 1
    rate = config.machine.nvlink_gbps if one_node else config.machine.nic_gbps
    efficiency = config.machine.link_efficiency
    return SyncPlan(
        round(into * receivers),
        round(into),
        round(out),
        stages.index(max(stages)),
        "NVLink" if one_node else "NIC",
        rate * G * efficiency,
        efficiency,
        into * receivers / (inventory.width * len(stages)),
    )
