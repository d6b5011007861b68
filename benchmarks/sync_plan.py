"""The weight update of DeepSeek-V4-Pro at full size, planned for all ranks on a CPU: who sends what to whom, and what links carry.

    python benchmarks/sync_plan.py --out benchmarks/results/sync_plan.json

Trainer ranks are built on the meta device, each with its own share of the model's real shapes; receivers hold what vLLM's
ranks hold of it (experts whole, dealt to all ranks of a replica; attention by heads; everything else on every rank),
quantised. The plan is the one that real runs make (`moe_rl/reshard/plan.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import resource
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from moe_rl.audit import coordinates
from moe_rl.config import load_config
from moe_rl.config.layout import resolve_stages
from moe_rl.models.deepseek_v4.weights import served_cut
from moe_rl.models.family import get_family, read_config, read_facts
from moe_rl.models.weights import Box, WeightTable
from moe_rl.models.wire import Wire, wire_bytes
from moe_rl.reshard.plan import Plan, Share, Topology, plan_shares
from moe_rl.reshard.traffic import Traffic

H100 = {"pp": 32, "ep": 8, "world": 512, "tp": 8, "dp": 8, "replicas": 8, "per_node": 8, "nic": 50.0, "nvlink": 450.0}
CASES: dict[str, dict[str, Any]] = {
    "h100": H100 | {"pinned": True},
    "h100, hash layers spread": H100 | {"pinned": False},  # layout.pin_hash_layers=false: no stage has three layers
    "gb200": H100
    | {"pp": 16, "ep": 16, "world": 256, "tp": 1, "dp": 32, "per_node": 4, "nvlink": 900.0, "pinned": True},
}
PACKET = 256 << 20


def trainer_shares(
    path: str, pp: int, ep: int, world: int, stages: str = "", pinned: bool = True, dtype: str = "bf16"
) -> list[Share]:
    """What each trainer rank owns, read from the chunks that it builds."""
    from moe_rl.engine.standing import Layout, meta_chunks, single_process
    from moe_rl.models.weights import dtype_name

    facts, family = read_facts(path), get_family(read_facts(path).family)
    arch = family.read_arch(path)
    table = family.weight_table(arch)
    layout = Layout(resolve_stages(stages, facts.num_layers, facts.hash_layers, pp, 1, pinned), pp=pp, ep=ep)
    width, found = world // pp, []
    with single_process():
        for stage, shard in coordinates(layout):
            tensors = []
            for chunk in meta_chunks(family, arch, layout, stage, shard, dtype):
                for name, parts in table.trainer_parts(chunk, shard).items():
                    tensors += [(name, p.shape, dtype_name(p.view), p.box(name)) for p in parts]
            ranks = tuple(stage * width + j for j in range(width) if j % ep == shard.ep_rank)
            found.append(Share(ranks, tuple(sorted(tensors))))
    return found


def rollout_shares(table: WeightTable, wire: Wire, tp: int, dp: int, replicas: int) -> list[Share]:
    """What each rank of each replica holds: experts over all tp * dp ranks, attention by heads over tp."""
    size, found = tp * dp, []
    for rank in range(size):
        tensors = []
        for entry in table.entries:
            shape, start = list(entry.spec.shape), [0] * len(entry.spec.shape)
            if entry.spec.expert is not None:
                if not rank * table.experts // size <= entry.spec.expert < (rank + 1) * table.experts // size:
                    continue
            elif (axis := served_cut(entry.name)) is not None:
                shape[axis] //= tp
                start[axis] = rank % tp * shape[axis]
            box = Box(entry.name, tuple(start), tuple(shape))
            tensors.append((entry.name, entry.spec.shape, wire.kind(entry) or entry.spec.dtype, box))
        found.append(Share(tuple(k * size + rank for k in range(replicas)), tuple(sorted(tensors))))
    return found


def prove(plan: Plan, owned: list[Share], held: list[Share]) -> float:
    """Every receiver gets each element that it holds once, from a rank that owns it: bytes received / bytes held at most."""
    first = {rank: share.ranks[0] for share in owned for rank in share.ranks}
    of_rank: dict[int, dict[str, list[Box]]] = {share.ranks[0]: defaultdict(list) for share in owned}
    for share in owned:
        for name, _, _, box in share.tensors:
            of_rank[share.ranks[0]][name].append(box)
    got: dict[int, list[tuple[Box, ...]]] = defaultdict(list)
    nbytes: Counter[int] = Counter()
    checked: set[tuple[int, int]] = set()
    for source, receiver, boxes, size in plan.transfers:
        got[receiver].append(boxes)
        nbytes[receiver] += size
        if (first[source], id(boxes)) not in checked:  # copies and replicas share their blocks
            checked.add((first[source], id(boxes)))
            for box in boxes:
                assert any(own & box == box for own in of_rank[first[source]][box.name]), (source, box)
    worst = 0.0
    for share in held:
        wanted = {name: math.prod(box.extent) for name, _, _, box in share.tensors}
        for receiver in share.ranks:
            boxes = list(itertools.chain.from_iterable(got[receiver]))
            have: Counter[str] = Counter()
            for box in boxes:
                have[box.name] += box.numel
            assert dict(have) == wanted and len(set(boxes)) == len(boxes), receiver
            worst = max(worst, nbytes[receiver] / sum(wire_bytes(d, b.start, b.extent) for _, _, d, b in share.tensors))
    return worst


def balance(plan: Plan, traffic: Traffic, width: int) -> dict[str, float]:
    """Most over mean: of the data-parallel copies of a stage, which own the same, and of all receivers."""
    sent, received = Counter[int](), Counter[int]()
    for t in plan.transfers:
        sent[t.source] += t.nbytes
        received[t.receiver] += t.nbytes
    stages = [[sent[rank] for rank in plan.sources[i : i + width]] for i in range(0, len(plan.sources), width)]
    nic = [[traffic.nic_out[rank] for rank in plan.sources[i : i + width]] for i in range(0, len(plan.sources), width)]
    return {
        "copies_of_a_stage": max(max(s) / (sum(s) / len(s)) for s in stages),
        "nics_of_a_stage": max(max(s) / (sum(s) / len(s)) for s in nic),
        "receivers": max(received.values()) / (sum(received.values()) / len(received)),
        "stages": max(map(sum, stages)) / (sum(map(sum, stages)) / len(stages)),
        # no plan can have a stage's ranks send less than their equal part of what only they own
        "busiest_sender_over_least_possible": max(map(max, stages)) / max(sum(s) / len(s) for s in stages),
    }


def case(name: str, efficiency: float = 0.7) -> dict[str, Any]:
    """One layout: times of building and planning, the proof, and what links carry."""
    c, path = CASES[name], load_config("dsv4-pro").model.path
    table = get_family("deepseek_v4").weight_table(get_family("deepseek_v4").read_arch(path))
    wire = Wire.released(read_config(path))
    start = time.perf_counter()
    owned = trainer_shares(path, c["pp"], c["ep"], c["world"], pinned=c["pinned"])
    held = rollout_shares(table, wire, c["tp"], c["dp"], c["replicas"])
    built = time.perf_counter()
    topology = Topology(c["per_node"], colocated=True)
    plan = plan_shares(owned, held, topology)
    planned = time.perf_counter()
    ratio = prove(plan, owned, held)
    traffic = Traffic.of(plan, topology)
    seconds, link = traffic.critical(c["nic"], c["nvlink"], efficiency)
    layers = Counter[str]()
    for name, _, dtype, box in held[0].tensors:
        layers[name.split(".")[1] if name.startswith("layers.") else name] += wire_bytes(dtype, box.start, box.extent)
    sensitivity = {
        f"{nic:g} GB/s": {f"{e:.0%}": traffic.critical(nic, c["nvlink"], e)[0] for e in (0.5, 0.7, 0.9)}
        for nic in (c["nic"] / 2, c["nic"], 2 * c["nic"])
    }
    extremes = {k: [min(v.values()), max(v.values())] for k, v in vars(traffic).items()}
    return {
        "layout": dict(c),
        "trainer_ranks": len(plan.sources),
        "receivers": sum(len(s.ranks) for s in held),
        "tensors_declared": sum(len(s.tensors) * len(s.ranks) for s in (*owned, *held)),
        "transfers": len(plan.transfers),
        "seconds_building_ranks": built - start,
        "seconds_planning": planned - built,
        "seconds_proving": time.perf_counter() - planned,
        "bytes_total": plan.nbytes,
        "received_over_held": ratio,
        "sent": [min(sent := traffic.sent()), max(sent)],
        "least_and_most_of_a_rank": extremes,
        "balance": balance(plan, traffic, c["world"] // c["pp"]),
        "buffers": {"packet_bytes": PACKET, "largest_layer_of_a_receiver": max(layers.values())},
        "critical_path": {"link": link, "seconds": seconds, "efficiency": efficiency},
        "seconds_by_nic_rate_and_efficiency": sensitivity,
        "lines": [*plan.summary().splitlines(), *traffic.lines()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--efficiency", type=float, default=0.7, help="share of a link's rate that transfers reach")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()},
        "model": "dsv4-pro, sizes of its config.json",
        "cases": {},
    }
    for name in options.cases:
        result["cases"][name] = found = case(name, options.efficiency)
        print(f"{name}: " + "\n  ".join(found["lines"]))
        for key in ("seconds_building_ranks", "seconds_planning", "seconds_proving", "received_over_held", "balance"):
            print(f"  {key}: {found[key]}")
        print(f"  critical path: {found['critical_path']}\n  buffers: {found['buffers']}")
        result["host_peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
