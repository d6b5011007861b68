"""Reading a configuration: defaults < recipe < profile < files < environment < command line, each with its origin.

Every value goes through an omegaconf structured node, which checks and converts its type, then against the allowed
values of its key.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moe_rl.errors import UserError

from .environment import VARIABLES
from .keys import KeyInfo, keys, sections
from .problem import Problem, nearest, raise_all
from .schema import Config

PACKAGE = Path(__file__).resolve().parent.parent
ASSETS = PACKAGE / "assets"
DEFAULT_PROFILE = "cpu"
PATCH_SWITCH = "MOE_PATCHES_DISABLE"
FREE_FORM = ("reward.args", "model.config")  # mappings whose keys are the verifier's or the model's, not the schema's
PATH_KEYS = ("model.path", "data.train", "data.validation")
_HEADER = "# moe_rl configuration: recipe {recipe}, profile {profile}"
_HEADER_PATTERN = re.compile(r"# moe_rl configuration: recipe (.*), profile (.*)")  # matched at the first line


@dataclass(frozen=True)
class Entry:
    """One value as written: dotted key, Python value, origin, and the directory its relative paths start from."""

    key: str
    value: Any
    origin: str
    base: Path | None = None


class _Loader(yaml.SafeLoader):
    """YAML 1.1, but 1e-3 is a number as in YAML 1.2 and dates stay text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if not tag.endswith("timestamp")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load_config(
    recipe: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    hw: str | None = None,
    files: Sequence[str | Path] = (),
    environment: Mapping[str, str] | None = None,
) -> Config:
    """The configuration of a run.

    `recipe` is the name of a shipped recipe, or a path to a YAML file (one that :meth:`Config.to_yaml` wrote keeps its
    origins and profile), or None for the defaults alone. `overrides` are ``key=value`` strings, `hw` names a profile
    (None: the recipe's own ``profile:`` line, else cpu), `files` are YAML files read after the profile, later ones
    winning, `environment` holds variables of :data:`moe_rl.config.environment.VARIABLES` beside others. Raises one UserError that names every unknown key, wrong type and value that is not allowed. Rules over
    several keys are :func:`moe_rl.config.check`'s.
    """
    entries: list[Entry] = []
    name, profile = str(recipe or ""), hw or DEFAULT_PROFILE
    resolved = None
    if recipe is not None:
        path = _find("recipe", name)
        resolved = _HEADER_PATTERN.match(_read_text(path))
        entries, meta = _read_yaml(
            path, _label("recipe", name), meta_keys=("profile",), origins_in_comments=bool(resolved)
        )
        profile = hw or str(meta.get("profile") or DEFAULT_PROFILE)
    if resolved:
        name = resolved[1]
        profile = hw or resolved[2]
    if hw or not resolved:
        entries += _read_yaml(_find("profile", profile), _label("profile", profile))[0]
    for file in files:
        path = Path(file).expanduser()
        if not path.is_file():
            raise UserError(
                "config.file", f"configuration file {file} does not exist", fix="Check the path after --file."
            )
        entries += _read_yaml(path, None)[0]
    entries += _from_environment(environment or {})
    entries += [_parse_override(text) for text in overrides]
    config = _build(entries)
    config.recipe, config.profile = name, profile
    _add_environment(config)
    return config


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """A recipe's name or file and the ``key=value`` strings among words that may stand in any order.

    The recipe is the first word that is a file, or neither has a ``=`` nor is a key; None if there is none.
    """
    known = keys()
    recipe = next((w for w in words if Path(w).is_file() or ("=" not in w and w not in known)), None)
    rest = list(words)
    if recipe is not None:
        rest.remove(recipe)
    return recipe, rest


def _add_environment(config: Config) -> None:
    """Patches that the environment switches off join those of the configuration: here once, for all processes alike."""
    named = {name.strip() for name in os.environ.get(PATCH_SWITCH, "").split(",")} - {""}
    if named - set(config.patches.disable):
        config.patches.disable = [*config.patches.disable, *sorted(named - set(config.patches.disable))]
        before = config.origins.get("patches.disable")
        config.origins["patches.disable"] = f"{before} and " * bool(before) + f"environment {PATCH_SWITCH}"
        raise_all(value_problems(config))


def load_resolved(path: str | Path) -> Config:
    """Read what :func:`dump_yaml` wrote. Raises UserError if there is no such file or it is no resolved configuration."""
    path = Path(path)
    if not path.is_file():
        raise UserError(
            "config.file", f"{path} does not exist", "A run keeps its configuration there.", "Check the run directory."
        )
    if not _HEADER_PATTERN.match(_read_text(path)):
        raise UserError(
            "config.file",
            f"{path} is no resolved configuration",
            f"Its first line is not like {_HEADER.format(recipe='NAME', profile='NAME')!r}.",
            "Give the config.resolved.yaml of a run.",
        )
    return load_config(path)


def dump_yaml(config: Config, origins: bool) -> str:
    """The configuration as YAML text that :func:`load_resolved` reads back to an equal Config."""
    lines = [_HEADER.format(recipe=config.recipe, profile=config.profile)]

    def emit(name: str, label: str, value: Any, indent: int) -> None:
        pad = "  " * indent
        if dataclasses.is_dataclass(value) or (isinstance(value, dict) and value):
            lines.append(f"{pad}{label}:")
            items = (
                value
                if isinstance(value, dict)
                else {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            )
            for child, child_value in items.items():
                emit(f"{name}.{child}", _scalar(str(child)), child_value, indent + 1)
            return
        comment = f"  # {config.origin(name)}" if origins else ""
        lines.append(f"{pad}{label}: {_scalar(value)}{comment}")

    for f in dataclasses.fields(config):
        emit(f.name, f.name, getattr(config, f.name), 0)
    return "\n".join(lines) + "\n"


def shipped(kind: str) -> list[str]:
    """Names of the shipped files of a kind, ``recipe`` or ``profile``."""
    return sorted(p.stem for p in (PACKAGE / "config" / f"{kind}s").glob("*.yaml"))


def value_problems(config: Config) -> list[Problem]:
    """Values outside their key's allowed list or bounds; also finds those assigned in Python after loading."""
    problems = []
    for name, info in keys().items():
        value = config.get(name)
        for item in value if isinstance(value, list) else [value]:
            if info.choices and item not in info.choices:
                shown = "".join(f"; nearest: {near}" for near in [nearest(str(item), map(str, info.choices))] if near)
                what, rule = f"{name} is {item!r}{shown}", "config.choice"
            elif _outside(item, info):
                what, rule = f"{name} is {item!r}", "config.range"
            else:
                continue
            fix = f"Give {name} {info.allowed()}."
            problems.append(Problem(rule, what, info.help, fix, name, config.origin(name)))
    return problems


def _outside(value: Any, info: KeyInfo) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return (
        (isinstance(value, float) and not math.isfinite(value))
        or (info.above is not None and value <= info.above)
        or (info.low is not None and value < info.low)
        or (info.high is not None and value > info.high)
    )


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _label(kind: str, name: str) -> str | None:
    return f"{kind} {name}" if name in shipped(kind) else None


def _find(kind: str, name: str) -> Path:
    known = shipped(kind)
    if name in known:
        return PACKAGE / "config" / f"{kind}s" / f"{name}.yaml"
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return path
    near = nearest(name, known)
    raise UserError(
        f"config.{kind}",
        f"there is no {kind} {name!r}" + (f"; nearest: {near}" if near else ""),
        f"Shipped {kind}s: {', '.join(known)}.",
        "Give one of these names, or the path of a .yaml file that exists.",
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise UserError("config.yaml", f"{path} cannot be read", str(error), "Give a text file in UTF-8.") from None


def _not_yaml(path: Path, error: Exception) -> UserError:
    return UserError("config.yaml", f"{path} is not YAML", " ".join(str(error).split()), "Correct the file.")


def _read_yaml(
    path: Path, origin: str | None, *, meta_keys: Sequence[str] = (), origins_in_comments: bool = False
) -> tuple[list[Entry], dict[str, Any]]:
    """Entries of a YAML file in their order, and the values of its top-level `meta_keys`, which are no run keys."""
    text = _read_text(path)
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except (yaml.YAMLError, RecursionError) as error:
        raise _not_yaml(path, error) from None
    if root is None:
        return [], {}
    if not isinstance(root, yaml.MappingNode):
        raise UserError(
            "config.yaml", f"{path} is not a mapping of sections", fix="Write it as `layout:` with `pp: 2` below."
        )
    lines = text.split("\n")
    base = path.resolve().parent

    def origin_of(node: yaml.Node) -> str:
        comment = lines[node.end_mark.line][node.end_mark.column :].strip() if origins_in_comments else ""
        return (
            comment.removeprefix("# ")
            if comment.startswith("# ")
            else origin or f"file {path}:{node.start_mark.line + 1}"
        )

    entries, meta, known_sections = [], {}, sections()
    for name, node in _flatten(root, "", path):
        try:
            value = loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise _not_yaml(path, error) from None
        if name in meta_keys:
            meta[name] = value
        elif not (value is None and name in known_sections):  # a section left empty
            entries.append(Entry(name, value, origin_of(node), base))
    return entries, meta


def _flatten(mapping: yaml.MappingNode, prefix: str, path: Path) -> Iterator[tuple[str, yaml.Node]]:
    known_sections, seen = sections(), set()
    for key_node, node in mapping.value:
        name = f"{prefix}{key_node.value}"
        if name in seen:
            raise UserError(
                "config.duplicate", f"{path}:{key_node.start_mark.line + 1} gives {name} a second time", fix="Keep one."
            )
        seen.add(name)
        inside = name in known_sections or name in FREE_FORM or _is_free(name)
        if isinstance(node, yaml.MappingNode) and node.value and inside:
            yield from _flatten(node, f"{name}.", path)
        else:
            yield name, node


def _is_free(name: str) -> bool:
    """Whether a key is one of a free mapping's."""
    return name.startswith(tuple(f"{mapping}." for mapping in FREE_FORM))


def _from_environment(environment: Mapping[str, str]) -> list[Entry]:
    entries = []
    for name, key in VARIABLES.items():
        text = environment.get(name, "")
        if text:
            if keys()[key].type.startswith("list") and not text.startswith("["):
                text = f"[{text}]"
            entries.append(dataclasses.replace(_parse_override(f"{key}={text}"), origin=f"environment {name}"))
    return entries


def _parse_override(text: str) -> Entry:
    name, equals, raw = text.partition("=")
    name = name.strip()
    if not equals or not name:
        near = nearest(name, keys())
        raise UserError(
            "config.override",
            f"{text!r} is not of the form key=value",
            fix=f"Write {near or 'layout.pp'}=VALUE; options start with --.",
        )
    info = keys().get(name)
    quoted = len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "'\""
    if info and info.type == "str" and not quoted:
        return Entry(name, raw, "command line")  # text is taken as it stands: braces and colons are not YAML here
    try:
        return Entry(name, yaml.load(raw, _Loader), "command line")
    except yaml.YAMLError as error:
        raise UserError(
            "config.override", f"the value of {text!r} cannot be read", " ".join(str(error).split())
        ) from None


def _build(entries: Sequence[Entry]) -> Config:
    tree = OmegaConf.structured(Config)
    origins: dict[str, str] = {}
    problems = []
    for entry in entries:
        problem = _set(tree, entry)
        if problem:
            problems.append(problem)
        elif entry.value == {}:
            for name in [n for n in origins if n.startswith(f"{entry.key}.")]:
                del origins[name]
        origins[entry.key] = entry.origin
    raise_all(problems)
    config: Config = OmegaConf.to_object(tree)  # type: ignore[assignment]
    config.origins = origins
    raise_all(value_problems(config))
    return config


def _set(tree: DictConfig, entry: Entry) -> Problem | None:
    """Put one value into the tree; a Problem if its key or its type is wrong."""
    info = keys().get(entry.key)
    if info is None and not _is_free(entry.key):
        return _unknown(entry)
    value = entry.value
    if entry.key in PATH_KEYS and isinstance(value, str):
        value = resolve_path(value, entry.base)
    try:
        cleared = value == {} and entry.key in FREE_FORM
        OmegaConf.update(tree, entry.key, _escape(value), merge=not cleared)
    except (OmegaConfBaseException, ValueError, TypeError):
        expected = (
            f"{info.type}, {info.allowed()}" if info and info.allowed() else info.type if info else "a plain value"
        )
        what = f"{entry.key} is {entry.value!r}, which is not of type {info.type if info else 'value'}"
        return Problem(
            "config.type",
            what,
            info.help if info else "",
            f"Give it a value of type {expected}.",
            entry.key,
            entry.origin,
        )
    return None


def _unknown(entry: Entry) -> Problem:
    known = keys()
    if entry.key in sections():
        inside = ", ".join(k for k in known if k.startswith(f"{entry.key}."))
        return Problem(
            "config.section",
            f"{entry.key} is a section, not a key",
            f"Its keys: {inside}.",
            "Set one of these.",
            entry.key,
            entry.origin,
        )
    if entry.key in ("profile", "recipe"):
        return Problem(
            "config.unknown_key",
            f"{entry.key} is no key",
            "It is chosen when the run is started.",
            "moe-rl train RECIPE --hw PROFILE",
            entry.key,
            entry.origin,
        )
    near = nearest(entry.key, known)
    what = f"unknown key {entry.key}" + (f"; nearest: {near}" if near else "")
    return Problem(
        "config.unknown_key", what, "", f"moe-rl explain {near or 'layout'} tells more.", entry.key, entry.origin
    )


def _escape(value: Any) -> Any:
    """Text with ``${`` in it is meant literally; omegaconf would take it for a reference."""
    if isinstance(value, str):
        return value.replace("${", r"\${")
    if isinstance(value, list):
        return [_escape(v) for v in value]
    if isinstance(value, dict):
        return {k: _escape(v) for k, v in value.items()}
    return value


def resolve_path(value: str, base: Path | None = None) -> str:
    """The absolute path a configured path means. ``pkg:NAME`` is a shipped file; a relative path is looked for beside
    the file it was written in (`base`), then taken from the working directory. `reasoning_gym:` specs are no paths.
    """
    if not value or value.startswith("reasoning_gym:"):
        return value
    if value.startswith("pkg:"):
        return str(ASSETS / value.removeprefix("pkg:"))
    path = Path(value).expanduser()
    if path.is_absolute():
        return str(path)
    beside = (base or Path.cwd()) / path
    return str(beside if beside.exists() else Path.cwd() / path)
