"""One file of a conversion, written by one process: values from the source, encoded for the target, rows at a time."""

from __future__ import annotations

import fcntl
import pickle
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_rl.convert import keep
from moe_rl.convert.dist import DistValues, changed_files, write_file
from moe_rl.convert.plan import AS_STORED, CARRIED, Plan, Unit
from moe_rl.convert.slots import Slot
from moe_rl.convert.tensors import ShardFile
from moe_rl.lifetime import end_with_parent
from moe_rl.models import codec
from moe_rl.models.headers import broken
from moe_rl.models.load import check_experts
from moe_rl.models.reader import DTYPES, Reader, not_finite, row_steps
from moe_rl.models.weights import Entry, torch_dtype
from moe_rl.models.wire import E8M0, FP8_BLOCK, MXFP4_BLOCK, scale_name


@dataclass
class Done:
    """What became of a unit: `blocks` are quantised blocks, `kept` those under their released scale; `peak` is the most
    memory that the process had by then, in bytes; `sha256` is for a dist-checkpoint's digests."""

    file: str
    nbytes: int
    mtime_ns: int
    sha256: str
    results: list[Any]
    kept: int = 0
    blocks: int = 0
    peak: int = 0


def peak_bytes() -> int:
    """The most memory that this process has had (getrusage would count what its parent had before it)."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) << 10


class Worker:
    """Writes units of a plan into a directory; `progress(bytes)` is told as they are written."""

    def __init__(self, plan: Plan, root: Path, progress: Callable[[int], None]) -> None:
        self.plan, self.root, self.progress = plan, root, progress
        self.table = plan.table()
        self._entries = {entry.name: entry for entry in (*self.table.entries, *plan.extras)}
        self._extras = {entry.name for entry in plan.extras}
        self._reader = Reader(plan.request.source, plan.stored)
        self._origin = Reader(plan.origin, plan.origin_stored) if plan.origin else None
        self._values: DistValues | None = None
        if plan.source_kind == "dist":
            self._values = DistValues(plan.request.source, plan.slots)
            self._check(
                f"{CARRIED}/{file.name}" for file in sorted((plan.request.source / CARRIED).glob("*.safetensors"))
            )
        self._dtype = torch_dtype(plan.dtype)
        self._kept = self._blocks = 0

    def run(self, unit: Unit) -> Done:
        """Write one unit and force it to disk.

        Raises:
            UserError: the source is not what it should be; tensor and file are named. OSError: the disk.
        """
        self._kept = self._blocks = 0
        path = self.root / unit.file
        path.parent.mkdir(exist_ok=True)
        results: list[Any] = []
        if self._values is not None:
            self._check(self._values.files(self._sources(unit)))
        if unit.tensors is None:
            results, digest = write_file(self.root, unit.file, unit.chunks, unit.items, self._fill, self.progress)
        else:
            from moe_rl.engine.hashed import sha256

            self._write_tensors(unit)
            digest = sha256(path) if self.plan.request.to == "dist" else ""
        stat = path.stat()
        return Done(unit.file, stat.st_size, stat.st_mtime_ns, digest, results, self._kept, self._blocks, peak_bytes())

    def _sources(self, unit: Unit) -> set[str]:
        """The released tensors whose values a unit takes from a dist-checkpoint."""
        if unit.tensors is None:
            return {block.name for chunk in unit.chunks for block in chunk.slot.blocks}
        if self.plan.request.to == "dist":
            return set()
        return {self._owner(piece.name).name for piece in unit.tensors.pieces} - self._extras

    def _check(self, files: Iterable[str]) -> None:
        """UserError if a file of the source dist-checkpoint is not the one that was saved.

        Right before they are read: they then come from the page cache. Processes that need the same files share them out.
        """
        marks = {file: self.root.parent / "checked" / file for file in files}
        for wait in (fcntl.LOCK_NB, 0):
            for file, mark in marks.items():
                mark.parent.mkdir(parents=True, exist_ok=True)
                with open(f"{mark}.lock", "w") as lock:
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | wait)
                    except BlockingIOError:
                        continue
                    if mark.exists():
                        continue
                    if changed_files(self.plan.request.source, [file]):
                        raise broken(self.plan.request.source, [f"{file} is not the file that was saved"])
                    mark.touch()

    # ---------------------------------------------------------------------------------------------------------- values
    def _rows(self, entry: Entry, start: int, stop: int) -> torch.Tensor:
        """Rows of an entry's values: quantised ones decoded to the plan's dtype, all finite, experts in range."""
        request, name = self.plan.request, entry.name
        if name in self._extras:
            assert self._origin is not None
            return self._origin.decoded(entry, AS_STORED, start, stop, self._dtype)
        if self._values is None:
            value = self._reader.decoded(entry, self.plan.wire, start, stop, self._dtype)
            file = self.plan.stored[name].file
        else:
            value, file = self._values.rows(name, start, stop), "dist-checkpoint"
            encoded = request.to == "released" and self.plan.out.kind(entry)  # the encoder refuses what is not finite
            if not encoded and (problem := not_finite(value, entry, self._dtype, start)):
                raise broken(request.source, [f"{name} {problem}"])
        if not value.is_floating_point() and value.numel():
            check_experts(value, name, file, self.table.experts, request.source)
        return value

    def _fill(self, slot: Slot, start: int, stop: int) -> torch.Tensor:
        """A slot's value for a dist-checkpoint (rows of it where it goes by rows)."""
        if slot.by_rows:
            entry = self._entries[slot.blocks[0].name]
            return torch.cat(
                [self._rows(entry, a, b)[max(0, start - a) :] for a, b in row_steps(entry, start, stop)]
            ).to(slot.dtype)
        parameter = torch.empty(slot.shape, dtype=slot.dtype)
        for name in dict.fromkeys(block.name for block in slot.blocks):
            blocks = [b for b in slot.blocks if b.name == name]
            entry = self._entries[name]
            for start, stop in row_steps(entry):
                value = self._rows(entry, start, stop)
                for block in blocks:
                    first = block.start[0] if block.start else 0
                    view = block.place.view(parameter)
                    if not block.start:
                        view.copy_(value)
                        continue
                    low, high = max(first, start), min(first + view.shape[0], stop)
                    if low < high:
                        rest = block.inside[1:]
                        view[low - first : high - first].copy_(value[(slice(low - start, high - start), *rest)])
        return parameter

    # --------------------------------------------------------------------------------------------------------- tensors
    def _write_tensors(self, unit: Unit) -> None:
        assert unit.tensors is not None
        file = ShardFile(self.root, unit.tensors)
        try:
            if self.plan.request.to == "dist":
                self._carry(file, unit)
                return
            owners = {piece.name: self._owner(piece.name) for piece in unit.tensors.pieces}
            dtypes = {piece.name: DTYPES[piece.dtype] for piece in unit.tensors.pieces}
            for entry in dict.fromkeys(owners.values()):
                for start, stop in row_steps(entry):
                    for name, row, value in self._encoded(entry, start, stop):
                        if name in file:
                            self.progress(file.put(name, row, value.to(dtypes[name])))
        finally:
            file.close()

    def _carry(self, file: ShardFile, unit: Unit) -> None:
        """Copy released scales and passed-over tensors as they are."""
        assert unit.tensors is not None and self._origin is not None
        for piece in unit.tensors.pieces:
            self.progress(file.put(piece.name, 0, self._origin.rows(piece.name)))

    def _owner(self, piece: str) -> Entry:
        """The entry that a tensor on disk belongs to."""
        return self._entries.get(piece) or self._entries[piece.removesuffix("scale") + "weight"]

    def _encoded(self, entry: Entry, start: int, stop: int) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(tensor on disk, its first row, rows) for rows of an entry."""
        plan, name = self.plan, entry.name
        extra = name in self._extras
        kind = (AS_STORED if extra else plan.out).kind(entry) if plan.request.to == "released" else ""
        values = self._rows(entry, start, stop)
        if not kind:
            yield name, start, values
            return
        scale = scale_name(name)
        at, end = (start // FP8_BLOCK, -(-stop // FP8_BLOCK)) if kind == "fp8" else (start, stop)
        same = self._origin if extra else self._reader if plan.source_kind == "safetensors" else None
        if same is not None and (extra or plan.wire == plan.out):
            yield name, start, same.rows(name, start, stop)
            yield scale, at, same.rows(scale, at, end)
            return
        codes, scales = self._quantised(kind, name, values, self._released(entry, scale, at, end))
        yield name, start, codes
        yield scale, at, scales

    def _quantised(
        self, kind: str, name: str, values: torch.Tensor, released: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of an entry's rows: under the released scales where these give the values, else encoded."""
        wide = kind == "fp8"
        same = codes = None
        if released is not None:
            codes, same = (keep.released_fp8 if wide else keep.released_mxfp4)(values, released)
            self._kept, self._blocks = self._kept + int(same.sum()), self._blocks + same.numel()
        if codes is None or same is None or not bool(same.all()):
            if wide:
                form = "e8m0" if self.plan.out.scale == E8M0 else "fp32"
                fresh, scales = codec.fp8_encode(values, scale_dtype=form, name=name)
            else:
                fresh, scales = codec.mxfp4_encode(values, name=name)
                scales = scales.view(torch.float8_e8m0fnu)
            if codes is None or same is None or released is None:
                self._blocks += scales.numel()
                codes, released = fresh, scales
            else:
                step = (FP8_BLOCK, FP8_BLOCK) if wide else (1, MXFP4_BLOCK // 2)
                codes = _choose(keep.spread(same, codes.shape, *step), codes, fresh)
                released = _choose(same, released, scales)
        assert released is not None
        return codes if wide else codes.view(DTYPES[self.plan.out.packed]), released

    def _released(self, entry: Entry, scale: str, start: int, stop: int) -> torch.Tensor | None:
        """The scales that a released checkpoint has for these rows, if one is known."""
        if self._origin is None or scale not in self._origin.stored:
            return None
        place, (_, wanted) = self._origin.stored[scale], self.plan.out.pieces(entry)
        if (place.dtype, place.shape) != (wanted.dtype, wanted.shape):
            return None
        return self._origin.rows(scale, start, stop)


def _choose(first: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a` where `first`, else `b`; for element types that torch cannot choose from, too."""
    raw = torch.uint8 if a.element_size() == 1 else a.dtype
    return torch.where(first, a.view(raw), b.view(raw)).view(a.dtype)


_worker: Worker | None = None


def start_process(plan_file: Path, root: Path, counter: Any) -> None:
    """In a process of a pool: read the plan and stand ready."""
    global _worker
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the first process ends this one
    torch.set_num_threads(1)
    plan: Plan = pickle.loads(plan_file.read_bytes())

    def progress(nbytes: int) -> None:
        with counter.get_lock():
            counter.value += nbytes

    _worker = Worker(plan, root, progress)


def run_in_process(number: int) -> Done:
    """In a process of a pool: write one unit."""
    assert _worker is not None
    return _worker.run(_worker.plan.units[number])
