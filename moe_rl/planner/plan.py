"""A run's plan as one object: layout, memory, time, checkpoints, weight update, rules. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_rl.config import Config, ModelFacts, Problem
from moe_rl.config.layout import format_stages, parse
from moe_rl.config.machine import RATES

from .comm import SyncPlan, sync_plan
from .inventory import Inventory, parameters
from .memory import GIB, Items, Memory, worst
from .report import plan_stages
from .rollouts import Rollout
from .timing import Timing


@dataclass
class Rates:
    """Rates that a run measured, under the names of config.machine; 0 where it measured none."""

    decode_layer_ms: float = 0.0
    utilisation: float = 0.0
    disk_gbps: float = 0.0


ROUTED_ID_BYTES = {True: 1, False: 2}  # an expert's number in R3's rows: one byte where all fit into it


CHECKED = (
    *(
        f"layout.{name}"
        for name in ("world", "ep", "vpp", "experts", "tp", "segments", "layers", "ends", "empty_stage")
    ),
    *("layout.hash_layers", "layout.too_many_stages", "rollout.group", "rollout.replicas", "rollout.positions"),
    *("algorithm.minibatches", "engine.token_budget", "memory.gpu", "memory.host"),
)


def describe_problem(problem: Problem) -> dict[str, Any]:
    """A broken rule as JSON has it."""
    return {"id": problem.rule, "ok": False, "what": problem.headline, "why": problem.why, "fix": problem.fix}


@dataclass(frozen=True)
class Plan:
    """What a configuration asks for. `problems` are the rules that it breaks."""

    config: Config
    facts: ModelFacts
    memory: Memory
    timing: Timing
    problems: tuple[Problem, ...]

    @classmethod
    def of(cls, config: Config, facts: ModelFacts, problems: Sequence[Problem] = ()) -> Plan:
        """Of a layout that can be laid out. Raises UserError where it cannot."""
        inventory, rollout = Inventory.of(config, facts), Rollout.of(config, facts)
        timing = Timing(config, facts, inventory, rollout, *_sync(config, facts, inventory, rollout))
        memory = Memory.of(config, facts, timing.micro_batches, timing.tokens)
        return cls(config, facts, memory, timing, (*problems, *_room(config, memory)))

    def gpu_per_stage(self) -> list[float]:
        return [stage.gpu_peak() for stage in self.memory.stages]

    def host_per_stage(self) -> list[float]:
        return [sum(worst(node).values()) for node in self.memory.nodes]

    def actor_mean(self) -> float:
        """What a trainer rank keeps on its GPU, mean over ranks: weights, gradients, states."""
        return sum(stage.actor() for stage in self.memory.stages) / len(self.memory.stages)

    @property
    def sync(self) -> SyncPlan:
        """The weight update."""
        return sync_plan(self.config, self.facts, self.memory.inventory, self.memory.rollout)

    @property
    def fits(self) -> bool:
        return not any(problem.rule.startswith("memory.") for problem in self.problems)

    def phases_gib(self) -> dict[str, dict[str, float]]:
        """By phase what a run's workers would measure: the fullest GPU without its contexts (torch does not see them), the
        workers' resident memory in all, and seconds."""
        t, m = self.timing, self.memory
        seconds = {"rollout": t.rollout, "log_prob": t.log_prob, "update": t.update, "sync": t.sync, "save": t.save}
        found = {}
        for phase, time in seconds.items():
            gpu = max(
                sum(v for k, v in stage.gpu[phase].items() if not k.startswith(("contexts", "rollout", "kv cache")))
                for stage in m.stages
            )
            found[phase] = {"gpu_gib": gpu / GIB, "host_gib": m.workers(phase) / GIB, "seconds": time}
        return found

    def rates(self, measured: Mapping[str, Mapping[str, float]]) -> Rates:
        """The machine's rates that make the plan's seconds the measured ones, by phase of a run's measured.json."""
        t, machine = self.timing, self.config.machine
        rates = Rates()
        if rollout := measured.get("rollout", {}).get("seconds", 0.0):
            rates.decode_layer_ms = machine.decode_layer_ms * rollout / t.rollout
        busy = measured.get("update", {}).get("seconds", 0.0) - t.optimizer
        if busy > 0:
            rates.utilisation = min(1.0, machine.utilisation * t.passes / busy)
        if save := measured.get("checkpoint", {}).get("seconds", 0.0):
            rates.disk_gbps = machine.disk_gbps * t.save / save
        return rates

    def rates_used(self) -> dict[str, dict[str, Any]]:
        """The machine's rates that times come from: `value`, `origin` of the key and, where the value has one, its `source`."""
        found = {}
        for name, source in RATES.items():
            value = self.config.get(f"machine.{name}")
            found[name] = {"value": value, "origin": self.config.origin(f"machine.{name}")}
            if source and value == source[0]:
                found[name]["source"] = source[1]
        return found

    def kept(self) -> list[str]:
        """Rules on layout, batch and memory that hold."""
        broken = {problem.rule for problem in self.problems}
        return [rule for rule in CHECKED if rule not in broken]

    def r3_bytes_per_token(self) -> int:
        """Of router replay: the experts that each layer chose for a token."""
        sparse = sum(1 for w in self.facts.layers if w.expert)
        return sparse * self.facts.top_k * ROUTED_ID_BYTES[self.facts.num_experts <= 256]

    def as_dict(self) -> dict[str, Any]:
        """The object that ``moe-rl plan --json`` prints; sizes in GiB (2**30 bytes), times in seconds."""
        c, t, m = self.config, self.timing, self.memory
        sync = self.sync
        gpu, nodes = self.gpu_per_stage(), m.nodes
        host = self.host_per_stage()
        total, active = parameters(self.facts)
        layout, saved = c.layout, t.save_bytes()
        steps = c.trainer.steps
        saves = -(-steps // c.checkpoint.every)
        seconds = steps * t.step + saves * t.save
        fullest, fullest_node = gpu.index(max(gpu)), host.index(max(host))
        return {
            "model": {"params_total": total, "params_active": active, "path": self.facts.path},
            "layout": {
                "pp": layout.pp,
                "ep": layout.ep,
                "tp": layout.tp,
                "dp": c.dp,
                "etp": layout.etp,
                "vpp": layout.vpp,
                "stages": format_stages(parse(plan_stages(c, self.facts))),
                "world_size": c.world,
                "nodes": c.cluster.nodes,
                "gpus_per_node": c.cluster.gpus_per_node,
                "expert_copies": m.inventory.copies,
            },
            "gpu_gib": {
                "max": max(gpu) / GIB,
                "per_stage": [size / GIB for size in gpu],
                "items": _gib(worst(m.stages[fullest].gpu, resume=True)),
                "actor_mean": self.actor_mean() / GIB,
                "actor_per_stage": [stage.actor() / GIB for stage in m.stages],
                "phases": {k: _gib(v) for k, v in m.stages[fullest].gpu.items()},
                "limit": c.machine.gpu_memory_gib,
            },
            "host_gib": {
                "max_node": max(host) / GIB,
                "per_stage": [size / GIB for size in host],
                "items": _gib(worst(nodes[fullest_node])),
                "phases": {k: _gib(v) for k, v in nodes[fullest_node].items()},
                "resume_max_node": max(sum(worst(node, resume=True).values()) for node in nodes) / GIB,
                "limit": c.machine.host_memory_gib,
            },
            "checkpoint_gib": {part: size / GIB for part, size in saved.items()},
            "sync": {
                "bytes_total": t.sync_bytes_total,
                "bytes_per_gpu_max": t.sync_bytes_gpu,
                "seconds": t.sync,
                "bytes_out_max": sync.bytes_out_max,
                "link": sync.link,
                "efficiency": sync.efficiency,
                "seconds_by_gbps_and_efficiency": sync.sensitivity(),
            },
            "pipeline": {
                "bubble_fraction": t.bubble,
                "micro_batches": t.micro_batches,
                "tokens_per_micro_batch": t.tokens,
            },
            "step": {
                "seconds": t.step,
                "rollout": t.rollout,
                "log_prob": t.log_prob,
                "update": t.update,
                "optimizer": t.optimizer,
                "sync": t.sync,
            },
            "rates": self.rates_used(),
            "rollout": {
                "engine": "vllm" if m.rollout.vllm else "transformers",
                "replicas": m.rollout.replicas,
                "tp": m.rollout.tp,
                "dp": m.rollout.dp,
                "ep": m.rollout.ep,
                "weights_gib": m.rollout.weights / GIB,
                "kv_bytes_per_token": m.rollout.kv_token,
                "kv_bytes_per_sequence": m.rollout.kv_sequence,
                "router_replay_bytes_per_token": self.r3_bytes_per_token(),
            },
            "run": {
                "steps": steps,
                "save_seconds": t.save,
                "hours": seconds / 3600,
                "node_hours": seconds / 3600 * c.cluster.nodes,
                "tokens_at_most": steps * c.data.prompts_per_step * c.rollout.n * t.longest,
            },
            "rules": [*map(describe_problem, self.problems), *({"id": rule, "ok": True} for rule in self.kept())],
        }


def _gib(items: Items) -> dict[str, float]:
    return {name: size / GIB for name, size in items.items() if size}


def _sync(config: Config, facts: ModelFacts, inventory: Inventory, rollout: Rollout) -> tuple[int, int, float]:
    """Bytes of a weight update in all and to the GPU that gets most, and the seconds of its busiest link."""
    found = sync_plan(config, facts, inventory, rollout)
    return found.bytes_total, found.bytes_per_gpu_max, found.seconds


def _room(config: Config, memory: Memory) -> list[Problem]:
    """Memory that a GPU or a node does not have."""
    found = []
    for place, sizes, limit, key, fix in (
        (
            "gpu",
            [s.gpu_peak() for s in memory.stages],
            config.machine.gpu_memory_gib,
            "machine.gpu_memory_gib",
            "More pipeline stages or expert ranks, or one of the levers that `moe-rl plan` lists.",
        ),
        (
            "host",
            [sum(worst(node, resume=True).values()) for node in memory.nodes],
            config.machine.host_memory_gib,
            "machine.host_memory_gib",
            "More nodes, or one of the levers that `moe-rl plan` lists.",
        ),
    ):
        most = max(sizes) / GIB
        if most > limit:
            stage = sizes.index(max(sizes))
            what = f"stage {stage} needs {most:.1f} GiB of a {'GPU' if place == 'gpu' else 'node'}, which has {limit:g} GiB"
            why = "A process that asks for more is ended in the middle of a step."
            found.append(Problem(f"memory.{place}", what, why, fix, key, config.origin(key)))
    return found
