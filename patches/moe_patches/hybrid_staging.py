"""Offloaded gradients pass through two pinned buffers instead of staying on the host beside the states.

The CPU-offloading optimizer copies every gradient to a pinned tensor of its own before the first parameter is updated, and
keeps them all: 4 bytes a parameter, up to 8 as PyTorch rounds pinned blocks up to a power of two, of no use between
steps. With one CPU optimizer for each parameter, which is how megatron-core overlaps copies with updates, the next
gradient is needed only when the parameter before it is done.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from .hybrid import HYBRID, MethodPatch, bare_hybrid, hybrid_class, values

DEPTH = 2  # one gradient arrives while another is read


class Staging:
    """The buffers of one hybrid optimizer, and the hooks that fill them as its CPU optimizers go by."""

    def __init__(self, hybrid: Any) -> None:
        self.hybrid, self.optimizers = hybrid, hybrid.cpu_optimizers
        self.params = [optimizer.param_groups[0]["params"][0] for optimizer in self.optimizers]
        most = max(param.nbytes for param in self.params)
        self.buffers = [
            torch.empty(most, dtype=torch.uint8, pin_memory=hybrid.pin_cpu_grads)
            for _ in range(min(DEPTH, len(self.params)))
        ]
        self.events: dict[int, Any] = {}
        for i, optimizer in enumerate(self.optimizers):
            optimizer.register_step_pre_hook(partial(self._before, i))
            optimizer.register_step_post_hook(partial(self._after, i))

    @classmethod
    def of(cls, hybrid: Any) -> Staging:
        """The hybrid optimizer's; a load makes its CPU optimizers anew, and then the buffers too."""
        held = getattr(hybrid, "_staging", None)
        if held is None or held.optimizers is not hybrid.cpu_optimizers:
            hybrid._staging = held = cls(hybrid)
        return held

    def start(self) -> None:
        """Queue the first copies, on the current stream."""
        for i in range(len(self.buffers)):
            self._copy(i, nullcontext())

    def _copy(self, i: int, stream: Any) -> None:
        param = self.params[i]
        source = self.hybrid.cpu_copys_map_gpu_param[param]
        grad = getattr(source, "decoupled_grad", source.grad)
        param.requires_grad, param.grad = False, None
        if grad is not None:
            buffer = self.buffers[i % DEPTH][: param.nbytes].view(param.dtype).view(param.shape)
            with stream:
                buffer.copy_(grad, non_blocking=True)
                self.events[i] = self.hybrid._d2h_stream.record_event()
            param.grad = buffer

    def _before(self, i: int, *_: Any) -> None:
        event = self.events.pop(i, None)
        if event is not None:
            event.synchronize()

    def _after(self, i: int, *_: Any) -> None:
        self.params[i].grad = None
        if i + DEPTH < len(self.params):
            self._copy(i + DEPTH, torch.cuda.stream(self.hybrid._d2h_stream))


class HybridStaging(MethodPatch):
    """See the module; a ledger entry."""

    name = "hybrid_staging"
    method = "_set_sub_optimizer_grads"
    target = f"{HYBRID}.{method}"
    fault = "every offloaded gradient keeps a pinned fp32 copy on the host: 4 to 8 bytes a parameter"
    upstream = "no report is known"
    versions = "0.19.2"

    def owner(self) -> Any:
        return hybrid_class()

    def replace(self, original: Callable) -> Callable:
        def set_gradients(self: Any) -> None:
            each = self.cpu_optimizers
            if not each or any(sum(len(g["params"]) for g in optimizer.param_groups) > 1 for optimizer in each):
                original(self)  # one CPU optimizer of many parameters reads all gradients at once
                return
            self.cpu_optimizers = []
            try:
                original(self)
            finally:
                self.cpu_optimizers = each
            Staging.of(self).start()

        return set_gradients

    def probe(self) -> bool:
        """Set the gradients of three parameters; no more than two may have a copy."""
        sources = [torch.nn.Parameter(values(1, 2)) for _ in range(3)]
        copies = [torch.nn.Parameter(values(1, 2)) for _ in sources]
        for source in sources:
            source.grad = values(3, 4)
        hybrid = bare_hybrid(
            param_update_in_fp32=False,
            param_to_inner_param={},
            cpu_optimizers=[torch.optim.SGD([copy]) for copy in copies],
            cpu_copys_map_gpu_param=dict(zip(copies, sources, strict=True)),
            cpu_copy_map_grad={},
            pin_cpu_grads=False,
            _d2h_stream=SimpleNamespace(record_event=lambda: None),
            _cpu_optimizer_map_data_event={},
        )
        getattr(hybrid, self.method)()
        return sum(copy.grad is not None for copy in copies) > DEPTH
