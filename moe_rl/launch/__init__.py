"""Starting a run on an allocation of nodes: the batch job's text, and what runs on each node. Imports neither torch nor Ray."""

from pathlib import Path

JANITOR = Path(__file__).parent / "janitor.py"
