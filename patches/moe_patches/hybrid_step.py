"""A resumed optimizer of which a fraction is offloaded counts its steps on.

After each step the CPU-offloading optimizer takes over the states of the optimizers beneath it, and not their groups; before
each step it writes its own groups over theirs. A load puts the step into its groups, so that from then on Transformer
Engine's FusedAdam, which counts in the group, corrects the bias of its moments at every step as if it were the first after
the load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from .hybrid import HYBRID, MethodPatch, bare_hybrid, hybrid_class, values


def _steps(hybrid: Any) -> Iterator[int]:
    """What each optimizer beneath has counted, in its groups (FusedAdam) or in its states (torch)."""
    for optimizer in hybrid.sub_optimizers:
        yield from (int(group["step"]) for group in optimizer.param_groups if "step" in group)
    for optimizer in hybrid.sub_optimizers:
        yield from (int(state["step"]) for state in optimizer.state.values() if "step" in state)


class HybridStep(MethodPatch):
    """See the module; a ledger entry."""

    name = "hybrid_step"
    method = "_sync_sub_optimizers_state_to_hdo"
    target = f"{HYBRID}.{method}"
    fault = (
        "a resumed optimizer, offloaded in part, stays at the step after the load: wrong bias corrections on the GPU"
    )
    upstream = "no report is known"
    versions = "0.19.2"

    def owner(self) -> Any:
        return hybrid_class()

    def replace(self, original: Callable) -> Callable:
        def take_states_and_step(self: Any) -> None:
            original(self)
            step = max(_steps(self), default=None)
            if step is not None:
                for group in self.param_groups:
                    group["step"] = step

        return take_states_and_step

    def probe(self) -> bool:
        """An optimizer loaded at step 5 takes one more; what counts it must start the next from 6."""
        param, inner = values(1), values(1)
        counting = SimpleNamespace(param_groups=[{"params": [inner], "step": 6}], state={})
        hybrid = bare_hybrid(
            param_update_in_fp32=False,
            param_groups=[{"params": [param], "step": 5}],
            param_to_inner_param={param: inner},
            inner_param_to_orig_param={inner: param},
            cpu_optimizers=[],
            gpu_optimizer=counting,
        )
        getattr(hybrid, self.method)()
        hybrid._sync_hdo_param_groups_to_sub_optimizers()
        return counting.param_groups[0]["step"] != 6
