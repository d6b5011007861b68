"""The weight map: which tensor of the trainer and of transformers each released tensor is. Importing it needs no torch.

A family writes one table of `Row`s. Everything else (what a checkpoint must hold, views onto a live model, what a
rollout replica lacks) is read off that table. The released name is the only name that crosses a border: trainer to
disk, disk to trainer, trainer to rollout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
DTYPES = {d.name: d for d in _DTYPES}
BY_TORCH_NAME = {d.torch: d for d in _DTYPES}
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


class Row(NamedTuple):
    """One line of a family's table, for all layers and experts at once.

    `{l}` stands for the global layer and `{e}` for the expert (global in the released name, counted from the rank's
    first expert in the trainer's). A name may end in an index, applied to dimension 0 from left to right: `[e]` picks
    the expert, `[first]` and `[second]` a half. `shape` names sizes; `when` names the layers that have the tensor.
    """

    released: str
    trainer: str
    transformers: str
    shape: str
    dtype: str = "bf16"
    when: str = "always"


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
        else:
            half = view.shape[0] // 2
            view = view[:half] if item == "first" else view[half:]
    return view


@dataclass(frozen=True)
class WeightTable:
    """A family's rows with one model's sizes.

    `sizes(layer)` gives the numbers that the rows' shapes name (layer None for tensors outside the layers);
    `has(when, layer)` says whether a layer has the rows marked `when`. Released tensors whose name starts with one of
    `ignored` belong to parts that are not built here (extra prediction layers).
    """

    rows: tuple[Row, ...]
    layers: int
    experts: int
    sizes: Callable[[int | None], Mapping[str, int]]
    has: Callable[[str, int], bool]
    ignored: tuple[str, ...] = ()

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
        """Released name -> view onto the live tensor of one model chunk; writing into a view changes the model.

        Takes the chunk as it is (pipeline stage, virtual stage, wrapped or not) and this rank's share of the experts.
        Views follow the storage of the moment: take them after whatever moves parameters (DDP buffers) has run.

        Raises:
            RunFailed: a parameter that no row speaks of or covers whole, a layer with only some of its tensors, or a
                shape other than the table's. The table or the model is wrong; the message names the tensors.
        """
        if self.experts % ep_size:
            raise RunFailed("weights.map", f"{self.experts} experts cannot be shared by {ep_size} ranks")
        share = self.experts // ep_size
        state = _state(chunk)
        views: dict[str, torch.Tensor] = {}
        absent: dict[int | None, list[str]] = {}
        covered = dict.fromkeys(state, 0)
        problems: list[str] = []
        for row, name, spec in self.entries:
            local = None if spec.expert is None else spec.expert - ep_rank * share
            if local is not None and not 0 <= local < share:
                continue
            place, index = _place(row.trainer, spec.layer, local)
            if place not in state:
                absent.setdefault(spec.layer, []).append(place)
                continue
            views[name] = view = _select(state[place], index, local)
            covered[place] += view.numel()
            problems += _misshapen(name, place, view, spec)
        here = {self._layer_of[name] for name in views}
        for layer, places in absent.items():
            if layer is not None and layer in here:
                problems += [f"no tensor {place} in layer {layer}" for place in places]
        _finish("trainer", problems, chunk, covered)
        return views

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
            problems += _misshapen(name, place, view, spec)
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


def _misshapen(name: str, place: str, view: torch.Tensor, spec: TensorSpec) -> list[str]:
    problems = []
    if tuple(view.shape) != spec.shape:
        problems.append(f"{name} is {place} of shape {tuple(view.shape)}, not {spec.shape}")
    if DTYPES[dtype_name(view)].integer != DTYPES[spec.dtype].integer:
        problems.append(f"{name} is {place} of dtype {dtype_name(view)}, not {spec.dtype}")
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
