"""Masters inside Transformer Engine's FusedAdam are saved as what they are, load from any mode, and follow the weights.

The precision-aware option without offload leaves the fp32 masters to FusedAdam, which by default keeps of a bf16
parameter's master only what the parameter lacks: the lower 16 bits, as int16 (`store_param_remainders`). Four faults:

- A checkpoint holds these remainders, turned into floats, under the name of the masters: another mode that loads it
  takes noise for its masters, without a message.
- The reshardable format cannot be loaded at all: FusedAdam asserts int16 and is given fp32.
- FusedAdam updates a native-fp32 parameter in place and leaves the master that it made of it as it was at the start; a
  checkpoint holds that, and another mode that loads it goes back to the start, without a message.
- DistributedOptimizer.reload_model_params stops early: after a load of weights alone the old remainders are added to the
  new weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from .hybrid import DISTRIBUTED, distributed_class, values
from .ledger import mark, marks

_GET, _SET = "_get_main_param_and_optimizer_states", "_set_main_param_and_optimizer_states"
_RELOAD = "_copy_model_params_to_main_params"
_LEAST, _MOST = -(1 << 15), (1 << 15) - 1


def join_master(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 parameter: its bits, with the int16 remainder added to them as one integer."""
    high = param.detach().view(torch.int16).to(torch.int32) << 16
    return (high + remainder).view(torch.float32)


def split_master(param: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """The int16 remainder that, joined to the bf16 `param`, gives the fp32 `master`; `param` stays as it is.

    A master half-way between two bf16 values that was rounded down to `param` (FusedAdam rounds up, torch to even) is
    one unit in the last place out of reach, and comes back as the fp32 value before it.

    Raises:
        RuntimeError: `master` does not round to `param`: they are of different checkpoints.
    """
    high = param.detach().view(torch.int16).to(torch.int64) << 16
    difference = master.detach().to(param.device).contiguous().view(torch.int32) - high
    if bool(((difference < _LEAST) | (difference > _MOST + 1)).any()):
        raise RuntimeError("masters that do not round to the weights: load the weights of the same checkpoint first")
    return difference.clamp(max=_MOST).to(torch.int16)


def _fused(optimizer: Any) -> Any:
    """The FusedAdam that holds a DistributedOptimizer's masters, or None in other modes."""
    inner = optimizer.optimizer
    aware = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    return inner if aware and hasattr(inner, "set_scaled_state") else None


def _place(optimizer: Any, model_param: Any) -> tuple[Any, Any]:
    """The parameter that FusedAdam updates for a model parameter, and its master there; (None, None) in other modes."""
    fused = _fused(optimizer)
    if fused is None:
        return None, None
    group, order = optimizer.model_param_group_index_map[model_param]
    param = fused.param_groups[group]["params"][order]
    return param, fused.state[param]["master_param"]


class FusedMasters:
    """See the module; a ledger entry."""

    name = "fused_masters"
    package = "megatron-core"
    target = f"{DISTRIBUTED}.{{{_GET},{_SET},{_RELOAD}}}"
    fault = "masters inside FusedAdam are saved as their lower 16 bits, cannot be loaded, and ignore loaded weights"
    upstream = "no report is known"
    versions = "0.19.2"

    def applied(self) -> bool:
        return all(self.name in marks(getattr(distributed_class(), method)) for method in (_GET, _SET, _RELOAD))

    def apply(self) -> None:
        owner = distributed_class()
        get_states, set_states, reload = (getattr(owner, method) for method in (_GET, _SET, _RELOAD))

        @functools.wraps(get_states)
        def get_main_param_and_states(self: Any, model_param: Any) -> dict[str, Any]:
            tensors = get_states(self, model_param)
            param, master = _place(self, model_param)
            if master is not None and master.dtype == torch.int16:
                tensors["param"] = join_master(param, master)
            elif master is not None and param.dtype == torch.float32:
                tensors["param"] = param.detach()
            return tensors

        @functools.wraps(set_states)
        def set_main_param_and_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
            param, master = _place(self, model_param)
            if master is not None and isinstance(tensors.get("param"), torch.Tensor):
                if master.dtype == torch.int16:
                    tensors = {**tensors, "param": split_master(param, tensors["param"])}
                elif param.dtype == torch.float32:
                    param.data.copy_(tensors["param"])
            set_states(self, model_param, tensors)

        @functools.wraps(reload)
        def copy_to_masters(self: Any, *args: Any, **kwargs: Any) -> None:
            reload(self, *args, **kwargs)
            fused = _fused(self)
            for param in [] if fused is None else list(fused.state):
                master = fused.state[param]["master_param"]
                if master.dtype == torch.int16:
                    master.zero_()
                else:
                    fused.set_scaled_state(param, "master_param", param.detach().float())

        replaced: dict[str, Callable] = {
            _GET: get_main_param_and_states,
            _SET: set_main_param_and_states,
            _RELOAD: copy_to_masters,
        }
        for method, function in replaced.items():
            setattr(owner, method, mark(function, self.name))

    def probe(self) -> bool:
        """Read, write and reload a bf16 parameter whose remainder is kept; read an fp32 one with a forgotten master."""
        owner, native = distributed_class(), values(5, 6)
        fused = _Remainders(values(1.5, -2).bfloat16(), native)
        master = torch.tensor([1.5 + 2**-20, -2.0])
        fused.state[fused.param]["master_param"].copy_(split_master(fused.param, master))
        stub = SimpleNamespace(
            optimizer=fused,
            config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True),
            ddp_config=SimpleNamespace(use_megatron_fsdp=False),
            model_param_group_index_map={fused.param: (0, 0), native: (0, 1)},
        )
        if getattr(owner, _GET)(stub, native)["param"].tolist() != [5, 6]:
            return True
        if getattr(owner, _GET)(stub, fused.param)["param"].tolist() != master.tolist():
            return True
        try:
            getattr(owner, _SET)(stub, fused.param, {"param": master + torch.tensor([2**-20, 0])})
        except AssertionError:
            return True
        if fused.master().tolist() != [1.5 + 2**-19, -2.0]:
            return True
        getattr(owner, _RELOAD)(stub)
        return fused.master().tolist() != [1.5, -2.0]


class _Remainders:
    """A bf16 and an fp32 parameter as FusedAdam holds them, for the probe: of the first it hands out and takes int16."""

    def __init__(self, param: torch.Tensor, native: torch.Tensor) -> None:
        self.param = param
        self.param_groups = [{"params": [param, native]}]
        self.state = {
            param: {"master_param": torch.zeros(param.shape, dtype=torch.int16)},
            native: {"master_param": torch.zeros_like(native)},
        }

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        return self.state[param][name]

    def set_scaled_state(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        assert value.dtype == (torch.int16 if param is self.param else torch.float32)
        self.state[param][name].copy_(value)

    def master(self) -> torch.Tensor:
        return join_master(self.param, self.state[self.param]["master_param"])
