"""One node of a run's Ray cluster, from its start in a batch job to the job's end. `moe-rl node` runs it on every node.

The nodes and the driver meet in a directory that all of them see (MOE_RL_EXCHANGE, below the run's): the head writes its
address there, a node that cannot take part writes why, and the job writes `stop`. Several nodes on one address are told
apart by their names and by the ports that Ray picks for each.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from moe_rl.config.host import free_port
from moe_rl.errors import MoeRLError, RunFailed, UserError

from . import JANITOR

EXCHANGE, NODES, HEAD = "MOE_RL_EXCHANGE", "MOE_RL_NODES", "MOE_RL_HEAD"
PACKAGES = ("moe-rl", "torch", "megatron-core", "transformers", "ray", "numpy", "vllm", "transformer-engine")
POLL_S, LIMIT_S, STOP_S = 0.2, 600.0, 10.0
SCRATCH = "moe_rl_"
LONGEST_BASE = 24  # Ray adds some 80 characters for its sockets, whose paths have 107 at most


def versions() -> dict[str, str]:
    """What must be equal on every node: Python, and the packages that exchange objects or weights."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def make_scratch() -> Path:
    """A private temporary directory whose path is short enough for Ray's sockets."""
    base = os.path.realpath(tempfile.gettempdir())
    return Path(tempfile.mkdtemp(prefix=SCRATCH, dir=base if len(base) <= LONGEST_BASE else "/tmp"))


def start_janitor(scratch: Path) -> subprocess.Popen:
    """The process that removes `scratch` and ends its users when this one is gone."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(JANITOR), str(scratch)],
        stdin=subprocess.PIPE,
        start_new_session=True,  # what ends this process's group is not to end it
    )


def serve(cpus: int, gpus: int, object_store_gib: float) -> None:
    """Be this node of the cluster until the job says `stop` or a signal does.

    Raises:
        UserError: this node has other versions than the head.
        RunFailed: Ray does not start here, or ends by itself.
    """
    exchange, name = Path(os.environ[EXCHANGE]), os.environ.get("SLURMD_NODENAME") or platform.node()
    stopped = _Stop(exchange / "stop")
    scratch = make_scratch()
    janitor = start_janitor(scratch)
    ray = None
    try:
        head = name == os.environ[HEAD]
        place = _lead(exchange, name) if head else _follow(exchange, name, stopped)
        if place is None:
            return
        resources = ["--num-cpus", cpus, "--num-gpus", gpus, "--object-store-memory", int(object_store_gib * 2**30)]
        fixed = ["--min-worker-port", 0, "--max-worker-port", 0, "--dashboard-agent-listen-port", 0, "--block"]
        command = ["start", *place, "--node-name", name, "--temp-dir", scratch, *resources, *fixed]
        with (exchange / f"ray-{name}.log").open("w") as log:
            ray = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", *map(str, command)], stdout=log, stderr=log
            )
        while not stopped():
            if ray.poll() is not None:
                shutil.copytree(scratch / "session_latest" / "logs", exchange / f"ray-{name}", dirs_exist_ok=True)
                raise RunFailed(
                    "node.ray", f"Ray ended on node {name} (exit code {ray.returncode})", "", f"See {log.name}."
                )
            time.sleep(POLL_S)
    except MoeRLError as error:
        _write(exchange / f"{name}.failed", json.dumps([type(error).__name__, *error.__reduce__()[1]]))
        raise
    finally:
        if ray is not None and ray.poll() is None:
            ray.terminate()
            try:
                ray.wait(STOP_S)
            except subprocess.TimeoutExpired:
                ray.kill()
        janitor.communicate()


class _Stop:
    """Whether this node is to end: its job wrote the file, or a signal came."""

    def __init__(self, file: Path) -> None:
        self.file, self.asked = file, False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True

    def __call__(self) -> bool:
        return self.asked or self.file.exists()


def _lead(exchange: Path, name: str) -> list[Any]:
    port = free_port()
    address = f"{own_address()}:{port}"
    _write(exchange / "head.json", json.dumps({"address": address, "name": name, "versions": versions()}))
    return ["--head", "--port", port, "--include-dashboard", "false"]


def own_address() -> str:
    """The IP address that other machines reach this one by, as Ray finds it: nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address of documentation (RFC 5737): only the route counts
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def _follow(exchange: Path, name: str, stopped: _Stop) -> list[Any] | None:
    while not (file := exchange / "head.json").is_file():
        if stopped():
            return None
        time.sleep(POLL_S)
    head = json.loads(file.read_text())
    check_versions({head["name"]: head["versions"], name: versions()})
    while not listens(head["address"]):
        if stopped():
            return None
        time.sleep(POLL_S)
    return ["--address", head["address"]]


def listens(address: str) -> bool:
    """Whether a TCP connection to HOST:PORT is accepted."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError:
        return False
    return True


def check_versions(nodes: dict[str, dict[str, str]]) -> None:
    """Raise UserError if a node's versions are not those of the first one."""
    first, *others = nodes
    for name in others:
        differ = [f"{p} {nodes[name].get(p)} and {v}" for p, v in nodes[first].items() if nodes[name].get(p) != v]
        if differ:
            raise UserError(
                "node.versions",
                f"nodes {name} and {first} have different versions: {'; '.join(differ)}",
                "Objects, weights and checkpoints cross between nodes.",
                "Use one environment, or one container image, on all of them.",
            )


def _write(file: Path, text: str) -> None:
    work = file.with_name(f".{file.name}")
    work.write_text(text)
    work.replace(file)


def meet(exchange: Path) -> str:
    """The address of the head, once it listens. Raises what a node failed with, or RunFailed after LIMIT_S."""
    deadline, file = time.monotonic() + LIMIT_S, exchange / "head.json"
    while True:
        raise_failed(exchange)
        if file.is_file() and listens(address := str(json.loads(file.read_text())["address"])):
            return address
        if time.monotonic() > deadline:
            raise RunFailed("node.head", f"the head node of {exchange} does not answer after {LIMIT_S:.0f} s")
        time.sleep(POLL_S)


def raise_failed(exchange: Path) -> None:
    """Raise what the first node that failed wrote, if one did."""
    kinds = {"UserError": UserError, "RunFailed": RunFailed}
    for file in sorted(exchange.glob("*.failed")):
        kind, *arguments = json.loads(file.read_text())
        raise kinds[kind](*arguments)
