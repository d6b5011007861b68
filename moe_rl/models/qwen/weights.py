"""The weight table of Qwen2, Qwen3 and Qwen3-MoE. Importing it needs no torch.

Released names are transformers' but for the experts, which checkpoints hold one by one and transformers in two stacks.
"""

from __future__ import annotations

from collections.abc import Mapping

from moe_rl.models.qwen.arch import QwenArch
from moe_rl.models.weights import Row, WeightTable

_L = "layers.{l}."


def _layer(
    released: str, trainer: str, shape: str, split: str = "", when: str = "always", transformers: str = ""
) -> Row:
    name = f"model.{_L}{released}"
    return Row(name, _L + trainer, f"model.{_L}{transformers}" if transformers else name, shape, "bf16", when, split)


# Columns: released, trainer, shape, split, which layers, transformers (released where not said).
LAYER_ROWS: tuple[Row, ...] = (
    _layer("input_layernorm.weight", "input_layernorm.weight", "hidden"),
    _layer("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", "hidden"),
    _layer("self_attn.q_proj.weight", "self_attention.linear_qkv.weight[q]", "q_wide hidden", "rows"),
    _layer("self_attn.k_proj.weight", "self_attention.linear_qkv.weight[k]", "kv_wide hidden", "rows"),
    _layer("self_attn.v_proj.weight", "self_attention.linear_qkv.weight[v]", "kv_wide hidden", "rows"),
    _layer("self_attn.q_proj.bias", "self_attention.linear_qkv.bias[q]", "q_wide", "rows", "qkv_bias"),
    _layer("self_attn.k_proj.bias", "self_attention.linear_qkv.bias[k]", "kv_wide", "rows", "qkv_bias"),
    _layer("self_attn.v_proj.bias", "self_attention.linear_qkv.bias[v]", "kv_wide", "rows", "qkv_bias"),
    _layer("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", "head", "", "qk_norm"),
    _layer("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", "head", "", "qk_norm"),
    _layer("self_attn.o_proj.weight", "self_attention.linear_proj.weight", "hidden q_wide", "columns"),
    _layer("mlp.gate_proj.weight", "mlp.linear_fc1.weight[first]", "ffn hidden", "rows", "dense"),
    _layer("mlp.up_proj.weight", "mlp.linear_fc1.weight[second]", "ffn hidden", "rows", "dense"),
    _layer("mlp.down_proj.weight", "mlp.linear_fc2.weight", "hidden ffn", "columns", "dense"),
    _layer("mlp.gate.weight", "mlp.router.weight", "experts hidden", "", "moe"),
    *(
        _layer(f"mlp.experts.{{e}}.{name}", f"mlp.experts.local_experts.{{e}}.{trainer}", shape, split, "moe", theirs)
        for name, trainer, shape, split, theirs in (
            (
                "gate_proj.weight",
                "linear_fc1.weight[first]",
                "moe hidden",
                "rows",
                "mlp.experts.gate_up_proj[e, first]",
            ),
            (
                "up_proj.weight",
                "linear_fc1.weight[second]",
                "moe hidden",
                "rows",
                "mlp.experts.gate_up_proj[e, second]",
            ),
            ("down_proj.weight", "linear_fc2.weight", "hidden moe", "columns", "mlp.experts.down_proj[e]"),
        )
    ),
)
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_TABLE = ("vocab hidden", "bf16", "always", "vocabulary")


def _ends(tied: bool) -> tuple[Row, ...]:
    """Embedding, final norm and output layer; tied, the last stage's output layer is a second copy of the embedding."""
    names = "model.embed_tokens.weight", "lm_head.weight"
    norm = Row("model.norm.weight", "norm.weight", "model.norm.weight", "hidden")
    if tied:
        return Row(names[0], f"{_EMBEDDING} | {_OUTPUT}", names[0], *_TABLE), norm
    return Row(names[0], _EMBEDDING, names[0], *_TABLE), norm, Row(names[1], _OUTPUT, names[1], *_TABLE)


def _sizes(arch: QwenArch) -> Mapping[str, int]:
    """The numbers behind the words of the table's shapes."""
    return {
        "vocab": arch.vocab_size,
        "hidden": arch.hidden_size,
        "head": arch.head_dim,
        "q_wide": arch.num_heads * arch.head_dim,
        "kv_wide": arch.num_kv_heads * arch.head_dim,
        "ffn": arch.intermediate_size,
        "moe": arch.moe_intermediate_size,
        "experts": arch.num_experts,
    }


def _has(arch: QwenArch, when: str, layer: int) -> bool:
    return {
        "always": True,
        "qkv_bias": arch.qkv_bias,
        "qk_norm": arch.qk_norm,
        "moe": layer in arch.moe_layers,
        "dense": layer not in arch.moe_layers,
    }[when]


def weight_table(arch: QwenArch) -> WeightTable:
    """The table for one model. A tied model's checkpoint may hold the output layer once more: it is passed over."""
    return WeightTable(
        rows=(*_ends(arch.tied), *LAYER_ROWS),
        layers=arch.num_layers,
        experts=arch.num_experts,
        sizes=lambda _: _sizes(arch),
        has=lambda when, layer: _has(arch, when, layer),
        copies={"lm_head.weight": "model.embed_tokens.weight"} if arch.tied else {},
        groups=arch.num_kv_heads,
    )
