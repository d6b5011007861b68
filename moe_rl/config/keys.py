"""What is known of every key without a run, read off the schema. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from .schema import Config


@dataclass(frozen=True)
class KeyInfo:
    """What is known of one key without a run."""

    name: str
    type: str
    default: Any
    help: str
    unit: str
    choices: tuple[Any, ...]
    low: float | None
    above: float | None
    high: float | None

    def allowed(self) -> str:
        """The allowed values in words, or an empty string where any value of the type will do."""
        if self.choices:
            return ("any of " if self.type.startswith("list") else "one of ") + ", ".join(map(str, self.choices))
        bounds = []
        if self.above is not None:
            bounds.append(f"above {_shown(self.above)}")
        if self.low is not None:
            bounds.append(f"at least {_shown(self.low)}")
        if self.high is not None:
            bounds.append(f"at most {_shown(self.high)}")
        return " and ".join(bounds)


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


@cache
def keys() -> dict[str, KeyInfo]:
    """Every key by its dotted name, in the order of the schema."""
    return {info.name: info for info in _walk(Config, "")}


@cache
def sections() -> dict[str, str]:
    """Every section by its dotted name, with its meaning."""
    found: dict[str, str] = {}

    def visit(cls: type, prefix: str) -> None:
        for f in dataclasses.fields(cls):
            if _is_section(f):
                found[prefix + f.name] = (f.default_factory.__doc__ or "").strip()
                visit(f.default_factory, f"{prefix}{f.name}.")  # type: ignore[arg-type]

    visit(Config, "")
    return found


def _is_section(f: dataclasses.Field[Any]) -> bool:
    return dataclasses.is_dataclass(f.default_factory)


def _walk(cls: type, prefix: str) -> Iterator[KeyInfo]:
    for f in dataclasses.fields(cls):
        if _is_section(f):
            yield from _walk(f.default_factory, f"{prefix}{f.name}.")  # type: ignore[arg-type]
            continue
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        yield KeyInfo(name=prefix + f.name, type=str(f.type), default=default, **f.metadata)
