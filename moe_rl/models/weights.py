"""The weight map: which tensor of the trainer and of transformers each released tensor is. Importing it needs no torch.

A family writes one table of `Row`s. Everything else (what a checkpoint must hold, views onto a live model, what a
rollout replica lacks) is read off that table. The released name is the only name that crosses a border: trainer to
disk, disk to trainer, trainer to rollout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from moe_rl.errors import RunFailed

if TYPE_CHECKING:
    import torch


class DType(NamedTuple):
    """One element type under the names that it has elsewhere; `size` in bytes."""

    name: str
    torch: str
    safetensors: str
    size: int
    integer: bool


_DTYPES = (
    DType("fp32", "float32", "F32", 4, False),
    DType("bf16", "bfloat16", "BF16", 2, False),
    DType("fp16", "float16", "F16", 2, False),
    DType("int32", "int32", "I32", 4, True),
    DType("int64", "int64", "I64", 8, True),
)
_CODES = DType("u8", "uint8", "U8", 1, True)  # of a weight that travels encoded: no parameter has it
DTYPES = {d.name: d for d in (*_DTYPES, _CODES)}
BY_TORCH_NAME = {d.torch: d for d in DTYPES.values()}
BY_SAFETENSORS_NAME = {d.safetensors: d for d in _DTYPES}


def dtype_name(tensor: torch.Tensor) -> str:
    """Our short name ("fp32", "bf16", "int64", ...) of a tensor's dtype; RunFailed for one that no weight may have."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in BY_TORCH_NAME:
        raise RunFailed("weights.dtype", f"a weight has dtype {name}", f"weights are one of {', '.join(DTYPES)}")
    return BY_TORCH_NAME[name].name


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype behind a short name."""
    import torch

    return getattr(torch, DTYPES[name].torch)


class TensorSpec(NamedTuple):
    """What a released checkpoint says of one tensor; `layer` and `expert` are global indices, or None."""

    shape: tuple[int, ...]
    dtype: str
    layer: int | None = None
    expert: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Box(NamedTuple):
    """A block of the released tensor `name`: its first index and its length along each axis."""

    name: str
    start: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.extent)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where the block lies in the whole tensor."""
        return tuple(slice(first, first + size) for first, size in zip(self.start, self.extent, strict=True))

    def __and__(self, other: Box) -> Box:
        """What two blocks of one tensor share; `numel` 0 where they do not meet."""
        start = tuple(map(max, self.start, other.start))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.start, self.extent, other.start, other.extent, strict=True)
        )
        return Box(self.name, start, tuple(max(0, end - first) for end, first in zip(ends, start, strict=True)))


class Part(NamedTuple):
    """A block of a released tensor and the live view that holds it.

    `view.shape` is the block's, `start` its first index along each axis, `shape` the whole tensor's.
    """

    view: torch.Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where the block lies in the whole tensor."""
        return self.box("").slices

    def box(self, name: str) -> Box:
        """The block without its values; `name` is the tensor's."""
        return Box(name, self.start, tuple(self.view.shape))

    def holds(self, box: Box) -> bool:
        """Whether the block has all of a box of its tensor."""
        return len(box.start) == len(box.extent) == self.view.dim() and self.box(box.name) & box == box

    def within(self, box: Box) -> torch.Tensor:
        """The view of a box that lies inside the block."""
        view = self.view
        for axis, (at, first, size) in enumerate(zip(box.start, self.start, box.extent, strict=True)):
            view = view.narrow(axis, at - first, size)
        return view

    @property
    def is_whole(self) -> bool:
        return tuple(self.view.shape) == self.shape


Parts = Mapping[str, Sequence[Part]]
"""Released name -> the blocks of it that are held, disjoint."""


def whole_parts(views: Mapping[str, torch.Tensor]) -> dict[str, list[Part]]:
    """Each whole tensor as the one block of itself."""
    return {name: [Part(view, (0,) * view.dim(), tuple(view.shape))] for name, view in views.items()}


class Shard(NamedTuple):
    """Where a rank stands in the groups that tensors are cut over: experts by `ep` and, inside an expert, `etp`; what is
    outside the experts by `tp`."""

    ep_rank: int = 0
    ep: int = 1
    tp_rank: int = 0
    tp: int = 1
    etp_rank: int = 0
    etp: int = 1


WHOLE = Shard()


class Row(NamedTuple):
    """One line of a family's table, for all layers and experts at once.

    `{l}` stands for the global layer and `{e}` for the expert (global in the released name, counted from the rank's
    first expert in the trainer's). A name may end in an index, applied to dimension 0 from left to right: `[e]` picks
    the expert, `[first]` and `[second]` a half, and `[q]`, `[k]`, `[v]` the rows of one projection in a matrix that holds
    query heads, key and value of one key-value head after the other. `a | b` are two places in the trainer that are one
    tensor (tied embeddings); a chunk may have either. `shape` names sizes; `when` names the layers that have the tensor.

    `split` says how tensor parallelism cuts the released tensor, inside an expert by expert tensor parallelism: "rows"
    (axis 0), "columns" (axis 1), "vocabulary" (axis 0, after padding to equal shares), or "" where each rank has all.

    `quant` says how released checkpoints store it: "fp8" or "mxfp4" with block scales beside (see `wire.py`), "" as it is.
    """

    released: str
    trainer: str
    transformers: str
    shape: str
    dtype: str = "bf16"
    when: str = "always"
    split: str = ""
    quant: str = ""


class Entry(NamedTuple):
    """A row written out for one layer and expert."""

    row: Row
    name: str
    spec: TensorSpec


_INDEXED = re.compile(r"^(?P<name>[^\[]+)(?:\[(?P<index>[a-z, ]+)\])?$")


def _place(template: str, layer: int | None, expert: int | None) -> tuple[str, list[str]]:
    """Module name and index items of a table cell."""
    match = _INDEXED.match(template)
    if match is None:
        raise ValueError(f"not a name with an index: {template}")
    index = [item.strip() for item in match["index"].split(",")] if match["index"] else []
    return match["name"].format(l=layer, e=expert), index


def _select(tensor: torch.Tensor, index: Sequence[str], expert: int | None) -> torch.Tensor:
    view = tensor.detach()
    for item in index:
        if item == "e":
            view = view[expert]
        elif item in ("first", "second"):
            half = view.shape[0] // 2
            view = view[:half] if item == "first" else view[half:]
    return view


class _Cut(NamedTuple):
    """How a released tensor of `shape` is shared: this is rank `rank` of `size`, and there are `groups` key-value heads."""

    shape: tuple[int, ...]
    split: str
    rank: int
    size: int
    groups: int

    def parts(self, view: torch.Tensor, index: Sequence[str]) -> list[Part]:
        """The blocks in this rank's `view` (which `index` picked), each of the shape that it should have or else `view`'s."""
        rest = self.shape[1:]
        projection = next((item for item in index if item in ("q", "k", "v")), None)
        if projection:
            here, rows = self.groups // self.size, self.shape[0] // self.groups
            width = view.shape[0] // here
            first = {"q": 0, "k": width - 2 * rows, "v": width - rows}[projection]
            blocks = [view[g * width + first : g * width + first + rows] for g in range(here)]
            return [
                Part(v, (rows * (self.rank * here + g), *(0 for _ in rest)), self.shape) for g, v in enumerate(blocks)
            ]
        start = [0] * len(self.shape)
        if self.split:
            axis = int(self.split == "columns")
            start[axis] = self.rank * view.shape[axis]
        if self.split == "vocabulary":
            view = view[: max(0, self.shape[0] - start[0])]
        return [Part(view, tuple(start), self.shape)]

    def wanted(self, part: Part, index: Sequence[str]) -> tuple[int, ...]:
        """The shape that a block must have."""
        shape = list(self.shape)
        if {"q", "k", "v"} & set(index):
            shape[0] //= self.groups
        elif self.split == "vocabulary":
            padded = -(-shape[0] // self.size) * self.size
            shape[0] = max(0, min(shape[0] - part.start[0], padded // self.size))
        elif self.split:
            shape[int(self.split == "columns")] //= self.size
        return tuple(shape)


@dataclass(frozen=True)
class WeightTable:
    """A family's rows with one model's sizes.

    `sizes(layer)` gives the numbers that the rows' shapes name (layer None for tensors outside the layers);
    `has(when, layer)` says whether a layer has the rows marked `when`. Released tensors whose name starts with one of
    `ignored` belong to parts that are not built here (extra prediction layers); those of `copies` repeat another one of the
    model, their values are not read. `groups` is the number of key-value heads, where rows pick `[q]`, `[k]` and `[v]`.
    """

    rows: tuple[Row, ...]
    layers: int
    experts: int
    sizes: Callable[[int | None], Mapping[str, int]]
    has: Callable[[str, int], bool]
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    groups: int = 1

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._write_out())

    def _write_out(self) -> Iterator[Entry]:
        for layer in (None, *range(self.layers)):
            sizes = self.sizes(layer)
            for row in self.rows:
                if ("{l}" in row.released) != (layer is not None):
                    continue
                if layer is not None and not self.has(row.when, layer):
                    continue
                shape = tuple(sizes[word] for word in row.shape.split())
                for expert in range(self.experts) if "{e}" in row.released else (None,):
                    name = row.released.format(l=layer, e=expert)
                    yield Entry(row, name, TensorSpec(shape, row.dtype, layer, expert))

    def expected(self) -> dict[str, TensorSpec]:
        """Released name -> shape and dtype of every tensor of the model, buffers included."""
        return {entry.name: entry.spec for entry in self.entries}

    def trainer_views(self, chunk: torch.nn.Module, *, ep_rank: int = 0, ep_size: int = 1) -> dict[str, torch.Tensor]:
        """Released name -> view onto the live tensor, for a chunk without tensor parallelism; see `trainer_parts`."""
        parts = self.trainer_parts(chunk, Shard(ep_rank, ep_size))
        return {name: part.view for name, (part,) in parts.items()}

    def trainer_parts(self, chunk: torch.nn.Module, shard: Shard = WHOLE) -> dict[str, list[Part]]:
        """Released name -> blocks in the live tensors of one model chunk; writing into a view changes the model.

        Takes the chunk as it is (pipeline stage, virtual stage, wrapped or not) and this rank's share of experts and rows.
        Views follow the storage of the moment: take them after whatever moves parameters (DDP buffers) has run.

        Raises:
            RunFailed: a parameter that no row speaks of or covers whole, a layer with only some of its tensors, or a
                shape other than the table's. The table or the model is wrong; the message names the tensors.
        """
        if self.experts % shard.ep:
            raise RunFailed("weights.map", f"{self.experts} experts cannot be shared by {shard.ep} ranks")
        share = self.experts // shard.ep
        state = _state(chunk)
        parts: dict[str, list[Part]] = {}
        absent: dict[int | None, list[str]] = {}
        covered = dict.fromkeys(state, 0)
        problems: list[str] = []
        for row, name, spec in self.entries:
            local = None if spec.expert is None else spec.expert - shard.ep_rank * share
            if local is not None and not 0 <= local < share:
                continue
            places = [_place(template, spec.layer, local) for template in row.trainer.split(" | ")]
            place, index = next((found for found in places if found[0] in state), places[0])
            if place not in state:
                absent.setdefault(spec.layer, []).append(place)
                continue
            ranks = (shard.tp_rank, shard.tp) if local is None else (shard.etp_rank, shard.etp)
            cut = _Cut(spec.shape, row.split, *ranks, self.groups)
            view = _select(state[place], index, local)
            blocks = cut.parts(view, index)
            # Rows beyond the vocabulary are padding, and belong to no released tensor.
            covered[place] += view.numel() if row.split == "vocabulary" else sum(b.view.numel() for b in blocks)
            problems += [p for b in blocks for p in _misshapen(name, place, b.view, cut.wanted(b, index), spec.dtype)]
            if blocks := [b for b in blocks if b.view.numel()]:
                parts[name] = blocks
        here = {self._layer_of[name] for name in parts}
        for layer, names in absent.items():
            if layer is not None and layer in here:
                problems += [f"no tensor {place} in layer {layer}" for place in names]
        _finish("trainer", problems, chunk, covered)
        return parts

    def transformers_views(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Released name -> view onto the live tensor of the whole transformers model.

        Raises:
            RunFailed: as `trainer_views`, and for any tensor of the table that the model lacks.
        """
        state = _state(model)
        views: dict[str, torch.Tensor] = {}
        covered = dict.fromkeys(state, 0)
        problems: list[str] = []
        for row, name, spec in self.entries:
            place, index = _place(row.transformers, spec.layer, spec.expert)
            if place not in state:
                problems.append(f"no tensor {place}")
                continue
            views[name] = view = _select(state[place], index, spec.expert)
            covered[place] += view.numel()
            problems += _misshapen(name, place, view, spec.shape, spec.dtype)
        _finish("transformers", problems, model, covered)
        return views

    def transformers_names(self, dtype: str) -> set[str]:
        """Names of transformers' parameters and buffers whose released dtype is `dtype`."""
        return {_place(row.transformers, spec.layer, None)[0] for row, _, spec in self.entries if spec.dtype == dtype}

    @cached_property
    def _layer_of(self) -> dict[str, int | None]:
        return {entry.name: entry.spec.layer for entry in self.entries}


def _strip(name: str) -> str:
    """Wrappers (DDP) put `module.` before a name, once each."""
    while name.startswith("module."):
        name = name[len("module.") :]
    return name


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers by their unwrapped names."""
    state = {_strip(name): tensor for name, tensor in module.named_parameters()}
    state.update((_strip(name), tensor) for name, tensor in module.named_buffers())
    return state


def _misshapen(name: str, place: str, view: torch.Tensor, shape: tuple[int, ...], dtype: str) -> list[str]:
    problems = []
    if tuple(view.shape) != shape:
        problems.append(f"{name} is {place} of shape {tuple(view.shape)}, not {shape}")
    if DTYPES[dtype_name(view)].integer != DTYPES[dtype].integer:
        problems.append(f"{name} is {place} of dtype {dtype_name(view)}, not {dtype}")
    return problems


def _finish(side: str, problems: list[str], module: torch.nn.Module, covered: Mapping[str, int]) -> None:
    """Raise one error for all problems; a parameter must be spoken for element by element (buffers may be scratch)."""
    for full, parameter in module.named_parameters():
        seen, size = covered[_strip(full)], parameter.numel()
        if seen != size:
            problems.append(f"{seen} of the {size} elements of {_strip(full)} are in the table")
    if problems:
        raise RunFailed(
            "weights.map",
            f"the {side} model and the weight table differ: {'; '.join(problems)}",
            "a tensor outside the table would neither be loaded, saved nor sent to the rollouts",
        )
