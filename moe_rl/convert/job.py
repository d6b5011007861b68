"""A conversion from start to end: processes, progress, what is kept for a second call, and the rename at the end.

Beside the target stands `.NAME.converting/` while the work is going on: `job.json` (what was asked of which source),
`done/` (a record of each finished file, with its size and time), `checked/` (the source's files held against their digests)
and `out/`, which takes the target's name once it is whole.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import pickle
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_rl.convert.plan import CARRIED, Plan, Request, Unit, carried_pieces, make_plan
from moe_rl.convert.work import Done, Worker, peak_bytes, run_in_process, start_process
from moe_rl.durable import FULL, sync, write_atomic
from moe_rl.errors import RunFailed, UserError
from moe_rl.models.family import get_family, read_config
from moe_rl.models.headers import DIST_DIGESTS, INDEX
from moe_rl.models.load import TOKENIZER_FILES, copy_files
from moe_rl.units import size_text


@dataclass(frozen=True)
class Report:
    """What a conversion did; `seconds` of this call, the rest of all calls; `peak_bytes` is the largest process's."""

    target: str
    form: str
    files: int
    reused: int
    tensors: int
    read_bytes: int
    written_bytes: int
    seconds: float
    blocks: int
    blocks_kept: int
    peak_bytes: int
    mtp_kept: tuple[str, ...]
    mtp_dropped: tuple[str, ...]
    left_out: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people."""
        speed = (self.read_bytes + self.written_bytes) / max(self.seconds, 1e-9)
        lines = [
            f"{self.target}: {self.form}, {self.tensors} tensors, {size_text(self.written_bytes)} in {self.files} files"
            + (f", {self.reused} of them from the call before" if self.reused else ""),
            f"read {size_text(self.read_bytes)} and wrote it in {self.seconds:.1f} s: {size_text(speed)}/s both ways together;"
            f" a process had at most {size_text(self.peak_bytes)}",
        ]
        if self.blocks:
            lines.append(f"quantised blocks: {self.blocks}, {self.blocks_kept} under their released scale")
        for word, names in (("kept", self.mtp_kept), ("dropped", self.mtp_dropped)):
            if names:
                lines.append(f"prediction layers {word}: {len(names)} tensors")
                patterns = Counter(re.sub(r"experts\.\d+", "experts.*", name) for name in names)
                lines += [f"  {name}" + (f" ({n})" if n > 1 else "") for name, n in patterns.items()]
        if self.left_out:
            lines.append(f"left out, as config.json ties them to others: {', '.join(self.left_out)}")
        return lines


def convert(
    request: Request, *, workers: int = 1, restart: bool = False, tell: Callable[[str], None] | None = None
) -> Report:
    """Convert a checkpoint; `tell` is given a line of progress from time to time.

    Memory: a process holds some 16 MiB of values and what their encoding takes, and up to two parameters of at most 256
    MiB; the first process the list of all tensors.

    Raises:
        UserError: the target exists, the source is broken, what is asked for is not possible, or another conversion to
        the
            same target was left unfinished.
        RunFailed: the disk is full, or a process died. What is finished is kept for a second call.
    """
    started = time.perf_counter()
    source, target = request.source.absolute(), request.target.absolute()
    _check_target(source, target)
    plan = make_plan(request)
    work = target.parent / f".{target.name}.converting"
    with _held(work):
        reused = _take_over(work, request, restart)
        out = work / "out"
        out.mkdir(exist_ok=True)
        done = {n: d for n, unit in enumerate(plan.units) if (d := reused(n, unit))}
        again = len(done)
        _check_disk(plan, done, work)
        for number, result in _run(
            plan, set(range(len(plan.units))) - done.keys(), out, work, workers, tell or _silent
        ):
            _record(work, number, result)
            done[number] = result
        ordered = [done[n] for n in range(len(plan.units))]
        _finish(plan, out, ordered)
        os.rename(out, target)
        sync(target.parent)
    shutil.rmtree(work, ignore_errors=True)
    data = (f for f in source.iterdir() if f.suffix in (".safetensors", ".distcp") and f.is_file())
    return Report(
        str(target),
        request.to,
        len(ordered),
        again,
        sum(len(u.tensors.pieces) if u.tensors else len(u.chunks) for u in plan.units),
        sum(f.stat().st_size for f in data),
        sum(d.nbytes for d in ordered),
        time.perf_counter() - started,
        sum(d.blocks for d in ordered),
        sum(d.kept for d in ordered),
        max([peak_bytes(), *(d.peak for d in ordered)]),
        tuple(entry.name for entry in plan.extras),
        plan.dropped,
        plan.left_out,
    )


def _check_target(source: Path, target: Path) -> None:
    if os.path.lexists(target):
        raise UserError("convert.target", f"{target} exists", "Nothing is overwritten.", "Name a new directory.")
    if not target.parent.is_dir():
        what = "is no directory" if os.path.lexists(target.parent) else "does not exist"
        raise UserError("convert.target", f"{target.parent} {what}", "", "Make it, or name another target.")
    if target.parent.resolve().is_relative_to(source.resolve()):
        why = "The files of a checkpoint would change while they are read."
        raise UserError("convert.target", f"{target} lies in the source", why, "Name a directory outside of it.")


def _silent(line: str) -> None: ...


# ------------------------------------------------------------------------------------------------------ work directory
@contextmanager
def _held(work: Path) -> Iterator[None]:
    """The work directory, kept from other processes until this one ends; gone with an error that left nothing in it.

    Raises:
        UserError: it cannot be made, or another process has it.
    """
    try:
        work.mkdir(exist_ok=True)
        lock = (work / "lock").open("w")
    except OSError as error:
        if error.errno in FULL:
            raise
        what = f"{work}, where files are kept until all are written, cannot be made: {error.strerror}"
        raise UserError("convert.target", what, "", "Name another target.") from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                "convert.busy", f"another process is writing {work}", "", "Wait for it, or name another target."
            ) from None
        try:
            yield
        except BaseException:
            if not any((work / "done").glob("*")):
                shutil.rmtree(work, ignore_errors=True)
            raise


def _take_over(work: Path, request: Request, restart: bool) -> Callable[[int, Unit], Done | None]:
    """What finds the records of a call before this one; none are believed if they are of something else.

    Raises:
        UserError: the call before had other arguments or another source.
    """
    job: dict[str, dict[str, Any]] = {"request": {k: str(v) for k, v in asdict(request).items() if k != "target"}}
    job["source"] = {}
    for root in filter(None, (request.source, request.like)):
        for file in sorted(p for p in root.rglob("*") if p.is_file()):
            stat = file.stat()
            job["source"][str(file.absolute())] = [stat.st_size, stat.st_mtime_ns]
    file, done = work / "job.json", work / "done"
    try:
        before = json.loads(file.read_text()) if file.is_file() and not restart else None
    except ValueError:
        before = None
    if before is not None and before != job:
        parts = [
            f"{name}: {before.get(part, {}).get(name)} before, {job[part].get(name)} now"
            for part in ("request", "source")
            for name in sorted(before.get(part, {}).keys() | job[part].keys())
            if before.get(part, {}).get(name) != job[part].get(name)
        ]
        raise UserError(
            "convert.other",
            f"{work} holds an unfinished conversion of something else: {'; '.join(parts[:4])}",
            "Its files do not belong to what is asked for now.",
            "Repeat the first call to finish it, or add --restart to drop it.",
        )
    if before is None:
        for before_it in (done, work / "out", work / "checked"):
            shutil.rmtree(before_it, ignore_errors=True)
        write_atomic(file, json.dumps(job, indent=1).encode())
    done.mkdir(exist_ok=True)

    def find(number: int, unit: Unit) -> Done | None:
        record = done / f"{number:06d}"
        if not record.is_file():
            return None
        found: Done = pickle.loads(record.read_bytes())
        path = work / "out" / unit.file
        if found.file != unit.file or not path.is_file():
            return None
        stat = path.stat()
        return found if (stat.st_size, stat.st_mtime_ns) == (found.nbytes, found.mtime_ns) else None

    return find


def _record(work: Path, number: int, done: Done) -> None:
    write_atomic(work / "done" / f"{number:06d}", pickle.dumps(done))


def _check_disk(plan: Plan, done: dict[int, Done], work: Path) -> None:
    needed = sum(unit.nbytes for n, unit in enumerate(plan.units) if n not in done)
    free = shutil.disk_usage(work).free
    if needed > free:
        raise UserError(
            "convert.disk",
            f"{size_text(needed)} are to be written, {size_text(free)} are free in {work.parent}",
            "",
            "Free space, or name a target elsewhere.",
        )


# ----------------------------------------------------------------------------------------------------------- processes
def _run(
    plan: Plan, numbers: set[int], out: Path, work: Path, workers: int, tell: Callable[[str], None]
) -> Iterator[tuple[int, Done]]:
    """(number, result) of each unit, as they are finished; in their order, so that neighbours read the same files."""
    order = sorted(numbers)
    progress = _Progress(sum(plan.units[n].nbytes for n in order), tell)
    try:
        if workers <= 1:
            yield from _run_here(plan, order, out, progress)
        else:
            yield from _run_there(plan, order, out, work, min(workers, len(order)), progress)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise RunFailed(
            "convert.disk",
            f"no space left for {out}",
            f"{error.strerror}.",
            "Free space and call again: finished files are kept.",
        ) from error


def _run_here(plan: Plan, order: list[int], out: Path, progress: _Progress) -> Iterator[tuple[int, Done]]:
    if not order:
        return
    worker = Worker(plan, out, progress.add)
    for number in order:
        yield number, worker.run(plan.units[number])


def _run_there(
    plan: Plan, order: list[int], out: Path, work: Path, workers: int, progress: _Progress
) -> Iterator[tuple[int, Done]]:
    if not order:
        return
    file = work / "plan.pickle"
    file.write_bytes(pickle.dumps(plan))
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch in huge pages: copies are half as fast again
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    counter = context.Value("q", 0)
    with ProcessPoolExecutor(workers, context, start_process, (file, out, counter)) as pool:
        waiting = {pool.submit(run_in_process, number): number for number in order}
        try:
            while waiting:
                finished, _ = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                progress.set(counter.value)
                for future in finished:
                    yield waiting.pop(future), future.result()
        except BrokenProcessPool as error:
            raise RunFailed(
                "convert.worker",
                "a process of the conversion died",
                "It was killed, perhaps for want of memory.",
                "Call again, with fewer --workers: finished files are kept.",
            ) from error
        except BaseException:  # an interrupt above all: a unit may take a minute yet
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        # A process that is still starting is waited for here: it would die of what it was started with being gone.


class _Progress:
    """Tells of bytes written: twice a second on a terminal, every ten seconds in a log."""

    def __init__(self, total: int, tell: Callable[[str], None]) -> None:
        self._every = 0.5 if sys.stderr.isatty() else 10.0
        self._total, self._tell, self._done = total, tell, 0
        self._start = self._last = time.perf_counter()

    def add(self, nbytes: int) -> None:
        self.set(self._done + nbytes)

    def set(self, done: int) -> None:
        self._done, now = done, time.perf_counter()
        if now - self._last < self._every:
            return
        self._last = now
        speed = done / (now - self._start)
        left = f", {max(0, self._total - done) / speed:.0f} s left" if speed else ""
        self._tell(f"{size_text(done)} of {size_text(self._total)} written, {size_text(speed)}/s{left}")


def show_progress(line: str) -> None:
    """A line on stderr that replaces the one before on a terminal."""
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"{line:<70}", end=end, file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------------------------------------- finish
def _finish(plan: Plan, out: Path, done: list[Done]) -> None:
    """What belongs beside the weights: index and configuration, tokenizer; the index of a dist-checkpoint, its digests."""
    request = plan.request
    copy_files(TOKENIZER_FILES, request.source, out)
    if request.to == "dist":
        copy_files(("config.json",), request.source, out)
        _finish_dist(plan, out, done)
    else:
        tensors = [unit.tensors for unit in plan.units if unit.tensors]
        weight_map = {piece.name: file.file for file in tensors for piece in file.pieces}
        index = {
            "metadata": {"total_size": sum(f.nbytes for f in tensors)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_atomic(out / INDEX, (json.dumps(index, indent=2) + "\n").encode())
        write_atomic(out / "config.json", (json.dumps(_config(plan), indent=2) + "\n").encode())
    for file in (p for p in out.rglob("*") if p.is_file()):
        sync(file)
    sync(out)


def _config(plan: Plan) -> dict[str, Any]:
    """config.json as vLLM and transformers read it: the source's, with what the files hold."""
    request = plan.request
    config = read_config(request.source)
    family = get_family(plan.family)
    config = family.export_config(config, family.read_arch(request.source))
    quantised = {k: v for k, v in config.items() if k in ("quantization_config", "expert_dtype")}
    config = {k: v for k, v in config.items() if k not in quantised}
    if request.to == "released" and plan.out.quantised:
        theirs = read_config(request.like) if request.like else quantised
        form = plan.out.config()
        kept = {k: theirs[k] for k in form if k in theirs}
        config |= kept if len(kept) == len(form) and kept["expert_dtype"] == form["expert_dtype"] else form
    if config.get("num_nextn_predict_layers") and not plan.extras:
        config["num_nextn_predict_layers"] = 0
    return config | {"torch_dtype": "bfloat16", "dtype": "bfloat16"}


def _finish_dist(plan: Plan, out: Path, done: list[Done]) -> None:
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from torch.distributed.checkpoint import FileSystemWriter

    from moe_rl.convert.dist import make_metadata
    from moe_rl.engine.hashed import sha256
    from moe_rl.engine.shards import files

    chunks = [chunk for unit in plan.units for chunk in unit.chunks]
    items = [item for unit in plan.units for item in unit.items]
    FileSystemWriter(out).finish(make_metadata(chunks, items), [d.results for d in done if d.results])
    save_config(CheckpointingConfig("torch_dist", 1), str(out))
    if carried_pieces(plan, plan.table()):
        layout = {n: [s.file, s.dtype, list(s.shape), s.offset] for n, s in plan.origin_stored.items()}
        before = plan.origin / "layout.json" if plan.origin and plan.origin.name == CARRIED else None
        text = before.read_bytes() if before else json.dumps(layout).encode()
        write_atomic(out / CARRIED / "layout.json", text)
    digests = {d.file: d.sha256 for d in done}
    own = [*files(out), *(f"{CARRIED}/{p.name}" for p in (out / CARRIED).glob("*.json"))]
    digests |= {name: sha256(out / name) for name in own if name not in digests}
    write_atomic(out / DIST_DIGESTS, json.dumps(dict(sorted(digests.items())), indent=1).encode())
