"""vLLM's arguments: what each node of a replica is given, and what is refused. tests/test_vllm_judge.py has vLLM judge."""

from __future__ import annotations

import shlex

import pytest

from moe_rl.config import load_config
from moe_rl.config.kernels import kernel_problems
from moe_rl.config.replicas import nodes_of_replica, parts_on
from moe_rl.errors import UserError
from moe_rl.models.family import read_facts
from moe_rl.rollout.vllm_args import kernel_options, replica_nodes

VERSIONS = ["0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"]
PRO = {"tp": 8, "dp": 8, "ep": 64, "num_experts": 384, "gpus_per_node": 8}
GB200 = {"tp": 1, "dp": 32, "ep": 32, "num_experts": 384, "gpus_per_node": 4}


def nodes(version="0.29.0", replicas=1, count=1, **shape):
    shape = {"tp": 1, "dp": 1, "ep": 1, "num_experts": 8, "gpus_per_node": 8, "port": 29700} | shape
    return replica_nodes(version, addresses=[f"10.0.0.{i}" for i in range(count)], replicas=replicas, **shape)


# One data-parallel rank a node is where a leader's start rank of 0 would make vLLM 0.28 and later external.
GOLDEN = {
    "Pro on H100: tp8 dp8 over eight nodes": (
        dict(PRO, count=8),
        {
            0: "--tensor-parallel-size 8 --enable-expert-parallel --data-parallel-size 8 --data-parallel-size-local 1"
            " --data-parallel-address 10.0.0.0 --data-parallel-rpc-port 29700",
            1: "--headless --tensor-parallel-size 8 --enable-expert-parallel --data-parallel-size 8"
            " --data-parallel-size-local 1 --data-parallel-address 10.0.0.0 --data-parallel-rpc-port 29700"
            " --data-parallel-start-rank 1",
            7: "--headless --tensor-parallel-size 8 --enable-expert-parallel --data-parallel-size 8"
            " --data-parallel-size-local 1 --data-parallel-address 10.0.0.0 --data-parallel-rpc-port 29700"
            " --data-parallel-start-rank 7",
        },
    ),
    "Pro on GB200: dp32 over eight nodes": (
        dict(GB200, count=8),
        {
            0: "--tensor-parallel-size 1 --enable-expert-parallel --data-parallel-size 32 --data-parallel-size-local 4"
            " --data-parallel-address 10.0.0.0 --data-parallel-rpc-port 29700",
            7: "--headless --tensor-parallel-size 1 --enable-expert-parallel --data-parallel-size 32"
            " --data-parallel-size-local 4 --data-parallel-address 10.0.0.0 --data-parallel-rpc-port 29700"
            " --data-parallel-start-rank 28",
        },
    ),
    "one node, dp2 x ep2": (
        dict(dp=2, ep=2, gpus_per_node=2),
        {
            0: "--tensor-parallel-size 1 --enable-expert-parallel --data-parallel-size 2 --data-parallel-size-local 2"
            " --data-parallel-address 10.0.0.0 --data-parallel-rpc-port 29700"
        },
    ),
    "one GPU": (dict(gpus_per_node=1), {0: "--tensor-parallel-size 1 --no-enable-expert-parallel"}),
    "a tensor-parallel group over two nodes": (
        dict(tp=16, count=2),
        {
            1: "--headless --tensor-parallel-size 16 --no-enable-expert-parallel --nnodes 2 --node-rank 1"
            " --master-addr 10.0.0.0 --master-port 29700"
        },
    ),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", GOLDEN)
def test_golden(case, version):
    shape, golden = GOLDEN[case]
    (replica,) = nodes(version, **shape)
    assert len(replica) == shape.get("count", 1)
    assert {k: shlex.join(replica[k].argv) for k in golden} == golden
    assert [n.headless for n in replica] == [False] + [True] * (len(replica) - 1)
    assert "data_parallel_start_rank" not in replica[0].engine


@pytest.mark.parametrize(("shape", "count", "replicas"), [(PRO, 64, 8), (GB200, 64, 8)])
def test_every_rank_runs_once_and_every_replica_meets_alone(shape, count, replicas):
    found = nodes(count=count, replicas=replicas, **shape)
    assert [n.address for replica in found for n in replica] == [f"10.0.0.{i}" for i in range(count)]
    for replica in found:
        assert [rank for n in replica for rank in n.ranks] == list(range(shape["dp"]))
        assert all(n.engine.get("data_parallel_start_rank", 0) == n.ranks[0] for n in replica)
    meeting = {(r[0].engine["data_parallel_address"], r[0].engine["data_parallel_rpc_port"]) for r in found}
    assert len(meeting) == replicas


def test_small_replicas_share_a_node():
    found = nodes(count=2, replicas=7, dp=2, ep=2)
    assert [(r[0].address, list(r[0].gpus)) for r in found[3:6]] == [
        ("10.0.0.0", [6, 7]),
        ("10.0.0.1", [0, 1]),
        ("10.0.0.1", [2, 3]),
    ]
    meeting = {(r[0].engine["data_parallel_address"], r[0].engine["data_parallel_rpc_port"]) for r in found}
    assert len(meeting) == 7


@pytest.mark.parametrize(
    ("shape", "rule", "says"),
    [
        ({"version": "0.24.0"}, "rollout.vllm_version", "0.25 to 0.33"),
        ({"version": "1.0.0"}, "rollout.vllm_version", "0.25 to 0.33"),
        ({"tp": 2, "dp": 4, "ep": 4}, "rollout.layout", "all ranks of a replica"),
        ({"dp": 8, "ep": 8, "num_experts": 0}, "rollout.layout", "no experts"),
        ({"tp": 3}, "rollout.layout", "divisor of 8"),
        ({"dp": 12, "count": 2}, "rollout.layout", "nodes of 8"),
        ({"tp": 16, "dp": 2, "count": 4}, "rollout.layout", "over several nodes"),
        ({"tp": 6, "dp": 4, "count": 3}, "rollout.layout", "torn"),
        ({"dp": 16, "num_experts": 0, "count": 2}, "rollout.layout", "dense"),
        ({"replicas": 9}, "rollout.gpus", "take 9 GPUs"),
    ],
)
def test_what_vllm_has_no_form_for_is_refused(shape, rule, says):
    with pytest.raises(UserError) as error:
        nodes(**shape)
    assert error.value.rule == rule and says in str(error.value)


def test_kernels_are_chosen_for_quantised_weights_alone():
    config = load_config("dsv4-pro", hw="h100")
    assert kernel_options(config, read_facts(config.model.path)) == {
        "moe_backend": "marlin",
        "linear_backend": "deep_gemm",
    }
    assert kernel_options(config, read_facts(load_config("qwen3-moe-tiny").model.path)) == {}


REPLICAS = {  # overrides of dsv4-pro on 64 nodes of 8 H100 -> the rule that they break
    "eight nodes each, on all nodes": ("tp=8 dp=8 ep=64 replicas=8", ""),
    "half a node each": ("tp=4 dp=1 ep=4 replicas=64", ""),
    "a tensor-parallel group over two nodes": ("tp=16", ""),
    "one replica too many": ("tp=8 dp=8 ep=64 replicas=9", "rollout.gpus"),
    "a node and a half": ("dp=12 ep=12", "rollout.layout"),
    "three of eight": ("tp=3", "rollout.layout"),
    "groups over two nodes, twice": ("tp=16 dp=2 ep=32", "rollout.layout"),
    "experts over some ranks": ("tp=8 dp=8 ep=8", "rollout.layout"),
}


@pytest.mark.parametrize("case", REPLICAS)
def test_a_replica_that_the_nodes_cannot_hold_is_told_before_a_node_is_taken(case):
    shape, rule = REPLICAS[case]
    keys = [f"rollout.{key}" for key in shape.split()]
    config = load_config("dsv4-pro", ["rollout.engine=vllm", "data.prompts_per_step=64", *keys], hw="h100")
    facts = read_facts(config.model.path)
    found = [name for name, *_ in kernel_problems(config, facts) if name in ("rollout.layout", "rollout.gpus")]
    assert found == [rule] * bool(rule)
    span, world = nodes_of_replica(config), config.world
    parts = [part for node in range(64) for part in parts_on(config, node)]
    assert sorted(parts) == [divmod(i, span) for i in range(config.rollout.replicas * span)]
    if not rule:  # what vLLM is told agrees with where the parts are
        shape = {"tp": config.rollout.tp, "dp": config.rollout.dp, "ep": config.rollout.ep}
        found = nodes(count=64, replicas=config.rollout.replicas, **shape, num_experts=384)
        assert {len(replica) for replica in found} == {span} and world == 512


@pytest.mark.parametrize("nodes_", [1, 2])
def test_on_one_cpu_machine_a_replica_has_as_many_ranks_as_one_likes(nodes_):
    keys = ["rollout.engine=vllm", "rollout.dp=3", "rollout.ep=3", "cluster.gpus_per_node=2", f"cluster.nodes={nodes_}"]
    config = load_config("qwen3-moe-tiny", keys)
    found = [name for name, *_ in kernel_problems(config, read_facts(config.model.path))]
    assert ("rollout.layout" in found) == (nodes_ == 2)
