"""A DeepSeek-V4 small enough for many layouts, with every mechanism: two hash layers and all three attention kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.config.schema import Config

VOCAB = 64


def model_config(**changes: Any) -> dict[str, Any]:
    """config.json of 5 layers: sliding, sparse, heavily compressed, sparse, sliding; layers 0 and 1 route by token id."""
    return {
        "model_type": "deepseek_v4",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "sliding_window": 8,
        "compress_ratios": [0, 4, 8, 4, 0],
        "num_hash_layers": 2,
        # with few heads ReLU scores of exactly 0 tie often, and which of equals top-k takes depends on the row's width
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 2,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "initializer_range": 0.1,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        **changes,
    }


def write_model(directory: Path, **changes: Any) -> Path:
    """A model directory without weights (engines start from `random_init`)."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model_config(**changes)))
    return directory


def run_config(path: Path | str, world: int = 1, **keys: Any) -> Config:
    """A fp32 CPU configuration; `keys` are dotted keys with `__` for the dot (``layout__pp=2``)."""
    config = Config()
    config.model.path = str(path)
    config.engine.device, config.engine.dtype, config.engine.recompute = "cpu", "fp32", "off"
    config.engine.attention_chunk, config.engine.logprob_chunk = 16, 16
    config.engine.distributed_timeout_s = 60.0
    config.optimizer.lr = 1e-2
    config.cluster.gpus_per_node = world
    for name, value in keys.items():
        section, key = name.split("__")
        assert hasattr(getattr(config, section), key), name
        setattr(getattr(config, section), key, value)
    return config


def sequences(lengths: tuple[int, ...], seed: int = 5) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n) for n in lengths]
