"""`moe-rl audit`: every tensor of a checkpoint accounted for, and every rank of a layout.

Of a directory: each tensor on disk belongs to one place of the model, each place of the model has its tensors, in the
right shape and dtype. Of a layout: the chunks that all its ranks build hold together the whole model, no gap, no
overlap.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from moe_rl.config.figures import UNVERIFIED
from moe_rl.config.layout import resolve_stages
from moe_rl.config.layout_rules import fit_problems
from moe_rl.config.problem import raise_all
from moe_rl.errors import MoeRLError, UserError
from moe_rl.models.family import Model, directory, get_family, read_config, read_facts
from moe_rl.models.headers import Stored, listed, recognise, scan_headers
from moe_rl.models.weights import DTYPES, Entry, WeightTable
from moe_rl.models.wire import SIZES, Wire, mismatches, scale_name


class Listed(NamedTuple):
    """One tensor of the source: the model's tensor that it belongs to ("" if none), and a digest where asked for."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    belongs_to: str
    sha256: str = ""


@dataclass(frozen=True)
class Totals:
    """Numbers of values: `embedding` both ends' vocabulary matrices, `experts` the routed ones, `dense` all other
    parameters, `active` what one token meets, `tables` what is no parameter (expert tables, correction biases)."""

    parameters: int
    embedding: int
    experts: int
    dense: int
    active: int
    tables: int
    released_bytes: int


@dataclass(frozen=True)
class LayoutAudit:
    """One layout: coordinates built, parameters of the smallest and the largest rank."""

    layout: str
    coordinates: int
    least: int
    most: int


@dataclass
class Audit:
    """What was found; `problems` is empty if all is accounted for. `unverified` figures of config.json have no sure source."""

    source: str
    form: str
    totals: Totals
    layouts: list[LayoutAudit] = field(default_factory=list)
    tensors: list[Listed] = field(default_factory=list)
    passed_over: int = 0
    unverified: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)

    def as_dict(self, *, with_tensors: bool) -> dict[str, Any]:
        """For --json."""
        return asdict(self) | {"tensors": [t._asdict() for t in self.tensors] if with_tensors else len(self.tensors)}

    def lines(self, *, with_tensors: bool) -> list[str]:
        """For people."""
        t = self.totals
        lines = [f"{self.source}: {self.form or 'a config.json without weights'}"]
        lines += [
            f"parameters: {_big(t.parameters)} = {_big(t.embedding)} embedding and output + {_big(t.dense)} dense"
            f" + {_big(t.experts)} routed experts; {_big(t.active)} are active for one token",
            f"beside them {_big(t.tables)} in expert tables and correction biases; released size {_big(t.released_bytes)}B",
        ]
        if self.unverified:
            lines.append(f"not verified, and set by model.config.NAME=VALUE: {', '.join(self.unverified)}")
        if self.tensors:
            over = f", {self.passed_over} of them passed over (prediction layers, copies)" if self.passed_over else ""
            lines.append(f"tensors on disk: {len(self.tensors)}{over}")
        lines += [
            f"{a.layout}: {a.coordinates} coordinates built, {_big(a.least)} to {_big(a.most)} parameters each, together the"
            " whole model once"
            for a in self.layouts
        ]
        if with_tensors:
            lines += [
                f"  {x.name} {x.dtype} {list(x.shape)} {x.file} {x.sha256}".rstrip()
                + (f" -> {x.belongs_to}" if x.belongs_to else "")
                for x in self.tensors
            ]
        return lines


def _big(count: float) -> str:
    """Four digits and a unit: 1.573 T."""
    for unit in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.4g} {unit}".strip()
        count /= 1000
    return f"{count:.4g} T"


def audit(
    model: Model, family: str = "auto", layouts: Sequence[Mapping[str, Any]] = (), *, digests: bool = False
) -> Audit:
    """Audit a model: its weights, if it has any, and the given layouts (keys pp, ep, tp, etp, vpp, stages).

    With `digests` every tensor is read: SHA-256 of each, and values that are not finite or name no expert are problems.

    Raises:
        UserError: there is no usable config.json, or a layout cannot be built at all.
    """
    facts, path, config = read_facts(model, family), directory(model), read_config(model)
    raise_all([problem for sizes in layouts for problem in fit_problems(facts, sizes)])
    kind = get_family(facts.family)
    arch = kind.read_arch(model)
    table = kind.weight_table(arch)
    form = recognise(path)
    doubts = tuple(config.get(UNVERIFIED, ()))
    found = Audit(str(path), form, totals(table, facts.top_k, config), unverified=doubts)
    try:
        if form == "safetensors":
            _audit_tensors(found, path, table, digests)
        elif form == "dist":
            _audit_dist(found, path, kind, arch, table, digests)
    except UserError as error:  # files that cannot be read at all
        found.problems += [line.strip() for line in error.what.splitlines()[1:]] or [error.what]
    for sizes in layouts:
        _audit_layout(found, kind, arch, table, facts, sizes)
    return found


def totals(table: WeightTable, top_k: int, config: Mapping[str, Any]) -> Totals:
    """Counted from the weight table; bytes as the family's released checkpoints store it."""
    sums = dict.fromkeys(("embedding", "experts", "dense", "tables"), 0)
    wire = Wire.released(config) if any(row.quant for row in table.rows) else Wire()
    nbytes = 0
    vocab = table.sizes(None).get("vocab")
    for entry in table.entries:
        spec = entry.spec
        if DTYPES[spec.dtype].integer or entry.name.endswith("gate.bias"):
            where = "tables"
        elif spec.expert is not None:
            where = "experts"
        else:
            where = "embedding" if spec.layer is None and spec.shape[:1] == (vocab,) else "dense"
        sums[where] += spec.numel
        nbytes += sum(SIZES[p.dtype] * math.prod(p.shape) for p in wire.pieces(entry))
    used = sums["experts"] * top_k // table.experts if table.experts else 0
    fixed = sums["embedding"] + sums["dense"]
    return Totals(
        fixed + sums["experts"], sums["embedding"], sums["experts"], sums["dense"], fixed + used, sums["tables"], nbytes
    )


# ---------------------------------------------------------------------------------------------------------- a directory
def _audit_tensors(found: Audit, path: Path, table: WeightTable, digests: bool) -> None:
    stored, problems = scan_headers(path)
    found.problems += problems
    wire = Wire.of(table, stored)
    kinds: dict[str, list[str]] = {}
    for kind, tensor in mismatches(table, stored, wire):
        kinds.setdefault(kind, []).append(tensor)
    found.problems += [line for kind in sorted(kinds) for line in listed(kind, kinds[kind])]
    forms = {"": "plain", "fp8": "FP8", "mxfp4": "MXFP4"}
    found.form = (
        f"released ({forms[wire.linears]} linears, {forms[wire.experts]} experts)" if wire.quantised else "plain"
    )
    owner = {piece.name: entry.name for entry in table.entries for piece in wire.pieces(entry)}
    hashes = _digests(found, path, stored, table, wire) if digests else {}
    for name, place in stored.items():
        over = name not in owner and (name in table.copies or name.startswith(table.ignored))
        found.passed_over += over
        belongs = "" if over else owner.get(name, "")
        found.tensors.append(Listed(name, place.dtype, place.shape, place.file, belongs, hashes.get(name, "")))


def _digests(found: Audit, path: Path, stored: Mapping[str, Stored], table: WeightTable, wire: Wire) -> dict[str, str]:
    """SHA-256 of each tensor's bytes; values that cannot be are noted."""
    import torch

    from moe_rl.models.load import check_experts
    from moe_rl.models.reader import Reader, row_steps

    hashes = {}
    with Reader(path, stored) as reader:
        for name, place in stored.items():
            if place.dtype not in SIZES:
                continue  # already a problem
            sha = hashlib.sha256()
            rows = 0 if 0 in place.shape else place.shape[0] if place.shape else 1
            step = max(1, rows * (16 << 20) // max(1, SIZES.get(place.dtype, 8) * math.prod(place.shape)))
            for start in range(0, rows, step):
                part = reader.rows(name, start, min(start + step, rows))
                sha.update(memoryview(part.reshape(-1).view(torch.uint8).numpy()))
            hashes[name] = sha.hexdigest()
        found.problems += [
            f"{name} ({stored[name].file}) has other values than {of}, but config.json ties them"
            for name, of in table.copies.items()
            if name in hashes and of in hashes and hashes[name] != hashes[of]
        ]
        bad = {name.split(" ")[0] for problem in found.problems for name in problem.split(": ", 1)[-1].split(", ")}
        for entry in table.entries:
            if entry.name in bad or scale_name(entry.name) in bad or entry.name not in stored:
                continue
            try:
                for start, stop in row_steps(entry):
                    value = reader.decoded(entry, wire, start, stop, torch.bfloat16)
                    if not value.is_floating_point() and value.numel():
                        check_experts(value, entry.name, stored[entry.name].file, table.experts, path)
            except UserError as error:
                found.problems.append(error.what.splitlines()[-1].strip())
    return hashes


def _audit_dist(found: Audit, path: Path, family: Any, arch: Any, table: WeightTable, digests: bool) -> None:
    """Each part of each parameter, as the model itself would ask for it, is in the checkpoint once."""
    from moe_rl.convert.dist import DistReader, changed_files, surplus
    from moe_rl.convert.slots import make_slots
    from moe_rl.models.headers import check_dist_files

    check_dist_files(path)
    if digests:
        found.problems += [f"{name} is not the file that was saved" for name in changed_files(path)]
    reader = DistReader(path)
    slots, _ = make_slots(family, arch, "bf16")
    wanted = {stored.key: stored.whole for slot in slots for stored in slot.stored}
    for slot in slots:
        for stored in slot.stored:
            shape = reader.shapes.get(stored.key)
            where = ", ".join(sorted({block.name for block in slot.blocks}))
            if shape is None:
                found.problems.append(f"{stored.key} ({where}) is missing from .metadata")
            elif shape != stored.whole:
                found.problems.append(f"{stored.key} ({where}) is {list(shape)}, not {list(stored.whole)}")
    found.problems = list(dict.fromkeys(found.problems))
    found.problems += [f"{key} is no tensor of the model" for key in surplus(reader, slots)]
    for key, shape in reader.shapes.items():
        covered, overlap = reader.covered(key)
        if covered != math.prod(shape) or overlap:
            found.problems.append(f"{key}: {covered} of {math.prod(shape)} values are stored{', some twice' * overlap}")
        dtype = str(reader.dtypes[key]).removeprefix("torch.")
        found.tensors.append(Listed(key, dtype, shape, ", ".join(reader.files(key)), key if key in wanted else ""))


# -------------------------------------------------------------------------------------------------------------- layouts
def _audit_layout(
    found: Audit, family: Any, arch: Any, table: WeightTable, facts: Any, sizes: Mapping[str, Any]
) -> None:
    """Build every coordinate of a layout on the meta device and put the blocks of all of them together."""
    from moe_rl.engine.standing import Layout, single_process

    pp, vpp = sizes.get("pp", 1), sizes.get("vpp", 1)
    pinned = sizes.get("pin_hash_layers", True)
    stages = resolve_stages(sizes.get("stages", ""), facts.num_layers, facts.hash_layers, pp, vpp, pinned)
    ranks = {name: sizes.get(name, 1) for name in ("pp", "ep", "tp", "etp", "vpp")}
    layout = Layout(stages, **ranks)
    name = " ".join(f"{k}={v}" for k, v in ranks.items() if v != 1) or "one rank"
    boxes: dict[str, dict[tuple, set[str]]] = {}
    counts: list[int] = []
    with single_process():
        for pp_rank, shard in coordinates(layout):
            try:
                counts.append(_collect(family, arch, table, layout, pp_rank, shard, boxes))
            except MoeRLError as error:
                found.problems.append(f"{name}, stage {pp_rank}, {shard}: {error.what}")
                return
    problems = list(_uncovered(table, boxes))
    found.problems += [f"{name}: {line}" for line in problems]
    if not problems:
        found.layouts.append(LayoutAudit(name, len(counts), min(counts), max(counts)))


def coordinates(layout: Any) -> Iterator[tuple[int, Any]]:
    """(pipeline rank, shard) of every rank whose share of the model may differ from another's."""
    from moe_rl.models.weights import Shard

    for pp_rank, ep_rank, t in itertools.product(range(layout.pp), range(layout.ep), range(max(layout.tp, layout.etp))):
        yield pp_rank, Shard(ep_rank, layout.ep, t % layout.tp, layout.tp, t % layout.etp, layout.etp)


def _collect(
    family: Any,
    arch: Any,
    table: WeightTable,
    layout: Any,
    pp_rank: int,
    shard: Any,
    boxes: dict[str, dict[tuple, set[str]]],
) -> int:
    """Add the blocks of one rank; the number of its parameters.

    Raises:
        RunFailed: the model that it builds and the weight table differ, also by a buffer that is saved.
    """
    from moe_rl.engine.standing import meta_chunks
    from moe_rl.errors import RunFailed

    count = 0
    for number, chunk in enumerate(meta_chunks(family, arch, layout, pp_rank, shard)):
        stage = f"{pp_rank}.{number}" if layout.vpp > 1 else str(pp_rank)
        known = set()
        for name, parts in table.trainer_parts(chunk, shard).items():
            for part in parts:
                known.add(part.view.untyped_storage()._cdata)
                held = boxes.setdefault(name, {}).setdefault((part.start, tuple(part.view.shape)), set())
                held.add(stage)
        state = {n: t for n, t in chunk.state_dict().items() if hasattr(t, "untyped_storage")}
        outside = [n for n, t in state.items() if t.untyped_storage()._cdata not in known]
        if outside:
            raise RunFailed("audit.table", f"saved with the model, but in no row of the table: {', '.join(outside)}")
        count += sum(p.numel() for p in chunk.parameters())
    return count


def _uncovered(table: WeightTable, boxes: Mapping[str, Mapping[tuple, set[str]]]) -> Iterator[str]:
    """What the ranks of a layout lack or hold in two places."""
    missing: list[str] = []
    for entry in table.entries:
        held = boxes.get(entry.name)
        if held is None:
            missing.append(entry.name)
            continue
        if sum(math.prod(shape) for _, shape in held) != entry.spec.numel or _overlap(list(held)):
            yield f"{entry.name} {list(entry.spec.shape)} is held as {sorted(held)}: gaps or overlaps"
        stages = set().union(*held.values())
        if len(stages) > 1 and not _tied(entry):
            yield f"{entry.name} is on the pipeline stages {', '.join(sorted(stages))}"
    yield from listed("on no rank", missing)
    yield from listed("not of this model", sorted(boxes.keys() - {e.name for e in table.entries}))


def _tied(entry: Entry) -> bool:
    return " | " in entry.row.trainer


def _overlap(held: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether two of the boxes (start, shape) have an element in common."""
    return any(
        all(a < b + m and b < a + n for a, n, b, m in zip(start, shape, other, size, strict=True))
        for (start, shape), (other, size) in itertools.combinations(held, 2)
    )
