"""Safetensors files written piece by piece: the header first, from shapes alone, then rows where they belong."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from moe_rl.models.headers import Stored
from moe_rl.models.wire import SIZES, Piece


class FilePlan(NamedTuple):
    """One file to be: its name and its tensors in the order of their bytes."""

    file: str
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(SIZES[p.dtype] * math.prod(p.shape) for p in self.pieces)


def plan_files(pieces: Sequence[Piece], limit: int, prefix: str = "model") -> list[FilePlan]:
    """Share pieces out to files of at most `limit` bytes (one piece at least), in their order."""
    groups: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        nbytes = SIZES[piece.dtype] * math.prod(piece.shape)
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += nbytes
    if len(groups) == 1:
        return [FilePlan(f"{prefix}.safetensors", _in_order(groups[0]))]
    return [
        FilePlan(f"{prefix}-{i + 1:05d}-of-{len(groups):05d}.safetensors", _in_order(group))
        for i, group in enumerate(groups)
    ]


def _in_order(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Wide elements first, so that every tensor is aligned."""
    return tuple(sorted(pieces, key=lambda p: (-SIZES[p.dtype], p.name)))


def files_like(stored: Mapping[str, Stored], pieces: Sequence[Piece]) -> list[FilePlan] | None:
    """The files of another checkpoint with these pieces in them; None if it lacks one, or has it otherwise."""
    by_file: dict[str, list[tuple[int, Piece]]] = {}
    for piece in pieces:
        place = stored.get(piece.name)
        if place is None or (place.dtype, place.shape) != (piece.dtype, piece.shape):
            return None
        by_file.setdefault(place.file, []).append((place.offset, piece))
    return [FilePlan(file, tuple(piece for _, piece in sorted(by_file[file]))) for file in sorted(by_file)]


class ShardFile:
    """A file of a plan, open for writing rows of its tensors in any order; `close` forces it to disk."""

    def __init__(self, root: Path, plan: FilePlan) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        self._offsets: dict[str, int] = {}
        for piece in plan.pieces:
            end = at + SIZES[piece.dtype] * math.prod(piece.shape)
            header[piece.name] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": [at, end]}
            self._offsets[piece.name], at = at, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        self._offsets = {name: start + offset for name, offset in self._offsets.items()}
        self._handle = os.open(root / plan.file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._write(len(text).to_bytes(8, "little") + text, 0)
        os.ftruncate(self._handle, start + at)

    def __contains__(self, name: str) -> bool:
        return name in self._offsets

    def put(self, name: str, first_row: int, rows: torch.Tensor) -> int:
        """Write rows of a tensor from `first_row` on; the number of bytes."""
        rows = rows.contiguous()
        stride = rows[0].numel() * rows.element_size() if rows.dim() and len(rows) else 0
        data = memoryview(rows.reshape(-1).view(torch.uint8).numpy()) if rows.numel() else memoryview(b"")
        self._write(data, self._offsets[name] + first_row * stride)
        return len(data)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while len(view):
            done = os.pwrite(self._handle, view, offset)
            view, offset = view[done:], offset + done

    def close(self) -> None:
        os.fsync(self._handle)
        os.close(self._handle)
