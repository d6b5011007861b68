"""The optimizer's states as tensors of the parameters' own names and shapes, which any layout can load.

This is megatron-core's format `fully_reshardable`, made in another way. Megatron gathers the states of all parameters on
every data-parallel rank: 12 bytes for each parameter of the model-parallel share, whatever the number of ranks; and on a
load it asks for as much again. A rank's shard is a run of whole parameters with a cut one at either end. So here the
rank with the largest piece of a parameter writes it, from where its states lie, and only the pieces of cut parameters
travel; a load reads what this rank's shard touches, some parameters at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing as dc
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from moe_patches.hybrid import hybrid_class
from moe_rl.engine.memory import give_back

LOAD_BYTES = 256 << 20  # states read at once, one parameter's at least


@dataclass(eq=False)
class _Cut:
    """A parameter of the optimizer: its sharded weight, and the range of its elements that each rank's shard holds."""

    param: torch.nn.Parameter
    weight: Any
    ranges: list[range]

    @property
    def owner(self) -> int:
        """The rank that holds most of it."""
        return max(range(len(self.ranges)), key=lambda rank: len(self.ranges[rank]))


def sharded_states(optimizer: Any, model_state: dict[str, Any]) -> list[dict[str, Any]]:
    """For each chained optimizer the sharded tensors that this rank writes; all ranks call.

    Tensors are views of the live states, but for cut parameters, whose pieces are put together in host memory, and for
    states that the optimizer holds in another form than fp32, which are converted there.
    """
    weights = _weights(model_state)
    return [_sharded(part, weights) for part in optimizer.chained_optimizers]


def load_states(optimizer: Any, model_state: dict[str, Any], root: Path) -> None:
    """Read the states of this rank's shards. The weights must have been loaded. No collective."""
    weights = _weights(model_state)
    for part in optimizer.chained_optimizers:
        rank = part.data_parallel_group.rank()
        for cuts in _groups([cut for cut in _cuts(part, weights) if cut.ranges[rank]], len(_keys(part))):
            give_back()  # what the group before it, and the masters that were replaced, left
            _load_group(part, cuts, rank, root)
        if isinstance(part.optimizer, hybrid_class()):
            part.optimizer._sync_hdo_state_to_sub_optimizers()


def _keys(part: Any) -> tuple[str, ...]:
    return ("param", *part.optimizer_state_keys)


def _weights(model_state: dict[str, Any]) -> dict[Any, Any]:
    """Each parameter's sharded weight."""
    return {sharded.data: sharded for sharded in nested_values(model_state) if hasattr(sharded, "replica_id")}


def _cuts(part: Any, weights: dict[Any, Any]) -> Iterator[_Cut]:
    """Every parameter of a distributed optimizer, in one order on all ranks."""
    ranks = part.data_parallel_group.size()
    for buffer in part.buffers:
        for bucket in buffer.buckets:
            shard = bucket.grad_data.numel() // ranks
            for param in bucket.params_list:
                start, end = bucket.param_to_index[param]
                bounds = [min(max(shard * rank, start), end) - start for rank in range(ranks + 1)]
                yield _Cut(param, weights[param], [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False)])


def _sharded(part: Any, weights: dict[Any, Any]) -> dict[str, Any]:
    rank, found = part.data_parallel_group.rank(), {}
    on_the_way = not isinstance(part.optimizer, hybrid_class()) and (
        part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    )
    for number, cut in enumerate(_cuts(part, weights)):
        states = part._get_main_param_and_optimizer_states(cut.param) if cut.ranges[rank] else {}
        for key in _keys(part):
            tensor = states[key].detach() if states else torch.empty(0)
            if on_the_way:  # FusedAdam makes fp32 copies, on the GPU
                tensor = tensor.cpu()
            whole = _gathered(tensor, cut, part.data_parallel_group_gloo)
            if whole is not None:
                found[f"{number}.{key}"] = _entry(cut.weight, key, whole)
    return found


def _gathered(piece: torch.Tensor, cut: _Cut, group: Any) -> torch.Tensor | None:
    """The whole state, fp32 in the parameter's shape, on the rank that owns it; None on others."""
    rank, ranks = group.rank(), dist.get_process_group_ranks(group)
    if rank != cut.owner:
        if len(piece):
            dist.send(piece.float().cpu().contiguous(), ranks[cut.owner], group)
        return None
    if len(piece) == cut.param.numel():
        return piece.float().view(cut.param.shape)
    whole = torch.empty(cut.param.numel(), dtype=torch.float32)
    for other, span in enumerate(cut.ranges):
        if other == rank:
            whole[span.start : span.stop] = piece
        elif span:
            dist.recv(whole[span.start : span.stop], ranks[other], group)
    return whole.view(cut.param.shape)


def _entry(weight: Any, key: str, data: torch.Tensor) -> Any:
    """The sharded state beside a sharded weight. The owner is its only copy among the data-parallel ranks."""
    dtype = {} if isinstance(weight, ShardedTensorFactory) else {"dtype": data.dtype}
    replica = (*weight.replica_id[:-1], 0)
    return replace(weight, key=f"optimizer.state.{key}.{weight.key}", data=data, replica_id=replica, **dtype)


def _groups(cuts: list[_Cut], keys: int) -> Iterator[list[_Cut]]:
    """Parameters whose states take `LOAD_BYTES` together, or one."""
    group: list[_Cut] = []
    size = 0
    for cut in cuts:
        nbytes = 4 * keys * cut.param.numel()
        if group and size + nbytes > LOAD_BYTES:
            yield group
            group, size = [], 0
        group.append(cut)
        size += nbytes
    if group:
        yield group


def _parts(entry: Any) -> list[Any]:
    """The sharded tensors of an entry: a gated linear layer's weight is stored as two."""
    return list(nested_values(entry.build())) if isinstance(entry, ShardedTensorFactory) else [entry]


def _alone(part: Any) -> Any:
    """A sharded tensor that can be read without its neighbours: megatron wants all of a rank's experts of one key at once
    where their number is an axis of the key's tensor but not of theirs."""
    shape = (1,) * part.prepend_axis_num + tuple(part.local_shape)
    return replace(part, data=part.data.view(shape), local_shape=shape, prepend_axis_num=0)


def _shared(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _load_group(part: Any, cuts: list[_Cut], rank: int, root: Path) -> None:
    whole = {(cut, key): torch.empty(cut.param.shape, dtype=torch.float32) for cut in cuts for key in _keys(part)}
    wanted = {
        f"{i}": {f"{k}": _alone(p) for k, p in enumerate(_parts(_entry(cut.weight, key, data)))}
        for i, ((cut, key), data) in enumerate(whole.items())
    }
    loaded = dc.load(wanted, str(root), validate_access_integrity=False)
    for i, data in enumerate(whole.values()):  # it reads into the tensors that it is given
        assert all(_shared(tensor, data) for tensor in loaded[f"{i}"].values())
    del wanted, loaded
    held_inside = isinstance(part.optimizer, hybrid_class()) and (
        part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    )
    for cut in cuts:
        span = cut.ranges[rank]
        states = {key: whole.pop((cut, key)).flatten()[span.start : span.stop] for key in _keys(part)}
        if held_inside:  # megatron would put these in the place of its own, which its sub-optimizers keep until the end
            live = part._get_main_param_and_optimizer_states(cut.param)
            for key, state in states.items():
                live[key].copy_(state)
        else:
            part._set_main_param_and_optimizer_states(cut.param, states)
