"""Qwen models of a few thousand parameters, one of each kind, with transformers' as the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from moe_rl.models.qwen.arch import QwenArch
from moe_rl.models.qwen.weights import weight_table

VOCAB = 64
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-6,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "sliding_window": 4096, "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
}


def model_config(kind: str, **changes: Any) -> dict[str, Any]:
    """A config.json in the released spelling: four layers, two query heads to a key-value head."""
    return _COMMON | KINDS[kind] | changes


def write_model(directory: Path, kind: str, **changes: Any) -> Path:
    """A model directory without weights (engines start from `random_init`)."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model_config(kind, **changes)))
    return directory


def oracle(config: dict[str, Any]) -> torch.nn.Module:
    """transformers' own model for a config.json, in float32 with eager attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    built = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(built, attn_implementation="eager", dtype=torch.float32).eval()
    if config["model_type"] == "qwen3_moe":
        model.set_experts_implementation("eager")  # the others want sizes that are multiples of 16 bytes
    return model


def transformers_views(model: torch.nn.Module, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Released name -> view onto transformers' tensor."""
    return weight_table(QwenArch.from_dict(config)).transformers_views(model)


def randomise(views: dict[str, torch.Tensor], seed: int) -> None:
    """Seeded values: norms near 1, the rest normal."""
    generator = torch.Generator().manual_seed(seed)
    for name, view in sorted(views.items()):
        noise = torch.randn(view.shape, generator=generator)
        view.copy_(1 + 0.1 * noise if "norm" in name else 0.2 * noise)


def save_model(directory: Path, kind: str, seed: int = 3, **changes: Any) -> Path:
    """A model directory as transformers writes it, with random weights."""
    config = model_config(kind, **changes)
    model = oracle(config)
    with torch.no_grad():
        randomise(transformers_views(model, config), seed)
    model.save_pretrained(directory)
    return directory


def token_logprobs(model: torch.nn.Module, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """transformers' log-probs [L-1] of tokens [L] after the first, the sequence alone."""
    logits = model(tokens[None]).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
