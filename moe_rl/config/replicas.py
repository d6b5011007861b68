"""Which shapes a vLLM replica can have, and over how many nodes it lies. Torch-free."""

from __future__ import annotations

from .schema import Config


def nodes_of_replica(config: Config) -> int:
    """Nodes that one replica lies on in a cluster: whole ones, or a part of one."""
    rollout, per_node = config.rollout, config.cluster.gpus_per_node
    return max(1, rollout.tp * rollout.dp // per_node) if rollout.engine == "vllm" else 1


def parts_on(config: Config, node: int) -> list[tuple[int, int]]:
    """(replica, which of its nodes it is) of what runs on a node: they are dealt to the nodes in turn."""
    span = nodes_of_replica(config)
    return [divmod(i, span) for i in range(node, config.rollout.replicas * span, config.cluster.nodes)]


def part_name(replica: int, part: int) -> str:
    """The worker on one of a replica's nodes; the first is its leader, and has the replica's own name."""
    return f"rollout_{replica}_{part}" if part else f"rollout_{replica}"


def shape_fault(tp: int, dp: int, ep: int, num_experts: int, gpus_per_node: int) -> tuple[str, str, str] | None:
    """What, why and how to fix it where vLLM has no form of such a replica on nodes of `gpus_per_node`, or None.

    `num_experts` is 0 for a dense model; ranks of a replica are tp * dp.
    """
    size = tp * dp
    if ep not in (1, size):
        what = f"rollout.ep is {ep} with rollout.tp {tp} * rollout.dp {dp} = {size}"
        why, fix = "vLLM spreads experts over all ranks of a replica or over none.", f"Set rollout.ep={size}, or 1."
    elif ep > 1 and not num_experts:
        what, why = f"rollout.ep is {ep}, but the model has no experts", "There is nothing to spread."
        fix = "Set rollout.ep=1."
    elif size >= gpus_per_node and size % gpus_per_node or size < gpus_per_node and gpus_per_node % size:
        what = f"a replica of rollout.tp {tp} * rollout.dp {dp} = {size} GPUs does not fit nodes of {gpus_per_node}"
        why = "Every node of a replica gives it the same number of GPUs."
        fix = f"Use a multiple or a divisor of {gpus_per_node}."
    elif tp > gpus_per_node and dp > 1:
        what = f"rollout.tp is {tp} with rollout.dp {dp}, and a node has {gpus_per_node} GPUs"
        why = "vLLM has no tensor-parallel group over several nodes inside a data-parallel rank."
        fix = f"Set rollout.tp={gpus_per_node} or less, or rollout.dp=1."
    elif tp <= gpus_per_node and gpus_per_node % tp:
        what = f"rollout.tp {tp} does not divide the {gpus_per_node} GPUs of a node"
        why, fix = "A group would be torn in two.", "Use a divisor."
    elif dp > 1 and size > gpus_per_node and not num_experts:
        what = f"rollout.dp is {dp} over {size // gpus_per_node} nodes, but the model has no experts"
        why = "vLLM makes independent engines of a dense model's data-parallel ranks, and fails over several nodes."
        fix = "Set rollout.dp=1 and more rollout.replicas."
    else:
        return None
    return what, why, fix
