"""What is wrong with the nodes of a run, found before any GPU is touched. Imports neither torch nor Ray."""

from .checks import Needs, problems, unfit
from .node import NodeFacts, examine, listener, unreachable

__all__ = ["Needs", "NodeFacts", "examine", "listener", "problems", "unfit", "unreachable"]
