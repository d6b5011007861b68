"""The state of all trainer ranks in one directory: a megatron dist-checkpoint that loads in any layout.

The optimizer is stored in one of two formats. `reshardable`: one tensor per parameter and moment, in the parameter's own
shape, gathered over the data-parallel ranks. `same_layout`: each rank's buffers as they lie in memory, without any
gathering. Every file's SHA-256 is recorded, so that a damaged checkpoint is refused before anything is loaded from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing as dc
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from moe_patches import sync_save
from moe_rl.engine.parallel import Parallel
from moe_rl.errors import MoeRLError, RunFailed, UserError

INTEGRITY = "integrity.json"
PARTS = ("model", "optimizer", "extra")
NEARLY_FULL = 64 << 20  # bytes free where a failed write is put down to a full disk: megatron-core hides the reason
RESHARDABLE, SAME_LAYOUT = "reshardable", "same_layout"
_SHARDING = {RESHARDABLE: "fully_reshardable", SAME_LAYOUT: "dp_reshardable"}


def save(
    directory: str | Path,
    contents: Sequence[str],
    chunks: Sequence[nn.Module],
    optimizer: Any,
    parallel: Parallel,
    arch: Any,
    extra: dict[str, Any],
    optimizer_format: str = RESHARDABLE,
) -> None:
    """Write `contents` (of model, optimizer, extra) to a new or empty directory. Called by all ranks.

    `extra` holds plain values, equal on all ranks; the random state of each rank is stored beside it. An optimizer in
    the format `same_layout` loads in the layout and with the buffer dtypes of this run alone.

    Raises:
        UserError: unknown contents. RunFailed: the directory cannot be written (all ranks raise).
    """
    root = Path(directory)
    _check_contents(contents)
    sync_save.install()
    with_model, metadata = _model_state(chunks), _metadata(optimizer_format)
    state: dict[str, Any] = {"moe_rl": _description(contents, parallel, arch)}
    if "model" in contents:
        state.update(with_model)
    if "optimizer" in contents:
        state["moe_rl"] |= {"optimizer_format": optimizer_format, "buffers": _buffers(optimizer)}
        state["optimizer"] = optimizer.sharded_state_dict(with_model, metadata=metadata)
        _shorten_groups(optimizer, state["optimizer"])
    if "extra" in contents:
        state.update(extra=extra, rng=_rng_object(parallel, _rng_state(parallel)))
    with _AllOrNone("written", root):
        if parallel.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
    with _AllOrNone("written", root):
        # Data-parallel ranks hold the same tensors: let each write a share of them
        strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), parallel.groups.dp)
        dc.save(state, str(root), strategy, content_metadata=metadata)
    with _AllOrNone("written", root):
        digests = _gather(_hash_share(root, _files(root), parallel))
        if parallel.rank == 0:
            (root / INTEGRITY).write_text(json.dumps(dict(sorted(digests.items())), indent=1))


def load(
    directory: str | Path,
    contents: Sequence[str] | None,
    chunks: Sequence[nn.Module],
    optimizer: Any,
    parallel: Parallel,
    arch: Any,
) -> dict[str, Any]:
    """Read `contents` (None: all that was saved) into the live chunks and optimizer, whatever layout wrote them; returns
    the `extra` dict.

    Without `optimizer` its fp32 masters are set to the loaded weights. The optimizer keeps its own mode and rates: it may
    have been saved plain and be loaded offloaded. The random states are restored if the layout is the one that wrote
    them. Called by all ranks; if one fails, all raise.

    Raises:
        UserError: no checkpoint there, contents that it lacks, another model's, or an optimizer of another layout in the
            format `same_layout`.
        RunFailed: a file is missing, truncated or changed; it is named.
    """
    root = Path(directory)
    if contents is not None:
        _check_contents(contents)
    with _AllOrNone("read", root):
        verify(root, parallel)
    with _AllOrNone("read", root):
        described = dc.load_common_state_dict(str(root)).get("moe_rl", {})
        if contents is None:
            contents = [p for p in described.get("contents", ()) if p != "optimizer" or optimizer is not None]
        if "optimizer" in contents and "model" not in contents:
            raise UserError(
                "checkpoint.contents", "optimizer states without the model's weights", "One belongs to the other."
            )
        _check_description(described, contents, arch, root)
        if "optimizer" in contents:
            _check_format(described, parallel, optimizer, root)
    same_layout = described["layout"] == parallel.describe()
    metadata = _metadata(described.get("optimizer_format", RESHARDABLE))
    with _AllOrNone("read", root):
        with_model = _model_state(chunks)
        state: dict[str, Any] = dict(with_model) if "model" in contents else {}
        if "optimizer" in contents:
            state["optimizer"] = optimizer.sharded_state_dict(with_model, is_loading=True, metadata=metadata)
        if "extra" in contents and same_layout:
            state["rng"] = _rng_object(parallel, None)
        state = dc.load(state, str(root))
    if "model" in contents:
        for name, chunk in zip(with_model, chunks, strict=True):
            chunk.load_state_dict(state[name], strict=True)
    if "optimizer" in contents:
        _keep_own_groups(optimizer, state["optimizer"])
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
            "Resume from an older checkpoint: --resume RUN/checkpoints/step_NNNNNN.",
        )


# ------------------------------------------------------------------------------------------------ parts of the state
def _model_state(chunks: Sequence[nn.Module]) -> dict[str, Any]:
    """Sharded tensors of each chunk; their keys are global names, so chunks of any layout can read them."""
    several = len(chunks) > 1
    return {
        f"model{i}" if several else "model": chunk.sharded_state_dict(metadata=_metadata(RESHARDABLE))
        for i, chunk in enumerate(chunks)
    }


def _metadata(optimizer_format: str) -> dict[str, Any]:
    """What megatron's sharded_state_dict is told of a checkpoint."""
    return {
        "distrib_optim_sharding_type": _SHARDING[optimizer_format],
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _buffers(optimizer: Any) -> str:
    """The dtypes of all ranks' buffers, which are part of the keys in the format `same_layout`."""
    part = optimizer.chained_optimizers[0]
    return f"weights {part.config.params_dtype}, gradients fp32 {part.ddp_config.grad_reduce_in_fp32}"


def _groups(optimizer: Any, state: dict[Any, Any]) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """Each chained optimizer with its parameter groups in a sharded or loaded state."""
    parts = optimizer.chained_optimizers
    for i, part in enumerate(parts):
        held = (state if len(parts) == 1 else state[i])["optimizer"]
        yield part, (held.data if isinstance(held, ShardedObject) else held)["param_groups"]


def _shorten_groups(optimizer: Any, state: dict[Any, Any]) -> None:
    """Store of each parameter group its identity and step: the rest is this run's, and holds classes that torch refuses
    to load."""
    kept = {*param_group_identifier_keys, "step"}
    for _, groups in _groups(optimizer, state):
        groups[:] = [{key: value for key, value in group.items() if key in kept} for group in groups]


def _keep_own_groups(optimizer: Any, loaded: dict[Any, Any]) -> None:
    """Of a loaded parameter group the optimizer takes the step; all else is its own, whatever mode saved the group."""
    for part, saved in _groups(optimizer, loaded):
        own = {_identifier(group): group for group in part.param_groups}
        for group in saved:
            step = {key: group[key] for key in ("step",) if key in group}
            mine = own.get(_identifier(group))
            if mine is not None:
                group.clear()
                group.update({key: value for key, value in mine.items() if key not in ("params", "step")} | step)


def _identifier(group: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key) for key in param_group_identifier_keys)


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


def _check_format(described: dict[str, Any], parallel: Parallel, optimizer: Any, root: Path) -> None:
    """Whether an optimizer in the format `same_layout` stands where it stood."""
    if described.get("optimizer_format", RESHARDABLE) != SAME_LAYOUT:
        return
    here = parallel.describe() | {"buffers": _buffers(optimizer)}
    there = described["layout"] | {"buffers": described["buffers"]}
    differ = [f"{name} {there[name]} there, {here[name]} here" for name in here if here[name] != there[name]]
    if differ:
        raise UserError(
            "checkpoint.optimizer_format",
            f"the optimizer in {root} was saved by another layout: {'; '.join(differ)}",
            "checkpoint.optimizer_format=same_layout stores each rank's buffers as they lie in memory.",
            "Load it in its own layout and save with checkpoint.optimizer_format=reshardable, or load its model alone.",
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
        if isinstance(error, CheckpointException) and error.failures:
            error = next(iter(error.failures.values()))[0]  # a rank's own, without the traceback around it
        reason = " ".join(f"{type(error).__name__}: {error}".split())[-300:]
        what = f"the checkpoint in {self.root} could not be {self.done}"
        if self.done != "written":
            return RunFailed("checkpoint.io", what, reason)
        there = next(p for p in self.root.parents if p.is_dir())
        free = shutil.disk_usage(there).free
        why = "The disk is full." if free < NEARLY_FULL else reason
        return RunFailed(
            "checkpoint.io", what, why, f"{free >> 20} MiB are free in {there}: make room, or write elsewhere."
        )
