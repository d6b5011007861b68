"""``moe-rl plan``, and what becomes of a plan after the run: reads a recipe or a model's config.json, and hands both to the
planner. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_rl.config import Config, load_config
from moe_rl.config.load import shipped
from moe_rl.config.plan_rules import plan_problems
from moe_rl.config.problem import Problem, raise_all
from moe_rl.config.rules import model_directory
from moe_rl.errors import UserError
from moe_rl.models.family import read_facts

MEASURED, PLANNED, RESOLVED = "measured.json", "plan.json", "config.resolved.yaml"
PHASES = {"rollout": "rollout", "log_prob": "log_prob", "update": "update", "sync": "sync", "checkpoint": "save"}


class Answer(NamedTuple):
    """What the command prints, and the error that it then ends with: None where the question's answer is yes."""

    text: str
    fault: UserError | None

    def give(self) -> None:
        """Print the text, whole, and raise what is wrong."""
        print(self.text, flush=True)
        if self.fault is not None:
            raise self.fault


def run(
    source: str,
    overrides: Sequence[str],
    *,
    hw: str | None,
    files: Sequence[Path],
    search: bool,
    measured: Path | None,
    as_json: bool,
) -> Answer:
    """The text, or with `as_json` the JSON object; its fault is that the configuration breaks a rule, and under `search`,
    which asks for another layout, that none was found.

    Raises:
        UserError: the recipe or the model cannot be read, or its layout cannot be laid out at all.
    """
    from moe_rl.planner import search as finder
    from moe_rl.planner.plan import Plan, describe_problem
    from moe_rl.planner.text import describe

    config = read_source(source, overrides, hw, files)
    facts = read_facts(config.model, config.model.family)
    if measured is not None:
        config = with_rates(config, measured)
    found = [p.as_dict() if as_json else p.line() for p in finder.search(config, facts)] if search else None
    problems = plan_problems(config, facts)

    def answer(text: str, broken: Sequence[Problem]) -> Answer:
        if found is None:
            return Answer(text, _breaks(broken) if broken else None)
        return Answer(text, None if found else _nothing_fits())

    if any(p.rule.startswith("layout.") for p in problems):  # there is nothing to lay out
        rules = list(map(describe_problem, problems))
        more = {"search": found} if search else {}
        return answer(
            json.dumps({"rules": rules} | more, indent=1)
            if as_json
            else "\n".join(["rules that this breaks:", *(f"  {p.error()}" for p in problems), *_found(found)]),
            problems,
        )
    plan = Plan.of(config, facts, problems)
    levers, fraction, longest = finder.levers(plan), finder.least_offload(plan), finder.longest_response(plan)
    if as_json:
        ways: dict[str, Any] = {"levers": [dataclasses.asdict(lever) for lever in levers]}
        ways |= {"least_offload_fraction": fraction, "longest_response": longest}
        text = json.dumps(plan.as_dict() | ways | ({"search": found} if search else {}), indent=1)
        return answer(text, plan.problems)
    lines = [lever.line() for lever in levers]
    spread = finder.saved_by_spreading(plan)
    if spread > 0:
        lines.append(f"hash layers beside the embedding cost the fullest node {spread:.1f} GiB")
    share = (
        "none makes it fit" if fraction is None else f"{1 - fraction:.2%} with optimizer.offload_fraction={fraction:g}"
    )
    parts = [describe(plan, lines), f"largest share of the optimizer on the GPU that fits: {share}"]
    if longest:
        parts += [
            f"largest rollout.max_response that the GPUs have room for, one sequence a micro-batch: {longest['tokens']:,} tokens",
            f"  activations of engine.attention_backend={longest['backend']}, counted tensor by tensor: {longest['rests_on']}",
        ]
    return answer("\n".join([*parts, *_found(found)]), plan.problems)


def _breaks(problems: Sequence[Problem]) -> UserError:
    named = ", ".join(dict.fromkeys(p.rule for p in problems))
    why = "A run of it would be refused, or would end for want of memory."
    fix = "The plan says how, rule by rule; where it is the layout, --search lists those that fit."
    return UserError("plan.rules", f"rules are broken: {named}", why, fix)


def _nothing_fits() -> UserError:
    why = "Each that was tried breaks a rule, or needs more memory than machine.* says is there."
    fix = "Mend the rules that the plan names, use its levers, or give the run more nodes."
    return UserError("plan.search", "no layout fits", why, fix)


def _found(found: Sequence[Any] | None) -> list[str]:
    if found is None:
        return []
    return ["", "layouts that fit, the fastest step first:" if found else "no layout fits", *(f"  {f}" for f in found)]


def read_source(source: str, overrides: Sequence[str], hw: str | None, files: Sequence[Path]) -> Config:
    """The configuration of a recipe, or the default one for a model: `source` is its config.json or its directory.

    A shipped recipe's name is always the recipe; where a directory has the same name, stderr says so. Any other directory,
    and any path that is not a YAML file's, is a model's.

    Raises:
        UserError: a value is wrong, or the model's directory or figures are.
    """
    path = Path(source)
    a_path = path.is_dir() or (path.suffix not in (".yaml", ".yml") and len(path.parts) > 1)
    if source in shipped("recipe"):
        config = load_config(source, overrides, hw=hw, files=files)
        if path.is_dir():
            print(f"{source} is taken as the recipe; ./{source} means the directory", file=sys.stderr)
    elif a_path or path.name == "config.json":
        directory = path.parent if path.name == "config.json" and not path.is_dir() else path
        config = load_config(None, [f"model.path={directory}", *overrides], hw=hw, files=files)
    else:
        config = load_config(source, overrides, hw=hw, files=files)
    raise_all([*model_directory(config)])
    return config


# --------------------------------------------------------------------------------------------------- after a run
def with_rates(config: Config, directory: Path) -> Config:
    """The configuration with the machine's rates as the run in `directory` measured them.

    Raises:
        UserError: the directory is no run's, the run measured nothing, or its rates are damaged.
    """
    file = directory / PLANNED
    if not file.is_file():
        raise UserError(
            "plan.measured",
            f"{file} does not exist",
            "A run writes there, when it ends, the rates that it measured.",
            "Give the directory of a run that finished a step, or leave --measured out.",
        )
    from moe_rl.planner.search import changed

    rates: dict[str, object] = {f"machine.{k}": v for k, v in _rates(file).items()}
    return changed(config, rates, origin=str(file))


def _rates(file: Path) -> dict[str, float]:
    """The rates in a run's plan.json, under the names of config.machine. Raises UserError: they are not what a run writes."""
    from moe_rl.planner.plan import Rates

    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:  # what is no text or no JSON is a ValueError
        raise _no_rates(file, f"cannot be read as JSON: {error}") from None
    rates = content.get("rates") if isinstance(content, dict) else None
    if not isinstance(rates, dict):
        raise _no_rates(file, "has no object `rates`")
    known = [f.name for f in dataclasses.fields(Rates)]
    for name, value in rates.items():
        if name not in known:
            raise _no_rates(file, f"has a rate {name!r}; known are {', '.join(known)}")
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise _no_rates(file, f"has {name} {value!r}, which is no number above 0")
    return rates


def _no_rates(file: Path, what: str) -> UserError:
    return UserError(
        "plan.measured",
        f"{file} {what}",
        "A run writes there, when it ends, the rates that it measured.",
        "Give the directory of a run that this version made, or leave --measured out.",
    )


def keep_comparison(directory: Path, config: Config) -> str:
    """Hold the plan of a run that ended against what it measured: a table, and `plan.json` in the run's directory with it
    and the rates; an empty string where the run measured nothing."""
    file = directory / MEASURED
    if not file.is_file():
        return ""
    from moe_rl.planner.plan import Plan

    measured = json.loads(file.read_text())["phases"]
    plan = Plan.of(config, read_facts(config.model, config.model.family))
    planned = plan.phases_gib()
    rows = {}
    for phase, taken in measured.items():
        said = planned[PHASES[phase]]
        rows[phase] = {
            place: {"planned": said[place], "measured": taken[place]}
            for place in ("gpu_gib", "host_gib")
            if taken[place]
        } | {"seconds": {"planned": said["seconds"], "measured": taken["seconds"]}}
    result = {"phases": rows, "rates": dataclasses.asdict(plan.rates(measured))}
    result["rates"] = {k: v for k, v in result["rates"].items() if v}
    part = directory / (PLANNED + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(directory / PLANNED)
    lines = ["planned / measured by phase (workers alone):"]
    for phase, places in rows.items():
        cells = [f"{place} {v['planned']:.2f} / {v['measured']:.2f}" for place, v in places.items()]
        lines.append(f"  {phase:<11}" + "   ".join(cells))
    return "\n".join(lines)
