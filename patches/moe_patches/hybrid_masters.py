"""The CPU-offloading optimizer takes the masters of a loaded state into the parameters that it updates, all of them.

On 0.19.2 it looks every parameter up among those that have an fp32 copy, so that a state with parameters that are fp32
already, which without the precision-aware option all are, ends in a KeyError. Leaving those out, as later versions do,
keeps the CPU copies at the values from before the load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .hybrid import HYBRID, MethodPatch, bare_hybrid, hybrid_class, values


class HybridMasters(MethodPatch):
    """See the module; a ledger entry."""

    name = "hybrid_masters"
    method = "_update_fp32_params_by_new_state"
    target = f"{HYBRID}.{method}"
    fault = "an offloaded optimizer with parameters that are fp32 already cannot be loaded: KeyError"
    upstream = "Megatron-LM 86e928a97f (in part), SkyRL #1403"
    versions = "0.19.2"

    def owner(self) -> Any:
        return hybrid_class()

    def replace(self, original: Callable) -> Callable:
        def update_masters(self: Any) -> None:
            if self.param_update_in_fp32:
                for param, state in self.state.items():
                    self.param_to_inner_param[param].data.copy_(state["master_param"])

        return update_masters

    def probe(self) -> bool:
        """Load a master for a parameter that is fp32 and has a copy; the copy must take it."""
        param, inner = values(1, 2), values(1, 2)
        hybrid = bare_hybrid(
            param_update_in_fp32=True,
            param_to_fp32_param={},
            param_to_inner_param={param: inner},
            state={param: {"master_param": values(3, 4)}},
        )
        try:
            getattr(hybrid, self.method)()
        except KeyError:
            return True
        return inner.tolist() != [3, 4]
