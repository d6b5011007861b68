"""Weights that were loaded reach the masters of an offloaded optimizer, and its copies on the CPU.

DistributedOptimizer.reload_model_params stops early for the CPU-offloading optimizer, which then refreshes nothing but
its fp32 copies of bf16 parameters: without the precision-aware option there are none, and with it native-fp32 ones have
none. The first step after a load of weights alone, or after a model that was loaded once the optimizer stood, then
writes the old weights back.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from .hybrid import DISTRIBUTED, MethodPatch, bare_hybrid, distributed_class, distributed_module, hybrid_class, values


class HybridReload(MethodPatch):
    """See the module; a ledger entry."""

    name = "hybrid_reload"
    method = "_copy_model_params_to_main_params"
    target = f"{DISTRIBUTED}.{method}"
    fault = "an offloaded optimizer undoes a load of weights at its next step"
    upstream = "Megatron-LM #5071 (open), NeMo-RL #2371, Megatron-Bridge #4082"
    versions = "0.19.2"

    def owner(self) -> Any:
        return distributed_class()

    def replace(self, original: Callable) -> Callable:
        def copy_to_masters(self: Any, *args: Any, **kwargs: Any) -> None:
            hybrid = self.optimizer
            if not isinstance(hybrid, hybrid_class()):
                original(self, *args, **kwargs)
                return
            self.optimizer = None  # so that the original copies model to main parameters as for any other optimizer
            try:
                original(self, *args, **kwargs)
            finally:
                self.optimizer = hybrid
            for param, inner in hybrid.param_to_inner_param.items():
                if inner is not param:
                    inner.data.copy_(param.data)
                state = hybrid.state.get(param, {})
                if "master_param" in state:
                    state["master_param"] = inner

        return copy_to_masters

    def probe(self) -> bool:
        """Reload one parameter that has a main copy and a copy of that on the CPU; both must take its values."""
        from megatron.core.optimizer.distrib_optimizer import Range

        model, main, inner = values(1, 2), values(0, 0), values(0, 0)
        stub = SimpleNamespace(
            optimizer=bare_hybrid(param_to_fp32_param={}, param_to_inner_param={main: inner}, state={}),
            ddp_config=SimpleNamespace(use_megatron_fsdp=False),
            config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
            model_float16_groups=[[model]],
            shard_fp32_from_float16_groups=[[main]],
            model_fp32_groups=[],
            shard_fp32_groups=[],
            _get_model_param_range_map=lambda param: {"param": Range(0, 2)},
            _is_distopt_quantized_param=lambda param: False,
        )
        getattr(distributed_module().DistributedOptimizer, self.method)(stub)
        return main.tolist() != [1, 2] or inner.tolist() != [1, 2]
