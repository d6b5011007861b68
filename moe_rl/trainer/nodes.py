"""Preflight on the nodes of a cluster: each is asked by a process of its own there, this machine without one."""

from __future__ import annotations

import os
import platform
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from moe_rl.config import ModelFacts
from moe_rl.config.problem import raise_all
from moe_rl.launch.node import EXCHANGE
from moe_rl.preflight import Needs, NodeFacts, examine, listener, problems, unfit, unreachable
from moe_rl.trainer.placement import Cluster, living_nodes

ANSWER_S = 120.0
UNFIT = "unfit"  # the nodes that the batch job leaves out of its next start


class Probe:
    """What asks a node, in a process that runs there."""

    def __init__(self) -> None:
        self.address, self.server = listener()

    def listens_at(self) -> str:
        return self.address

    def examine(self, name: str, run_dir: str, mark: str, ports: tuple[int, ...]) -> NodeFacts:
        return examine(name, Path(run_dir), mark, ports)

    def unreachable(self, addresses: dict[str, str]) -> tuple[str, ...]:
        return unreachable(addresses)


def check_nodes(cluster: Cluster, facts: ModelFacts, run_dir: Path) -> None:
    """Raise one UserError that names every node and what it lacks; nothing of the run has touched a GPU by then."""
    needs, run_dir = Needs.of(cluster.config, facts), run_dir.absolute()
    with tempfile.NamedTemporaryFile(dir=run_dir, prefix=".seen-") as mark:
        asked = (str(run_dir), os.path.basename(mark.name), needs.ports)
        if cluster.session:  # all ranks are here, so the room of all nodes is looked for here
            needs = replace(needs, host_gib=[sum(needs.host_gib)])
            found = [examine(platform.node(), run_dir, *asked[1:])]
        else:
            found = _ask_all(cluster, asked)
            if EXCHANGE in os.environ and (lacking := unfit(found, needs)):
                Path(os.environ[EXCHANGE], UNFIT).write_text("\n".join(lacking) + "\n")
    raise_all(problems(found, needs))


def _ask_all(cluster: Cluster, asked: tuple[Any, ...]) -> list[NodeFacts]:
    names, ids = list(dict.fromkeys(cluster.node_of(slot) for slot in range(cluster.config.world))), living_nodes()
    where = {name: node for node, name in ids.items()}
    probes = {}
    for name in names:
        strategy = NodeAffinitySchedulingStrategy(where[name], soft=False)
        probes[name] = ray.remote(Probe).options(num_cpus=0, scheduling_strategy=strategy).remote()
    try:
        addresses = dict(zip(names, _all(p.listens_at.remote() for p in probes.values()), strict=True))
        found = _all(probes[name].examine.remote(name, *asked) for name in names)
        cut_off = _all(p.unreachable.remote(addresses) for p in probes.values())
    finally:
        for probe in probes.values():
            ray.kill(probe)
    return [replace(node, unreachable=others) for node, others in zip(found, cut_off, strict=True)]


def _all(references: Any) -> list[Any]:
    return ray.get(list(references), timeout=ANSWER_S)
