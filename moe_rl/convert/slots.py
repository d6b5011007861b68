"""Where each value of a released tensor lies in a megatron dist-checkpoint: read off the model code itself.

The model is built on the meta device as one rank. Its weight table says which views of which parameters the released
tensors are, its `sharded_state_dict` under which key and at which offset each part of a parameter is stored. Both speak
of the same storages, so neither needs to know the other's names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moe_rl.config.layout import layers_of
from moe_rl.models.weights import WeightTable

WHOLE_BYTES = 256 << 20  # larger parameters are handled by rows


class Geometry(NamedTuple):
    """A view of a parameter: shape, strides and offset, in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: torch.Tensor) -> Geometry:
        return cls(tuple(view.shape), tuple(view.stride()), view.storage_offset())

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.as_strided(self.shape, self.stride, self.offset)


class Block(NamedTuple):
    """A block of a released tensor, at `start` of it, and where it is in the parameter."""

    name: str
    start: tuple[int, ...]
    place: Geometry

    @property
    def inside(self) -> tuple[slice, ...]:
        """Where the block lies in the released tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.place.shape, strict=True))


class Stored(NamedTuple):
    """A part of a parameter as the dist-checkpoint knows it: key, its whole shape, where this part is, of which shape."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]  # with the axes that megatron-core puts before the parameter's own
    place: Geometry


class Item(NamedTuple):
    """What is not a tensor: the extra state of a module."""

    key: str
    data: Any


@dataclass(frozen=True)
class Slot:
    """One parameter or buffer of the trainer; `stage` and `ep_rank` own it in the layout at hand."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[Block, ...]
    stored: tuple[Stored, ...]
    stage: int = 0
    ep_rank: int = 0

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def by_rows(self) -> bool:
        """Large, and all of one released tensor: it need never be held whole."""
        plain = len(self.blocks) == 1 == len(self.stored) and self.blocks[0].place == self.stored[0].place
        return self.nbytes > WHOLE_BYTES and plain and self.stored[0].shape == self.shape == self.blocks[0].place.shape


def make_slots(family: Any, arch: Any, dtype: str) -> tuple[list[Slot], list[Item]]:
    """Every parameter and buffer of a model that a checkpoint holds, and its extra states; `dtype` "bf16" or "fp32"."""
    from moe_rl.engine.standing import Layout, meta_chunks, single_process

    table: WeightTable = family.weight_table(arch)
    with single_process():
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

        (chunk,) = meta_chunks(family, arch, Layout(""), dtype=dtype)
        state = chunk.sharded_state_dict(metadata={"singleton_local_shards": False})
        apply_factories(state)
    owners = {_storage(t): n for n, t in [*chunk.named_parameters(), *chunk.named_buffers()]}
    tensors = {n: t for n, t in [*chunk.named_parameters(), *chunk.named_buffers()]}
    blocks: dict[str, list[Block]] = {}
    layer_of: dict[str, tuple[int | None, int | None]] = {}
    specs = table.expected()
    for name, parts in table.trainer_parts(chunk).items():
        for part in parts:
            owner = owners[_storage(part.view)]
            blocks.setdefault(owner, []).append(Block(name, part.start, Geometry.of(part.view)))
            layer_of[owner] = (specs[name].layer, specs[name].expert)
    stored: dict[str, list[Stored]] = {}
    items = []
    for value in nested_values(state):
        if isinstance(value, ShardedTensor):
            owner = owners.get(_storage(value.data), "")
            shape = (1,) * value.prepend_axis_num + tuple(value.local_shape)
            place = Stored(
                value.key, tuple(value.global_shape), tuple(value.global_offset), shape, Geometry.of(value.data)
            )
            stored.setdefault(owner, []).append(place)
        elif isinstance(value, ShardedObject):
            items.append(Item(value.unique_key, value.data))
    assert stored.keys() == blocks.keys(), f"in one of both alone: {sorted(stored.keys() ^ blocks.keys())}"
    slots = []
    for name, found in blocks.items():
        tensor = tensors[name]
        slots.append(Slot(name, tuple(tensor.shape), tensor.dtype, tuple(found), tuple(stored[name])))
    return slots, items


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def owned(slots: list[Slot], table: WeightTable, stages: str, pp: int, ep: int) -> Iterator[Slot]:
    """The slots with the rank that owns them in a layout; what is outside the layers by its end of the pipeline."""
    stage_of = {layer: segment % pp for segment, layers in enumerate(layers_of(stages)) for layer in layers}
    specs = table.expected()
    for slot in slots:
        spec = specs[slot.blocks[0].name]
        outside = 0 if slot.name.startswith("embedding.") else pp - 1
        stage = outside if spec.layer is None else stage_of[spec.layer]
        ep_rank = 0 if spec.expert is None else spec.expert // (table.experts // ep)
        yield dataclasses.replace(slot, stage=stage, ep_rank=ep_rank)
