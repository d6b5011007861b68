"""The part of a half-offloaded optimizer that stays on the GPU waits for its gradients.

The CPU-offloading optimizer makes fp32 gradients of bf16 ones on the stream of its copies to the host, and then steps the
GPU's optimizer on the stream of the training, which waits for nothing: it may read what the cast has not written yet. Only
the precision-aware option has such casts.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from .hybrid import HYBRID, MethodPatch, bare_hybrid, hybrid_class, values


class HybridStreams(MethodPatch):
    """See the module; a ledger entry."""

    name = "hybrid_streams"
    method = "_set_sub_optimizer_grads"
    target = f"{HYBRID}.{method}"
    fault = "precision-aware offload of a fraction steps on the GPU before its gradients are cast: a race"
    upstream = "no report is known"
    versions = "0.19.2"

    def owner(self) -> Any:
        return hybrid_class()

    def replace(self, original: Callable) -> Callable:
        def set_gradients(self: Any) -> None:
            original(self)
            optimizer = getattr(self, "gpu_optimizer", None)
            if optimizer is not None and not hasattr(optimizer, "_waits_for_casts"):  # a load makes it anew
                optimizer._waits_for_casts = optimizer.register_step_pre_hook(
                    lambda *_: self._d2h_stream.record_event().wait()
                )

        return set_gradients

    def probe(self) -> bool:
        """Set gradients and step the GPU's optimizer; it must have waited for the copying stream."""
        waited: list[bool] = []
        stream = SimpleNamespace(record_event=lambda: SimpleNamespace(wait=lambda *_: waited.append(True)))
        optimizer = torch.optim.SGD([torch.nn.Parameter(values(1))], lr=0.1)
        hybrid = bare_hybrid(
            param_update_in_fp32=True,
            param_to_fp32_param={},
            param_to_inner_param={},
            gpu_params_map_cpu_copy={},
            cpu_optimizers=[],
            gpu_optimizer=optimizer,
            _d2h_stream=stream,
        )
        getattr(hybrid, self.method)()
        optimizer.step()
        return not waited
