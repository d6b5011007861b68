"""From an architecture and a layout to megatron-core's configuration, model chunks and fresh weights."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.nn import functional as F

from moe_rl.errors import UserError
from moe_rl.models.chunk import build_device
from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from moe_rl.models.deepseek_v4.model import DeepseekV4Model, V4TransformerConfig
from moe_rl.models.options import Options, named_generator, shared_options

NO_TENSOR_PARALLEL = (
    "attention shares one key-value head among all query heads, so its layers are not split (use ep, pp)"
)


def make_transformer_config(arch: DeepseekV4Arch, **given: Any) -> V4TransformerConfig:
    """The one configuration that all chunks of a rank share; `given` are fields of `Options`.

    Raises:
        UserError: tensor parallelism, an unknown dtype or recompute mode, or kernels asked for where they do not run.
    """
    options = Options(**given)
    lacking, backend = _kernels_lack(arch, options.dtype, options.device), options.attention_backend
    if backend == "triton" and lacking:
        what, fix = "engine.attention_backend is triton", "Set engine.attention_backend=auto."
        raise UserError("engine.attention_backend", what, f"The kernels need {lacking}.", fix)
    note = f", since kernels need {lacking}" if lacking and backend == "auto" else ""
    backend = "plain" if lacking or backend == "plain" else "triton"
    tp, etp = options.tp, options.etp
    if tp > 1 or etp > 1:
        raise UserError(
            "layout.tp", f"layout.tp={tp} layout.etp={etp} with a DeepSeek-V4 model", NO_TENSOR_PARALLEL, "use 1"
        )
    return V4TransformerConfig(
        arch=arch,
        attention_backend=backend,
        attention_note=backend + note,
        attention_chunk=options.attention_chunk,
        logprob_chunk=options.logprob_chunk,
        **_sizes(arch),
        **_experts(arch),
        **shared_options(options),
    )


def _kernels_lack(arch: DeepseekV4Arch, dtype: str, device: str) -> str:
    """What the attention kernels need and do not have; empty if nothing."""
    if device != "cuda" or dtype != "bf16":
        return "a GPU and bf16"
    if torch.cuda.get_device_capability() < (9, 0):
        return "a GPU of compute capability 9.0"
    return arch.kernels_lack()


def _sizes(arch: DeepseekV4Arch) -> dict:
    return {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "num_attention_heads": arch.num_heads,
        "kv_channels": arch.head_dim,
        "ffn_hidden_size": arch.moe_intermediate_size,
        "layernorm_epsilon": arch.norm_eps,
        "normalization": "RMSNorm",
        "init_method_std": arch.initializer_range,
    }


def _experts(arch: DeepseekV4Arch) -> dict:
    return {
        "num_moe_experts": arch.num_experts,
        "moe_router_topk": arch.top_k,
        "moe_ffn_hidden_size": arch.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": arch.moe_intermediate_size,
        "moe_router_score_function": "sqrtsoftplus",
        "moe_router_dtype": "fp32",
        # Our router holds its own bias, which RL leaves as it is; megatron-core would move it at each step.
        "moe_router_enable_expert_bias": False,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        # The overlapped shared expert leaves out the clamp of the activation.
        "moe_shared_expert_overlap": False,
        "activation_func": F.silu,
        "activation_func_clamp_value": arch.swiglu_limit,
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }


def build_chunk(
    arch: DeepseekV4Arch, config: V4TransformerConfig, pre: bool = True, post: bool = True, vp_stage: int | None = None
) -> DeepseekV4Model:
    """One pipeline chunk on the device of `config`, its parameters in their final dtypes and uninitialised.

    Needs torch.distributed and megatron-core's process groups to be up.
    """
    assert config.arch == arch, "the configuration was made for another architecture"
    return DeepseekV4Model(config, pre, post, vp_stage=vp_stage).to(build_device(config))


def global_name(model: DeepseekV4Model, name: str) -> str:
    """A parameter's or buffer's name with its expert's global number: the same in every layout."""
    group = model.pg_collection.ep

    def renumber(match: re.Match) -> str:
        return f"local_experts.{int(match[1]) + group.rank() * (model.arch.num_experts // group.size())}"

    return re.sub(r"local_experts\.(\d+)", renumber, name)


@torch.no_grad()
def init_weights(model: DeepseekV4Model, seed: int) -> None:
    """Fresh weights that depend on (seed, global name) alone, so that every layout starts alike.

    Matrices are normal with the config's `initializer_range`; norms and scales 1; sinks, biases and bases 0; each token
    id of a hash layer gets `top_k` distinct experts, all experts equally often.
    """
    arch = model.arch
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        generator = named_generator(seed, global_name(model, name))
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "tid2eid":
            tensor.copy_(balanced_table(arch.vocab_size, arch.num_experts, arch.top_k, generator))
        elif leaf in ("sinks", "position_bias", "expert_bias", "base", "hc_base"):
            tensor.zero_()
        elif leaf in ("scale", "hc_scale") or "norm" in name.split(".")[-2]:
            tensor.fill_(1.0)
        else:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * arch.initializer_range)


def balanced_table(vocab: int, experts: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """int64 [vocab, top_k]: distinct experts in each row, and each expert equally often up to a last partial block.

    Rows come in blocks of `experts`: within a block each column is a rotation of one permutation of all experts.
    """
    blocks = -(-vocab // experts)
    first = torch.rand(blocks, experts, generator=generator).argsort(1)
    shift = torch.rand(blocks, experts, generator=generator).argsort(1)[:, :top_k]
    table = ((first[:, :, None] + shift[:, None, :]) % experts).flatten(0, 1)[:vocab]
    return table[torch.randperm(vocab, generator=generator)]
