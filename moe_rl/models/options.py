"""What every family tells megatron-core alike: precision, the pipeline, recompute; and where fresh weights come from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from moe_rl.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Options:
    """What a rank's chunks are told beside the architecture: sizes of the layout, precision, kernels.

    `stages` is the pipeline layout (`Ett|ttL`), needed when pp > 1; `recompute` is "off" or "full"; `dtype` "fp32" or
    "bf16"; `attention_backend` "plain", "triton" or "auto"; chunks are in tokens.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    stages: str = ""
    recompute: str = "off"
    dtype: str = "fp32"
    device: str = "cpu"
    attention_backend: str = "plain"
    attention_chunk: int = 256
    logprob_chunk: int = 1024


def layout_options(layout: Any) -> dict[str, Any]:
    """The fields of `Options` that a layout (or a rank's place in one) has under the same names."""
    return {name: getattr(layout, name) for name in ("tp", "pp", "vpp", "ep", "etp", "stages")}


def shared_options(options: Options) -> dict[str, Any]:
    """The fields of a TransformerConfig that do not depend on the architecture.

    Raises:
        UserError: an unknown dtype or recompute mode.
    """
    dtype, recompute = options.dtype, options.recompute
    if dtype not in DTYPES:
        raise UserError("engine.dtype", f"engine.dtype={dtype}", f"known: {', '.join(DTYPES)}", "use one of them")
    if recompute not in ("off", "full"):
        raise UserError("engine.recompute", f"engine.recompute={recompute}", "known: off, full", "use one of them")
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {
        **_numerics(DTYPES[dtype], options.device),
        **_pipeline(options.pp, options.vpp, options.stages, DTYPES[dtype]),
        "expert_model_parallel_size": options.ep,
        "expert_tensor_parallel_size": options.etp,
        **(full if recompute == "full" else {}),
    }


def _numerics(dtype: torch.dtype, device: str) -> dict:
    return {
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "transformer_impl": "local",
        # The fused activation leaves out DeepSeek-V4's clamp; the other fusions need kernels that a CPU lacks.
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": device == "cpu",
        "perform_initialization": False,
        # Losses arrive as sums that carry their own weights.
        "calculate_per_token_loss": True,
    }


def _pipeline(pp: int, vpp: int, stages: str, dtype: torch.dtype) -> dict:
    return {
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "pipeline_model_parallel_layout": stages if pp > 1 else None,
        "pipeline_dtype": dtype,
        "variable_seq_lengths": True,
        "deallocate_pipeline_outputs": True,
        # With two stages batched sends match first in first out, and an interleaved schedule would swap tensors.
        "overlap_p2p_comm": vpp > 1,
        "batch_p2p_comm": vpp <= 1,
    }


def named_generator(seed: int, name: str) -> torch.Generator:
    """The random numbers of one tensor's fresh weights: they depend on (seed, name) alone, so every layout starts alike."""
    key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(key, "big"))
