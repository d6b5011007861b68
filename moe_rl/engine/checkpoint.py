"""The state of all trainer ranks in one directory: a megatron dist-checkpoint that loads in any layout.

The optimizer is stored in one of two formats. `reshardable`: one tensor per parameter and moment, in the parameter's own
shape. `same_layout`: each rank's buffers as they lie in memory. Every file's SHA-256 is recorded, so that a damaged
checkpoint is refused before anything is loaded from it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing as dc
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch import nn

from moe_rl.engine import optimizer_state, shards
from moe_rl.engine.parallel import Parallel
from moe_rl.engine.saver import Saver
from moe_rl.engine.shards import INTEGRITY, AllOrNone
from moe_rl.errors import RunFailed, UserError

PARTS = ("model", "optimizer", "extra")
RESHARDABLE, SAME_LAYOUT = "reshardable", "same_layout"


def save(
    directory: str | Path,
    contents: Sequence[str],
    chunks: Sequence[nn.Module],
    optimizer: Any,
    parallel: Parallel,
    arch: Any,
    extra: dict[str, Any],
    saver: Saver,
    *,
    optimizer_format: str = RESHARDABLE,
    background: bool = False,
) -> None:
    """Write `contents` (of model, optimizer, extra) to a new or empty directory. Called by all ranks.

    `extra` holds plain values, equal on all ranks; the random state of each rank is stored beside it. An optimizer in
    the format `same_layout` loads in the layout and with the buffer dtypes of this run alone. With `background` this
    returns once everything is copied to host memory; `saver` has the rest done, and tells of its failure.

    Host memory beside the live tensors: the largest tensor of this rank's share; with `background` all that the rank
    writes (its share of the weights, and 12 bytes for each of its optimizer's elements in fp32), until it is written. In
    the format `reshardable` the states of at most two parameters cut by the shard's ends more. GPU memory: none.

    Raises:
        UserError: unknown contents. RunFailed: the directory cannot be written (all ranks raise).
    """
    root = Path(directory)
    _check_contents(contents)
    with AllOrNone("written", root):
        if parallel.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
    group = saver.group
    with AllOrNone("written", root):
        state = _state(contents, chunks, optimizer, parallel, arch, extra, optimizer_format)
        work = shards.plan(state, root, group, parallel.groups.dp)
        del state
        if background:
            shards.stage(work)
    if background:
        saver.start(work)
    else:
        saver.complete(work)


def _state(
    contents: Sequence[str],
    chunks: Sequence[nn.Module],
    optimizer: Any,
    parallel: Parallel,
    arch: Any,
    extra: dict[str, Any],
    optimizer_format: str,
) -> dict[str, Any]:
    """What is to be saved, in megatron's sharded tensors and objects, which are the live ones."""
    model = _model_state(chunks)
    state: dict[str, Any] = {"moe_rl": _description(contents, parallel, arch)}
    if "model" in contents:
        state.update(model)
    if "optimizer" in contents:
        state["moe_rl"] |= {"optimizer_format": optimizer_format, "buffers": _buffers(optimizer)}
        if optimizer_format == SAME_LAYOUT:
            state["optimizer"] = optimizer.sharded_state_dict(model, metadata=_AS_IT_LIES)
            _clear_padding(state["optimizer"])
        else:
            if len(optimizer.chained_optimizers) > 1:
                optimizer._synchronize_steps()
            state["optimizer"] = _chained(optimizer, [part.state_dict() for part in optimizer.chained_optimizers])
            state["states"] = dict(enumerate(optimizer_state.sharded_states(optimizer, model)))
        _shorten_groups(optimizer, state["optimizer"])
    if "extra" in contents:
        state.update(extra=extra, rng=_rng_object(parallel, _rng_state(parallel)))
    return state


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

    Host memory beside the live tensors: the largest stored tensor twice, as torch reads it; for states in the format
    `reshardable` `optimizer_state.LOAD_BYTES` more, or one parameter's; and an offloading optimizer makes the masters that
    it updates a second time, 4 bytes an element. Moments are made anew before the old ones go, on the device that has them:
    8 bytes an element, of an offloading or precision-aware optimizer in the format `same_layout` up to 24.

    Raises:
        UserError: no checkpoint there, contents that it lacks, another model's, or an optimizer of another layout in the
            format `same_layout`.
        RunFailed: a file is missing, truncated or changed; it is named.
    """
    root = Path(directory)
    if contents is not None:
        _check_contents(contents)
    verify(root, parallel)
    with AllOrNone("read", root):
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
    model = _model_state(chunks)
    as_it_lies = "optimizer" in contents and described.get("optimizer_format") == SAME_LAYOUT
    with AllOrNone("read", root):
        wanted: dict[str, Any] = dict(model) if "model" in contents else {}
        if as_it_lies:
            wanted["optimizer"] = optimizer.sharded_state_dict(model, is_loading=True, metadata=_AS_IT_LIES)
        if "extra" in contents and described["layout"] == parallel.describe():
            wanted["rng"] = _rng_object(parallel, None)
        state = dc.load(wanted, str(root))
    if "model" in contents:
        for name, chunk in zip(model, chunks, strict=True):
            chunk.load_state_dict(state[name], strict=True)
    if "optimizer" in contents:
        _keep_own_groups(optimizer, state["optimizer"])
        optimizer.load_state_dict(state["optimizer"])
        with AllOrNone("read", root), torch.no_grad():
            if not as_it_lies:
                optimizer_state.load_states(optimizer, _model_state(chunks), root)
    elif "model" in contents and optimizer is not None:
        optimizer.reload_model_params()
    if "rng" in state:
        _set_rng_state(state["rng"])
    return dict(state.get("extra", {})) if "extra" in contents else {}


def verify(directory: str | Path, parallel: Parallel) -> None:
    """Check every file against its recorded SHA-256; each rank takes a share, and all must call.

    Raises:
        UserError: `directory` holds no checkpoint. RunFailed: files are missing or changed, all named.
    """
    root = Path(directory)
    with AllOrNone("read", root) as step:
        recorded = _recorded(root)
        mine = sorted(recorded)[parallel.rank :: parallel.world]
        step.mine = [fault for name in mine if (fault := _fault(root / name, recorded[name]))]
    if wrong := sorted(fault for faults in step.all for fault in faults):
        raise RunFailed(
            "checkpoint.corrupt",
            "; ".join(wrong),
            "The file is not the one that was saved.",
            "Resume from an older checkpoint: --resume RUN/checkpoints/step_NNNNNN.",
        )


def _recorded(root: Path) -> dict[str, str]:
    """File name -> SHA-256 as it was saved."""
    if not (root / INTEGRITY).is_file():
        left = "it is missing or was never finished" if root.is_dir() else "the directory does not exist"
        raise UserError(
            "checkpoint.missing", f"no checkpoint in {root}: {INTEGRITY} not found", left, "Name another one."
        )
    try:
        return json.loads((root / INTEGRITY).read_text())
    except ValueError as error:
        raise RunFailed("checkpoint.corrupt", f"{root / INTEGRITY} is damaged: {error}") from error


def _fault(path: Path, recorded: str) -> str:
    try:
        return "" if shards.sha256(path) == recorded else f"{path} has changed"
    except OSError:
        return f"{path} is missing"


# ------------------------------------------------------------------------------------------------ parts of the state
def _model_state(chunks: Sequence[nn.Module]) -> dict[str, Any]:
    """Sharded tensors of each chunk; their keys are global names, so chunks of any layout can read them."""
    several = len(chunks) > 1
    return {
        f"model{i}" if several else "model": chunk.sharded_state_dict(metadata=_RESHARDABLE)
        for i, chunk in enumerate(chunks)
    }


# what megatron's sharded_state_dict is told of a checkpoint
_RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
_AS_IT_LIES = _RESHARDABLE | {"distrib_optim_sharding_type": "dp_reshardable"}


def _chained(optimizer: Any, states: list[dict[str, Any]]) -> dict[Any, Any]:
    """States of all chained optimizers, in the form that their load_state_dict takes."""
    return states[0] if len(states) == 1 else dict(enumerate(states))


def _clear_padding(node: Any) -> None:
    """Megatron leaves what it puts between parameters as it found it in memory: equal states would make unequal files."""
    if isinstance(node, dict) and "padding" in node:
        if node["padding"].unwrap():
            for tensor in (value for value in node.values() if isinstance(value, ShardedTensor)):
                tensor.data.zero_()
    elif isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
            _clear_padding(child)


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
    return {"contents": list(contents), "layout": parallel.describe(), "arch": arch_values(arch)}


def arch_values(arch: Any) -> dict[str, str]:
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
    theirs, ours = described["arch"], arch_values(arch)
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
            "Resume in its own layout, or without the optimizer: checkpoint.load_contents=[model,extra].",
        )
