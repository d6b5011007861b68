"""Configuration of a run: keys, recipes, profiles and preflight rules. Imports no torch and no transformers."""

from .facts import ModelFacts
from .load import load_config
from .problem import Problem
from .rules import check, preflight
from .schema import Config

__all__ = ["Config", "ModelFacts", "Problem", "check", "load_config", "preflight"]
