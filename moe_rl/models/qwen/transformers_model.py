"""transformers' Qwen for the embedded rollout engine, built from a `config.json` and never from weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# What speaks of the files' dtypes and not of the model.
_OF_THE_FILES = ("torch_dtype", "dtype", "quantization_config")


def build_transformers_model(
    config: Mapping[str, Any], *, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> torch.nn.Module:
    """An evaluation-mode `Qwen2ForCausalLM`, `Qwen3ForCausalLM` or `Qwen3MoeForCausalLM` with arbitrary weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    built = AutoConfig.for_model(**{key: value for key, value in config.items() if key not in _OF_THE_FILES})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(built, dtype=dtype)
    if "moe_intermediate_size" in config:
        # On a CPU the grouped matrix products are the fastest of transformers' three and equal the loop; they want rows of
        # whole 16 bytes.
        whole = all(config[key] * dtype.itemsize % 16 == 0 for key in ("hidden_size", "moe_intermediate_size"))
        model.set_experts_implementation("grouped_mm" if whole else "eager")
    return model.eval()
