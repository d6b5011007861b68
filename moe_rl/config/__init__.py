"""Configuration of a run: keys, recipes, profiles and preflight rules. Imports no torch and no transformers."""

from .load import load_config
from .schema import Config

__all__ = ["Config", "load_config"]
