"""Memory by phase and owner: each stage's GPUs, each stage's nodes. Imports no torch.

What a process takes before it holds a tensor was measured and is given with its source; everything else is counted from
the model's sizes. docs/planner.md says where each term comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from moe_rl.config import Config, ModelFacts

from .activations import activations, on_gpu
from .inventory import Inventory, Stage
from .optimizer_memory import OptimizerMemory, OptimizerMode, Shard, optimizer_memory, split_offloaded
from .rollouts import Rollout

GB, GIB = 10**9, 2**30
PHASES = ("load", "rollout", "log_prob", "update", "save", "resume", "sync")
Items = dict[str, float]

# Resident host bytes of one process, nothing of a model on the host
TRAINER_ON_GPU = 2.605 * GB  # H200, after its first steps: optimizers_h200.json, `fp32-states`, host_rss
TRAINER_ON_CPU = 0.86 * GB  # planner_memory_cpu.json: torch and megatron-core, a few MB of model
ROLLOUT_ON_CPU = 0.87 * GB  # likewise: torch and transformers
ENGINE_CORE = (
    1.3 * GB
)  # beside each vLLM worker its scheduler, and a server's share: 0.6 + 0.7 GB as vLLM shows them on a CPU
DRIVER = 0.85 * GB  # planner_memory_cpu.json: driver and Ray's servers
NCCL_ON_GPU = 1.0 * GIB  # CUDA context and NCCL's channels of one process (vLLM PR #51485: about 1 GiB a rank)
PACKET = 64 * 2**20  # of weights in flight
MALLOC_KEEPS = 32 * 2**20  # blocks below this the C library keeps when they are freed (M_MMAP_THRESHOLD's most)
READ_BUFFER = 64 * 2**20  # of rows that are decoded at a time (models/load.py)
RAY_DEFAULT = 200 * GB


def ray_default_store(available: float, shm: float) -> float:
    """Bytes of Ray's object store where nothing is said: 30 % of available memory, at most 200 GB and 95 % of /dev/shm
    (Ray 2.60: DEFAULT_OBJECT_STORE_MEMORY_PROPORTION and its neighbours)."""
    return min(0.3 * available, RAY_DEFAULT, 0.95 * shm)


@dataclass(frozen=True)
class StageMemory:
    """A stage's bytes, phase -> item -> bytes: of one of its GPUs, and of one of its ranks on the host."""

    gpu: Mapping[str, Items]
    host: Mapping[str, Items]

    def gpu_peak(self) -> float:
        return sum(worst(self.gpu, resume=True).values())

    def actor(self) -> float:
        """What the trainer keeps on a GPU between phases: weights, gradients, states, buffers."""
        return sum(self.gpu["load"].get(k, 0.0) for k in RESIDENT)


RESIDENT = ("weights", "gradients", "masters", "moments", "buffers")


@dataclass
class Memory:
    """Everything, by stage."""

    config: Config
    facts: ModelFacts
    inventory: Inventory
    rollout: Rollout
    micro_batches: int
    tokens: int
    stages: list[StageMemory] = field(default_factory=list)

    @classmethod
    def of(cls, config: Config, facts: ModelFacts, micro_batches: int, tokens: int) -> Memory:
        """`tokens` are those of the largest micro-batch, of which each rank has `micro_batches` in a step."""
        memory = cls(config, facts, Inventory.of(config, facts), Rollout.of(config, facts), micro_batches, tokens)
        seen: dict[tuple, StageMemory] = {}
        for stage in memory.inventory.stages:
            key = (memory.inventory.kind(stage), memory.in_flight(stage))
            if key not in seen:
                seen[key] = memory._stage(stage)
            memory.stages.append(seen[key])
        return memory

    @cached_property
    def on_gpu(self) -> bool:
        return on_gpu(self.config)

    def in_flight(self, stage: Stage) -> int:
        """Micro-batches whose activations a stage keeps at once: 1F1B, interleaved with virtual stages."""
        layout = self.config.layout
        depth = layout.pp - stage.index
        if layout.vpp > 1:
            depth = 2 * (layout.pp - stage.index - 1) + (layout.vpp - 1) * layout.pp + 1
        return max(1, min(self.micro_batches * layout.vpp, depth)) if layout.pp > 1 else 1

    # ------------------------------------------------------------------------------------------------------- one stage
    def _stage(self, stage: Stage) -> StageMemory:
        config, inventory = self.config, self.inventory
        mode = OptimizerMode.of(config)
        b = 4 if config.engine.dtype == "fp32" else 2
        shards = inventory.shards(stage)
        if b == 4:  # fp32 weights are their own masters
            shards = [type(s)(s.numel, s.owned, fp32=True) for s in shards]
        states = optimizer_memory(shards, mode)
        owned, largest = sum(s.owned for s in shards), inventory.largest(stage)
        held: Items = {**states.gpu, "buffers": inventory.untrained_bytes(stage)}
        if config.algorithm.kl != "none":
            held["reference"] = states.gpu["weights"]
        offloaded = {k: float(v) for k, v in states.host.items() if v}
        step: Items = {k: v for k, v in states.gpu_step.items() if v}
        acts = {
            train: activations(inventory, stage, self.tokens, self.in_flight(stage), train) for train in (True, False)
        }
        update = {"activations kept": acts[True].kept, "activations running": acts[True].peak - acts[True].kept}
        score = {"activations running": acts[False].peak}
        packet = float(min(4 * largest, PACKET)) if self.on_gpu else 4.0 * largest
        save, resume = self._saving(states, owned, largest, max((s.owned for s in shards), default=0), offloaded)
        gpu: dict[str, Items] = {phase: dict(held) for phase in PHASES}
        gpu["update"] |= update if sum(update.values()) > sum(step.values()) else step
        gpu["log_prob"] |= score
        gpu["sync"]["packets"] = 2 * packet
        if self.on_gpu and "optimizer" in (config.checkpoint.load_contents or config.checkpoint.contents):
            gpu["resume"]["states again"] = _loaded_again(mode, shards, held)
        host: dict[str, Items] = {phase: dict(offloaded) for phase in PHASES}
        host["save"] |= save
        host["resume"] |= resume
        host["load"]["read buffer"] = float(READ_BUFFER)
        host["sync"]["packets"] = packet
        return StageMemory(*self._placed(gpu, host))

    def _placed(self, gpu: dict[str, Items], host: dict[str, Items]) -> tuple[dict[str, Items], dict[str, Items]]:
        """On GPUs the colocated rollout engine and what each process takes; on a CPU one memory for both."""
        if not self.on_gpu:
            for phase, items in gpu.items():
                for name, size in items.items():
                    host[phase][name] = host[phase].get(name, 0.0) + size
            if 4 * self.facts.boundary * self.tokens < MALLOC_KEEPS:
                kept = sum(v for name, v in gpu["update"].items() if name.startswith("activations"))
                for phase in ("rollout", "save", "sync"):
                    host[phase]["kept by malloc"] = kept
            return {phase: {} for phase in PHASES}, host
        for items in gpu.values():
            items["contexts"] = NCCL_ON_GPU * (2 if self.rollout.colocated else 1)
            if self.rollout.colocated:
                items["rollout weights"], items["kv cache"] = self.rollout.weights, self.kv_cache()
        if self.rollout.colocated:
            gpu["sync"]["rollout reload"] = 2 * self.rollout.layer
        return gpu, host

    def _saving(
        self, states: OptimizerMemory, owned: int, largest: int, most: int, offloaded: Items
    ) -> tuple[Items, Items]:
        """What a save and a resume add to a rank's host memory (the table in docs/architecture.md)."""
        c = self.config.checkpoint
        b = 4 if self.config.engine.dtype == "fp32" else 2
        tensor = 4.0 * largest if "optimizer" in c.contents else float(b * largest)
        # of a tensor that all data-parallel ranks hold one of them writes a copy
        save: Items = {
            "checkpoint tensor": tensor / max(1, min(self.inventory.width, self.config.cluster.gpus_per_node))
        }
        share = states.gpu["weights"] / max(1, self.inventory.copies) + 12 * owned * ("optimizer" in c.contents)
        if c.async_save:
            save["checkpoint staging"] = share
        if self.config.optimizer.precision_aware and not offloaded and "optimizer" in c.contents:
            save["states in fp32"] = 12.0 * owned
        resume: Items = {"checkpoint tensor": 2 * tensor}
        if "optimizer" in (c.load_contents or c.contents):
            resume["checkpoint piece"] = max(min(256 * 2**20, 12.0 * owned), 12.0 * most)
            if (
                offloaded
            ):  # torch's load copies states, and megatron-core makes the masters again; pinned ones in blocks
                resume["masters again"] = offloaded["masters"]
                if self.on_gpu and not self.config.optimizer.precision_aware:  # moved to the GPU on the way
                    resume["states again"] = sum(offloaded.values()) - offloaded["gradient staging"]
        return save, resume

    # ---------------------------------------------------------------------------------------------------- whole nodes
    def kv_cache(self) -> float:
        """Bytes of KV cache of a rollout rank: what its share of a GPU leaves, or what the sequences need."""
        r, c = self.rollout, self.config
        if r.vllm and self.on_gpu and r.share is not None:
            return max(0.0, r.share * c.machine.gpu_memory_gib * GIB - r.weights - NCCL_ON_GPU)
        per_rank = -(-c.data.prompts_per_step * c.rollout.n // (r.replicas * r.dp))
        return min(per_rank, c.rollout.batch_size) * (self.longest * r.kv_token + r.kv_sequence)

    @property
    def longest(self) -> int:
        return self.config.data.max_prompt + self.config.rollout.max_response

    def store(self) -> float:
        return self.config.cluster.object_store_gib * GIB

    def ray_default(self) -> float:
        """Bytes of the store that Ray would take of a node where nothing is said."""
        m = self.config.machine
        return ray_default_store(m.host_memory_gib * GIB, (m.shm_gib or m.host_memory_gib / 2) * GIB)

    def processes(self, node: int) -> Items:
        """Host bytes of a node's processes: trainer ranks, rollout workers with their copies of the weights, Ray."""
        ranks, r = self.config.cluster.gpus_per_node, self.rollout
        if not self.on_gpu:
            items = {"trainer processes": ranks * TRAINER_ON_CPU, "driver": DRIVER}
            items["rollout processes"] = r.replicas * (ROLLOUT_ON_CPU + r.weights + r.copy * r.span)
            return items
        workers, nodes = ranks if r.colocated or r.vllm else 0, self.config.cluster.nodes
        items = {"trainer processes": ranks * TRAINER_ON_GPU, "object store": self.store()}
        items["rollout processes"] = workers * TRAINER_ON_GPU + -(-workers // r.tp) * ENGINE_CORE
        parts = r.replicas * r.span
        items["rollout copies"] = r.copy * (parts // nodes + (node < parts % nodes))  # dealt to nodes in turn
        if node == 0:
            items["driver"] = DRIVER
        return items

    def workers(self, phase: str) -> float:
        """Resident bytes of all trainer and rollout processes in a phase."""
        width, r = self.inventory.width, self.rollout
        trainers = sum(width * sum(stage.host[phase].values()) for stage in self.stages)
        trainers += self.config.world * (TRAINER_ON_GPU if self.on_gpu else TRAINER_ON_CPU)
        kv = self.kv_cache() if phase == "rollout" and not self.on_gpu else 0.0
        held = r.weights + ROLLOUT_ON_CPU if not self.on_gpu else TRAINER_ON_GPU
        return trainers + r.replicas * (held + r.copy * r.span + kv)

    @cached_property
    def nodes(self) -> list[dict[str, Items]]:
        """For each stage the fullest node that has ranks of it: phase -> item -> bytes."""
        width, per_node = self.inventory.width, self.config.cluster.gpus_per_node
        found = []
        for index in range(len(self.stages)):
            first = index * width // per_node
            best: dict[str, Items] = {}
            last = ((index + 1) * width - 1) // per_node
            for node in sorted({first, min(first + 1, last), last}):  # those between are like the second
                items = self._node(node, width, per_node)
                if sum(worst(items).values()) > sum(worst(best).values()):
                    best = items
            found.append(best)
        return found

    def _node(self, node: int, width: int, per_node: int) -> dict[str, Items]:
        total: dict[str, Items] = {phase: self.processes(node) for phase in PHASES}
        for rank in range(node * per_node, min((node + 1) * per_node, self.config.world)):
            for phase, items in self.stages[rank // width].host.items():
                for name, size in items.items():
                    total[phase][name] = total[phase].get(name, 0.0) + size
        if not self.on_gpu:
            total["rollout"]["kv cache"] = self.rollout.replicas * self.kv_cache()
            total["sync"]["object store"] = min(self.store(), float(self.rollout.weights))
        return total


def _loaded_again(mode: OptimizerMode, shards: list[Shard], held: Items) -> float:
    """GPU bytes that a load of the optimizer holds beside the live states (measured: planner_memory_h200.json).

    FusedAdam makes its moments anew in fp32, and in the precision-aware mode its masters. torch moves the states of an
    offloaded parameter to the device of the parameter, the GPU, before the hybrid optimizer takes them back.
    """
    away, here = (sum(s.owned for s in part) for part in split_offloaded(shards, mode.offload_fraction))
    again = 8.0 * here
    if not away:
        return again + held["moments"] * (mode.moment_bytes == 2) + held["masters"] * mode.precision_aware
    return again if mode.precision_aware else max(again, 12.0 * away)


def worst(phases: Mapping[str, Items], resume: bool = False) -> Items:
    """The items of the phase that needs most; a resume, which not every run has, counts where asked for."""
    chosen = [items for phase, items in phases.items() if resume or phase != "resume"]
    return max(chosen, key=lambda items: sum(items.values()), default={})
