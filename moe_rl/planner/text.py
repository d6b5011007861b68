"""A plan in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .memory import GIB, PHASES, Items
from .plan import Plan
from .report import describe_layout


def describe(plan: Plan, levers: Sequence[str] = ()) -> str:
    """What ``moe-rl plan`` prints; sizes in GiB (2**30 bytes) and GB (10**9 bytes) as named."""
    d = plan.as_dict()
    model, gpu, host, step, run = d["model"], d["gpu_gib"], d["host_gib"], d["step"], d["run"]
    memory = plan.memory
    fullest = gpu["per_stage"].index(gpu["max"])
    lines = [
        f"model: {model['params_total'] / 1e9:,.1f}e9 parameters, {model['params_active'] / 1e9:,.1f}e9 active; {model['path']}",
        describe_layout(plan.config, plan.facts, ranks=plan.config.world <= 64),
        "",
        f"GPU memory by phase, GiB, stage {fullest} (the fullest); a GPU has {gpu['limit']:g}:",
        *_table(memory.stages[fullest].gpu),
        f"  actor GPU memory between phases, mean over ranks: {gpu['actor_mean']:.1f} GiB ({gpu['actor_mean'] * GIB / 1e9:.1f} GB)",
        "",
        f"host memory by phase, GiB, the fullest node; it has {host['limit']:g}:",
        *_table(max(memory.nodes, key=lambda node: sum(max(node.values(), key=_sum).values()))),
        f"  Ray's object store is {memory.store() / GIB:.1f} GiB; left to itself it would be {memory.ray_default() / GIB:.1f}",
        "",
        "stages: layers, peak of a GPU, the trainer's part between phases, peak of a node",
        *_stages(plan, gpu, host),
        "",
        f"pipeline: {d['pipeline']['micro_batches']} micro-batches of up to {d['pipeline']['tokens_per_micro_batch']} tokens a"
        f" rank, {100 * d['pipeline']['bubble_fraction']:.0f} % of the average stage's time is waiting",
        f"rollout: {_rollout(d['rollout'])}",
        f"step: {step['seconds']:,.1f} s = rollout {step['rollout']:,.1f} + log-probs {step['log_prob']:,.1f} + update"
        f" {step['update']:,.1f} (optimizer {step['optimizer']:,.1f}) + weight update {step['sync']:,.1f}",
        *plan.sync.lines(),
        f"rates: {_rates(d['rates'])}",
        "checkpoint, GiB: " + ", ".join(f"{part} {size:,.1f}" for part, size in d["checkpoint_gib"].items()),
        f"run: {run['steps']} steps, {run['hours']:,.1f} h, {run['node_hours']:,.1f} node-hours, at most"
        f" {run['tokens_at_most'] / 1e6:,.1f}e6 tokens",
    ]
    if levers:
        lines += ["", "levers, each alone, in the order of what they cost in time:", *(f"  {line}" for line in levers)]
    if plan.problems:
        lines += ["", "rules that this breaks:", *(f"  {p.error()}" for p in plan.problems)]
    return "\n".join(lines)


def _sum(items: Items) -> float:
    return sum(items.values())


def _table(phases: Mapping[str, Items]) -> list[str]:
    names = list(dict.fromkeys(name for items in phases.values() for name, size in items.items() if size))
    rows = [["", *PHASES]]
    rows += [[name, *(_number(phases[phase].get(name, 0.0)) for phase in PHASES)] for name in names]
    rows.append(["sum", *(_number(_sum(phases[phase])) for phase in PHASES)])
    return [f"  {row[0]:<20}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows]


def _number(size: float) -> str:
    return f"{size / GIB:,.2f}" if size else "-"


def _stages(plan: Plan, gpu: Mapping[str, list[float]], host: Mapping[str, list[float]]) -> Iterable[str]:
    """One line for each run of stages alike."""
    rows = []
    for stage in plan.memory.inventory.stages:
        i = stage.index
        ends = ("E" if stage.embedding else "") + "t" * len(stage.layers) + ("L" if stage.loss else "")
        rows.append(
            (ends, f"{gpu['per_stage'][i]:.1f}", f"{gpu['actor_per_stage'][i]:.1f}", f"{host['per_stage'][i]:.1f}")
        )
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[start]:
            name = f"{start}" if i - start == 1 else f"{start}-{i - 1}"
            ends, peak, kept, node = rows[start]
            gb = float(node) * GIB / 1e9
            yield f"  {name:>7}: {ends}  GPU {peak} GiB, trainer {kept} GiB, node {node} GiB ({gb:.0f} GB)"
            start = i


def _rates(rates: Mapping[str, Mapping[str, object]]) -> str:
    """Rates by where they come from."""
    found: dict[str, list[str]] = {}
    for name, rate in rates.items():
        place = f"{rate['origin']}: {rate['source']}" if "source" in rate else f"{rate['origin']}"
        found.setdefault(place, []).append(f"{name} {rate['value']:g}")
    return "; ".join(f"{', '.join(names)} ({place})" for place, names in found.items())


def _rollout(r: Mapping[str, object]) -> str:
    shape = f"{r['replicas']} replica(s) of tp {r['tp']} * dp {r['dp']}, ep {r['ep']}"
    return (
        f"{r['engine']}, {shape}; {r['weights_gib']:.1f} GiB of weights a rank, KV {r['kv_bytes_per_token']:,.0f} bytes a token"
        f" and {r['kv_bytes_per_sequence']:,.0f} a sequence; router replay {r['router_replay_bytes_per_token']} bytes a token"
    )
