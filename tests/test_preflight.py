"""Nodes that a run cannot use: each case ends in one message with the node's name; docs/wrong_input.md holds the table.

What cannot be made here (GPUs, other processors, other versions) is injected as facts; ports, shared memory, full disks, the
run directory and connections are real. `python -m tests.test_preflight` rewrites the table.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from moe_rl.config import load_config
from moe_rl.config.rules import disk_fix
from moe_rl.models.family import read_facts
from moe_rl.preflight import Needs, NodeFacts, examine, listener, problems, unfit, unreachable
from moe_rl.preflight.node import Gpu

DOC = Path(__file__).parent.parent / "docs" / "wrong_input.md"
BEGIN, END = "<!-- written by tests/test_preflight.py -->", "<!-- end of nodes -->"
H100 = Gpu("NVIDIA H100 80GB HBM3", "sm90", 79.0)
VERSIONS = {"python": "3.12.11", "torch": "2.11.0", "ray": "2.60.0", "megatron-core": "0.19.2"}
GOOD = NodeFacts("n1", "x86_64", VERSIONS, (H100,) * 8, 2000.0, 900.0, 60000.0, True, {29500: True})
NODES = [replace(GOOD, name=f"n{i}") for i in range(64)]
NEEDS = Needs(
    gpus=8,
    gpu_gib=[60.0] * 64,
    host_gib=[520.0] * 2 + [365.0] * 62,  # stage 0, on two nodes, has most layers
    shm_gib=32.0,
    disk_gib=8790.0,
    gpu_arch="sm90",
    cpu_arch="x86_64",
    ports=(29500,),
)


@dataclass(frozen=True)
class Case:
    """`change` breaks node `number` of 64 good ones."""

    wrong: str
    rule: str
    change: Callable[[NodeFacts], NodeFacts]
    number: int = 9


def with_gpu(**changes: object) -> Callable[[NodeFacts], NodeFacts]:
    return lambda node: replace(node, gpus=(*node.gpus[:3], replace(H100, **changes), *node.gpus[4:]))


def with_version(name: str, value: str) -> Callable[[NodeFacts], NodeFacts]:
    return lambda node: replace(node, versions={**node.versions, name: value})


def having(**changes: object) -> Callable[[NodeFacts], NodeFacts]:
    return lambda node: replace(node, **changes)


CASES = [
    Case("a GPU that fell off the bus", "node.gpus", having(gpus=(H100,) * 7)),
    Case("a node without GPUs", "node.gpus", having(gpus=())),
    Case("a GPU of another kind", "node.gpu_kind", with_gpu(name="NVIDIA A100-SXM4-80GB", arch="sm80")),
    Case("a GPU that someone else uses", "node.gpu_memory", with_gpu(free_gib=11.5)),
    Case("a node of the other processor", "node.cpu_arch", having(cpu_arch="aarch64")),
    Case("too little host memory for the optimizer", "node.memory", having(memory_gib=256.0)),
    Case("too little host memory for the first stage alone", "node.memory", having(memory_gib=450.0), number=0),
    Case("Docker's /dev/shm of 64 MiB", "node.shm", having(shm_gib=0.0625)),
    Case("a full disk", "node.disk", having(disk_gib=3.0)),
    Case("a run directory on a node's own disk", "node.storage", having(marks=False)),
    Case("a port in use on the first node", "node.port", having(ports={29500: False}), number=0),
    Case("a firewall", "node.reach", having(unreachable=("n3", "n4"))),
    Case("a network interface that is not there", "node.interface", having(missing_interfaces=("ib0",))),
    Case("another torch", "node.versions", with_version("torch", "2.13.0")),
    Case("another Ray", "node.versions", with_version("ray", "2.50.0")),
    Case("another Python", "node.versions", with_version("python", "3.12.3")),
    Case("a package that is missing", "node.versions", with_version("megatron-core", "absent")),
]


def message(case: Case) -> str:
    nodes = list(NODES)
    nodes[case.number] = case.change(nodes[case.number])
    found = problems(nodes, NEEDS)
    assert [p.rule for p in found] == [case.rule]
    return str(found[0].error())


def table_row(case: Case) -> str:
    return f"| {case.wrong} | {message(case).split(' [')[0]} | `{case.rule}` | 2 |"


def test_good_nodes_are_good():
    assert problems(NODES, NEEDS) == []
    elsewhere = [replace(n, ports={29500: False}) for n in NODES[1:]]  # the ranks meet on the first node alone
    assert problems([NODES[0], *elsewhere], NEEDS) == []


@pytest.mark.parametrize("case", CASES, ids=[c.wrong for c in CASES])
def test_a_node_that_cannot_take_part_is_named(case: Case):
    text = message(case)
    assert re.search(rf"\bn{case.number}\b", text) and "  why: " in text and "  fix: " in text
    assert table_row(case) in DOC.read_text(), "run python -m tests.test_preflight"


def test_several_nodes_are_all_named():
    nodes = [replace(n, shm_gib=1.0) if i in (3, 40) else n for i, n in enumerate(NODES)]
    assert [p.what.split(":")[0] for p in problems(nodes, NEEDS)] == ["node n3", "node n40"]
    assert unfit(nodes, NEEDS) == ["n3", "n40"]  # the job goes on without them
    assert unfit([replace(n, shm_gib=1.0) for n in NODES], NEEDS) == []  # what all lack, no other node has


def test_needs_of_the_reference_run():
    """Stage 0 has most layers, so its two nodes need most host memory (verl PR #8383 measured 558 GB there)."""
    config = load_config("dsv4-pro", ["cluster.port=29500"], hw="h100")
    needs = Needs.of(config, read_facts(config.model.path))
    assert len(needs.host_gib) == 64 and needs.host_gib[0] == needs.host_gib[1] == max(needs.host_gib)
    assert needs.host_gib[0] > 1.2 * needs.host_gib[5] and (needs.gpus, needs.shm_gib) == (8, 32.0)
    assert (needs.gpu_arch, needs.cpu_arch, needs.ports) == ("sm90", "x86_64", (29500,))
    full = problems([replace(GOOD, disk_gib=0.0)], needs)
    assert [p.rule for p in full] == ["node.disk"] and full[0].fix == disk_fix(config)
    assert "optimizer" not in full[0].fix  # Pro saves none


# ------------------------------------------------------------------------------------------------------- real machines
TINY = Needs(0, [0.0], [0.001], shm_gib=0.01, disk_gib=0.01)


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {made.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def rules(node: NodeFacts, needs: Needs = TINY) -> list[str]:
    return [p.rule for p in problems([node], needs)]


def test_this_machine_is_described(tmp_path: Path):
    (tmp_path / "mark").touch()
    node = examine("here", tmp_path, "mark")
    assert rules(node) == [] and node.versions["python"] == sys.version.split()[0]
    assert rules(examine("here", tmp_path, "other")) == ["node.storage"]


def test_a_port_that_is_taken(tmp_path: Path):
    (tmp_path / "mark").touch()
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert rules(examine("here", tmp_path, "mark", (port,))) == ["node.port"]
    assert rules(examine("here", tmp_path, "mark", (port,))) == []


def test_shared_memory_that_is_too_small(tmp_path: Path):
    with small_disk(tmp_path / "shm", "8m") as shm:
        (tmp_path / "mark").touch()
        assert rules(examine("here", tmp_path, "mark", shm=shm)) == ["node.shm"]


def test_a_disk_that_is_full(tmp_path: Path):
    with small_disk(tmp_path / "disk", "16m") as disk:
        (disk / "mark").touch()
        assert rules(examine("here", disk, "mark")) == []
        (disk / "data").write_bytes(bytes(12 * 2**20))
        assert rules(examine("here", disk, "mark")) == ["node.disk"]


def test_what_cannot_be_reached():
    address, server = listener()
    assert unreachable({"n1": address}) == ()
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    assert unreachable({"n1": address}, timeout_s=1.0) == ("n1",)


def test_interfaces_of_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for setting, missing in (("lo", ()), ("=lo,ib7", ("ib7",)), ("^docker", ()), ("ib", ("ib",))):
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", setting)
        assert examine("here", tmp_path, "mark").missing_interfaces == missing


def main() -> None:
    before, rest = DOC.read_text().split(BEGIN)
    table = ["| what is wrong | message | rule | exit code |", "|---|---|---|---|", *map(table_row, CASES)]
    DOC.write_text("\n".join([before + BEGIN, *table, END]) + rest.split(END)[1])


if __name__ == "__main__":
    main()
