"""What a conversion has to do, worked out before anything is written: from one source to the files of the target."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from moe_rl.config.layout import default_stages, resolve_stages
from moe_rl.config.rules import model_of_run
from moe_rl.convert.dist import Chunk, chunks_of, is_fp32
from moe_rl.convert.slots import Item, Slot, make_slots, owned
from moe_rl.convert.tensors import FilePlan, files_like, plan_files
from moe_rl.errors import UserError
from moe_rl.models.family import get_family, read_config, read_facts
from moe_rl.models.headers import Stored, broken, read_headers, recognise
from moe_rl.models.load import check_released
from moe_rl.models.weights import Entry, Row, TensorSpec, WeightTable
from moe_rl.models.wire import BYTES, FP8, MXFP4_BLOCK, PLAIN, Piece, Wire, scale_name

CARRIED = "carried"  # of a dist-checkpoint: block scales and passed-over layers, as the released checkpoint had them
FORMS = ("released", "bf16", "dist")
FILE_BYTES = 4 << 30
AS_STORED = Wire("fp8", "mxfp4")  # for entries whose kind is what their headers show


@dataclass(frozen=True)
class Request:
    """What the user asks for; `like` is a released checkpoint whose scales, files and passed-over layers are taken."""

    source: Path
    target: Path
    to: str
    pp: int = 1
    ep: int = 1
    stages: str = ""
    mtp: str = "keep"
    like: Path | None = None
    file_bytes: int = FILE_BYTES


class Unit(NamedTuple):
    """One file to write: `tensors` of a safetensors file, or `chunks` and `items` of one of a dist-checkpoint."""

    file: str
    nbytes: int
    tensors: FilePlan | None = None
    chunks: tuple[Chunk, ...] = ()
    items: tuple[Item, ...] = ()


@dataclass
class Plan:
    """All that a worker needs. `origin` holds the scales and passed-over layers, if anything does."""

    request: Request
    family: str
    source_kind: str
    stored: dict[str, Stored]  # of a safetensors source
    wire: Wire  # of the source
    out: Wire  # of a safetensors target
    dtype: str  # of what the released checkpoints hold in bf16: "bf16" or "fp32"
    slots: list[Slot]  # where a side is a dist-checkpoint
    items: list[Item]
    origin: Path | None
    origin_stored: dict[str, Stored]
    extras: tuple[Entry, ...]  # passed-over tensors that are kept
    dropped: tuple[str, ...]
    left_out: tuple[str, ...]  # tensors of the source that repeat others
    units: list[Unit] = field(default_factory=list)

    def table(self) -> WeightTable:
        family = get_family(self.family)
        return family.weight_table(family.read_arch(self.request.source))


def make_plan(request: Request) -> Plan:
    """Check source and request, and cut the work into files.

    Raises:
        UserError: the source is broken, or what is asked for is not possible with it.
    """
    kind = recognise(request.source)
    if not kind:
        if instead := model_of_run(request.source):
            what = f"{request.source} is a run's directory, not a checkpoint"
            raise UserError("model.path", what, "Its checkpoints hold the weights.", instead)
        raise broken(request.source, ["it holds neither *.safetensors nor a dist-checkpoint"])
    facts = read_facts(request.source)
    family = get_family(facts.family)
    arch = family.read_arch(request.source)
    table = family.weight_table(arch)
    family.check_weights(request.source)
    stored, wire = check_released(request.source, table) if kind == "safetensors" else ({}, PLAIN)
    origin, origin_stored = _origin(request, kind, stored, wire, table)
    dtype = _dtype(request, kind, stored, wire, table)
    slots, items = make_slots(family, arch, dtype) if "dist" in (kind, request.to) else ([], [])
    extras = _extras(origin_stored, table) if request.mtp == "keep" else ()
    passed = [n for n in origin_stored if n.startswith(table.ignored)] if table.ignored else []
    if request.to == "released" and passed and extras and not any(e.row.quant for e in extras):
        raise UserError(
            "convert.mtp",
            f"{len(passed)} tensors of prediction layers in {origin} are not quantised ({passed[0]}, ...)",
            "How a released checkpoint quantises them is known from one alone.",
            "Use --mtp drop, or --like with the released checkpoint.",
        )
    out = PLAIN
    if request.to == "released":
        out = Wire.of(table, origin_stored) if origin_stored else PLAIN
        out = out if out.quantised else _released_wire(request.source, table)
        _check_geometry(table, out)
    plan = Plan(
        request,
        facts.family,
        kind,
        stored,
        wire,
        out,
        dtype,
        slots,
        items,
        origin,
        origin_stored,
        extras,
        () if extras else tuple(passed),
        tuple(name for name in table.copies if name in stored),
    )
    plan.units = _dist_units(plan, table, facts, arch) if request.to == "dist" else _tensor_units(plan, table)
    return plan


def _origin(
    request: Request, kind: str, stored: dict[str, Stored], wire: Wire, table: WeightTable
) -> tuple[Path | None, dict[str, Stored]]:
    """Where released scales and passed-over layers come from: --like, the source, or what a dist-checkpoint carries."""
    if request.like is not None:
        found, like_wire = check_released(request.like, table)
        if not like_wire.quantised:
            raise broken(request.like, ["it is not quantised, so --like can take nothing from it"])
        return request.like, found
    if kind == "safetensors":
        return request.source, stored
    carried = request.source / CARRIED
    return (carried, read_headers(carried)) if carried.is_dir() else (None, {})


def _dtype(request: Request, kind: str, stored: Mapping[str, Stored], wire: Wire, table: WeightTable) -> str:
    """fp32 where the source is in fp32 and a dist-checkpoint is asked for, which can hold it; else bf16."""
    if request.to != "dist" or wire.quantised:
        return "bf16"
    if kind == "dist":
        return "fp32" if is_fp32(request.source) else "bf16"
    plain = [stored[e.name].dtype for e in table.entries if e.spec.dtype == "bf16"]
    return "fp32" if plain and plain.count("F32") * 2 > len(plain) else "bf16"


def _released_wire(source: Path, table: WeightTable) -> Wire:
    if not any(row.quant for row in table.rows):
        return PLAIN  # a family whose releases are not quantised
    return Wire.released(read_config(source))


def _check_geometry(table: WeightTable, wire: Wire) -> None:
    wrong = [e.name for e in table.entries if wire.kind(e) == "mxfp4" and e.spec.shape[-1] % MXFP4_BLOCK]
    if wrong:
        raise UserError(
            "convert.geometry",
            f"{len(wrong)} tensors cannot be MXFP4: {', '.join(wrong[:4])}, ...",
            f"A scale is for {MXFP4_BLOCK} values of a row, and their rows do not divide into such blocks.",
            "Use --to bf16.",
        )


def _extras(stored: Mapping[str, Stored], table: WeightTable) -> tuple[Entry, ...]:
    """The passed-over tensors of a checkpoint as entries of the kinds that their headers show."""
    found = []
    for name, place in stored.items():
        if not table.ignored or not name.startswith(table.ignored) or name.endswith(".scale"):
            continue
        scaled = scale_name(name) in stored and name.endswith(".weight")
        quant = "fp8" if scaled and place.dtype == FP8 else "mxfp4" if scaled and place.dtype in BYTES else ""
        shape = (*place.shape[:-1], 2 * place.shape[-1]) if quant == "mxfp4" else place.shape
        dtype = {"F32": "fp32", "I32": "int32", "I64": "int64"}.get(place.dtype, "bf16")
        found.append(Entry(Row(name, "", "", "", dtype, quant=quant), name, TensorSpec(shape, dtype)))
    return tuple(found)


def pieces_as_stored(entry: Entry, stored: Mapping[str, Stored]) -> list[Piece]:
    """An entry's tensors on disk, as another checkpoint has them."""
    names = (entry.name, scale_name(entry.name)) if entry.row.quant else (entry.name,)
    return [Piece(name, stored[name].dtype, stored[name].shape) for name in names]


def _tensor_units(plan: Plan, table: WeightTable) -> list[Unit]:
    """The files of a released or plain checkpoint: those of the origin where it has the very same tensors."""
    pieces = [p for entry in table.entries for p in plan.out.pieces(entry)]
    for entry in plan.extras:
        pieces += PLAIN.pieces(entry) if plan.request.to == "bf16" else pieces_as_stored(entry, plan.origin_stored)
    files = files_like(plan.origin_stored, pieces) if plan.request.to == "released" else None
    if files is None and plan.origin is not None and plan.origin.name == CARRIED and plan.out.quantised:
        files = files_like(_layout(plan.origin), pieces)
    return [Unit(f.file, f.nbytes, f) for f in files or plan_files(pieces, plan.request.file_bytes)]


def _layout(carried: Path) -> dict[str, Stored]:
    """The headers of the released checkpoint whose scales a dist-checkpoint carries."""
    try:
        places = json.loads((carried / "layout.json").read_text())
        return {n: Stored(f, d, tuple(s), o) for n, (f, d, s, o) in places.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise broken(carried.parent, [f"{CARRIED}/layout.json cannot be read: {error}"]) from None


def carried_pieces(plan: Plan, table: WeightTable) -> list[Piece]:
    """What a dist-checkpoint carries along: released scales, and the passed-over tensors that are kept."""
    stored = plan.origin_stored
    scales = [scale_name(e.name) for e in table.entries if e.row.quant]
    pieces = [Piece(n, stored[n].dtype, stored[n].shape) for n in scales if n in stored]
    return pieces + [p for entry in plan.extras for p in pieces_as_stored(entry, stored)]


def _dist_units(plan: Plan, table: WeightTable, facts: Any, arch: Any) -> list[Unit]:
    """Files of a dist-checkpoint by the rank that owns their content, and then the carried ones."""
    from moe_rl.engine.checkpoint import arch_values

    request = plan.request
    stages = _stages(request, facts)
    by_rank: dict[tuple[int, int], list[Chunk]] = {}
    for slot in owned(plan.slots, table, stages, request.pp, request.ep):
        by_rank.setdefault((slot.stage, slot.ep_rank), []).extend(chunks_of(slot))
    units: list[Unit] = []
    for (stage, ep_rank), chunks in sorted(by_rank.items()):
        rank = stage * request.ep + ep_rank
        for i, group in enumerate(_groups(chunks, request.file_bytes)):
            units.append(Unit(f"__{rank}_{i}.distcp", sum(c.nbytes for c in group), None, tuple(group)))
    described = {"contents": ["model"], "layout": _describe(request, stages), "arch": arch_values(arch)}
    common = Item("common_state/shard_0_1", {"moe_rl": described})
    units[0] = units[0]._replace(items=(*plan.items, common))
    pieces = carried_pieces(plan, table)
    for file in plan_files(pieces, request.file_bytes) if pieces else []:
        units.append(Unit(f"{CARRIED}/{file.file}", file.nbytes, file._replace(file=f"{CARRIED}/{file.file}")))
    return units


def _groups(chunks: Sequence[Chunk], limit: int) -> list[list[Chunk]]:
    """Runs of chunks of at most `limit` bytes; a parameter's parts stay together."""
    groups: list[list[Chunk]] = [[]]
    size = 0
    for chunk in chunks:
        new = not groups[-1] or chunk.slot.name != groups[-1][-1].slot.name or chunk.slot.by_rows
        if groups[-1] and new and size + chunk.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(chunk)
        size += chunk.nbytes
    return groups


def _stages(request: Request, facts: Any) -> str:
    problem = ""
    if request.ep > 1 and (not facts.num_experts or facts.num_experts % request.ep):
        problem = f"ep={request.ep} does not divide the model's {facts.num_experts} experts"
    if problem:
        raise UserError("convert.layout", problem, "Every rank holds the same number of experts.", "Use a divisor.")
    if request.stages:
        stages = resolve_stages(request.stages, facts.num_layers, (), request.pp, 1, False)
        if stages.count("t") != facts.num_layers or stages.count("|") != request.pp - 1:
            what = f"stages={request.stages} has {stages.count('t')} layers in {stages.count('|') + 1} stages"
            raise UserError("convert.layout", what, f"The model has {facts.num_layers} layers, pp is {request.pp}.")
        return stages
    return default_stages(facts.num_layers, facts.hash_layers, request.pp)


def _describe(request: Request, stages: str) -> dict[str, Any]:
    """The layout as the engine describes its own."""
    world = request.pp * request.ep
    return {
        "world": world,
        "tp": 1,
        "pp": request.pp,
        "vpp": 1,
        "ep": request.ep,
        "etp": 1,
        "dp": request.ep,
        "stages": stages,
    }
