"""What `moe-rl explain` prints: keys, their values and where these came from."""

from __future__ import annotations

from moe_rl.errors import UserError

from .keys import KeyInfo, keys, sections
from .problem import nearest
from .schema import Config


def explain(name: str, config: Config) -> str:
    """A key, a section with all that is below it, or `all`.

    Raises:
        UserError: there is no such key or section.
    """
    known = keys()
    if name in known:
        return _key(known[name], config)
    if name == "all" or name in sections():
        return _section(name, config)
    near = nearest(name, [*known, *sections()])
    raise UserError(
        "config.unknown_key",
        f"unknown key {name}" + (f"; nearest: {near}" if near else ""),
        f"Sections: {', '.join(s for s in sections() if '.' not in s)}.",
        "`moe-rl explain all` lists every key.",
    )


def _key(info: KeyInfo, config: Config) -> str:
    rows = [
        ("", info.help),
        ("value", f"{config.get(info.name)!r}  ({config.origin(info.name)})"),
        ("default", repr(info.default)),
        ("type", info.type),
        ("unit", info.unit),
        ("allowed", info.allowed()),
    ]
    return "\n".join([info.name, *(f"  {label + ': ' if label else ''}{text}" for label, text in rows if text)])


def _section(name: str, config: Config) -> str:
    lines = []
    for section, meaning in sections().items():
        if name in ("all", section) or section.startswith(f"{name}."):
            lines.append(f"{section}: {meaning}")
            inside = (k for k in keys().values() if k.name.rpartition(".")[0] == section)
            lines += [f"  {k.name} = {config.get(k.name)!r}  {k.help}" for k in inside]
    return "\n".join(lines)
