"""DeepSeek-V4's weight table. Importing it needs no torch.

Released names are those of the published checkpoints (w1 the gate, w3 the up and w2 the down projection of an expert);
the dtypes are the published ones without their quantisation, `quant` is that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moe_rl.models.deepseek_v4.arch import HEAVY, SPARSE, DeepseekV4Arch
from moe_rl.models.weights import Row, TensorSpec, WeightTable

if TYPE_CHECKING:
    import torch

_LAYER = ("layers.{l}.", "layers.{l}.", "model.layers.{l}.")


def _under(released: str, module: str, *rows: tuple[str, ...], quant: str = "") -> tuple[Row, ...]:
    """Rows of one layer whose names all start alike, stored alike; `=` as transformers' name means the trainer's."""
    return tuple(
        Row(
            _LAYER[0] + released + theirs,
            _LAYER[1] + module + trainer,
            _LAYER[2] + module + (trainer if transformers == "=" else transformers),
            *rest,
        )._replace(quant=quant)
        for theirs, trainer, transformers, *rest in rows
    )


# Columns: released, trainer, transformers, shape, dtype (bf16 where not said), which layers (all where not said).
ROWS: tuple[Row, ...] = (
    Row("embed.weight", "embedding.word_embeddings.weight", "model.embed_tokens.weight", "vocab hidden"),
    Row("norm.weight", "norm.weight", "model.norm.weight", "hidden"),
    Row("head.weight", "output_layer.weight", "lm_head.weight", "vocab hidden"),
    Row("hc_head_fn", "hc_head.hc_fn", "model.hc_head.hc_fn", "hc hc_wide", "fp32"),
    Row("hc_head_base", "hc_head.hc_base", "model.hc_head.hc_base", "hc", "fp32"),
    Row("hc_head_scale", "hc_head.hc_scale", "model.hc_head.hc_scale", "one", "fp32"),
    *_under(
        "",
        "",
        ("attn_norm.weight", "input_layernorm.weight", "=", "hidden"),
        ("ffn_norm.weight", "post_attention_layernorm.weight", "=", "hidden"),
        ("hc_attn_fn", "attn_hc.fn", "=", "hc_mix hc_wide", "fp32"),
        ("hc_attn_base", "attn_hc.base", "=", "hc_mix", "fp32"),
        ("hc_attn_scale", "attn_hc.scale", "=", "three", "fp32"),
        ("hc_ffn_fn", "ffn_hc.fn", "=", "hc_mix hc_wide", "fp32"),
        ("hc_ffn_base", "ffn_hc.base", "=", "hc_mix", "fp32"),
        ("hc_ffn_scale", "ffn_hc.scale", "=", "three", "fp32"),
    ),
    *_under(
        "attn.",
        "self_attn.",
        ("q_norm.weight", "q_a_norm.weight", "=", "q_lora"),
        ("kv_norm.weight", "kv_norm.weight", "=", "head"),
        ("attn_sink", "sinks", "=", "heads", "fp32"),
    ),
    *_under(
        "attn.",
        "self_attn.",
        ("wq_a.weight", "q_a_proj.weight", "=", "q_lora hidden"),
        ("wq_b.weight", "q_b_proj.weight", "=", "q_wide q_lora"),
        ("wkv.weight", "kv_proj.weight", "=", "head hidden"),
        ("wo_a.weight", "o_a_proj.weight", "=", "o_wide group_wide"),
        ("wo_b.weight", "o_b_proj.weight", "=", "hidden o_wide"),
        quant="fp8",
    ),
    *_under(
        "attn.compressor.",
        "self_attn.compressor.",
        ("wkv.weight", "kv_proj.weight", "=", "compressed hidden", "bf16", "compressed"),
        ("wgate.weight", "gate_proj.weight", "=", "compressed hidden", "bf16", "compressed"),
        ("norm.weight", "kv_norm.weight", "=", "head", "bf16", "compressed"),
        ("ape", "position_bias", "=", "ratio compressed", "fp32", "compressed"),
    ),
    *_under(
        "attn.indexer.",
        "self_attn.compressor.indexer.",
        ("compressor.wkv.weight", "kv_proj.weight", "=", "index_series hidden", "bf16", "sparse"),
        ("compressor.wgate.weight", "gate_proj.weight", "=", "index_series hidden", "bf16", "sparse"),
        ("compressor.norm.weight", "kv_norm.weight", "=", "index_head", "bf16", "sparse"),
        ("compressor.ape", "position_bias", "=", "ratio index_series", "fp32", "sparse"),
        ("weights_proj.weight", "scorer.weights_proj.weight", "=", "index_heads hidden", "bf16", "sparse"),
    ),
    *_under(
        "attn.indexer.",
        "self_attn.compressor.indexer.",
        ("wq_b.weight", "q_b_proj.weight", "=", "index_wide q_lora", "bf16", "sparse"),
        quant="fp8",
    ),
    *_under(
        "ffn.",
        "mlp.",
        ("gate.weight", "router.weight", "gate.weight", "experts hidden"),
        ("gate.tid2eid", "router.tid2eid", "gate.tid2eid", "vocab top_k", "int32", "hash"),
        ("gate.bias", "router.expert_bias", "gate.e_score_correction_bias", "experts", "fp32", "scored"),
    ),
    *_under(
        "ffn.experts.{e}.",
        "mlp.experts.",
        ("w1.weight", "local_experts.{e}.linear_fc1.weight[first]", "gate_up_proj[e, first]", "moe hidden"),
        ("w2.weight", "local_experts.{e}.linear_fc2.weight", "down_proj[e]", "hidden moe"),
        ("w3.weight", "local_experts.{e}.linear_fc1.weight[second]", "gate_up_proj[e, second]", "moe hidden"),
        quant="mxfp4",
    ),
    *_under(
        "ffn.shared_experts.",
        "mlp.shared_experts.",
        ("w1.weight", "linear_fc1.weight[first]", "gate_proj.weight", "moe hidden"),
        ("w2.weight", "linear_fc2.weight", "down_proj.weight", "hidden moe"),
        ("w3.weight", "linear_fc1.weight[second]", "up_proj.weight", "moe hidden"),
        quant="fp8",
    ),
)

# Axis that vLLM's tensor parallelism cuts (0.25.1, models/deepseek_v4); all else is whole on every rank, shared experts too
# where data and expert parallelism are on.
SERVED_CUT = {"embed.weight": 0, "head.weight": 0, "wq_b.weight": 0, "wo_a.weight": 0, "wo_b.weight": 1, "attn_sink": 0}


def served_cut(name: str) -> int | None:
    """The axis that vLLM's tensor parallelism cuts of a released tensor, None where it is whole."""
    return SERVED_CUT.get(name.split("attn.")[-1])


def is_served_split(row: Row) -> bool:
    """Whether vLLM's tensor parallelism cuts the tensors of a row."""
    return served_cut(row.released) is not None


def _sizes(arch: DeepseekV4Arch, layer: int | None) -> Mapping[str, int]:
    """The numbers behind the words of the table's shapes."""
    sizes = {
        "one": 1,
        "three": 3,
        "vocab": arch.vocab_size,
        "hidden": arch.hidden_size,
        "moe": arch.moe_intermediate_size,
        "experts": arch.num_experts,
        "top_k": arch.top_k,
        "heads": arch.num_heads,
        "head": arch.head_dim,
        "q_lora": arch.q_lora_rank,
        "q_wide": arch.num_heads * arch.head_dim,
        "group_wide": arch.num_heads * arch.head_dim // arch.o_groups,
        "o_wide": arch.o_groups * arch.o_lora_rank,
        "index_heads": arch.index_num_heads,
        "index_head": arch.index_head_dim,
        "index_wide": arch.index_num_heads * arch.index_head_dim,
        "index_series": 2 * arch.index_head_dim,
        "hc": arch.hc_mult,
        "hc_mix": arch.hc_mix,
        "hc_wide": arch.hc_mult * arch.hidden_size,
    }
    if layer is not None:
        sizes |= {"compressed": arch.compressor_width(layer), "ratio": arch.compress_ratios[layer]}
    return sizes


def _has(arch: DeepseekV4Arch, when: str, layer: int) -> bool:
    return {
        "always": True,
        "hash": arch.is_hash(layer),
        "scored": not arch.is_hash(layer),
        "sparse": arch.attention_kinds[layer] == SPARSE,
        "compressed": arch.attention_kinds[layer] in (SPARSE, HEAVY),
    }[when]


def weight_table(arch: DeepseekV4Arch) -> WeightTable:
    """The table for one model; extra prediction layers (`mtp.`) of a released checkpoint are passed over."""
    return WeightTable(
        rows=ROWS,
        layers=arch.num_layers,
        experts=arch.num_experts,
        sizes=lambda layer: _sizes(arch, layer),
        has=lambda when, layer: _has(arch, when, layer),
        ignored=("mtp.",),
    )


def expected(arch: DeepseekV4Arch) -> dict[str, TensorSpec]:
    """Released name -> shape and dtype of every tensor of the model."""
    return weight_table(arch).expected()


def trainer_views(
    chunk: torch.nn.Module, arch: DeepseekV4Arch, *, ep_rank: int = 0, ep_size: int = 1
) -> dict[str, torch.Tensor]:
    """See `WeightTable.trainer_views`."""
    return weight_table(arch).trainer_views(chunk, ep_rank=ep_rank, ep_size=ep_size)


def transformers_views(model: torch.nn.Module, arch: DeepseekV4Arch) -> dict[str, torch.Tensor]:
    """See `WeightTable.transformers_views`."""
    return weight_table(arch).transformers_views(model)
