"""Native-fp32 parameters that stay on the GPU beside offloaded ones are trained under the precision-aware option.

That option leaves gradients in ``decoupled_grad``. The CPU-offloading optimizer copies them to the parameters on the CPU
and to the fp32 copies of bf16 ones. A parameter on the GPU that is fp32 already has neither: its ``grad`` stays None, so
it never moves, without a message, and has no state to save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .hybrid import HYBRID, MethodPatch, bare_hybrid, hybrid_class, values


class HybridGradients(MethodPatch):
    """See the module; a ledger entry."""

    name = "hybrid_gradients"
    method = "_set_sub_optimizer_grads"
    target = f"{HYBRID}.{method}"
    fault = "precision-aware offload of a fraction never updates native-fp32 parameters left on the GPU"
    upstream = "no report is known"
    versions = "0.19.2"

    def owner(self) -> Any:
        return hybrid_class()

    def replace(self, original: Callable) -> Callable:
        def set_gradients(self: Any) -> None:
            original(self)
            for param, inner in self.param_to_inner_param.items():
                grad = getattr(param, "decoupled_grad", None)
                if inner is param and grad is not None:
                    param.grad = grad.to(param.dtype)

        return set_gradients

    def probe(self) -> bool:
        """Set the gradients of one fp32 parameter that is its own inner one; the sub-optimizer must find it."""
        param = torch.nn.Parameter(values(1, 2))
        param.decoupled_grad = values(3, 4)
        hybrid = bare_hybrid(
            param_update_in_fp32=True,
            param_to_fp32_param={},
            param_to_inner_param={param: param},
            gpu_params_map_cpu_copy={},
            cpu_optimizers=[],
        )
        getattr(hybrid, self.method)()
        return param.grad is None or param.grad.tolist() != [3, 4]
