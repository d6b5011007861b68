"""A configuration key as a dataclass field."""

from __future__ import annotations

from dataclasses import field
from typing import Any


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
    """A configuration key. Bounds `low` and `high` are inclusive, `above` is not; for a list they bind its items."""
    metadata = {"help": help, "unit": unit, "choices": choices, "low": low, "above": above, "high": high}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
