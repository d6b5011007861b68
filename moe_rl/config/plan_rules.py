"""The rules that hold wherever a run is planned. Imports no torch."""

from __future__ import annotations

from . import rules
from .facts import ModelFacts
from .load import value_problems
from .problem import Problem
from .schema import Config


def plan_problems(config: Config, facts: ModelFacts) -> list[Problem]:
    """What is wrong with a run as far as this machine, its data and its disk have no part in it."""
    problems = value_problems(config) + rules.layout_problems(config, facts)
    for rule in (rules._group, rules._batch, rules._sampling, rules._optimizer, rules._algorithm, rules._checkpoint):
        problems += rule(config)
    return problems + list(rules._lengths(config, facts))
