"""Qwen2, Qwen3 and Qwen3-MoE from megatron-core's transformer layers: packed rows of tokens in, log-probs out."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import nn
from torch.nn import functional as F

from moe_rl.models.chunk import GlobalLayers, ModelChunk, build_device
from moe_rl.models.logprobs import label_logprobs
from moe_rl.models.packed import PackedSequences
from moe_rl.models.qwen.arch import QwenArch
from moe_rl.models.routing import choose, routed


@dataclass
class QwenTransformerConfig(TransformerConfig):
    """megatron-core's configuration with the architecture and the log-probs' chunk size (tokens) beside it."""

    arch: QwenArch = field(kw_only=True)
    logprob_chunk: int = 1024


class RMSNorm(nn.Module):
    """y = weight * x / rms(x) over the last axis; float32 inside, the product with the weight in the dtype of x.

    Under sequence parallelism each rank norms its share of the tokens, and the weight's gradient is summed over them.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=build_device(config)))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class PackedAttention(nn.Module):
    """Causal attention inside each sequence of a packed row: torch's fused attention, one sequence at a time.

    Memory is linear in the row's length, and a sequence's result does not depend on what it is packed with.
    """

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.groups = config.num_attention_heads // config.num_query_groups

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences, **_: Any
    ) -> torch.Tensor:
        """query [T, 1, heads, d], key and value [T, 1, kv heads, d] -> [T, 1, heads * d]."""
        heads = [t.squeeze(1).transpose(0, 1)[None] for t in (query, key, value)]
        out = [
            F.scaled_dot_product_attention(q, self._spread(k), self._spread(v), is_causal=True)
            for q, k, v in zip(*(h.split(packed.lengths, dim=2) for h in heads), strict=True)
        ]
        return torch.cat(out, dim=2)[0].transpose(0, 1).flatten(1).unsqueeze(1)

    def _spread(self, heads: torch.Tensor) -> torch.Tensor:
        # Not enable_gqa: where no fused kernel takes it, torch falls back to one that is quadratic in memory.
        return heads.repeat_interleave(self.groups, dim=1)


class Router(TopKRouter):
    """Softmax over all experts, then the best `top_k`, their weights made to sum to 1 where `norm_topk_prob` says so."""

    def __init__(self, config: QwenTransformerConfig, pg_collection=None, is_mtp_layer=False) -> None:
        super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        self.weight.data = self.weight.data.to(build_device(config))

    def forward(self, hidden: torch.Tensor, padding_mask: None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [T, 1, h] -> probs float32 [T, E] (0 where not chosen), map bool [T, E]."""
        # Not megatron-core's router_gating_linear: where Transformer Engine is installed it runs on GPUs alone.
        probs = F.linear(hidden.flatten(0, 1).float(), self.weight.float()).softmax(-1)
        chosen = choose(self, probs.detach(), self.config.arch.top_k)
        weights = probs.gather(1, chosen)
        if self.config.arch.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return (
            torch.zeros_like(probs).scatter(1, chosen, weights),
            torch.zeros_like(probs, dtype=torch.bool).scatter(1, chosen, True),
        )


def build_layer(config: QwenTransformerConfig, layer: int, pg_collection) -> TransformerLayer:
    """Decoder layer `layer` (0-based, global)."""
    arch = config.arch
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    norm = RMSNorm if arch.qk_norm else None
    mlp: Any = partial(MLP.as_mlp_submodule, submodules=linear, ffn_hidden_size=arch.intermediate_size)
    if layer in arch.moe_layers:
        parts = MoESubmodules(experts=partial(SequentialMLP, submodules=linear), router=Router)
        mlp = partial(MoELayer, submodules=parts)
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=PackedAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    return TransformerLayer(
        config,
        TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(module=SelfAttention, submodules=attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
        layer_number=layer + 1,
        add_layer_offset=False,
        pg_collection=pg_collection,
    )


class QwenModel(ModelChunk):
    """One pipeline chunk of the model. Parameters are uninitialised: load weights or call `init_weights`.

    With tensor parallelism the layers' inputs are cut along the row of tokens (sequence parallelism), which is filled up
    to a multiple of the ranks with a sequence of padding; the vocabulary is filled up likewise, with rows that no token
    has and no softmax counts.
    """

    def __init__(
        self, config: QwenTransformerConfig, pre_process: bool, post_process: bool, vp_stage: int | None = None
    ) -> None:
        arch = config.arch
        super().__init__(config, pre_process, post_process, vp_stage, tied=arch.tied)
        self.arch = arch
        padded = -(-arch.vocab_size // self.tp_group.size()) * self.tp_group.size()
        if pre_process:
            self.embedding = LanguageModelEmbedding(
                config, padded, arch.max_positions, position_embedding_type="none", tp_group=self.tp_group
            )
        self.layers = GlobalLayers({str(i): build_layer(config, i, self.pg_collection) for i in self.layer_range})
        if post_process:
            self.norm = RMSNorm(config, arch.hidden_size, arch.norm_eps)
            self.output_layer = ColumnParallelLinear(
                arch.hidden_size,
                padded,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=arch.tied and pre_process,
                tp_group=self.tp_group,
            )
        self.finish()
        self._zero_padding()

    def _zero_padding(self) -> None:
        for holder in (getattr(self, "embedding", None), getattr(self, "output_layer", None)):
            weight = getattr(getattr(holder, "word_embeddings", holder), "weight", None)
            if weight is not None:
                weight.data[self._rows(weight) :] = 0

    def _rows(self, weight: torch.Tensor) -> int:
        """How many of the rows of this rank's share of the vocabulary are no padding."""
        return min(len(weight), self.arch.vocab_size - self.tp_group.rank() * len(weight))

    def forward(
        self,
        tokens: torch.Tensor,
        packed: PackedSequences,
        labels: torch.Tensor | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> torch.Tensor:
        """tokens int64 [1, T] on every stage, `packed` their boundaries.

        Returns:
            without `post_process` the next stage's input [T', 1, h], T' this rank's share of the filled-up row; with it and
            `labels` int64 [1, T] their float32 [1, T] log-probs under softmax(logits / temperature), or [2, T] with
            `entropy` (row 1, no gradient); with it and no labels the logits [1, T, V] (one tensor-parallel rank only).
        """
        total = packed.total
        fill = -total % self.tp_group.size()
        if fill:
            packed, tokens = packed.followed_by(fill), F.pad(tokens, (0, fill))
        if packed.routing is not None and self.config.sequence_parallel:
            packed.routing.share(packed.total, self.tp_group.rank(), self.tp_group.size())
        if self.pre_process:
            hidden = self.embedding(tokens, None)
        else:
            assert self.input_tensor is not None, "the schedule hands over the previous stage's output first"
            hidden = self.input_tensor
        angles = self._angles(packed)
        for layer in self.layers.values():
            hidden = self.recomputed(partial(_run, layer, packed, angles), hidden)
        if not self.post_process:
            return hidden
        hidden = self.norm(hidden)
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        hidden, weight = (
            hidden[:total, 0],
            self.shared_embedding_or_output_weight() if self.arch.tied else self.output_layer.weight,
        )
        rows, first = self._rows(weight), self.tp_group.rank() * len(weight)
        weight = weight if rows == len(weight) else weight[:rows]
        if labels is None:
            return (hidden @ weight.t())[None]
        chunk = self.config.logprob_chunk
        return label_logprobs(hidden, weight, labels[0], temperature, chunk, entropy, first, self.tp_group)

    def _angles(self, packed: PackedSequences) -> torch.Tensor:
        """Rotary angles float32 [T, 1, 1, d] at each token's place in its own sequence, both halves of a head alike."""
        d = self.arch.head_dim
        exponents = torch.arange(0, d, 2, dtype=torch.float32, device=packed.device) / d
        angles = packed.positions[:, None].float() * (1.0 / self.arch.rope_theta**exponents)
        return torch.cat((angles, angles), dim=-1)[:, None, None]


def _run(layer: TransformerLayer, packed: PackedSequences, angles: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    # What megatron-core calls the mask reaches the core attention as it is; its own packing would loop over rotary tables.
    with routed(getattr(layer.mlp, "router", None), layer.layer_number - 1, packed):
        return layer(hidden, attention_mask=packed, rotary_pos_emb=angles)[0]
