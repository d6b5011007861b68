"""The facts of one node, asked of its kernel and driver."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from moe_rl.config import host
from moe_rl.launch.node import own_address, versions

GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi describes it; `arch` is that of cluster.gpu_arch (sm90)."""

    name: str
    arch: str
    free_gib: float


@dataclass(frozen=True)
class NodeFacts:
    """One node. Sizes are in GiB and free; `marks` says whether the mark in the run directory was read there, `ports` maps
    a port that the run asks for to whether it is free, `missing_interfaces` are those of NCCL_SOCKET_IFNAME that are not.
    """

    name: str
    cpu_arch: str
    versions: Mapping[str, str]
    gpus: tuple[Gpu, ...]
    memory_gib: float
    shm_gib: float
    disk_gib: float
    marks: bool
    ports: Mapping[int, bool] = field(default_factory=dict)
    missing_interfaces: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()


def examine(name: str, run_dir: Path, mark: str, ports: tuple[int, ...] = (), shm: Path = SHARED_MEMORY) -> NodeFacts:
    """This node's facts. `mark` is a file that the driver wrote into the run directory."""
    return NodeFacts(
        name=name,
        cpu_arch=platform.machine(),
        versions=versions(),
        gpus=_gpus() if host.gpu_count() else (),
        memory_gib=psutil.virtual_memory().available / GIB,
        shm_gib=shutil.disk_usage(shm).free / GIB,
        disk_gib=host.free_bytes(run_dir) / GIB,
        marks=(run_dir / mark).is_file(),
        ports={port: host.port_is_free(port) for port in ports},
        missing_interfaces=_missing_interfaces(os.environ.get("NCCL_SOCKET_IFNAME", "")),
    )


def _gpus() -> tuple[Gpu, ...]:
    query = "--query-gpu=name,compute_cap,memory.free"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [f"--id={visible}"] if visible else []
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", *chosen]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()]
    return tuple(Gpu(name, f"sm{cap.replace('.', '')}", float(free) / 1024) for name, cap, free in rows)


def _missing_interfaces(setting: str) -> tuple[str, ...]:
    """Names in NCCL_SOCKET_IFNAME (a list of prefixes, ``=`` for whole names, ``^`` for what to avoid) without a match."""
    if not setting or setting.startswith("^"):
        return ()
    exact, there = setting.startswith("="), [name for _, name in socket.if_nameindex()]
    wanted = setting.removeprefix("=").split(",")
    return tuple(w for w in wanted if not any(name == w or (not exact and name.startswith(w)) for name in there))


def listener() -> tuple[str, socket.socket]:
    """An address that other nodes can try to reach, and the socket that answers it until it is closed."""
    server = socket.create_server(("", 0), backlog=1024)

    def answer() -> None:
        while True:
            try:
                server.accept()[0].close()
            except OSError:
                return

    threading.Thread(target=answer, daemon=True).start()
    return f"{own_address()}:{server.getsockname()[1]}", server


def unreachable(addresses: Mapping[str, str], timeout_s: float = 5.0) -> tuple[str, ...]:
    """Of the nodes (name -> host:port) those that take no TCP connection from here, as NCCL's start-up makes them."""
    failed = []
    for name, address in addresses.items():
        where, _, port = address.rpartition(":")
        try:
            socket.create_connection((where, int(port)), timeout=timeout_s).close()
        except OSError:
            failed.append(name)
    return tuple(failed)
