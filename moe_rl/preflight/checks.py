"""What a run needs of each node, and which of the nodes do not have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moe_rl.config import Config, ModelFacts, Problem
from moe_rl.config.host import resolve_device
from moe_rl.config.rules import checkpoint_bytes, disk_fix, most_checkpoints
from moe_rl.planner.plan import Plan
from moe_rl.units import size_text

from .node import GIB, NodeFacts

Row = tuple[str, str, str, str]
"""Rule, what, why, fix."""
SHM_SHARE = 0.95  # of what is free there, the most that Ray takes for its object store


@dataclass(frozen=True)
class Needs:
    """GiB: on each of a node's GPUs and of each node's memory (a value for each node), of /dev/shm, and of the disk;
    `disk_fix` says what would make that less."""

    gpus: int
    gpu_gib: Sequence[float]
    host_gib: Sequence[float]
    shm_gib: float
    disk_gib: float
    gpu_arch: str = ""
    cpu_arch: str = ""
    ports: tuple[int, ...] = ()
    disk_fix: str = "Free space or choose another --run-dir."

    @classmethod
    def of(cls, config: Config, facts: ModelFacts) -> Needs:
        """From the planner's peaks. Raises UserError where the layout cannot be laid out."""
        cluster, plan = config.cluster, Plan.of(config, facts)
        on_gpu = resolve_device(config.engine.device) == "cuda"
        width, gpu, host = config.world // config.layout.pp, plan.gpu_per_stage(), plan.host_per_stage()
        held = [
            {rank // width for rank in range(node * cluster.gpus_per_node, (node + 1) * cluster.gpus_per_node)}
            for node in range(cluster.nodes)
        ]
        kept = most_checkpoints(config, config.checkpoint.keep)
        return cls(
            gpus=cluster.gpus_per_node if on_gpu else 0,
            gpu_gib=[max(gpu[stage] for stage in stages) / GIB for stages in held],
            host_gib=[max(host[stage] for stage in stages) / GIB for stages in held],
            shm_gib=cluster.object_store_gib,
            disk_gib=kept * checkpoint_bytes(config, facts) / GIB,
            gpu_arch=cluster.gpu_arch if on_gpu else "",
            cpu_arch=cluster.cpu_arch,
            ports=(cluster.port,) if cluster.port else (),
            disk_fix=disk_fix(config),
        )


def problems(nodes: Sequence[NodeFacts], needs: Needs) -> list[Problem]:
    """Every node that lacks something, by name. `nodes` are in the order of their ranks."""
    found: list[Problem] = []
    for i, node in enumerate(nodes):
        for rule, what, why, fix in _lacks(node, needs, i):
            found.append(Problem(f"node.{rule}", f"node {node.name}: {what}", why, fix))
    return [*found, *_versions(nodes)]


def unfit(nodes: Sequence[NodeFacts], needs: Needs) -> list[str]:
    """Names of the nodes that lack something which most others have: the run can go on without these."""
    lacking = [node.name for i, node in enumerate(nodes) if any(_lacks(node, needs, i))]
    return lacking if 2 * len(lacking) < len(nodes) else []


def _lacks(node: NodeFacts, needs: Needs, i: int) -> Iterator[Row]:
    for part in (_devices, _room):
        yield from part(node, needs, i)
    yield from _links(node, i)


def _devices(node: NodeFacts, needs: Needs, i: int) -> Iterator[Row]:
    if needs.cpu_arch and node.cpu_arch != needs.cpu_arch:
        what = f"its processor is {node.cpu_arch}, cluster.cpu_arch {needs.cpu_arch}"
        yield "cpu_arch", what, "Packages and containers are built for one of them.", "Choose the --hw of these nodes."
    if len(node.gpus) < needs.gpus:
        what = f"it shows {len(node.gpus)} GPU(s), cluster.gpus_per_node is {needs.gpus}"
        yield (
            "gpus",
            what,
            "Each trainer rank has a GPU of its own.",
            "Look at nvidia-smi there, or leave the node out.",
        )
    for number, gpu in enumerate(node.gpus[: needs.gpus]):
        if needs.gpu_arch and gpu.arch != needs.gpu_arch:
            what = f"GPU {number} is {gpu.name} ({gpu.arch}), cluster.gpu_arch {needs.gpu_arch}"
            yield "gpu_kind", what, "Kernels and layout were chosen for that one.", "Choose the --hw of these nodes."
        if gpu.free_gib < needs.gpu_gib[i]:
            what = f"GPU {number} has {gpu.free_gib:.1f} GiB free, its rank needs {needs.gpu_gib[i]:.1f} GiB"
            fix = "End what else runs there; `moe-rl plan` lists what saves memory."
            yield "gpu_memory", what, "Another process holds it, or the plan does not fit this GPU.", fix


def _room(node: NodeFacts, needs: Needs, i: int) -> Iterator[Row]:
    if node.memory_gib < needs.host_gib[i]:
        what = f"{node.memory_gib:.1f} GiB of memory are free, the run takes {needs.host_gib[i]:.1f} GiB there"
        yield (
            "memory",
            what,
            "The kernel would kill a worker hours later.",
            "`moe-rl plan` lists what saves host memory.",
        )
    if node.shm_gib * SHM_SHARE < needs.shm_gib:
        what = f"/dev/shm has {node.shm_gib:.2f} GiB free, cluster.object_store_gib is {needs.shm_gib:g}"
        fix = (
            "Mount it larger (mount -o remount,size=...; --shm-size of a container), or lower cluster.object_store_gib."
        )
        yield "shm", what, "Ray keeps weights in flight there.", fix
    if node.disk_gib < needs.disk_gib:
        what = f"{size_text(node.disk_gib * GIB)} of disk are free for the run, its checkpoints take {size_text(needs.disk_gib * GIB)}"
        yield "disk", what, "checkpoint.keep stay while the next is written.", needs.disk_fix


def _links(node: NodeFacts, i: int) -> Iterator[Row]:
    for port, free in node.ports.items():
        if i == 0 and not free:
            what = f"TCP port {port} (cluster.port) is in use"
            yield "port", what, "The trainer ranks meet there.", "Set cluster.port=0, or end the process that holds it."
    if not node.marks:
        what = "it does not see the run directory's files"
        fix = "Choose a --run-dir on storage that every node mounts."
        yield "storage", what, "Every node writes its part of a checkpoint there.", fix
    if node.missing_interfaces:
        what = f"NCCL_SOCKET_IFNAME names {', '.join(node.missing_interfaces)}, which it does not have"
        yield "interface", what, "NCCL would not start there.", "Name an interface that all nodes have, or unset it."
    if node.unreachable:
        what = f"it cannot connect to {', '.join(node.unreachable)}"
        fix = "Look at firewall, routes and NCCL_SOCKET_IFNAME; leave the node out if it alone cannot."
        yield "reach", what, "NCCL connects every pair of nodes that share a group.", fix


def _versions(nodes: Sequence[NodeFacts]) -> Iterator[Problem]:
    """Nodes whose packages are not those of the most."""
    for name in nodes[0].versions:
        counts = Counter(node.versions.get(name) for node in nodes)
        usual = counts.most_common(1)[0][0]
        odd = [f"{node.name} has {node.versions.get(name)}" for node in nodes if node.versions.get(name) != usual]
        if odd:
            yield Problem(
                "node.versions",
                f"{name} is {usual} on most nodes, but {', '.join(odd)}",
                "Objects, weights and checkpoints cross between nodes.",
                "Use one environment, or one container image, on all of them.",
            )
