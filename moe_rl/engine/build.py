"""The parts of a trainer rank: model chunks, data-parallel wrappers, optimizer. All built from megatron-core."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import nn

from moe_rl.config import Config
from moe_rl.engine.parallel import Parallel
from moe_rl.models.options import DTYPES, layout_options

# The rate is set before every step (schedule.py). A constant here keeps it out of megatron's param-group identifiers,
# by which a checkpoint is matched: else a run resumed with another rate would not find its groups.
_GROUP_RATE = 1.0


def dtype_of(config: Config) -> torch.dtype:
    """The dtype of weights and activations (`engine.dtype`)."""
    return DTYPES[config.engine.dtype]


def make_transformer_config(family: Any, arch: Any, config: Config, parallel: Parallel) -> Any:
    """The family's TransformerConfig for this run's layout, dtype, recompute and chunk sizes."""
    made = family.make_transformer_config(
        arch,
        **layout_options(parallel),
        recompute=config.engine.recompute,
        dtype=config.engine.dtype,
        device=parallel.device.type,
        attention_backend=config.engine.attention_backend,
        attention_chunk=config.engine.attention_chunk,
        logprob_chunk=config.engine.logprob_chunk,
    )
    # Losses arrive as sums; without this megatron divides them by micro-batches and data-parallel ranks
    assert made.calculate_per_token_loss
    made.finalize_model_grads_func = finalize
    made.moe_enable_routing_replay = config.rollout.router_replay != "none"
    return made


def finalize(model: list[nn.Module], num_tokens: Any = None, pg_collection: Any = None, **kwargs: Any) -> None:
    """Sum the gradients over data-parallel ranks; the schedule's token count is dropped, so that nothing divides them."""
    finalize_model_grads(model, None, pg_collection=pg_collection, **kwargs)


def build_chunks(family: Any, arch: Any, transformer_config: Any, parallel: Parallel) -> list[nn.Module]:
    """This rank's model chunks, one per virtual stage, on its device; weights are uninitialised until loaded."""
    return [
        family.build_chunk(
            arch,
            transformer_config,
            pre=parallel.is_first and stage == 0,
            post=parallel.is_last and stage == parallel.vpp - 1,
            vp_stage=stage if parallel.vpp > 1 else None,
        )
        for stage in range(parallel.vpp)
    ]


def wrap_ddp(config: Config, chunks: list[nn.Module], transformer_config: Any) -> list[DistributedDataParallel]:
    """Each chunk behind megatron's DDP: parameters and gradients move into contiguous buffers, one for each dtype.

    `optimizer.grad_dtype` is the type of gradients of bf16 weights; those of fp32 weights are fp32.
    """
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.optimizer.grad_dtype == "fp32", use_distributed_optimizer=True
    )
    return [
        DistributedDataParallel(transformer_config, options, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]


def build_optimizer(config: Config, chunks: list[DistributedDataParallel]) -> Any:
    """AdamW over parameters and states sharded over the data-parallel ranks, with its states allocated.

    With `optimizer.offload_fraction` a share of each rank's shards is kept and updated on the CPU. Vectors and scalars have no weight decay (megatron's standard). Parameters kept in fp32 have groups of their own: a
    group of mixed dtypes is saved in another order than it is held.
    """
    o, dtype = config.optimizer, dtype_of(config)
    moments = DTYPES[o.moment_dtype]
    options = MegatronOptimizerConfig(
        optimizer="adam",
        lr=_GROUP_RATE,
        min_lr=_GROUP_RATE,
        weight_decay=o.weight_decay,
        adam_beta1=o.betas[0],
        adam_beta2=o.betas[1],
        adam_eps=o.eps,
        clip_grad=o.clip_grad,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=o.precision_aware,
        # Checked and otherwise unread by megatron-core: the buffers are made by wrap_ddp
        main_grads_dtype=DTYPES[o.grad_dtype] if o.precision_aware else torch.float32,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
        optimizer_cpu_offload=o.offload_fraction > 0,
        optimizer_offload_fraction=o.offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=True,
    )
    overrides = get_standard_config_overrides(options)
    kept_fp32 = ParamPredicate(name="keep_fp32", fn=lambda param: bool(getattr(param, "keep_fp32", False)))
    overrides[ParamKey(predicate=kept_fp32)] = {"max_lr": _GROUP_RATE, "min_lr": _GROUP_RATE}
    optimizer = get_megatron_optimizer(options, chunks, config_overrides=overrides)
    for part in optimizer.chained_optimizers:  # so that a checkpoint saved before the first step has its states
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            _allocate_states(part.optimizer)
        elif o.precision_aware:
            _allocate_fused_states(part.optimizer)
        else:
            part.init_state_fn(part.optimizer, part.config)
    return optimizer


def _allocate_fused_states(fused: Any) -> None:
    """Moments of zero and the masters of Transformer Engine's FusedAdam; megatron-core's own function for it lacks the
    second argument that FusedAdam asks for, and ends in a TypeError."""
    for group in fused.param_groups:
        for param in group["params"]:
            fused.initialize_state(param, fused.store_param_remainders and param.dtype == torch.bfloat16)


def _allocate_states(hybrid: HybridDeviceOptimizer) -> None:
    """Moments of zero, where each is updated. Megatron's own way is a step on random gradients, at the groups' rate."""
    for optimizer in hybrid.sub_optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                state = optimizer.state[param]
                state.update(exp_avg=torch.zeros_like(param.data), exp_avg_sq=torch.zeros_like(param.data))
                if isinstance(optimizer, torch.optim.AdamW):  # Transformer Engine counts steps in the group
                    state["step"] = torch.zeros((), dtype=torch.float32)
    hybrid._sync_sub_optimizers_state_to_hdo()


def drop_gradients(optimizer: Any) -> None:
    """Free what a step leaves of the gradients beside their buffers: fp32 copies of bf16 ones, 4 bytes a parameter.

    The copies on the CPU stay: they are pinned once and used in every step.
    """
    optimizer.zero_grad()
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, HybridDeviceOptimizer) and part.optimizer.gpu_optimizer is not None:
            part.optimizer.gpu_optimizer.zero_grad()


def set_hyperparameters(optimizer: Any, config: Config, lr: float) -> None:
    """Give every parameter group the rate `lr` and this run's betas, eps and decay (a checkpoint brings its own)."""
    o = config.optimizer
    for group in optimizer.param_groups:
        group.update(lr=lr, betas=tuple(o.betas), eps=o.eps, weight_decay=o.weight_decay * group["wd_mult"])
