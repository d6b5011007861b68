"""Figures of a model's `config.json` that a run gives itself: `model.config.NAME=VALUE`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .problem import nearest

UNVERIFIED = "_unverified"  # in a shipped config.json: figures that no source at hand confirms


def overridden(
    config: Mapping[str, Any], figures: Mapping[str, Any], key: str = "model.config"
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """A parsed `config.json` with `figures` in place of its own, a nested mapping figure by figure.

    Returns it, and (key, what is wrong) of each figure that it does not have or has in another type.
    """
    known = {f"{key}.{name}": name for name in config if not name.startswith("_")}
    wrong: list[tuple[str, str]] = []
    merged = dict(config)
    for name, value in figures.items():
        full = f"{key}.{name}"
        if full not in known:
            near = nearest(full, known)
            wrong.append((full, f"config.json has no figure for {full}" + (f"; nearest: {near}" if near else "")))
        elif isinstance(value, dict) and isinstance(config[name], dict):
            merged[name], inside = overridden(config[name], value, full)
            wrong += inside
        elif config[name] is not None and type(value) not in (type(config[name]), *_also(config[name])):
            wrong.append((full, f"{full} is {value!r}, and config.json has {json.dumps(config[name])} there"))
        else:
            merged[name] = value
    if figures and isinstance(merged.get(UNVERIFIED), dict):
        merged[UNVERIFIED] = {name: why for name, why in merged[UNVERIFIED].items() if name not in figures}
    return merged, wrong


def _also(value: Any) -> tuple[type, ...]:
    return (int,) if isinstance(value, float) else ()
