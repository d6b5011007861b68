"""megatron dist-checkpoints without their ranks: values out of one, and the files of a new one.

The format is torch's (torch.distributed.checkpoint): `.metadata` lists for each key its chunks and where each lies, as
what torch.save made of it, in one of the `*.distcp` files. `torch.save` is a zip that holds the numbers uncompressed,
so that rows can be read out of the middle.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from moe_rl.convert.slots import Item, Slot, Stored
from moe_rl.models.headers import DIST_DIGESTS, broken, listed

STEP = 64 << 20  # bytes of a large parameter in one stored chunk
OPTIMIZER_KEYS = "optimizer."  # what the keys of a run's optimizer state begin with
_HELD = 2  # parameters kept in memory: a gated pair and its partner are read in turns


class _Chunk(NamedTuple):
    """A stored box of a key and the place of its numbers in a file."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    info: Any


class DistReader:
    """Reads boxes of the tensors of a dist-checkpoint (UserError if a file is shorter than its index says)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        metadata = FileSystemReader(str(root)).read_metadata()
        self.dtypes: dict[str, torch.dtype] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._chunks: dict[str, dict[int, list[_Chunk]]] = {}
        storage = {(i.fqn, tuple(i.offset or ())): info for i, info in metadata.storage_data.items()}
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                continue
            self.dtypes[key], self.shapes[key] = entry.properties.dtype, tuple(entry.size)
            by_first = self._chunks.setdefault(key, {})  # experts are found by their number
            for chunk in entry.chunks:
                offset = tuple(chunk.offsets)
                first = offset[0] if offset else 0
                by_first.setdefault(first, []).append(_Chunk(offset, tuple(chunk.sizes), storage[key, offset]))
        self._places: dict[tuple[str, int], int] = {}
        ends: dict[str, int] = {}
        for info in metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        sizes = {name: (root / name).stat().st_size if (root / name).is_file() else 0 for name in ends}
        short = [n for n, end in ends.items() if sizes[n] < end]
        if short:
            raise broken(root, [f"{n} is truncated: {sizes[n]} bytes, .metadata speaks of {ends[n]}" for n in short])

    def box(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """The values of a box of a key, in the dtype that they are stored in.

        Raises:
            UserError: the checkpoint lacks the key or a part of the box; it is named.
        """
        if key not in self._chunks:
            raise broken(self.root, [f"{key} is missing from .metadata"])
        chunks = list(self._candidates(key, offset, shape))
        whole = [chunk for chunk in chunks if (chunk.offset, chunk.shape) == (tuple(offset), tuple(shape))]
        if whole:
            return self._part(key, whole[0], [0] * len(shape), list(shape))
        out = torch.empty(tuple(shape), dtype=self.dtypes[key])
        filled = 0
        for chunk in chunks:
            low = [max(a, b) for a, b in zip(offset, chunk.offset, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, chunk.offset, chunk.shape, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            start = [a - o for a, o in zip(low, chunk.offset, strict=True)]
            found = self._part(key, chunk, start, [b - a for a, b in zip(low, high, strict=True)])
            out[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))] = found
            filled += found.numel()
        if filled != out.numel():
            raise broken(
                self.root, [f"{key}: {out.numel() - filled} of {out.numel()} values at {list(offset)} are missing"]
            )
        return out

    def covered(self, key: str) -> tuple[int, bool]:
        """How many values of a key are stored, and whether two of its chunks that begin in one row overlap."""
        count, twice = 0, False
        for chunks in self._chunks[key].values():
            count += sum(torch.Size(chunk.shape).numel() for chunk in chunks)
            twice |= any(
                all(a < b + m and b < a + n for a, n, b, m in zip(x.offset, x.shape, y.offset, y.shape, strict=True))
                for x, y in itertools.combinations(chunks, 2)
            )
        return count, twice

    def files(self, key: str) -> list[str]:
        """The files that a key's chunks are in."""
        return sorted({chunk.info.relative_path for chunks in self._chunks[key].values() for chunk in chunks})

    def _candidates(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Iterator[_Chunk]:
        chunks = self._chunks[key]
        if len(shape) > 0 and shape[0] == 1 and offset[0] in chunks:
            yield from chunks[offset[0]]
            return
        for found in chunks.values():
            yield from found

    def _part(self, key: str, chunk: _Chunk, start: list[int], shape: list[int]) -> torch.Tensor:
        """A box of one chunk: whole rows of its first long axis are read, the rest is cut off."""
        dtype = self.dtypes[key]
        axis = next((d for d, n in enumerate(chunk.shape) if n > 1), 0)
        row = dtype.itemsize
        for n in chunk.shape[axis + 1 :]:
            row *= n
        first, count = (start[axis], shape[axis]) if chunk.shape else (0, 1)
        rows = torch.empty([*chunk.shape[:axis], count, *chunk.shape[axis + 1 :]] if chunk.shape else [], dtype=dtype)
        buffer = memoryview(rows.reshape(-1).view(torch.uint8).numpy())
        path, at = self.root / chunk.info.relative_path, self._numbers(key, chunk) + first * row
        with path.open("rb") as file:
            while len(buffer):
                got = os.preadv(file.fileno(), [buffer], at)
                if not got:
                    raise broken(self.root, [f"{path.name} ends within {key}"])
                buffer, at = buffer[got:], at + got
        cut = [slice(a, a + n) for a, n in zip(start, shape, strict=True)]
        if cut:
            cut[axis] = slice(None)
        return rows[tuple(cut)]

    def _numbers(self, key: str, chunk: _Chunk) -> int:
        """First byte of a chunk's numbers in its file."""
        info = chunk.info
        place = (info.relative_path, info.offset)
        if place not in self._places:
            path = self.root / info.relative_path
            try:
                with path.open("rb") as file, zipfile.ZipFile(_Window(file, info.offset, info.length)) as archive:
                    entry = next(e for e in archive.infolist() if e.filename.endswith("/data/0"))
                    file.seek(info.offset + entry.header_offset + 26)
                    name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
            except (OSError, zipfile.BadZipFile, StopIteration) as error:
                raise broken(self.root, [f"{key} cannot be read from {path.name}: {error}"]) from None
            wanted = torch.Size(chunk.shape).numel() * self.dtypes[key].itemsize
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != wanted:
                raise broken(self.root, [f"{key} in {path.name} takes {entry.file_size} bytes, not {wanted}"])
            self._places[place] = info.offset + entry.header_offset + 30 + name + extra
        return self._places[place]


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        size = self._length - self._at if size < 0 else min(size, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, size))
        self._at += len(data)
        return data


class DistValues:
    """Values of released tensors out of a dist-checkpoint."""

    def __init__(self, root: Path, slots: Sequence[Slot]) -> None:
        self._reader = DistReader(root)
        if more := surplus(self._reader, slots):
            raise broken(root, listed("tensor(s) that the model of its config.json does not have", more))
        self._slots: dict[str, Slot] = {block.name: slot for slot in slots for block in slot.blocks}
        self._held: OrderedDict[str, torch.Tensor] = OrderedDict()

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a released tensor, as stored. Raises UserError as `DistReader.box` does."""
        slot = self._slots[name]
        blocks = [b for b in slot.blocks if b.name == name]
        if len(blocks) == 1:
            (block,) = blocks
            for part in slot.stored:
                if part.place == block.place and block.start:  # stored as such: none of the rest is read
                    offset, shape = list(part.offset), list(part.shape)
                    axis = len(shape) - len(block.start)  # after those that megatron-core puts before
                    offset[axis], shape[axis] = offset[axis] + start, stop - start
                    return self._reader.box(part.key, offset, shape).view(shape[axis:])
            return block.place.view(self._parameter(slot))[start:stop]
        parameter = self._parameter(slot)
        size = tuple(max(i.stop for i in axis) for axis in zip(*(b.inside for b in blocks), strict=True))
        whole = torch.empty(size, dtype=parameter.dtype)
        for block in blocks:
            whole[block.inside] = block.place.view(parameter)
        return whole[start:stop]

    def files(self, names: Iterable[str]) -> list[str]:
        """The files that released tensors are in."""
        keys = {stored.key for name in names for stored in self._slots[name].stored}
        return sorted({file for key in keys & self._reader.shapes.keys() for file in self._reader.files(key)})

    def _parameter(self, slot: Slot) -> torch.Tensor:
        if slot.name not in self._held:
            while len(self._held) >= _HELD:
                self._held.popitem(last=False)
            parts = [(p.place, self._reader.box(p.key, p.offset, p.shape)) for p in slot.stored]
            if len(parts) == 1 and parts[0][0].shape == slot.shape:
                parameter = parts[0][1].view(slot.shape)
            else:
                parameter = torch.empty(slot.shape, dtype=parts[0][1].dtype)
                for place, value in parts:
                    place.view(parameter).copy_(value.view(place.shape))
            self._held[slot.name] = parameter
        self._held.move_to_end(slot.name)
        return self._held[slot.name]


def surplus(reader: DistReader, slots: Sequence[Slot]) -> list[str]:
    """Keys of a dist-checkpoint that are no parameter of the model, those of the optimizer aside."""
    known = {stored.key for slot in slots for stored in slot.stored}
    return sorted(key for key in reader.shapes if key not in known and not key.startswith(OPTIMIZER_KEYS))


def is_fp32(root: Path) -> bool:
    """Whether no parameter of a dist-checkpoint is stored in fewer bits than fp32."""
    dtypes = DistReader(root).dtypes
    return not any(
        d.is_floating_point and d.itemsize < 4 for k, d in dtypes.items() if not k.startswith(OPTIMIZER_KEYS)
    )


def changed_files(root: Path, names: Iterable[str] | None = None) -> list[str]:
    """The files of a dist-checkpoint (or those named) that are not the ones whose SHA-256 was recorded."""
    from moe_rl.engine.hashed import sha256

    recorded = json.loads((root / DIST_DIGESTS).read_text())
    return [name for name in (recorded if names is None else names) if sha256(root / name) != recorded.get(name)]


class Chunk(NamedTuple):
    """What is written as one item: part `stored` of a slot, rows [start, stop) of it where `by_rows`."""

    slot: Slot
    stored: Stored
    start: int
    stop: int

    @property
    def offset(self) -> tuple[int, ...]:
        first, *rest = self.stored.offset or (0,)
        return (first + self.start, *rest) if self.stored.offset else ()

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.stored.shape[1:]) if self.slot.by_rows else self.stored.shape

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.slot.dtype.itemsize


def chunks_of(slot: Slot) -> Iterator[Chunk]:
    """The items that a slot is written as."""
    for stored in slot.stored:
        rows = stored.shape[0] if slot.by_rows else 0
        step = max(1, STEP // max(1, slot.nbytes // rows)) if rows else 1
        if not rows:
            yield Chunk(slot, stored, 0, 0)
        for start in range(0, rows, step):
            yield Chunk(slot, stored, start, min(start + step, rows))


def write_file(
    root: Path, file: str, chunks: Sequence[Chunk], items: Sequence[Item], fill, progress
) -> tuple[list[WriteResult], str]:
    """Write one file of a dist-checkpoint and force it to disk: torch's record of each item, and the file's SHA-256.

    `fill(slot, start, stop)` gives a slot's value (rows of it, where the slot goes by rows); `progress(bytes)` is told.
    """
    from moe_rl.engine.hashed import HashedFile

    results = []
    with (root / file).open("wb") as out:
        stream = HashedFile(out)

        def add(index: MetadataIndex, data: torch.Tensor | io.BytesIO) -> None:
            at = out.tell()
            stream.add(data)
            results.append(WriteResult(index, out.tell() - at, _StorageInfo(file, at, out.tell() - at)))
            progress(out.tell() - at)

        held: tuple[str, torch.Tensor] | None = None
        for chunk in chunks:
            if chunk.slot.by_rows:
                value = fill(chunk.slot, chunk.start, chunk.stop)
            else:
                if held is None or held[0] != chunk.slot.name:
                    held = (chunk.slot.name, fill(chunk.slot, 0, 0))
                value = chunk.stored.place.view(held[1]).reshape(chunk.shape)
            add(MetadataIndex(chunk.stored.key, torch.Size(chunk.offset)), value.contiguous())
        for item in items:
            data = io.BytesIO()
            torch.save([item.data], data)
            add(MetadataIndex(item.key), data)
        out.flush()
        os.fsync(out.fileno())
    return results, stream.sha256.hexdigest()


def make_metadata(chunks: Sequence[Chunk], items: Sequence[Item]) -> Metadata:
    """The index of a dist-checkpoint, its storage records aside."""
    entries: dict[str, Any] = {item.key: BytesStorageMetadata() for item in items}
    for chunk in chunks:
        entry = entries.get(chunk.stored.key)
        if entry is None:
            properties = TensorProperties(dtype=chunk.slot.dtype)
            entry = TensorStorageMetadata(properties, torch.Size(chunk.stored.whole), [])
            entries[chunk.stored.key] = entry
        entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)))
    return Metadata(entries)
