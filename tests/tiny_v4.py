"""A DeepSeek-V4 of a few thousand parameters with every kind of layer, for tests that need a real model."""

from __future__ import annotations

from typing import Any

import torch

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A `config.json` with the keys of the released checkpoints; windows so short that a few tokens fill them."""
    config: dict[str, Any] = dict(
        architectures=["DeepseekV4ForCausalLM"],
        model_type="deepseek_v4",
        vocab_size=61,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        qk_rope_head_dim=4,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=12,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        scoring_func="sqrtsoftplus",
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        hc_mult=4,
        hc_eps=1e-6,
        hc_sinkhorn_iters=20,
        layer_types=[SLIDING, SPARSE, HEAVY, SPARSE],
        compress_rates={SPARSE: 4, HEAVY: 8},
        compress_ratios=[0, 4, 8, 4],
        num_hash_layers=2,
        index_n_heads=4,
        index_head_dim=8,
        index_topk=2,
        sliding_window=6,
        max_position_embeddings=256,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        num_nextn_predict_layers=0,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.02,
        use_cache=True,
    )
    return config | overrides


def randomise(views: dict[str, torch.Tensor], seed: int, *, experts: int = 8, scale: float = 0.3) -> None:
    """Write seeded values into every view: norms near 1, expert tables in range, the rest normal with std `scale`."""
    generator = torch.Generator().manual_seed(seed)
    for name, view in sorted(views.items()):  # whatever the order of the weight table
        if name.endswith("tid2eid"):
            rows = torch.rand(view.shape[0], experts, generator=generator).argsort(1)
            view.copy_(rows[:, : view.shape[1]])
        elif "norm" in name:
            view.copy_(1 + 0.1 * torch.randn(view.shape, generator=generator))
        else:
            view.copy_(scale * torch.randn(view.shape, generator=generator))
