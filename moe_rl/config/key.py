"""A configuration key as a dataclass field."""

from __future__ import annotations

from dataclasses import field
from typing import Any

# The most of a count, by its unit: far above what anyone has. What is larger is a slip, and would be computed or printed for ever
MOST = {"tokens": 2**24, "steps": 10**9}
MOST_OTHERS = 10**6


def key(
    default: Any,
    help: str,
    *,
    unit: str = "",
    choices: tuple[Any, ...] = (),
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
) -> Any:
    """A configuration key. Bounds `low` and `high` are inclusive, `above` is not; for a list they bind its items. Without
    `high` a count that has a unit is bounded by `MOST`."""
    if high is None and type(default) is int and unit:
        high = MOST.get(unit, MOST_OTHERS)
    metadata = {"help": help, "unit": unit, "choices": choices, "low": low, "above": above, "high": high}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
