"""A batch job as text: the template that also runs as it is (train.sbatch), with a run's sizes written into it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from moe_rl.config import Config, ModelFacts
from moe_rl.config.environment import VARIABLES
from moe_rl.config.host import resolve_device
from moe_rl.config.layout import resolve_stages
from moe_rl.config.replicas import part_name, parts_on
from moe_rl.errors import RunFailed, UserError
from moe_rl.planner.report import rank_role

TEMPLATE = Path(__file__).parent / "train.sbatch"
BEGIN, END = "# settings\n", "# end of settings\n"


def settings(config: Config, arguments: Sequence[str]) -> str:
    """The job's sizes as assignments of the shell. `arguments` are those of `moe-rl train`, but for its run directory."""
    on_gpu = resolve_device(config.engine.device) == "cuda"
    ranks = config.cluster.gpus_per_node
    recipe = re.sub(r"[^\w.-]", "_", Path(config.recipe).stem)
    lines = [
        f"nodes={config.cluster.nodes}",
        f"cpus={ranks + len(parts_on(config, 0))}",
        f"gpus={ranks if on_gpu else ''}",
        f"object_store_gib={config.cluster.object_store_gib}",
        f"recipe={recipe}",
        f"arguments=({' '.join(map(shlex.quote, arguments))})",
    ]
    return "\n".join(lines) + "\n"


def render(
    config: Config, arguments: Sequence[str], options: Sequence[str] = (), environment: dict[str, str] | None = None
) -> str:
    """The whole job. `options` are sbatch's own (``--time=8:00:00``); the variables of `environment` that set keys, or say
    where moe-rl is, are written into it.

    Raises:
        UserError: an option is none of sbatch's form, or would not stay on its line.
    """
    for option in options:
        _check_option(option)
    cluster, text = config.cluster, TEMPLATE.read_text()
    header = [f"--nodes={cluster.nodes}"]
    if resolve_device(config.engine.device) == "cuda":
        header.append(f"--gpus-per-node={cluster.gpus_per_node}")
    text = text.replace("B:USR1@2400", f"B:USR1@{cluster.grace_s:.0f}")
    first = text.index("#SBATCH --ntasks-per-node")
    text = text[:first] + "".join(f"#SBATCH {o}\n" for o in [*header, *options]) + text[first:]
    kept = [*VARIABLES, "CONTAINER_IMAGE", "CONTAINER_MOUNTS", "VENV", "RUN_DIR"]
    exports = [f"export {n}={shlex.quote(v)}\n" for n in kept if (v := (environment or {}).get(n))]
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + settings(config, arguments) + "".join(exports) + END + rest.partition(END)[2]


def _check_option(option: str) -> None:
    """An option is a comment of the shell's, so no character in it is run: as long as it stays on one line."""
    if option.isprintable() and re.match(r"--[a-z]|-[A-Za-z]", option):
        return
    raise UserError(
        "launch.sbatch",
        f"--sbatch {option!r} is no option of sbatch",
        "It becomes a line of the job, after #SBATCH; what follows a line break would be run as a command.",
        "Give one option on one line, with its dashes, as in --sbatch=--time=8:00:00.",
    )


def roles(config: Config, facts: ModelFacts) -> str:
    """Stages, rollout replicas and ranks of every node, a line for each node and each rank."""
    layout, ranks = config.layout, config.cluster.gpus_per_node
    sizes = (layout.pp, layout.vpp, layout.pin_hash_layers)
    segments = resolve_stages(layout.stages, facts.num_layers, facts.hash_layers, *sizes).split("|")
    width, lines = config.world // layout.pp, []
    for node in range(config.cluster.nodes):
        first, last = node * ranks, (node + 1) * ranks - 1
        held = range(first // width, last // width + 1)
        stages = ", ".join(f"{s} ({' '.join(segments[s :: layout.pp])})" for s in held)
        rollouts = "".join(f", {part_name(*part)}" for part in parts_on(config, node))
        lines.append(
            f"  node {node}: ranks {first}-{last}, stage{'s' * (len(held) > 1)} {stages}{rollouts}"
            + ", head and driver" * (node == 0)
        )
        for rank in range(first, last + 1):
            lines.append(f"    rank {rank}: stage {rank // width}, {rank_role(config, facts, rank % width)}")
    return "\n".join(["nodes:", *lines])


def submit(script: str) -> str:
    """Hand a job to sbatch; what it answered. Raises UserError without Slurm, RunFailed if it refuses."""
    try:
        done = subprocess.run(["sbatch"], input=script, text=True, capture_output=True, env=dict(os.environ))
    except FileNotFoundError:
        raise UserError(
            "launch.slurm",
            "there is no sbatch on this machine",
            "--submit hands the job to Slurm.",
            "Go to a login node of the cluster, or print the job with --dry-run.",
        ) from None
    if done.returncode:
        raise RunFailed("launch.submit", f"sbatch refuses the job: {done.stderr.strip()}")
    return done.stdout.strip()
