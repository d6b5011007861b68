"""How released checkpoints store a weight: as it is, or as FP8 or MXFP4 with block scales beside it. Torch-free.

FP8: `X.weight` F8_E4M3 [out, in] and `X.scale` [ceil(out/128), ceil(in/128)], one scale for a block of 128 x 128.
MXFP4: `X.weight` bytes [out, in/2], two E2M1 codes each, low nibble first, and `X.scale` F8_E8M0 [out, in/32], one
scale for 32 values of a row (OCP Microscaling Formats, v1.0). Names and dtypes are those that vLLM's DeepSeek-V4 loader
reads; checkpoints with FP4 experts have E8M0 scales throughout, those with FP8 experts float32 ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from moe_rl.models.weights import BY_SAFETENSORS_NAME, DTYPES, Box, Entry, TensorSpec, WeightTable

FP8_BLOCK, MXFP4_BLOCK = 128, 32
BLOCKS = {"fp8": (FP8_BLOCK, FP8_BLOCK), "fp8_f32": (FP8_BLOCK, FP8_BLOCK), "mxfp4": (1, MXFP4_BLOCK)}
"""Forms in which a weight travels encoded -> rows and columns under one scale; "fp8_f32" has float32 scales."""
FP8, E8M0, BYTES = "F8_E4M3", "F8_E8M0", ("I8", "U8")
SCALES = (E8M0, "F32")
SIZES = {d.safetensors: d.size for d in DTYPES.values()} | {FP8: 1, E8M0: 1, "I8": 1, "U8": 1}


class Placed(Protocol):
    """What a header says of a tensor."""

    @property
    def file(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Piece(NamedTuple):
    """One tensor on disk; `dtype` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Wire:
    """How one checkpoint stores the rows that its family quantises.

    `linears` and `experts` are "fp8", "mxfp4" or "" (as they are) for the rows marked fp8 and mxfp4; `scale` is the
    dtype of the FP8 blocks' scales, `packed` that of the MXFP4 bytes.
    """

    linears: str = ""
    experts: str = ""
    scale: str = E8M0
    packed: str = "I8"

    @property
    def quantised(self) -> bool:
        return bool(self.linears or self.experts)

    def kind(self, entry: Entry) -> str:
        """How an entry is stored: "", "fp8" or "mxfp4"."""
        return {"": "", "fp8": self.linears, "mxfp4": self.experts}[entry.row.quant]

    def form(self, entry: Entry) -> str:
        """The form in which an entry travels to a rollout that keeps it so: one of `BLOCKS`, or "" as it is."""
        kind = self.kind(entry)
        return "fp8_f32" if kind == "fp8" and self.scale == "F32" else kind

    def pieces(self, entry: Entry) -> tuple[Piece, ...]:
        """The tensors on disk of an entry, the weight first."""
        kind, shape = self.kind(entry), entry.spec.shape
        if not kind:
            return (Piece(entry.name, DTYPES[entry.spec.dtype].safetensors, shape),)
        rows, columns = shape
        if kind == "fp8":
            blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
            return Piece(entry.name, FP8, shape), Piece(scale_name(entry.name), self.scale, blocks)
        return (
            Piece(entry.name, self.packed, (rows, -(-columns // 2))),
            Piece(scale_name(entry.name), E8M0, (rows, -(-columns // MXFP4_BLOCK))),
        )

    @classmethod
    def of(cls, table: WeightTable, stored: Mapping[str, Placed]) -> Wire:
        """What a checkpoint's headers show: how most of the rows of each kind are stored, if any is quantised at all."""
        seen: dict[str, Counter[str]] = {"fp8": Counter(), "mxfp4": Counter()}
        scales: Counter[str] = Counter()
        for entry in table.entries:
            if entry.row.quant and entry.name in stored:
                dtype = stored[entry.name].dtype
                seen[entry.row.quant][dtype] += 1
                scale = stored.get(scale_name(entry.name))
                if dtype == FP8 and scale is not None:
                    scales[scale.dtype] += 1
        commonest = max((s for s in scales if s in SCALES), key=scales.__getitem__, default=E8M0)
        packed = max((b for b in BYTES if seen["mxfp4"][b]), key=seen["mxfp4"].__getitem__, default="I8")
        forms = {}
        for quant, dtypes in seen.items():
            fp8, mxfp4 = dtypes[FP8], sum(dtypes[b] for b in BYTES)
            forms[quant] = "" if not fp8 + mxfp4 else "fp8" if fp8 >= mxfp4 else "mxfp4"
        return cls(forms["fp8"], forms["mxfp4"], commonest, packed)

    @classmethod
    def released(cls, config: Mapping[str, Any]) -> Wire:
        """The form that a parsed `config.json` asks for: MXFP4 experts, unless its `expert_dtype` is "fp8"."""
        fp8 = config.get("expert_dtype") == "fp8"
        return cls("fp8", "fp8" if fp8 else "mxfp4", "F32" if fp8 else E8M0)

    def config(self) -> dict[str, Any]:
        """The keys of `config.json` that tell vLLM and transformers of this form."""
        if not self.quantised:
            return {}
        scheme: dict[str, Any] = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
        scheme |= {"scale_fmt": "ue8m0"} if self.scale == E8M0 else {}
        scheme |= {"weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
        return {"quantization_config": scheme, "expert_dtype": "fp4" if self.experts == "mxfp4" else "fp8"}


PLAIN = Wire()


def is_integer(form: str) -> bool:
    """Whether a form in which a tensor travels (a short dtype or one of `BLOCKS`) holds integers."""
    return form in DTYPES and DTYPES[form].integer


class Stored(NamedTuple):
    """A block of one tensor of a checkpoint: short dtype ("u8" for codes and E8M0 scales) and the whole tensor's shape."""

    dtype: str
    box: Box
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.box.numel * DTYPES[self.dtype].size


def stored(form: str, box: Box, shape: Sequence[int]) -> tuple[Stored, ...]:
    """What a block of a weight of `shape` is in a checkpoint: itself, or codes and then scales."""
    if form not in BLOCKS:
        return (Stored(form, box, tuple(shape)),)
    codes, scales = ((1, 2) if form == "mxfp4" else (1, 1)), BLOCKS[form]
    return (
        Stored("u8", _shrunk(box.name, box, codes), _shrunk("", Box("", (0, 0), tuple(shape)), codes).extent),
        Stored(
            "fp32" if form == "fp8_f32" else "u8",
            _shrunk(scale_name(box.name), box, scales),
            _shrunk("", Box("", (0, 0), tuple(shape)), scales).extent,
        ),
    )


def stored_names(weight: str, form: str) -> tuple[str, ...]:
    """Names of the tensors that a weight in a form is in a checkpoint."""
    return (weight, scale_name(weight)) if form in BLOCKS else (weight,)


def _shrunk(name: str, box: Box, by: Sequence[int]) -> Box:
    """The block of elements that each stand for `by` of the weight's."""
    start = tuple(at // n for at, n in zip(box.start, by, strict=True))
    ends = (-(-(at + size) // n) for at, size, n in zip(box.start, box.extent, by, strict=True))
    return Box(name, start, tuple(end - first for end, first in zip(ends, start, strict=True)))


def wire_bytes(form: str, start: Sequence[int], extent: Sequence[int]) -> int:
    """Bytes of a block that travels in a form (a short dtype or one of `BLOCKS`), the scales that it touches included."""
    if form == "mxfp4":
        (_, left), (rows, columns) = start, extent
        return rows * (-(-columns // 2) + -(-(left + columns) // MXFP4_BLOCK) - left // MXFP4_BLOCK)
    if form in BLOCKS:
        blocks = (-(-(at + n) // FP8_BLOCK) - at // FP8_BLOCK for at, n in zip(start, extent, strict=True))
        return math.prod(extent) + math.prod(blocks) * (4 if form == "fp8_f32" else 1)
    return math.prod(extent) * DTYPES[form].size


def cut_inside(form: str, box: Box, shape: Sequence[int]) -> str:
    """Where a block of a weight begins or ends under a scale that it shares with another, in words; "" if nowhere."""
    for first, size, whole, n in zip(box.start, box.extent, shape, BLOCKS.get(form, ()), strict=False):
        if first % n or ((first + size) % n and first + size != whole):
            return f"{box.name} {list(shape)} is cut at {first}:{first + size}, inside a block of {n}"
    return ""


def scale_name(weight: str) -> str:
    """`X.weight` -> `X.scale`."""
    return weight.removesuffix("weight") + "scale"


def mismatches(table: WeightTable, stored: Mapping[str, Placed], wire: Wire) -> Iterator[tuple[str, str]]:
    """(kind of problem, tensor with its file) for whatever a checkpoint's headers and the model do not have in common."""
    taken: set[str] = set()
    for entry in table.entries:
        pieces = wire.pieces(entry)
        for piece in pieces:
            taken.add(piece.name)
            place = stored.get(piece.name)
            if place is None:
                beside = [f" ({p.name} is in {stored[p.name].file})" for p in pieces if p.name in stored]
                yield "missing", piece.name + "".join(beside)
                continue
            if not _fits(place.dtype, piece.dtype, bool(wire.kind(entry))):
                yield "of another dtype", f"{piece.name} is {place.dtype}, not {piece.dtype} ({place.file})"
            elif place.shape != piece.shape:
                padding = _padding(entry.spec, place.shape, table)
                yield (
                    "of another shape",
                    f"{piece.name} is {list(place.shape)}, not {list(piece.shape)} ({place.file}){padding}",
                )
    for name in sorted(stored.keys() - taken):
        if name in table.copies:
            twin, place = stored.get(table.copies[name]), stored[name]
            if twin is not None and place.shape != twin.shape:
                what = f"{name} is {list(place.shape)}, {table.copies[name]}, which it repeats, {list(twin.shape)}"
                yield "of another shape", f"{what} ({place.file})"
        elif not name.startswith(table.ignored):
            owner = name.removesuffix("scale") + "weight"
            why = f", which {'is not there' if owner not in stored else 'is not quantised'}" if owner != name else ""
            scale_of = f", the scale of {owner}{why}" if name.endswith(".scale") and owner in taken else ""
            yield "not a tensor of this model", f"{name} ({stored[name].file}{scale_of})"
        elif problem := _unreadable(name, stored):
            yield problem


def _unreadable(name: str, stored: Mapping[str, Placed]) -> tuple[str, str] | None:
    """(kind of problem, tensor) of one that is passed over, whose shape no table gives: what cannot be read as a value."""
    place, owner, scale = stored[name], name.removesuffix("scale") + "weight", scale_name(name)
    if place.dtype not in SIZES:
        return "of an unknown dtype", f"{name} is {place.dtype} ({place.file})"
    if name.endswith(".scale"):
        if owner not in stored:
            return "missing", f"{owner} ({name} is in {place.file})"
        coded = stored[owner].dtype in (FP8, *BYTES)
        return None if coded else ("not a tensor of this model", f"{name} ({place.file}), as {owner} is not quantised")
    if 0 in place.shape:
        return "of another shape", f"{name} is {list(place.shape)}: no values ({place.file})"
    if place.dtype not in (FP8, *BYTES):
        return None
    if not name.endswith(".weight") or scale not in stored:
        return "missing", f"{scale} ({name} is in {place.file})"
    found = stored[scale]
    step, dtypes = ((FP8_BLOCK, FP8_BLOCK), SCALES) if place.dtype == FP8 else ((1, MXFP4_BLOCK // 2), (E8M0,))
    if found.dtype not in dtypes:
        return "of another dtype", f"{scale} is {found.dtype}, not {' or '.join(dtypes)} ({found.file})"
    wanted = [-(-size // n) for size, n in zip(place.shape, step, strict=False)]
    if len(place.shape) != len(step) or list(found.shape) != wanted:
        both = f"{name} is {list(place.shape)} and {scale} {list(found.shape)}"
        return "of another shape", f"{both} ({', '.join(sorted({place.file, found.file}))})"
    return None


def _fits(found: str, wanted: str, quantised: bool) -> bool:
    """Quantised tensors have one dtype; of others the kind counts, for they are converted when read."""
    if quantised:
        return found == wanted
    known = BY_SAFETENSORS_NAME.get(found)
    return known is not None and known.integer == BY_SAFETENSORS_NAME[wanted].integer


def _padding(spec: TensorSpec, found: tuple[int, ...], table: WeightTable) -> str:
    """Says so where the rows beyond the vocabulary are padding."""
    vocab = table.sizes(None).get("vocab")
    if vocab and len(found) == len(spec.shape) and spec.shape[0] == vocab < found[0] and found[1:] == spec.shape[1:]:
        return f": {found[0] - vocab} rows of padding beyond vocab_size {vocab}"
    return ""
