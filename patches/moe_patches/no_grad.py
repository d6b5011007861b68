"""Main-parameter shards are leaves: DistributedOptimizer cuts them out of the model's parameters without a graph.

megatron-core slices a parameter that is kept in fp32, or dequantises and slices a quantised one, with gradients enabled.
The slice then is no leaf of autograd, and an optimizer that is built anew from such slices, as the CPU-offloading one
is, refuses them: ``can't optimize a non-leaf Tensor``. To cut under ``torch.no_grad()`` is half a cure: such a view asks
its base for a history again once the base was written to, as a load of weights does, and then raises an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from .ledger import mark, marks

_METHOD = "_build_model_and_main_param_groups"


class _DetachedViews(torch.overrides.TorchFunctionMode):
    """Within, a view of a tensor that needs gradients is one of the detached tensor: same memory, no history."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.view and args[0].requires_grad:
            args = (args[0].detach(), *args[1:])
        return func(*args, **(kwargs or {}))


def wrap_no_grad(method: Any) -> Any:
    """`method` run without a graph, its views of parameters detached: a function, or a classmethod, which stays one."""
    function: Callable = method.__func__ if isinstance(method, classmethod) else method

    @functools.wraps(function)
    def without_graph(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), _DetachedViews():
            return function(*args, **kwargs)

    return classmethod(without_graph) if isinstance(method, classmethod) else without_graph


class NoGradMainParams:
    """See the module; a ledger entry."""

    name = "no_grad_main_params"
    package = "megatron-core"
    target = f"megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.{_METHOD}"
    fault = "shards of native-fp32 and quantised parameters are no leaves, so CPU offload refuses them"
    upstream = "Megatron-LM #6212, #6124, #6982 (fp32 site, merged after the release), #8245 (quantised site)"
    versions = "0.19.2"

    def _class(self) -> Any:
        from megatron.core.optimizer import distrib_optimizer

        return distrib_optimizer.DistributedOptimizer

    def applied(self) -> bool:
        return self.name in marks(self._class().__dict__.get(_METHOD) or getattr(self._class(), _METHOD))

    def probe(self) -> bool:
        """Build the main shards of an fp32 and of a quantised parameter; a shard that is no leaf, or none any more once
        the parameter was written to, is the fault."""
        quantised = type("Quantised", (self._class(),), {"_is_distopt_quantized_param": classmethod(lambda c, t: True)})
        shards = [
            main_shard(self._class(), "torch.cuda.FloatTensor"),
            main_shard(quantised, "torch.cuda.BFloat16Tensor"),
        ]
        return not all(stays_leaf(param, shard) for param, shard in shards)

    def apply(self) -> None:
        owner = self._class()
        wrapped = wrap_no_grad(owner.__dict__[_METHOD])
        mark(wrapped.__func__, self.name)
        setattr(owner, _METHOD, wrapped)


def stays_leaf(param: torch.nn.Parameter, shard: torch.Tensor) -> bool:
    """Whether a shard of `param` is a leaf of autograd, before and after `param` is written to."""
    if not shard.is_leaf:
        return False
    with torch.no_grad():
        param.add_(1)
    try:
        return shard.is_leaf
    except RuntimeError:
        return False


def main_shard(owner: Any, type_name: str) -> tuple[torch.nn.Parameter, torch.Tensor]:
    """An fp32 parameter of 4 values which calls itself `type_name`, by which megatron-core chooses between its sites,
    and the shard of values 1 and 2 that `owner` (DistributedOptimizer) makes of it."""
    from megatron.core.optimizer.distrib_optimizer import Range

    class Named(torch.nn.Parameter):
        def type(self, *args: Any, **kwargs: Any) -> Any:
            return type_name

    param = Named(torch.arange(4.0))
    group: dict[str, Any] = {"params": [param], "orig_group": {}}
    ranges = [{"buffer": [{"param_map": {param: {"param": Range(1, 3)}}}]}]
    config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False, fp8_recipe=None)
    with torch.enable_grad():
        getattr(owner, _METHOD)(ranges, {param: (0, "buffer", 0)}, [group], config)
    return param, group["orig_group"]["params"][0]
