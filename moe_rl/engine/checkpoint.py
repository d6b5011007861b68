"""The state of all trainer ranks in one directory: a megatron dist-checkpoint that loads in any layout.

The optimizer is stored in the `fully_reshardable` form: one tensor per parameter and moment, in the parameter's own
shape. Every file's SHA-256 is recorded, so that a damaged checkpoint is refused before anything is loaded from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing as dc
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from moe_patches import sync_save
from moe_rl.engine.parallel import Parallel
from moe_rl.errors import MoeRLError, RunFailed, UserError

INTEGRITY = "integrity.json"
PARTS = ("model", "optimizer", "extra")
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def save(
    directory: str | Path,
    contents: Sequence[str],
    chunks: Sequence[nn.Module],
    optimizer: Any,
    parallel: Parallel,
    arch: Any,
    extra: dict[str, Any],
) -> None:
    """Write `contents` (of model, optimizer, extra) to a new or empty directory. Called by all ranks.

    `extra` holds plain values, equal on all ranks; the random state of each rank is stored beside it.

    Raises:
        UserError: unknown contents. RunFailed: the directory cannot be written (all ranks raise).
    """
    root = Path(directory)
    _check_contents(contents)
    sync_save.install()
    with_model = _model_state(chunks)
    state: dict[str, Any] = {"moe_rl": _description(contents, parallel, arch)}
    if "model" in contents:
        state.update(with_model)
    if "optimizer" in contents:
        state["optimizer"] = optimizer.sharded_state_dict(with_model, metadata=_METADATA)
    if "extra" in contents:
        state.update(extra=extra, rng=_rng_object(parallel, _rng_state(parallel)))
    with _AllOrNone("written", root):
        if parallel.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
    with _AllOrNone("written", root):
        # Data-parallel ranks hold the same tensors: let each write a share of them
        strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), parallel.groups.dp)
        dc.save(state, str(root), strategy, content_metadata=_METADATA)
    with _AllOrNone("written", root):
        digests = _gather(_hash_share(root, _files(root), parallel))
        if parallel.rank == 0:
            (root / INTEGRITY).write_text(json.dumps(dict(sorted(digests.items())), indent=1))


def load(
    directory: str | Path,
    contents: Sequence[str],
    chunks: Sequence[nn.Module],
    optimizer: Any,
    parallel: Parallel,
    arch: Any,
) -> dict[str, Any]:
    """Read `contents` into the live chunks and optimizer, whatever layout wrote them; returns the `extra` dict.

    Without `optimizer` its fp32 masters are set to the loaded weights. The random states are restored if the layout is
    the one that wrote them. Called by all ranks; if one fails, all raise.

    Raises:
        UserError: no checkpoint there, contents that it lacks, or another model's.
        RunFailed: a file is missing, truncated or changed; it is named.
    """
    root = Path(directory)
    _check_contents(contents)
    if "optimizer" in contents and "model" not in contents:
        raise UserError(
            "checkpoint.contents", "optimizer states without the model's weights", "One belongs to the other."
        )
    with _AllOrNone("read", root):
        verify(root, parallel)
    with _AllOrNone("read", root):
        described = dc.load_common_state_dict(str(root)).get("moe_rl", {})
        _check_description(described, contents, arch, root)
    same_layout = described["layout"] == parallel.describe()
    with _AllOrNone("read", root):
        with_model = _model_state(chunks)
        state: dict[str, Any] = dict(with_model) if "model" in contents else {}
        if "optimizer" in contents:
            state["optimizer"] = optimizer.sharded_state_dict(with_model, is_loading=True, metadata=_METADATA)
        if "extra" in contents and same_layout:
            state["rng"] = _rng_object(parallel, None)
        state = dc.load(state, str(root))
    if "model" in contents:
        for name, chunk in zip(with_model, chunks, strict=True):
            chunk.load_state_dict(state[name], strict=True)
    if "optimizer" in contents:
        optimizer.load_state_dict(state["optimizer"])
    elif "model" in contents and optimizer is not None:
        optimizer.reload_model_params()
    if "rng" in state:
        _set_rng_state(state["rng"])
    return dict(state.get("extra", {})) if "extra" in contents else {}


def verify(directory: str | Path, parallel: Parallel | None = None) -> None:
    """Check every file against its recorded SHA-256; with `parallel` each rank takes a share, and all must call.

    Raises:
        UserError: `directory` holds no checkpoint. RunFailed: files are missing or changed, all named.
    """
    root = Path(directory)
    if not (root / INTEGRITY).is_file():
        left = "it is missing or was never finished" if root.is_dir() else "the directory does not exist"
        raise UserError(
            "checkpoint.missing", f"no checkpoint in {root}: {INTEGRITY} not found", left, "Name another one."
        )
    try:
        recorded = json.loads((root / INTEGRITY).read_text())
    except ValueError as error:
        raise RunFailed("checkpoint.corrupt", f"{root / INTEGRITY} is damaged: {error}") from error
    found = _hash_share(root, sorted(recorded), parallel)
    wrong = [f"{root / n} {'is missing' if d is None else 'has changed'}" for n, d in found.items() if d != recorded[n]]
    if parallel is not None:
        wrong = sorted(set(_gather(dict.fromkeys(wrong))))
    if wrong:
        raise RunFailed(
            "checkpoint.corrupt",
            "; ".join(wrong),
            "The file is not the one that was saved.",
            "Resume from an older checkpoint.",
        )


# ------------------------------------------------------------------------------------------------ parts of the state
def _model_state(chunks: Sequence[nn.Module]) -> dict[str, Any]:
    """Sharded tensors of each chunk; their keys are global names, so chunks of any layout can read them."""
    several = len(chunks) > 1
    return {
        f"model{i}" if several else "model": chunk.sharded_state_dict(metadata=_METADATA)
        for i, chunk in enumerate(chunks)
    }


def _rng_object(parallel: Parallel, state: Any) -> ShardedObject:
    return ShardedObject("rng", state, (parallel.world,), (parallel.rank,))


def _rng_state(parallel: Parallel) -> dict[str, Any]:
    from megatron.core import tensor_parallel

    state = {"cpu": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    if parallel.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    from megatron.core import tensor_parallel

    torch.set_rng_state(state["cpu"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _description(contents: Sequence[str], parallel: Parallel, arch: Any) -> dict[str, Any]:
    return {"contents": list(contents), "layout": parallel.describe(), "arch": _arch_values(arch)}


def _arch_values(arch: Any) -> dict[str, str]:
    return {f.name: repr(getattr(arch, f.name)) for f in dataclasses.fields(arch)}


def _check_contents(contents: Sequence[str]) -> None:
    unknown = sorted(set(contents) - set(PARTS))
    if unknown or not contents:
        raise UserError("checkpoint.contents", f"contents {list(contents)}", f"Possible are {', '.join(PARTS)}.")


def _check_description(described: dict[str, Any], contents: Sequence[str], arch: Any, root: Path) -> None:
    if not described:
        raise UserError("checkpoint.foreign", f"{root} is a checkpoint of another program")
    lacking = [part for part in contents if part not in described["contents"]]
    if lacking:
        raise UserError(
            "checkpoint.contents",
            f"{root} holds {', '.join(described['contents'])}, not {', '.join(lacking)}",
            "It was saved with fewer contents.",
            f"Load {', '.join(part for part in contents if part not in lacking) or 'another checkpoint'}.",
        )
    theirs, ours = described["arch"], _arch_values(arch)
    differ = [f"{k} {theirs.get(k)} there, {v} here" for k, v in ours.items() if theirs.get(k) != v]
    if differ:
        raise UserError(
            "checkpoint.model",
            f"{root} belongs to another model: {'; '.join(differ)}",
            "Its tensors do not fit the model of this run.",
            "Set model.path to the model that the checkpoint was made with, or use another run directory.",
        )


# ------------------------------------------------------------------------------------------------------------- files
def _files(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.is_file() and p.name != INTEGRITY)


def _hash_share(root: Path, names: Sequence[str], parallel: Parallel | None) -> dict[str, str | None]:
    """SHA-256 of this rank's share of the files; None for one that is not there."""
    mine = names if parallel is None else names[parallel.rank :: parallel.world]
    return {name: _sha256(root / name) for name in mine}


def _sha256(path: Path) -> str | None:
    try:
        with path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError:
        return None


def _gather(share: dict[str, Any]) -> dict[str, Any]:
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, share)
    return {name: value for s in shares for name, value in s.items()}


class _AllOrNone:
    """A block that succeeds on all ranks or raises on all: no rank waits in a collective for one that has failed."""

    def __init__(self, done: str, root: Path) -> None:
        self.done, self.root = done, root

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # torch's CheckpointException is no Exception; an interrupt is not a fault to share
        if error is not None and not isinstance(error, Exception | CheckpointException):
            return
        faults: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(faults, None if error is None else self._as_ours(error))
        first = next((f for f in faults if f is not None), None)
        if first is not None:
            raise first from error

    def _as_ours(self, error: BaseException) -> MoeRLError:
        if isinstance(error, MoeRLError):
            return error
        reason = " ".join(f"{type(error).__name__}: {error}".split())[-300:]
        what = f"the checkpoint in {self.root} could not be {self.done}"
        return RunFailed("checkpoint.io", what, reason, _free_space(self.root) if self.done == "written" else "")


def _free_space(path: Path) -> str:
    """What is free where `path` would lie: the usual reason for a save that fails."""
    there = next(p for p in (path, *path.parents) if p.is_dir())
    return f"{shutil.disk_usage(there).free / 2**30:.1f} GiB are free in {there}: make room, or write elsewhere."
