"""Compressed keys: each complete window of tokens becomes one entry, and the indexer picks entries for each query."""

from __future__ import annotations

import torch
from torch import nn

from moe_rl.models.deepseek_v4.arch import SPARSE, DeepseekV4Arch
from moe_rl.models.deepseek_v4.layers import Projection, RMSNorm, parameter
from moe_rl.models.deepseek_v4.rotary import rotate, token_table, window_table
from moe_rl.models.packed import PackedSequences


class WindowPool(nn.Module):
    """Gated average of the tokens of a window, channel by channel, then norm and rotation.

    `overlap` (sparse layers) projects two series per token: a window pools its own second series with the first
    series of the window before it, so entries reach back 2 * ratio tokens at a stride of ratio.
    """

    def __init__(
        self, arch: DeepseekV4Arch, width: int, ratio: int, overlap: bool, dtype, device, backend: str
    ) -> None:
        super().__init__()
        self.rope, self.width, self.ratio, self.overlap = arch.compress_rope, width, ratio, overlap
        columns = 2 * width if overlap else width
        self.kv_proj = Projection(arch.hidden_size, columns, dtype, device)
        self.gate_proj = Projection(arch.hidden_size, columns, dtype, device)
        self.position_bias = parameter(ratio, columns, dtype=dtype, device=device, keep_fp32=True)
        self.kv_norm = RMSNorm(width, arch.norm_eps, dtype, device, backend)

    def entries(self, x: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        """x [T, h] -> entries [N, width] of all complete windows, N >= 1."""
        windows = packed.windows(self.ratio)
        values = self.kv_proj(x)[windows.tokens]
        gates = self.gate_proj(x)[windows.tokens] + self.position_bias
        if self.overlap:
            values = self._with_previous(values, windows.index, 0.0)
            gates = self._with_previous(gates, windows.index, float("-inf"))
        weights = gates.softmax(dim=1, dtype=torch.float32).to(values.dtype)
        pooled = self.kv_norm((values * weights).sum(dim=1))
        return rotate(pooled, *window_table(self.rope, packed, self.ratio))

    def _with_previous(self, series: torch.Tensor, index: torch.Tensor, absent: float) -> torch.Tensor:
        """[N, ratio, 2w] -> [N, 2 ratio, w]; a sequence's first window has `absent` where its predecessor would be."""
        before, own = series.split(self.width, dim=-1)
        before = torch.cat((before[:1], before[:-1])).masked_fill((index == 0)[:, None, None], absent)
        return torch.cat((before, own), dim=1)


class Scorer(nn.Module):
    """Holds the projection that weighs the indexer's heads."""

    def __init__(self, arch: DeepseekV4Arch, dtype, device) -> None:
        super().__init__()
        self.weights_proj = Projection(arch.hidden_size, arch.index_num_heads, dtype, device)


class Indexer(WindowPool):
    """Scores entries for each query with small heads of its own; frozen, since a choice passes no gradient."""

    def __init__(self, arch: DeepseekV4Arch, ratio: int, dtype, device, backend: str) -> None:
        super().__init__(arch, arch.index_head_dim, ratio, True, dtype, device, backend)
        self.arch = arch
        self.q_b_proj = Projection(arch.q_lora_rank, arch.index_num_heads * arch.index_head_dim, dtype, device)
        self.scorer = Scorer(arch, dtype, device)
        self.requires_grad_(False)

    @torch.no_grad()
    def scores(self, x, q_latent, keys, packed: PackedSequences, start: int) -> torch.Tensor:
        """Scores float32 [C, N] of `keys` [N, d] for the C tokens from `start` on.

        x [C, h] and q_latent [C, q_lora_rank] are those tokens' normed input and query latent.
        """
        q, weights = self.queries(x, q_latent, packed, start)
        hits = torch.relu(q.float() @ keys.float().t()) * self.width**-0.5
        return (hits * weights.unsqueeze(-1)).sum(1)

    @torch.no_grad()
    def queries(self, x, q_latent, packed: PackedSequences, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries [C, heads, d] and the heads' weights float32 [C, heads] of the same tokens."""
        heads = self.arch.index_num_heads
        cos, sin = (t[start : start + len(x), None] for t in token_table(self.rope, packed))
        q = rotate(self.q_b_proj(q_latent).unflatten(-1, (heads, -1)), cos, sin)
        return q, self.scorer.weights_proj(x).float() * heads**-0.5


class Compressor(WindowPool):
    """The compressed keys of one layer; sparse layers carry an indexer beside them."""

    def __init__(self, arch: DeepseekV4Arch, layer: int, dtype, device, backend: str = "plain") -> None:
        sparse, ratio = arch.attention_kinds[layer] == SPARSE, arch.compress_ratios[layer]
        super().__init__(arch, arch.head_dim, ratio, sparse, dtype, device, backend)
        self.top_k = arch.index_top_k
        self.indexer = Indexer(arch, ratio, dtype, device, backend) if sparse else None
