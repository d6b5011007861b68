"""Saved optimizer states find their way back into offloaded and torch optimizers.

Four faults stand in the way:

- The state of an offloaded parameter holds ``step`` and ``master_param``, which no checkpoint does: a KeyError. The step
  travels in the parameter groups, and the master is the loaded parameter.
- The layout-bound format (``dp_reshardable``) carries the step that the optimizer had *before* the load along with the
  loaded moments, and with it overwrites the right one: bias corrections are then of another step, without a message.
- The same format stores an offloaded parameter without the precision-aware option twice, as itself and as its master.
- Its loader copies into views of parameters that need gradients, an error outside ``no_grad``, and does
  not hand what it loaded to the optimizers beneath an offloaded one.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch

from .hybrid import DISTRIBUTED, bare_hybrid, distributed_class, hybrid_class, values
from .ledger import mark, marks

_GET, _SET = "_get_main_param_and_optimizer_states", "_set_main_param_and_optimizer_states"
_LOAD = "load_parameter_state_from_dp_reshardable"


class OptimizerStates:
    """See the module; a ledger entry."""

    name = "optimizer_states"
    package = "megatron-core"
    target = f"{DISTRIBUTED}.{{{_GET},{_SET},{_LOAD}}}"
    fault = "offloaded optimizers cannot be loaded (KeyError step, master_param); dp_reshardable loads a wrong step"
    upstream = "SkyRL #1403 (the step); of the others no report is known"
    versions = "0.19.2"

    def applied(self) -> bool:
        return all(self.name in marks(getattr(distributed_class(), method)) for method in (_GET, _SET, _LOAD))

    def apply(self) -> None:
        owner, name = distributed_class(), self.name
        get_states, set_states, load_states = (getattr(owner, method) for method in (_GET, _SET, _LOAD))

        @functools.wraps(get_states)
        def get_main_param_and_states(self: Any, model_param: Any) -> dict[str, Any]:
            tensors = get_states(self, model_param)
            tensors.pop("master_param", None)  # the very values of "param"
            return tensors

        @functools.wraps(set_states)
        def set_main_param_and_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
            tensors = {**tensors, "step": None}
            if isinstance(self.optimizer, hybrid_class()) and "param" in tensors:
                precision_aware = self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                tensors["master_param"] = None if precision_aware else tensors["param"]
            set_states(self, model_param, tensors)

        @functools.wraps(load_states)
        def load_same_layout(self: Any, *args: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                load_states(self, *args, **kwargs)
            if isinstance(self.optimizer, hybrid_class()):
                self.optimizer._sync_hdo_state_to_sub_optimizers()

        setattr(owner, _GET, mark(get_main_param_and_states, name))
        setattr(owner, _SET, mark(set_main_param_and_states, name))
        setattr(owner, _LOAD, mark(load_same_layout, name))

    def probe(self) -> bool:
        """Load a parameter of an offloaded optimizer, an empty set of buffers, and read the parameter's states again."""
        main, master = values(0, 0), values(0, 0)
        state = {"exp_avg": values(0, 0), "step": torch.tensor(7.0), "master_param": master}
        loaded = {"param": values(1, 2), "exp_avg": values(3, 4), "step": torch.tensor(5.0)}
        synced: list[bool] = []
        stub = SimpleNamespace(
            optimizer=bare_hybrid(
                param_groups=[{"params": [main]}],
                state={main: state},
                _sync_hdo_state_to_sub_optimizers=lambda: synced.append(True),
            ),
            config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
            model_param_group_index_map={main: (0, 0)},
            gbuf_ranges=[],
        )
        owner = distributed_class()
        try:
            getattr(owner, _SET)(stub, main, loaded)
        except KeyError:
            return True
        getattr(owner, _LOAD)(stub, None)
        right = [main.tolist(), master.tolist(), state["exp_avg"].tolist(), state["step"].item()]
        again = getattr(owner, _GET)(stub, main)
        return right != [[1, 2], [1, 2], [3, 4], 7] or not synced or "master_param" in again
