"""``moe-rl plan``: reads a recipe or a model's config.json, and hands both to the planner. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from moe_rl.config import Config, ModelFacts, load_config
from moe_rl.config.rules import plan_problems
from moe_rl.models.family import read_facts


def run(
    source: str,
    overrides: Sequence[str],
    *,
    hw: str | None,
    files: Sequence[Path],
    search: bool,
    measured: Path | None,
    as_json: bool,
) -> str:
    """The text, or with `as_json` the JSON object, that the command prints.

    Raises:
        UserError: the recipe or the model cannot be read, or its layout cannot be laid out at all.
    """
    from moe_rl.planner.plan import Plan
    from moe_rl.planner.text import describe

    config, facts = read(source, overrides, hw, files)
    problems = plan_problems(config, facts)
    plan = Plan.of(config, facts, problems)
    return json.dumps(plan.as_dict(), indent=1) if as_json else describe(plan)


def read(source: str, overrides: Sequence[str], hw: str | None, files: Sequence[Path]) -> tuple[Config, ModelFacts]:
    """The configuration, and the facts of its model. `source` is a recipe, or a config.json or the directory that has it."""
    path = Path(source)
    directory = path.parent if path.name == "config.json" else path
    if (directory / "config.json").is_file() and (path.is_dir() or path.name == "config.json"):
        config = load_config(None, [f"model.path={directory}", *overrides], hw=hw, files=files)
    else:
        config = load_config(source, overrides, hw=hw, files=files)
    return config, read_facts(config.model.path, config.model.family)
