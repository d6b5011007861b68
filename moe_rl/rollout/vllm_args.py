"""vLLM's arguments for every node of every rollout replica. Pure and torch-free; vLLM itself is not imported.

A replica is one engine of TP x DP ranks with internal load balancing: the leader node serves all requests, the other nodes
run headless and find it by the data-parallel address and port. vLLM takes this form from what is given and what is not:

- A follower gives the first of its data-parallel ranks; the leader must not. Up to 0.27 a leader's start rank of 0 is
  ignored; from 0.28 any start rank, 0 too, turns on hybrid load balancing (external with one local rank), and followers are
  refused.
- A tensor-parallel group over several nodes is formed by --nnodes, which knows no data parallelism inside it.

Read from vLLM 0.25.1, 0.29.0 and 0.32.0 (engine/arg_utils.py); tests/test_vllm_judge.py has their own parsers judge it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_rl.config import Config, ModelFacts
from moe_rl.config.replicas import shape_fault
from moe_rl.errors import UserError

OLDEST, NEWEST = (0, 25), (0, 33)  # versions whose parser takes these arguments
NAMES = {
    "tensor_parallel_size": "--tensor-parallel-size",
    "enable_expert_parallel": "--enable-expert-parallel",
    "data_parallel_size": "--data-parallel-size",
    "data_parallel_size_local": "--data-parallel-size-local",
    "data_parallel_address": "--data-parallel-address",
    "data_parallel_rpc_port": "--data-parallel-rpc-port",
    "data_parallel_start_rank": "--data-parallel-start-rank",
    "master_addr": "--master-addr",
    "master_port": "--master-port",
}


@dataclass(frozen=True)
class Node:
    """What one node runs of one replica.

    `gpus` are the node's GPUs it takes, `ranks` the replica's data-parallel ranks among them (empty where a rank spans
    nodes and this is not its first). `engine` are fields of vLLM's AsyncEngineArgs; `headless` is `vllm serve`'s flag and
    the argument of create_engine_config.
    """

    address: str
    gpus: range
    ranks: range
    headless: bool
    engine: Mapping[str, Any]

    @property
    def argv(self) -> list[str]:
        """The same for the command line of `vllm serve`."""
        out = ["--headless"] if self.headless else []
        for name, value in self.engine.items():
            flag = NAMES.get(name, f"--{name.replace('_', '-')}")
            if isinstance(value, bool):
                out.append(flag if value else f"--no-{flag[2:]}")
            else:
                out += [flag, str(value)]
        return out


def replica_nodes(
    version: str,
    *,
    addresses: Sequence[str],
    gpus_per_node: int,
    replicas: int,
    tp: int,
    dp: int,
    ep: int,
    num_experts: int,
    port: int,
    options: Mapping[str, Any] | None = None,
) -> list[tuple[Node, ...]]:
    """The nodes of each replica, its leader first.

    Replicas are laid over the nodes in order, whole nodes to one replica or several replicas to a node. Each has a
    rendezvous of its own: the leader's address, and `port` plus its number among the replicas that the node leads.

    Args:
        version: vLLM's, as "0.29.0".
        addresses: one for each node, which the others can reach.
        gpus_per_node: GPUs of a node that rollouts may take.
        tp, dp: ranks of a replica are tp * dp.
        ep: ranks that the experts of a layer are spread over: 1, or tp * dp.
        num_experts: of the model, 0 for a dense one.
        port: the first TCP port to meet at.
        options: further fields of AsyncEngineArgs, given to every node alike.

    Raises:
        UserError: vLLM has no such form, or the nodes have not the GPUs.
    """
    _check_version(version)
    size = tp * dp
    if fault := shape_fault(tp, dp, ep, num_experts, gpus_per_node):
        raise UserError("rollout.layout", *fault)
    span = max(1, size // gpus_per_node)  # nodes of one replica
    if replicas * size > len(addresses) * gpus_per_node:
        raise UserError(
            "rollout.gpus",
            f"{replicas} replicas of tp {tp} * dp {dp} take {replicas * size} GPUs, {len(addresses)} nodes have"
            f" {len(addresses) * gpus_per_node}",
            "A replica's GPUs are its own.",
            "Lower rollout.replicas, rollout.tp or rollout.dp, or take more nodes.",
        )
    per_node = max(1, gpus_per_node // size)
    found = []
    for i in range(replicas):
        first = i * span if size >= gpus_per_node else i // per_node
        gpus = range(gpus_per_node) if size >= gpus_per_node else range(i % per_node * size, (i % per_node + 1) * size)
        found.append(_replica(addresses[first : first + span], gpus, tp, dp, ep, port + i % per_node, options or {}))
    return found


def _replica(
    addresses: Sequence[str], gpus: range, tp: int, dp: int, ep: int, port: int, options: Mapping[str, Any]
) -> tuple[Node, ...]:
    common: dict[str, Any] = {**options, "tensor_parallel_size": tp, "enable_expert_parallel": ep > 1}
    nodes = []
    local = len(gpus) // tp  # data-parallel ranks of a node
    for k, address in enumerate(addresses):
        engine, ranks = dict(common), range(k * local, (k + 1) * local)
        if local == 0:  # one tensor-parallel group over all of these nodes
            engine |= {"nnodes": len(addresses), "node_rank": k, "master_addr": addresses[0], "master_port": port}
            ranks = range(int(k == 0))
        elif dp > 1:
            engine |= {"data_parallel_size": dp, "data_parallel_size_local": local}
            engine |= {"data_parallel_address": addresses[0], "data_parallel_rpc_port": port}
            if k:
                engine["data_parallel_start_rank"] = k * local
        nodes.append(Node(address, gpus, ranks, k > 0, engine))
    return tuple(nodes)


def _check_version(version: str) -> None:
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        low, high = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
        raise UserError(
            "rollout.vllm_version",
            f"vLLM {version} is not one of {low} to {high}",
            "What its arguments mean changes between versions: one that is not known may start another form silently.",
            "Install a version of that range.",
        )


def kernel_options(config: Config, facts: ModelFacts) -> dict[str, str]:
    """The fields of AsyncEngineArgs that choose kernels: for quantised weights alone, and where they are not `auto`."""
    rollout = config.rollout
    chosen = {
        "moe_backend": rollout.moe_backend if facts.experts_format else "auto",
        "linear_backend": rollout.linear_backend if facts.linears_format else "auto",
    }
    return {name: value for name, value in chosen.items() if value != "auto"}
