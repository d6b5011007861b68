"""Values of stored tensors, rows at a time and decoded on the way: memory is bounded by what is asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from moe_rl.errors import UserError
from moe_rl.models import codec
from moe_rl.models.headers import Stored, broken
from moe_rl.models.weights import BY_SAFETENSORS_NAME, Entry, torch_dtype
from moe_rl.models.wire import BYTES, E8M0, FP8, FP8_BLOCK, Wire, scale_name

STEP_BYTES = 16 << 20  # of decoded values in hand at a time
DTYPES = {n: torch_dtype(d.name) for n, d in BY_SAFETENSORS_NAME.items()} | {
    FP8: torch.float8_e4m3fn,
    E8M0: torch.float8_e8m0fnu,
    BYTES[0]: torch.int8,
    BYTES[1]: torch.uint8,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_OPEN_FILES = 16


def safetensors_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "BF16"."""
    return _NAMES[dtype]


class Reader:
    """Reads rows of the tensors of one directory by `pread`; nothing is mapped, nothing kept but open files."""

    def __init__(self, root: str | Path, stored: Mapping[str, Stored]) -> None:
        self.root, self.stored = Path(root), stored
        self._files: dict[str, int] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) of a tensor as it is stored (a scalar whole).

        Raises:
            UserError: the file ends before them.
        """
        place = self.stored[name]
        dtype = DTYPES[place.dtype]
        shape = list(place.shape)
        row = dtype.itemsize
        for n in shape[1:]:
            row *= n
        if shape:
            shape[0] = (place.shape[0] if stop is None else stop) - start
        out = torch.empty(shape, dtype=dtype)
        nbytes = out.numel() * dtype.itemsize
        if nbytes:
            self._fill(
                place.file, memoryview(out.reshape(-1).view(torch.uint8).numpy()), place.offset + start * row, name
            )
        return out

    def _fill(self, file: str, buffer: memoryview, offset: int, name: str) -> None:
        handle = self._files.get(file)
        if handle is None:
            while len(self._files) >= _OPEN_FILES:
                os.close(self._files.pop(next(iter(self._files))))
            handle = self._files[file] = os.open(self.root / file, os.O_RDONLY)
        done = 0
        while done < len(buffer):
            got = os.preadv(handle, [buffer[done:]], offset + done)
            if not got:
                raise broken(self.root, [f"{file} ends within {name}"])
            done += got

    def decoded(self, entry: Entry, wire: Wire, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows of an entry's values: decoded to floating `dtype`, or as stored where it is not quantised.

        `start` is a multiple of 128 for FP8. Products of code and scale are rounded once, to `dtype`.

        Raises:
            UserError: a value is not finite; names tensor and file.
        """
        kind, name = wire.kind(entry), entry.name
        weight = self.rows(name, start, stop)
        try:
            if kind == "fp8":
                scales = self.rows(scale_name(name), start // FP8_BLOCK, -(-stop // FP8_BLOCK))
                return codec.fp8_decode(weight, scales, dtype, name=name)
            if kind == "mxfp4":
                return codec.mxfp4_decode(weight, self.rows(scale_name(name), start, stop), dtype, name=name)
        except UserError as error:
            files = sorted({self.stored[name].file, self.stored[scale_name(name)].file})
            raise broken(self.root, [f"{error.what} ({', '.join(files)}): {error.why}"]) from None
        if problem := not_finite(weight, entry, dtype, start):
            raise broken(self.root, [f"{name} ({self.stored[name].file}) {problem}"])
        return weight


def not_finite(values: torch.Tensor, entry: Entry, dtype: torch.dtype, start: int = 0) -> str:
    """What keeps rows from `start` of an unquantised entry from floating `dtype` (fp32 where the entry is), in words; ""
    if nothing: a value is not finite, or becomes so when it is rounded."""
    if not values.is_floating_point():
        return ""
    held = values if entry.spec.dtype == "fp32" else values.to(dtype)
    if all_finite(held):
        return ""
    place = (~torch.isfinite(held)).nonzero()[0].tolist()
    value, at = float(values[tuple(place)]), [start + place[0], *place[1:]] if place else []
    return f"is {value:g} at {at}, too large for {str(dtype)[6:]}" if math.isfinite(value) else f"is not finite at {at}"


def all_finite(values: torch.Tensor) -> bool:
    if not values.numel():
        return True
    # The extremes are NaN where one value is.
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def row_steps(entry: Entry, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
    """Cut rows [start, stop) into runs of about STEP_BYTES at 2 bytes a value, whole blocks each."""
    rows = entry.spec.shape[0] if entry.spec.shape else 1
    stop = rows if stop is None else stop
    width = max(1, entry.spec.numel // max(1, rows))
    step = max(FP8_BLOCK, STEP_BYTES // (2 * width) // FP8_BLOCK * FP8_BLOCK)
    first = start // FP8_BLOCK * FP8_BLOCK
    for at in range(first, stop, step):
        yield at, min(at + step, stop)
