"""Which ways to hold the optimizer exist. What megatron-core 0.19 would take and ignore is refused, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

from . import host
from .schema import Config

Found = tuple[str, str, str, str, str]
"""Rule, keys divided by spaces, what, why, fix."""


def optimizer_modes(config: Config) -> Iterator[Found]:
    """What is wrong with precision_aware, offload_fraction, grad_dtype and moment_dtype together."""
    o, fp32 = config.optimizer, config.engine.dtype == "fp32"
    if o.grad_dtype != "fp32" and fp32:
        yield (
            "optimizer.grad_dtype",
            "optimizer.grad_dtype engine.dtype",
            f"optimizer.grad_dtype is {o.grad_dtype} with engine.dtype fp32",
            "A gradient buffer has the type of its weights or fp32; for fp32 weights both are fp32.",
            "Set optimizer.grad_dtype=fp32, or engine.dtype=bf16.",
        )
    if o.precision_aware and fp32:
        yield (
            "optimizer.precision_aware",
            "optimizer.precision_aware engine.dtype",
            "optimizer.precision_aware is true with engine.dtype fp32",
            "It keeps the fp32 masters of bf16 weights inside the optimizer; fp32 weights are their own masters.",
            "Set optimizer.precision_aware=false, or engine.dtype=bf16.",
        )
    elif o.precision_aware and o.offload_fraction == 0:
        yield from _needs_fused_adam(config)
    yield from _moments(config)


def _needs_fused_adam(config: Config) -> Iterator[Found]:
    on_cpu = host.resolve_device(config.engine.device) == "cpu"
    if not on_cpu and host.has_package("transformer_engine"):
        return
    missing = "which a CPU cannot run" if on_cpu else "which is not installed here"
    yield (
        "optimizer.precision_aware",
        "optimizer.precision_aware optimizer.offload_fraction engine.device",
        "optimizer.precision_aware is true and nothing is offloaded",
        f"On the device it is the FusedAdam of Transformer Engine, {missing}; the offloading optimizer needs none.",
        "Set optimizer.precision_aware=false, or optimizer.offload_fraction above 0.",
    )


def _moments(config: Config) -> Iterator[Found]:
    o = config.optimizer
    if o.moment_dtype == "fp32":
        return
    what, rule = f"optimizer.moment_dtype is {o.moment_dtype}", "optimizer.moment_dtype"
    if not o.precision_aware:
        yield (
            rule,
            "optimizer.moment_dtype optimizer.precision_aware",
            f"{what} without optimizer.precision_aware",
            "Only the precision-aware optimizer makes moments of another type; the plain one has fp32.",
            "Set optimizer.moment_dtype=fp32, or optimizer.precision_aware=true.",
        )
    elif o.offload_fraction > 0:
        yield (
            rule,
            "optimizer.moment_dtype optimizer.offload_fraction",
            f"{what} with optimizer.offload_fraction {o.offload_fraction:g}",
            "megatron-core's offloading optimizer makes fp32 moments on both devices, whatever it is asked for.",
            "Set optimizer.moment_dtype=fp32, or optimizer.offload_fraction=0.",
        )
