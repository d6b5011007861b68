"""transformers' DeepSeek-V4 for the embedded rollout engine, built from a `config.json` and never from weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_rl.errors import UserError
from moe_rl.models.deepseek_v4.arch import HEAVY, SPARSE, DeepseekV4Arch
from moe_rl.models.deepseek_v4.weights import weight_table

# Spellings that the architecture replaces below, and what speaks of the files' dtypes and not of the model.
_REPLACED = ("compress_ratios", "compress_rate_csa", "compress_rate_hca", "num_hash_layers")
_OF_THE_FILES = ("torch_dtype", "dtype", "quantization_config", "expert_dtype")


def transformers_config(config: Mapping[str, Any], arch: DeepseekV4Arch) -> Any:
    """A `DeepseekV4Config` for a parsed `config.json` in either spelling.

    Raises:
        UserError: two layers of a kind have different compress ratios, which transformers cannot express.
    """
    from transformers import DeepseekV4Config

    keys = {k: v for k, v in config.items() if v is not None and k not in (*_REPLACED, *_OF_THE_FILES)}
    rates: dict[str, int] = dict(DeepseekV4Config.default_compress_rates)
    for kind in (SPARSE, HEAVY):
        ratios = {r for r, k in zip(arch.compress_ratios, arch.attention_kinds, strict=True) if k == kind}
        if len(ratios) > 1:
            raise UserError(
                "rollout.model",
                f"{kind} layers have compress ratios {sorted(ratios)}",
                "transformers knows one ratio for each kind of layer",
                "use another rollout.engine",
            )
        rates[kind] = ratios.pop() if ratios else rates[kind]
    keys["layer_types"], keys["compress_rates"] = list(arch.attention_kinds), rates
    keys["mlp_layer_types"] = ["hash_moe" if arch.is_hash(layer) else "moe" for layer in range(arch.num_layers)]
    return DeepseekV4Config.from_dict(keys)


def build_transformers_model(
    config: Mapping[str, Any], arch: DeepseekV4Arch, *, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> torch.nn.Module:
    """An evaluation-mode `DeepseekV4ForCausalLM` with arbitrary weights.

    What the released checkpoints keep in fp32 is fp32 here too; `dtype` is that of everything else.
    """
    from transformers import DeepseekV4ForCausalLM

    built = transformers_config(config, arch)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = DeepseekV4ForCausalLM(built)
    finally:
        torch.set_default_dtype(before)
    for name in weight_table(arch).transformers_names("fp32"):
        owner, _, leaf = name.rpartition(".")
        tensor = getattr(model.get_submodule(owner), leaf)
        tensor.data = tensor.data.float()
    # On a CPU the grouped matrix products are the fastest of transformers' three and equal the loop to the last bit.
    model.set_experts_implementation("grouped_mm")
    return model.eval()
