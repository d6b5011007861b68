"""Which layers stand on which pipeline stage: the notation, a balanced default, and its checks. Imports no torch.

``E`` is the embedding, ``t`` a decoder layer, ``L`` the output layer and loss, ``|`` a boundary between stages; ``t*3``
and ``(tt|)*2`` repeat, commas are ignored. With virtual stages there are pp*vpp segments and segment ``i`` is chunk
``i // pp`` of pipeline rank ``i % pp``, as megatron-core reads the string.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from moe_rl.errors import UserError

from .problem import Problem

_REPEAT = re.compile(r"(?:\((?P<group>[^()*]+)\)|(?P<letter>[EtL]))\*(?P<count>\d+)")  # innermost first
_MAX_LENGTH = 100_000


def expand(stages: str) -> str:
    """The notation with every repeat written out: ``Et*3|t*2L`` -> ``Ettt|ttL``. Raises UserError on an unknown sign."""
    text = re.sub(r"[\s,]", "", stages)
    while match := _REPEAT.search(text):
        repeated, count = match["group"] or match["letter"], int(match["count"])
        if len(repeated) * count > _MAX_LENGTH:
            what = f"layout.stages {stages!r} repeats {repeated!r} {count} times"
            raise UserError("layout.stages", what, "No model has so many layers.", "Repeat less.")
        text = text[: match.start()] + repeated * count + text[match.end() :]
    unknown = sorted(set(text) - set("EtL|"))
    if unknown:
        raise UserError(
            "layout.stages",
            f"layout.stages {stages!r} has {' '.join(map(repr, unknown))}",
            "E is the embedding, t a layer, L the loss, | a boundary; t*3 and (tt|)*2 repeat.",
            "Write it as in Et*3|t*2L.",
        )
    return text


def parse(stages: str) -> list[str]:
    """The segments of the notation, one string of E, t and L each: ``Et*2|tL`` -> ``["Ett", "tL"]``."""
    return expand(stages).split("|")


def format_stages(segments: Sequence[str]) -> str:
    """The notation of segments, three or more equal layers as a repeat: ``["Ettt", "ttL"]`` -> ``Et*3|ttL``."""

    def short(segment: str) -> str:
        runs = [(letter, len(list(run))) for letter, run in groupby(segment)]
        return "".join(f"{letter}*{count}" if count > 2 else letter * count for letter, count in runs)

    return "|".join(map(short, segments))


def default_stages(
    num_layers: int, hash_layers: Sequence[int] = (), pp: int = 1, vpp: int = 1, pin_hash_layers: bool = True
) -> str:
    """A balanced layout, written out (``Ettt|ttL``).

    Layers are shared evenly over the pp*vpp segments; what is left over goes to the middle ones, then to the first
    (which has the embedding), never to the last (which has the loss). If hash layers (0-based indices in `hash_layers`) are
    pinned, segment 0 reaches up to the last of them and the others share what is left. Raises UserError if a segment
    would stay without a layer.
    """
    segments = pp * vpp
    pinned = max(hash_layers, default=-1) + 1 if pin_hash_layers and segments > 1 else 0
    problem = _too_many_segments(num_layers, pinned, pp, vpp)
    if problem:
        raise problem.error()
    counts = _share(num_layers, segments)
    if pinned > counts[0]:
        counts = [pinned, *_share(num_layers - pinned, segments - 1, first=False)]
    parts = ["t" * count for count in counts]
    parts[0] = "E" + parts[0]
    parts[-1] += "L"
    return "|".join(parts)


def resolve_stages(
    stages: str, num_layers: int, hash_layers: Sequence[int], pp: int, vpp: int, pin_hash_layers: bool
) -> str:
    """The layout a run uses, written out: `stages` if given, else the default. Raises UserError as both do."""
    if stages:
        return expand(stages)
    return default_stages(num_layers, hash_layers, pp, vpp, pin_hash_layers)


def layers_of(stages: str) -> list[range]:
    """The layers (0-based) of each segment of the notation, in segment order."""
    found, start = [], 0
    for segment in parse(stages):
        count = segment.count("t")
        found.append(range(start, start + count))
        start += count
    return found


def validate_stages(
    stages: str, num_layers: int, hash_layers: Sequence[int], pp: int, vpp: int, pin_hash_layers: bool
) -> list[Problem]:
    """What is wrong with a layout string for a model and its parallel sizes; empty if nothing is."""
    try:
        segments = parse(stages)
    except UserError as error:
        return [Problem(error.rule, error.what, error.why, error.fix, "layout.stages")]
    problems = []

    def add(rule: str, what: str, why: str, fix: str) -> None:
        problems.append(Problem(rule, what, why, fix, "layout.stages"))

    if len(segments) != pp * vpp:
        add(
            "layout.segments",
            f"layout.stages {stages!r} has {len(segments)} segment(s), but pp * vpp is {pp} * {vpp} = {pp * vpp}",
            "Each pipeline rank holds vpp segments.",
            f"Write {pp * vpp} segments divided by |, or leave layout.stages empty.",
        )
    whole = "".join(segments)
    if whole.count("t") != num_layers:
        add(
            "layout.layers",
            f"layout.stages {stages!r} has {whole.count('t')} layers, the model has {num_layers}",
            "Every layer of the model must stand on one stage.",
            f"Write {num_layers} t in all.",
        )
    if whole.count("E") != 1 or whole.count("L") != 1 or not whole.startswith("E") or not whole.endswith("L"):
        add(
            "layout.ends",
            f"layout.stages {stages!r} must start with its only E and end with its only L",
            "The embedding stands before the first layer and the loss after the last one.",
            "Put E first in the first segment and L last in the last one.",
        )
    empty = [i for i, segment in enumerate(segments) if "t" not in segment]
    if empty and num_layers:
        add(
            "layout.empty_stage",
            f"segment(s) {', '.join(map(str, empty))} of layout.stages {stages!r} hold no layer",
            "A stage without a layer would only pass its input on.",
            "Move a layer there, or use fewer stages.",
        )
    away = [layer for layer in hash_layers if layer >= segments[0].count("t")]
    if pin_hash_layers and away and len(segments) > 1:
        add(
            "layout.hash_layers",
            f"hash layer(s) {', '.join(map(str, away))} stand outside stage 0 in {stages!r}",
            "layout.pin_hash_layers keeps layers that route by token id beside the embedding.",
            f"Give segment 0 at least {max(away) + 1} layers, or set layout.pin_hash_layers=false.",
        )
    return problems


def _too_many_segments(num_layers: int, pinned: int, pp: int, vpp: int) -> Problem | None:
    most = 1 + num_layers - max(pinned, 1)
    if pp * vpp <= most:
        return None
    held = f", of which stage 0 must hold the first {pinned}" if pinned > 1 else ""
    return Problem(
        "layout.too_many_stages",
        f"{pp * vpp} pipeline segments (pp {pp} * vpp {vpp}) for {num_layers} layers{held}",
        "Every segment needs a layer.",
        f"Use pp * vpp of at most {most}"
        + (", or set layout.pin_hash_layers=false." if pinned > 1 and pp * vpp <= num_layers else "."),
        "layout.pp",
    )


def _share(layers: int, segments: int, first: bool = True) -> list[int]:
    """Even shares; what is left over goes to the middle, then to segment 0 if `first` says it is among these."""
    counts = [layers // segments] * segments
    early = [0] if first and segments > 1 else []
    order = [*range(len(early), segments - 1), *early, segments - 1]
    for i in order[: layers % segments]:
        counts[i] += 1
    return counts


def parse_sizes(text: str, known: Sequence[str] = ("pp", "ep", "tp", "etp", "vpp")) -> dict[str, Any]:
    """``pp=32,ep=8,stages=Et*3|...`` as {"pp": 32, "ep": 8, "stages": "Et*3|..."}. Raises UserError on anything else."""
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name in found:
            raise UserError("layout.option", f"--layout {text}: {name} is given twice", "", "Give each size once.")
        if name == "stages" and value:
            found[name] = expand(value)
        elif name in known and value.isdecimal() and int(value) > 0:
            found[name] = int(value)
        else:
            raise UserError(
                "layout.option",
                f"--layout {text}: {part!r}",
                f"Possible are {', '.join(known)} with a number from 1, and stages.",
                "Write it as in --layout pp=2,ep=2.",
            )
    return found
