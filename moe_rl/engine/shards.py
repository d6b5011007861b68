"""How the state of all ranks becomes files: who writes what, copies of it, the files, and the proof that they are whole.

megatron-core plans (torch_dist format); the writing is done here, tensor by tensor, so that a save holds one tensor at a
time beside the live ones. With `stage` everything is copied to host memory first, and the rest may run in a thread.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from moe_rl.engine.hashed import HashedFile, sha256
from moe_rl.engine.memory import GIB, Peak
from moe_rl.errors import MoeRLError, RunFailed

INTEGRITY = "integrity.json"  # SHA-256 of every other file; written last, by rename
REPORT = "save.json"  # what the save took


@dataclass
class Work:
    """What one rank has to write. `items` are torch's write items with their data, live or staged."""

    root: Path
    rank: int
    items: deque[tuple[Any, torch.Tensor | io.BytesIO]]
    metadata: Any  # of the whole checkpoint, on rank 0
    peak: Peak
    staged: int = 0


@dataclass
class Written:
    """What one rank wrote: torch's results, digest and size of its file, seconds, and what it took."""

    results: list[WriteResult]
    digests: dict[str, str]
    nbytes: int
    seconds: float
    staged: int
    host_peak: int
    gpu_peak: int


def plan(state: dict[str, Any], root: Path, group: dist.ProcessGroup, data_parallel: dist.ProcessGroup) -> Work:
    """Share the tensors and objects of a sharded state out among the ranks; all ranks call. Nothing is copied.

    Raises:
        CheckpointingException: a part of a tensor is written by no rank or by several.
    """
    peak, rank = Peak(), dist.get_rank()
    sharded, common = save_preprocess(state)
    sharded["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=rank)
    # Data-parallel ranks hold the same weights: let each write a share of them
    FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), data_parallel).apply_saving_parallelization(
        sharded
    )
    named, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    planner = MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(mcore_to_pyt_state_dict(named), is_coordinator=rank == 0)
    mine = planner.create_local_plan()
    plans: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(mine, plans, group=group)
    metadata = planner.create_global_plan(plans)[1] if plans else None
    return Work(root, rank, deque((item, planner.resolve_data(item)) for item in mine.items), metadata, peak)


def stage(work: Work) -> None:
    """Copy all data to host memory of its own: what is trained from here on changes nothing of what will be written.

    On a CPU, too, where `.cpu()` would be the live tensor itself.
    """
    for _ in range(len(work.items)):
        item, data = work.items.popleft()
        if isinstance(data, torch.Tensor):
            data = copied(data)
            work.staged += data.nbytes
        work.items.append((item, data))
    work.peak.stop()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory that shares nothing with the tensor."""
    return tensor.detach().to("cpu", copy=True)


def write(work: Work) -> Written:
    """Write this rank's file and force it to disk; each item is let go once written. No collective.

    Raises:
        OSError: the file cannot be written.
    """
    start, name, results = time.perf_counter(), f"__{work.rank}_0.distcp", []
    digests, nbytes = {}, 0
    if work.items:
        with (work.root / name).open("wb") as file:
            stream = HashedFile(file)
            while work.items:
                item, data = work.items.popleft()
                offset = file.tell()
                stream.add(data)
                length = file.tell() - offset
                results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
            file.flush()
            os.fsync(file.fileno())
            digests, nbytes = {name: stream.sha256.hexdigest()}, file.tell()
    work.peak.stop()
    seconds = time.perf_counter() - start
    return Written(results, digests, nbytes, seconds, work.staged, work.peak.host, work.peak.gpu)


def finish(work: Work, written: Sequence[Written]) -> None:
    """Rank 0, once every rank has written: the index of the tensors, the report, and last of all the digests."""
    FileSystemWriter(work.root).finish(work.metadata, [w.results for w in written])
    save_config(CheckpointingConfig("torch_dist", 1), str(work.root))
    report = {
        "bytes": sum(w.nbytes for w in written),
        "write_seconds": max(w.seconds for w in written),
        "staged_gib": sum(w.staged for w in written) / GIB,
        "host_peak_gib": max(w.host_peak for w in written) / GIB,
        "gpu_peak_gib": max(w.gpu_peak for w in written) / GIB,
    }
    (work.root / REPORT).write_text(json.dumps(report, indent=1))
    digests = {name: digest for w in written for name, digest in w.digests.items()}
    digests |= {name: sha256(work.root / name) for name in files(work.root) if name not in digests}
    with (work.root / f".{INTEGRITY}").open("w") as file:
        json.dump(dict(sorted(digests.items())), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(work.root / f".{INTEGRITY}", work.root / INTEGRITY)


def files(root: Path) -> list[str]:
    """The files of a checkpoint, the list of their digests aside."""
    return sorted(p.name for p in root.iterdir() if p.is_file() and p.name != INTEGRITY)


class AllOrNone:
    """A block that succeeds on all ranks or raises on all: no rank waits in a collective for one that has failed.

    `mine` of each rank is in `all` afterwards, in rank order.
    """

    def __init__(self, done: str, root: Path, group: dist.ProcessGroup | None = None) -> None:
        self.done, self.root, self.group = done, root, group
        self.mine: Any = None
        self.all: list[Any] = []

    def __enter__(self) -> AllOrNone:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # torch's CheckpointException is no Exception; an interrupt is not a fault to share
        if isinstance(error, KeyboardInterrupt | SystemExit):
            return
        shared: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shared, (self.mine, error and as_ours(error, self.done, self.root)), group=self.group)
        first = next((fault for _, fault in shared if fault is not None), None)
        if first is not None:
            raise first from error
        self.all = [mine for mine, _ in shared]


def as_ours(error: BaseException, done: str, root: Path) -> MoeRLError:
    """An error as the user is told of it: what could not be done with the checkpoint in `root`."""
    if isinstance(error, MoeRLError):
        return error
    reason = " ".join(f"{type(error).__name__}: {error}".split())[-300:]
    what = f"the checkpoint in {root} could not be {done}"
    if done != "written":
        return RunFailed("checkpoint.io", what, reason)
    there = next(p for p in root.parents if p.is_dir())
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    free = f"{shutil.disk_usage(there).free >> 20} MiB are free in {there}: make room, or write elsewhere."
    return RunFailed("checkpoint.io", what, "The disk is full." if full else reason, free)
