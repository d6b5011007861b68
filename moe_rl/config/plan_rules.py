"""The rules that hold wherever a run is planned. Imports no torch."""

from __future__ import annotations

from . import rules
from .facts import ModelFacts
from .layout_rules import layout_problems
from .load import value_problems
from .problem import Problem
from .schema import Config


def plan_problems(config: Config, facts: ModelFacts) -> list[Problem]:
    """What is wrong with a run as far as this machine, its data and its disk have no part in it."""
    problems = value_problems(config) + layout_problems(config, facts)
    for rule in (rules._group, rules._batch, rules._sampling, rules._optimizer, rules._algorithm, rules._checkpoint):
        problems += rule(config)
    if config.engine.device == "cuda" and config.engine.dtype == "bf16":
        # then this rule asks for Transformer Engine on this machine, and the run is on another one
        problems = [p for p in problems if p.rule != "optimizer.precision_aware"]
    return problems + list(rules._lengths(config, facts))
