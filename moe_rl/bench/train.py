"""`moe-rl bench train`: how fast one process trains a recipe's model, or a cut of it, with random weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_rl.bench.table import machine, make_directory_of
from moe_rl.config import load_config
from moe_rl.config.problem import raise_all
from moe_rl.config.rules import scoring_problems
from moe_rl.durable import write_atomic
from moe_rl.errors import UserError
from moe_rl.models.family import read_config, read_facts

ONE_PROCESS = ("layout.tp=1", "layout.pp=1", "layout.ep=1", "layout.etp=1", "layout.vpp=1", "layout.stages=")


def benchmark(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    hw: str | None = None,
    files: Sequence[Path] = (),
    layers: int | None = None,
    experts: int | None = None,
    length: int = 4096,
    sequences: int = 16,
    steps: int = 3,
    by_length: Sequence[int] = (),
    out: Path = Path("bench-train.json"),
    profile: bool = False,
) -> dict[str, Any]:
    """Measure (see `trainer.speed`), write `out` and with `profile` a trace beside it; returns what was written.

    `layers` and `experts` cut the model down to its first ones; `sequences` of `length` tokens make a step,
    whose update is timed once more with sequences of each length of `by_length`. `out` is written after every figure.

    Raises:
        UserError: the input is wrong; nothing has started.
    """
    small = [f"--{n} {v}" for n, v in (("sequences", sequences), ("steps", steps)) if v < 1]
    small += [f"--{n} {v}" for n, v in (("length", length), *(("by-length", v) for v in by_length)) if v < 2]
    if small:
        raise UserError("bench.size", ", ".join(small), "There is nothing to measure.", "Use at least 2.")
    one = [*ONE_PROCESS, "cluster.nodes=1", "cluster.gpus_per_node=1", *overrides]
    config = load_config(recipe, one, hw=hw, files=files)
    config.engine.max_tokens_per_micro_batch = max(length, config.engine.max_tokens_per_micro_batch)
    facts = read_facts(config.model, config.model.family)
    raise_all(scoring_problems(config, facts))
    make_directory_of(out)
    about = {"recipe": recipe, "overrides": list(overrides), "layers": layers, "experts": experts, "length": length}
    about |= machine()

    def save(found: dict[str, Any]) -> dict[str, Any]:
        write_atomic(out, json.dumps(about | {"result": found}, indent=1) + "\n")
        return about | {"result": found}

    with tempfile.TemporaryDirectory(prefix="bench-train-") as directory:
        changes = {"num_hidden_layers": layers, "n_routed_experts": experts}
        cut = read_config(config.model) | {k: v for k, v in changes.items() if v is not None}
        (Path(directory) / "config.json").write_text(json.dumps(cut))
        config.model.path, config.model.config = directory, {}
        read_facts(directory, config.model.family)
        from moe_rl.trainer.speed import measure

        trace = out.with_suffix(".trace.json") if profile else None
        found = measure(config, [length] * sequences, steps, by_length=by_length, trace=trace, save=save)
    return save(found)
