"""Layouts of a model on a cluster that break no rule and fit, the fastest first; and what each lever would save.

Imports no torch. Every proposal is a configuration that the rules of config/ accept: they are asked, not repeated.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass

from moe_rl.config import Config, ModelFacts
from moe_rl.config.plan_rules import plan_problems
from moe_rl.errors import UserError

from .activations import EVIDENCE, backend, on_gpu
from .memory import GIB
from .plan import Plan
from .stages import balance, write

KEPT = 10  # proposals
LENGTHS = 64  # tokens: responses are tried in steps of these


@dataclass(frozen=True)
class Proposal:
    """A layout with what it takes."""

    keys: dict[str, object]
    seconds: float
    gpu_gib: float
    host_gib: float

    def as_dict(self) -> dict[str, object]:
        return {"layout": self.keys, "step_seconds": self.seconds, "gpu_gib": self.gpu_gib, "host_gib": self.host_gib}

    def line(self) -> str:
        keys = " ".join(f"layout.{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in self.keys.items())
        return f"{self.seconds:9.1f} s  GPU {self.gpu_gib:6.1f} GiB  node {self.host_gib:7.1f} GiB  {keys}"


def changed(config: Config, keys: dict[str, object], origin: str = "plan") -> Config:
    """A copy of the configuration with other values, which came from `origin`."""
    new = copy.copy(config)
    new.origins = {k: v for k, v in config.origins.items() if k not in keys}
    for section in {name.partition(".")[0] for name in keys}:
        setattr(new, section, copy.deepcopy(getattr(config, section)))
    for name, value in keys.items():
        section, _, key = name.rpartition(".")
        setattr(new.get(section), key, value)
        new.origins[name] = origin
    return new


def search(config: Config, facts: ModelFacts) -> list[Proposal]:
    """The `KEPT` fastest layouts of `config.world` ranks that fit and break no rule of this run's."""
    found = []
    for keys in layouts(config, facts):
        candidate = changed(config, {f"layout.{k}": v for k, v in keys.items()})
        if plan_problems(candidate, facts):
            continue
        plan = Plan.of(candidate, facts)
        if plan.fits:
            found.append(
                Proposal(keys, plan.timing.step, max(plan.gpu_per_stage()) / GIB, max(plan.host_per_stage()) / GIB)
            )
    found.sort(key=lambda p: (p.seconds, p.gpu_gib, p.host_gib))
    return found[:KEPT]


def layouts(config: Config, facts: ModelFacts) -> Iterator[dict[str, object]]:
    """Sizes that divide the ranks, and for each the splits into stages: as `balanced` gives them."""
    world = config.world
    tps = [t for t in _divisors(config.cluster.gpus_per_node) if facts.supports_tp or t == 1]
    for pp in (d for d in _divisors(world) if d <= facts.num_layers):
        for tp in tps:
            if (world // pp) % tp:
                continue
            for ep in _divisors(world // pp):
                if (facts.num_experts or 1) % ep:
                    continue
                seen: set[str] = set()
                for pinned in (True, False) if facts.hash_layers and pp > 1 else (True,):
                    sizes = {"tp": tp, "pp": pp, "ep": ep, "etp": 1, "vpp": 1, "pin_hash_layers": pinned}
                    candidate = changed(config, {f"layout.{k}": v for k, v in sizes.items()})
                    if _too_large(candidate, facts):
                        break
                    for stages in balanced(candidate, facts):
                        if stages not in seen:
                            seen.add(stages)
                            yield {**sizes, "stages": stages}


def _too_large(config: Config, facts: ModelFacts) -> bool:
    """Whether the mean rank's experts, weights and gradients, are more than a GPU holds: most layouts end here."""
    experts = sum(t.numel for t in facts.tensors if t.expert) * facts.num_experts
    each = 2 + (2 if config.optimizer.grad_dtype == "bf16" else 4)
    ranks = config.layout.pp * config.layout.ep * config.layout.etp
    return config.engine.device == "cuda" and experts * each / ranks > config.machine.gpu_memory_gib * GIB


def balanced(config: Config, facts: ModelFacts) -> list[str]:
    """Splits of a layout's sizes: by the bytes of parameters, and by the work of a token; none where there is no way."""
    layout = config.layout
    segments = layout.pp * layout.vpp
    pinned = max(facts.hash_layers, default=-1) + 1 if layout.pin_hash_layers and segments > 1 else 0
    size = {"embedding": 0.0, "head": 0.0}
    layers = [0.0] * facts.num_layers
    for t in facts.tensors:
        values = t.numel * (facts.num_experts / layout.ep if t.expert else 1)
        if t.layer is None:
            size[t.place] += values
        else:
            layers[t.layer] += values
    work = [w.dense + facts.top_k * w.expert + w.pair_work * (w.window or 1) for w in facts.layers]
    ways = (
        balance(layers, segments, size["embedding"], size["head"], pinned),
        balance([float(v) for v in work], segments, 0.0, float(facts.vocab_size * facts.hidden_size), pinned),
    )
    return list(dict.fromkeys(write(way) for way in ways if way))


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


# ----------------------------------------------------------------------------------------------------------- the levers
@dataclass(frozen=True)
class Lever:
    """A change of one setting: what it saves of the fullest GPU and node, and what it adds to a step."""

    lever: str
    gpu_gib_saved: float
    host_gib_saved: float
    seconds_paid: float

    def line(self) -> str:
        return (
            f"{self.lever}: GPU {-self.gpu_gib_saved:+.1f} GiB, node {-self.host_gib_saved:+.1f} GiB, step"
            f" {self.seconds_paid:+.1f} s"
        )


def levers(plan: Plan) -> list[Lever]:
    """Each change of one setting that would save memory, with what it saves and costs; the cheapest in time first."""
    c, base, found = plan.config, _totals(plan), []
    for name, keys in _levers(c, plan.facts):
        candidate = changed(c, keys)
        if plan_problems(candidate, plan.facts):
            continue
        try:
            other = _totals(Plan.of(candidate, plan.facts))
        except UserError:
            continue
        gpu, host, seconds = (a - b for a, b in zip(base, other, strict=True))
        if gpu > 0.005 or host > 0.005:
            found.append(Lever(name, gpu, host, -seconds))
    return sorted(found, key=lambda f: (f.seconds_paid, -f.gpu_gib_saved - f.host_gib_saved))


def _totals(plan: Plan) -> tuple[float, float, float]:
    return max(plan.gpu_per_stage()) / GIB, max(plan.host_per_stage()) / GIB, plan.timing.step


def _levers(c: Config, facts: ModelFacts) -> Iterator[tuple[str, dict[str, object]]]:
    o, e = c.optimizer, c.engine
    values: list[tuple[str, object, object]] = [
        ("optimizer.grad_dtype", "bf16", o.grad_dtype),
        ("optimizer.precision_aware", True, o.precision_aware),
        ("optimizer.moment_dtype", "bf16", o.moment_dtype),
        ("engine.recompute", "full", e.recompute),
        ("checkpoint.async_save", False, c.checkpoint.async_save),
        ("cluster.object_store_gib", min(32.0, c.cluster.object_store_gib), c.cluster.object_store_gib),
        *(("optimizer.offload_fraction", f, o.offload_fraction) for f in (0.0, 0.25, 0.5, 0.75, 1.0)),
    ]
    if facts.hash_layers and c.layout.pp > 1 and not c.layout.stages:
        values.append(("layout.pin_hash_layers", False, c.layout.pin_hash_layers))
    longest = c.data.max_prompt + c.rollout.max_response
    if e.max_tokens_per_micro_batch >= 2 * longest:
        values.append(("engine.max_tokens_per_micro_batch", longest, e.max_tokens_per_micro_batch))
    values.append(("engine.attention_chunk", e.attention_chunk // 2, e.attention_chunk))
    values.append(("engine.logprob_chunk", e.logprob_chunk // 2, e.logprob_chunk))
    for name, value, now in values:
        if value != now and value:
            text = str(value).lower() if isinstance(value, bool) else value
            yield f"{name}={text}", {name: value}
        elif value != now and name in ("optimizer.offload_fraction", "checkpoint.async_save", "layout.pin_hash_layers"):
            yield f"{name}={str(value).lower()}", {name: value}


def least_offload(plan: Plan, steps: int = 16) -> float | None:
    """The smallest optimizer.offload_fraction, in sixteenths, with which everything fits: the most on the GPU; None if
    none does."""
    for i in range(steps + 1):
        keys: dict[str, object] = {"optimizer.offload_fraction": i / steps}
        if plan.config.optimizer.moment_dtype != "fp32" and i:
            keys["optimizer.moment_dtype"] = "fp32"
        if Plan.of(changed(plan.config, keys), plan.facts).fits:
            return i / steps
    return None


def longest_response(plan: Plan) -> dict[str, object] | None:
    """The largest rollout.max_response that all GPUs have room for, with one sequence a micro-batch and all else as it is:
    `tokens` (0: not even the shortest), the `backend` whose activations count, and what these rest on. None on a CPU."""
    c, facts = plan.config, plan.facts
    if not on_gpu(c):
        return None

    def fits(response: int) -> bool:
        keys = {"rollout.max_response": response, "engine.max_tokens_per_micro_batch": c.data.max_prompt + response}
        return max(Plan.of(changed(c, dict(keys)), facts).gpu_per_stage()) <= c.machine.gpu_memory_gib * GIB

    low, high = 0, max(0, facts.max_positions - c.data.max_prompt) // LENGTHS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * LENGTHS) else (low, middle - 1)
    used = backend(c, facts)
    return {"tokens": low * LENGTHS, "backend": used, "rests_on": EVIDENCE[used]}


def saved_by_spreading(plan: Plan) -> float:
    """GiB of the fullest node that hash layers beside the embedding cost: what layout.pin_hash_layers=false would save."""
    c = plan.config
    if not (plan.facts.hash_layers and c.layout.pin_hash_layers and c.layout.pp > 1 and not c.layout.stages):
        return 0.0
    other = Plan.of(changed(c, {"layout.pin_hash_layers": False}), plan.facts)
    return (max(plan.host_per_stage()) - max(other.host_per_stage())) / GIB
