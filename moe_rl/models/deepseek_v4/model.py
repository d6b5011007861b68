"""DeepSeek-V4 as a megatron-core module: packed rows of tokens in, log-probabilities or the next stage's input out."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor

from moe_rl.models.chunk import GlobalLayers, ModelChunk, build_device
from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from moe_rl.models.deepseek_v4.attention import Attention
from moe_rl.models.deepseek_v4.hyper import HyperConnection, HyperHead
from moe_rl.models.deepseek_v4.layers import RMSNorm
from moe_rl.models.deepseek_v4.moe import build_moe
from moe_rl.models.logprobs import label_logprobs
from moe_rl.models.packed import PackedSequences
from moe_rl.models.routing import routed


@dataclass
class V4TransformerConfig(TransformerConfig):
    """megatron-core's configuration with the architecture, our backend and its reason, and our chunk sizes (tokens)."""

    arch: DeepseekV4Arch = field(kw_only=True)
    attention_backend: str = "plain"
    attention_note: str = "plain"
    attention_chunk: int = 256
    logprob_chunk: int = 1024


class DecoderLayer(MegatronModule):
    """Attention and experts, each between a hyper-connection's collapse and rejoin."""

    def __init__(self, config: V4TransformerConfig, layer: int, pg_collection) -> None:
        super().__init__(config)
        arch, dtype, device = config.arch, config.params_dtype, build_device(config)
        self.layer_number = layer + 1
        backend = config.attention_backend
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.norm_eps, dtype, device, backend)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.norm_eps, dtype, device, backend)
        self.attn_hc, self.ffn_hc = (HyperConnection(arch, device, backend) for _ in range(2))
        self.self_attn = Attention(arch, layer, config.attention_chunk, dtype, device, backend)
        self.mlp = build_moe(config, layer, pg_collection)

    def forward(self, streams: torch.Tensor, token_ids: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        """streams [T, n, h], token_ids [T] -> streams [T, n, h]."""
        x, post, comb = self.attn_hc(streams)
        streams = self.attn_hc.rejoin(streams, self.self_attn(self.input_layernorm(x), packed), post, comb)
        x, post, comb = self.ffn_hc(streams)
        with routed(self.mlp.router, self.layer_number - 1, packed, token_ids):
            out = self.mlp(self.post_attention_layernorm(x).unsqueeze(1), token_ids).squeeze(1)
        return self.ffn_hc.rejoin(streams, out, post, comb)


class DeepseekV4Model(ModelChunk):
    """One pipeline chunk of the model. Parameters are uninitialised: load weights or call `init_weights`.

    With `pre_process` it holds the embedding, with `post_process` the stream head, final norm and output layer.
    """

    def __init__(
        self,
        config: V4TransformerConfig,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config, pre_process, post_process, vp_stage)
        arch, device = config.arch, build_device(config)
        self.arch = arch
        if pre_process:
            self.embedding = LanguageModelEmbedding(
                config, arch.vocab_size, arch.max_positions, position_embedding_type="none", tp_group=self.tp_group
            )
        self.layers = GlobalLayers({str(i): DecoderLayer(config, i, self.pg_collection) for i in self.layer_range})
        if post_process:
            self.hc_head = HyperHead(arch, device)
            self.norm = RMSNorm(arch.hidden_size, arch.norm_eps, config.params_dtype, device, config.attention_backend)
            self.output_layer = ColumnParallelLinear(
                arch.hidden_size,
                arch.vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                tp_group=self.tp_group,
            )
        self.finish()

    def forward(
        self,
        tokens: torch.Tensor,
        packed: PackedSequences,
        labels: torch.Tensor | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> torch.Tensor:
        """tokens int64 [1, T] on every stage (hash layers need them), `packed` their boundaries.

        Returns:
            without `post_process` the next stage's input [T, 1, n * h]; with it and `labels` int64 [1, T] their float32
            [1, T] log-probs under softmax(logits / temperature), or [2, T] with `entropy` (row 1, no gradient); with it
            and no labels the logits [1, T, V].
        """
        ids, n = tokens[0], self.arch.hc_mult
        if self.pre_process:
            streams = self.embedding(tokens, None).expand(-1, n, -1).contiguous()
        else:
            assert self.input_tensor is not None, "the schedule hands over the previous stage's output first"
            streams = self.input_tensor.view(packed.total, n, self.arch.hidden_size)
        for layer in self.layers.values():
            streams = self.recomputed(partial(layer, packed=packed), streams, ids)
        if not self.post_process:
            # The schedule frees a stage's output after sending it, which it refuses for views.
            return make_viewless_tensor(streams.flatten(1).unsqueeze(1), requires_grad=True, keep_graph=True)
        hidden = self.norm(self.hc_head(streams))
        weight = self.output_layer.weight
        if labels is None:
            return (hidden @ weight.t())[None]
        return label_logprobs(hidden, weight, labels[0], temperature, self.config.logprob_chunk, entropy)
