"""Gradient norm and clipping of lists that mix bf16 and fp32: one kernel launch per dtype.

With bf16 gradient buffers the gradients of native-fp32 parameters stay fp32, and the precision-aware optimizer hands
both to one multi-tensor launch. The kernels of Transformer Engine and apex read the whole list as the first tensor's
type: they refuse it, or return a wrong norm.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from .ledger import mark, marks

_MODULE = "megatron.core.optimizer.clip_grads"
_NORM, _CLIP = "get_grad_norm_fp32", "clip_grad_by_total_norm_fp32"


def by_dtype(tensors: Iterable[torch.Tensor]) -> dict[torch.dtype, list[torch.Tensor]]:
    """The tensors in one list for each dtype, in their order."""
    lists: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        lists.setdefault(tensor.dtype, []).append(tensor)
    return lists


def l2_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """2-norm of all values of the tensors, float64 accumulated; 0-d."""
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads])  # a 0 for each empty tensor
    )


def local_norm(
    grads: list[torch.Tensor], norm_type: float, l2: Callable[[list[torch.Tensor]], torch.Tensor]
) -> torch.Tensor:
    """The `norm_type`-norm (2, inf or another p) of a list of mixed dtypes, this rank's values alone; float32 [1].

    A NaN anywhere gives NaN, and no values give 0. `l2` is called with lists of one dtype.
    """
    filled = [g for g in grads if g.numel()]
    if not filled:
        return torch.zeros(1, device=grads[0].device if grads else None)
    if norm_type == 2:
        parts = [l2(same).reshape(()).double() for same in by_dtype(filled).values()]
    else:
        parts = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) for g in filled]
    return torch.linalg.vector_norm(torch.stack(parts), norm_type).float().reshape(1)


def make_dtype_safe_grad_fns(
    get_grad_norm: Callable, clip_by_total_norm: Callable, l2: Callable[[list[torch.Tensor]], torch.Tensor] = l2_norm
) -> tuple[Callable, Callable]:
    """Versions of megatron-core's gradient norm and clipping that never mix dtypes in one launch.

    A list of one dtype reaches the original as the same object. A mixed list becomes this rank's norm first, which the
    original then takes as its only gradient: it reduces over ranks as ever, once, so that a rank with mixed lists and
    one without stay in step. Clipping calls the original once for each dtype, which involves no other rank.

    Args:
        get_grad_norm: ``get_grad_norm_fp32(grads, norm_type=2, grad_stats_parallel_group=None)``.
        clip_by_total_norm: ``clip_grad_by_total_norm_fp32(parameters, max_norm, total_norm, use_decoupled_grad=False)``.
        l2: 2-norm of a list of one dtype.
    """

    @functools.wraps(get_grad_norm)
    def norm(grads_for_norm: Any, *args: Any, **kwargs: Any) -> Any:
        mixed = isinstance(grads_for_norm, list) and len({g.dtype for g in grads_for_norm}) > 1
        if not mixed or any(
            hasattr(g, "_local_tensor") for g in grads_for_norm
        ):  # FSDP's reduce over groups of their own
            return get_grad_norm(grads_for_norm, *args, **kwargs)
        norm_type = float(args[0] if args else kwargs.get("norm_type", 2))
        return get_grad_norm([local_norm(grads_for_norm, norm_type, l2)], *args, **kwargs)

    @functools.wraps(clip_by_total_norm)
    def clip(parameters: Any, max_norm: Any, total_norm: Any, use_decoupled_grad: bool = False, **kwargs: Any) -> Any:
        if isinstance(parameters, torch.Tensor):
            return clip_by_total_norm(parameters, max_norm, total_norm, use_decoupled_grad, **kwargs)
        parameters = parameters if isinstance(parameters, list) else list(parameters)
        attribute = "decoupled_grad" if use_decoupled_grad else "grad"
        lists: dict[torch.dtype, list[torch.Tensor]] = {}
        for param in parameters:
            grad = getattr(param, attribute, None)
            if grad is not None:
                lists.setdefault(grad.dtype, []).append(param)
        for same in [parameters] if len(lists) <= 1 else lists.values():
            clip_by_total_norm(same, max_norm, total_norm, use_decoupled_grad, **kwargs)

    return norm, clip


class DtypeSafeGradients:
    """See the module; a ledger entry."""

    name = "dtype_safe_gradients"
    package = "megatron-core"
    target = f"{_MODULE}.{{{_NORM},{_CLIP}}} and every module that imported them by value"
    fault = "bf16 and fp32 gradients go into one kernel launch: a crash or a wrong gradient norm"
    upstream = "Megatron-LM #7279, #7338"
    versions = "0.19.2"

    def applied(self) -> bool:
        module = _clip_grads()
        return all(self.name in marks(function) for _, _, function in _uses()) and hasattr(module, _CLIP)

    def probe(self) -> bool:
        """Whether a launch sees two dtypes when a mixed list is measured or clipped."""
        launches: list[set[torch.dtype]] = []
        grads = [torch.ones(2), torch.ones(3, dtype=torch.bfloat16)]
        params = [SimpleNamespace(decoupled_grad=g) for g in grads]
        with _recorded(_clip_grads(), launches):
            for _, name, function in _uses():
                if name == _NORM:
                    function(list(grads))
                else:
                    function(list(params), 1.0, 10.0, use_decoupled_grad=True)
        return any(len(dtypes) > 1 for dtypes in launches)

    def apply(self) -> None:
        made: dict[Any, Callable] = {}
        for module, name, function in _uses():
            if self.name in marks(function):
                continue
            if function not in made:
                pair = make_dtype_safe_grad_fns(function, function, _kernel_l2(function))
                made[function] = mark(pair[name == _CLIP], self.name)
            setattr(module, name, made[function])


def _clip_grads() -> ModuleType:
    import megatron.core.optimizer  # noqa: F401  (it imports the two functions by value into several modules)
    from megatron.core.optimizer import clip_grads

    return clip_grads


def _uses() -> list[tuple[ModuleType, str, Callable]]:
    """(module, name, function) wherever megatron-core holds one of the two functions, their home first."""
    home = _clip_grads()
    found = [(home, _NORM, getattr(home, _NORM)), (home, _CLIP, getattr(home, _CLIP))]
    for module in list(sys.modules.values()):
        if module is home or not getattr(module, "__name__", "").startswith("megatron."):
            continue
        for name in (_NORM, _CLIP):
            function = vars(module).get(name)
            if getattr(function, "__module__", None) == _MODULE:
                found.append((module, name, function))
    return found


def _kernel_l2(function: Callable) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """The 2-norm by the kernel that `function` uses; its plain torch substitute rounds bf16 norms to bf16: by ours."""
    names = function.__globals__

    def by_kernel(grads: list[torch.Tensor]) -> torch.Tensor:
        kernel = names["l2_norm_impl"]
        if getattr(kernel, "__name__", "") == "local_multi_tensor_l2_norm":
            return l2_norm(grads)
        flag = torch.zeros(1, dtype=torch.int, device=grads[0].device)
        return names["multi_tensor_applier"](kernel, flag, [grads], False)[0]

    return by_kernel


@contextmanager
def _recorded(module: ModuleType, launches: list[set[torch.dtype]]) -> Iterator[None]:
    """Within, the module's launches only note the dtypes they are given, no rank is waited for, and no GPU is needed."""

    def applier(kernel: Any, flag: Any, lists: list[list[torch.Tensor]], *args: Any) -> Any:
        launches.append({tensor.dtype for tensors in lists for tensor in tensors})
        return torch.zeros(1), None

    saved = {name: vars(module)[name] for name in ("torch", "multi_tensor_applier")}
    vars(module).update(torch=_HostTorch(), multi_tensor_applier=applier)
    try:
        yield
    finally:
        vars(module).update(saved)


class _HostTorch:
    """torch with its allocations on the host and reductions over one rank."""

    distributed = SimpleNamespace(
        all_reduce=lambda tensor, **kwargs: None, ReduceOp=torch.distributed.ReduceOp, ProcessGroup=Any
    )

    def __getattr__(self, name: str) -> Any:
        if name in ("zeros", "tensor", "ones", "empty"):
            return lambda *args, **kwargs: getattr(torch, name)(*args, **kwargs | {"device": "cpu"})
        return getattr(torch, name)
