"""A model's tensors by size, read off its weight table for the planner. Importing it needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from moe_rl.config.facts import TensorSize
from moe_rl.models.weights import DTYPES, Row, WeightTable
from moe_rl.models.wire import FP8_BLOCK, MXFP4_BLOCK

_INT_BYTES = 8  # integer buffers are int64 in the trainer, whatever the checkpoint has


def tensor_sizes(
    table: WeightTable,
    untrained: tuple[str, ...] = (),
    tied: bool = False,
    served: Callable[[Row], bool] = lambda row: bool(row.split),
) -> tuple[TensorSize, ...]:
    """Every tensor of the trainer's model; the released parts of one (gate and up, or query, key and value) are summed.

    Tensors whose name has one of `untrained` in it have no gradient: buffers, and parameters that are frozen. With `tied`
    the output layer is a second copy of the embedding, where the two stand on different stages. `served` says of a row
    whether vLLM's tensor parallelism cuts it; as the trainer's does where it is not given.
    """
    found: dict[tuple[int | None, str], TensorSize] = {}
    for layer in (None, *range(table.layers)):
        sizes = table.sizes(layer)
        for row in table.rows:
            if ("{l}" in row.released) != (layer is not None) or (layer is not None and not table.has(row.when, layer)):
                continue
            shape = tuple(sizes[word] for word in row.shape.split())
            for trainer in row.trainer.split(" | ")[: 2 if tied else 1]:
                name = trainer.partition("[")[0]
                old, integer = found.get((layer, name)), DTYPES[row.dtype].integer
                place = "layer" if layer is not None else "embedding" if name.startswith("embedding") else "head"
                found[layer, name] = TensorSize(
                    place=place,
                    layer=layer,
                    expert="{e}" in row.released,
                    numel=math.prod(shape) + (old.numel if old else 0),
                    bytes=_INT_BYTES if integer else DTYPES[row.dtype].size,
                    fp32=row.dtype == "fp32",
                    trained=not integer and not any(part in name for part in untrained),
                    split=bool(row.split),
                    released=_released(shape, row.quant, DTYPES[row.dtype].size) + (old.released if old else 0),
                    served_split=served(row),
                )
    return tuple(found.values())


def _released(shape: tuple[int, ...], quant: str, size: int) -> int:
    """Bytes of a tensor in a released checkpoint, block scales included (wire.py)."""
    if quant == "fp8":
        return math.prod(shape) + math.prod(-(-n // FP8_BLOCK) for n in shape)
    if quant == "mxfp4":
        rows, columns = shape
        return rows * (-(-columns // 2) + -(-columns // MXFP4_BLOCK))
    return math.prod(shape) * size


def work(tensors: tuple[TensorSize, ...], layers: int) -> Iterator[tuple[int, int]]:
    """For each layer the weights of its matrices that every token meets, and those of one expert."""
    dense, expert = [0] * layers, [0] * layers
    for t in tensors:
        if t.layer is not None and t.bytes != _INT_BYTES:
            (expert if t.expert else dense)[t.layer] += t.numel
    return iter(zip(dense, expert, strict=True))
