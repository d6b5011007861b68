"""From a Qwen architecture and a layout to megatron-core's configuration, model chunks and fresh weights."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from moe_rl.models.chunk import build_device
from moe_rl.models.options import Options, named_generator, shared_options
from moe_rl.models.qwen.arch import QwenArch
from moe_rl.models.qwen.model import QwenModel, QwenTransformerConfig
from moe_rl.models.qwen.weights import weight_table
from moe_rl.models.weights import Shard


def make_transformer_config(arch: QwenArch, **given: Any) -> QwenTransformerConfig:
    """The one configuration that all chunks of a rank share; `given` are fields of `Options`.

    `attention_backend` and `attention_chunk` are not needed: torch's fused attention is linear in memory as it is.

    Raises:
        UserError: an unknown dtype or recompute mode.
    """
    options = Options(**given)
    return QwenTransformerConfig(
        arch=arch,
        logprob_chunk=options.logprob_chunk,
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.intermediate_size,
        layernorm_epsilon=arch.norm_eps,
        normalization="RMSNorm",
        init_method_std=arch.initializer_range,
        qk_layernorm=arch.qk_norm,
        add_qkv_bias=arch.qkv_bias,
        add_bias_linear=False,
        activation_func=F.silu,
        gated_linear_unit=True,
        tensor_model_parallel_size=options.tp,
        # Always with tensor parallelism: the same bytes travel, less memory is held, and megatron-core asks it of experts.
        sequence_parallel=options.tp > 1,
        moe_token_dispatcher_type="alltoall",  # the default refuses rows of any length, also where there are no experts
        **_experts(arch),
        **shared_options(options),
    )


def _experts(arch: QwenArch) -> dict:
    if not arch.num_experts:
        return {}
    return {
        "num_moe_experts": arch.num_experts,
        "moe_router_topk": arch.top_k,
        "moe_ffn_hidden_size": arch.moe_intermediate_size,
        # Our router does the routing; it has megatron-core's constructor, which checks these.
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
    }


def build_chunk(
    arch: QwenArch, config: QwenTransformerConfig, pre: bool = True, post: bool = True, vp_stage: int | None = None
) -> QwenModel:
    """One pipeline chunk on the device of `config`, its parameters in their final dtypes and uninitialised.

    Needs torch.distributed and megatron-core's process groups to be up.
    """
    assert config.arch == arch, "the configuration was made for another architecture"
    return QwenModel(config, pre, post, vp_stage).to(build_device(config))


@torch.no_grad()
def init_weights(model: QwenModel, seed: int) -> None:
    """Fresh weights that depend on (seed, released name) alone, so that every layout starts alike: matrices are normal
    with the config's `initializer_range`, norms 1, biases 0."""
    groups = model.pg_collection
    shard = Shard(
        *(number for group in (groups.ep, groups.tp, groups.expt_tp) for number in (group.rank(), group.size()))
    )
    for name, parts in weight_table(model.arch).trainer_parts(model, shard).items():
        whole = torch.ones(parts[0].shape) if "norm" in name else torch.zeros(parts[0].shape)
        if whole.dim() > 1:
            whole = torch.randn(whole.shape, generator=named_generator(seed, name)) * model.arch.initializer_range
        for part in parts:
            part.view.copy_(whole[part.slices])
