"""What this machine offers, asked without torch: GPUs, ports, disk."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import socket
from pathlib import Path


def gpu_count() -> int:
    """NVIDIA devices of this machine that CUDA_VISIBLE_DEVICES does not hide."""
    devices = [d for d in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", d.name)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(devices)
    return min(len(devices), len([v for v in visible.split(",") if v.strip() not in ("", "-1")]))


def visible_gpus(numbers: range) -> str:
    """The CUDA_VISIBLE_DEVICES of a process that may use some of this process's GPUs, which are numbered from 0."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible is not None else None
    return ",".join(names[i] if names else str(i) for i in numbers)


def resolve_device(device: str) -> str:
    """``cpu`` or ``cuda`` for a value of engine.device; ``auto`` is cuda where a GPU is present."""
    if device == "auto":
        return "cuda" if gpu_count() else "cpu"
    return device


def has_package(name: str) -> bool:
    """Whether a package can be imported here; it is not imported."""
    return importlib.util.find_spec(name) is not None


def port_is_free(port: int) -> bool:
    """Whether a process of this machine may listen on a TCP port."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that only lingers in TIME_WAIT is free
        try:
            s.bind(("", port))
        except OSError:
            return False
    return True


def free_port(range_file: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> int:
    """A TCP port that nobody listens on, for a process that will in a moment.

    It lies below those that the system gives to outgoing connections (`range_file`), of which one could take it before
    the process listens; two that ask at once are told apart by chance, one in ten thousand. Ray's worker ports end at
    19999. Where that leaves too few, the system chooses.
    """
    try:
        first_outgoing = int(range_file.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_outgoing = 0
    ports = range(20000, first_outgoing)
    if len(ports) >= 1000:
        for port in random.SystemRandom().sample(ports, 100):
            if port_is_free(port):
                return port
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


def free_bytes(path: Path) -> int:
    """Bytes free on the file system that holds `path` or will hold it."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def has_cpu_flag(flag: str) -> bool:
    """Whether the kernel lists a feature (``amx_tile``) of this machine's CPU."""
    try:
        return f" {flag}" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
