"""Tasks that reasoning-gym generates (the extra `tasks`): ``reasoning_gym:NAME?size=N&seed=N``."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl

from moe_rl.errors import UserError


def parse_spec(spec: str, name: str) -> tuple[str, dict[str, Any]]:
    """The task's name and its options; a value is read as JSON where it is JSON (numbers, true, lists), else as text.

    Raises:
        UserError: no name, an option without a value or given twice, or a size below 1.
    """
    task, _, query = spec.partition(":")[2].partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        pairs = [("", "")]
    options = {key: _value(text) for key, text in pairs}
    unclear = "" in options or "" in options.values() or len(options) < len(pairs)
    size = options.setdefault("size", 1000)
    options.setdefault("seed", 1)
    if not task or unclear or type(size) is not int or size < 1:
        raise UserError(
            "data.reasoning_gym",
            f"{name}: {spec!r} is not of the form reasoning_gym:NAME?size=N&seed=N",
            "A name is needed, each option once with a value, and a size of at least 1.",
            "write for example reasoning_gym:chain_sum?size=1000&seed=1",
        )
    return task, options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def library() -> Any:
    """The module reasoning_gym, or a UserError that says how to get it."""
    try:
        import reasoning_gym
    except ImportError as e:
        raise UserError(
            "data.reasoning_gym",
            "reasoning-gym is not installed",
            f"Its tasks come with the extra `tasks` ({e}).",
            "pip install 'moe-rl[tasks]' (one of its packages needs a C compiler)",
        ) from None
    return reasoning_gym


def make_task(spec: str, name: str = "data.train") -> tuple[str, Sequence[dict[str, Any]]]:
    """Generate the items of a task: its name, and dicts with question, answer (may be None) and metadata.

    Raises:
        UserError: reasoning-gym is missing, the task is unknown, or it refuses an option.
    """
    task, options = parse_spec(spec, name)
    gym = library()
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1)
        raise UserError(
            "data.reasoning_gym",
            f"{name}: reasoning-gym has no task {task!r}",
            f"It has {len(DATASETS)} tasks.",
            f"did you mean {near[0]}?" if near else "list them with reasoning_gym.factory.DATASETS",
        )
    try:
        return task, list(gym.create_dataset(task, **options))
    except (TypeError, ValueError, AssertionError, LookupError) as e:
        raise UserError(
            "data.reasoning_gym",
            f"{name}: the task {task} refuses {spec.partition('?')[2]!r}",
            str(e),
            "see its options",
        ) from None
