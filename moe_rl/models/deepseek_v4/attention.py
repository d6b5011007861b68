"""Packed attention: a sliding window of tokens, plus compressed entries where the layer has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_rl.models.deepseek_v4.arch import SLIDING, DeepseekV4Arch
from moe_rl.models.deepseek_v4.compressor import Compressor
from moe_rl.models.deepseek_v4.layers import GroupedProjection, Projection, RMSNorm, parameter, unit_rms
from moe_rl.models.deepseek_v4.rotary import rotate, token_table
from moe_rl.models.packed import PackedSequences


class Attention(nn.Module):
    """Multi-query attention with one shared key-value head, per-head sinks and a grouped output projection.

    `backend` "triton" runs `fused_attention` and `fused_indexer`; "plain", their reference, is PyTorch alone:

    Queries go in chunks of `chunk` tokens: each meets the keys of its window and the entries of its own sequences,
    so that no tensor is quadratic in the length of the row; with several chunks each is recomputed in backward.
    """

    def __init__(self, arch: DeepseekV4Arch, layer: int, chunk: int, dtype, device, backend: str = "plain") -> None:
        super().__init__()
        self.arch, self.chunk, self.backend = arch, chunk, backend
        sliding = arch.attention_kinds[layer] == SLIDING
        self.rope = arch.main_rope if sliding else arch.compress_rope
        self.q_a_proj = Projection(arch.hidden_size, arch.q_lora_rank, dtype, device)
        self.q_a_norm = RMSNorm(arch.q_lora_rank, arch.norm_eps, dtype, device, backend)
        self.q_b_proj = Projection(arch.q_lora_rank, arch.num_heads * arch.head_dim, dtype, device)
        self.kv_proj = Projection(arch.hidden_size, arch.head_dim, dtype, device)
        self.kv_norm = RMSNorm(arch.head_dim, arch.norm_eps, dtype, device, backend)
        group_width = arch.num_heads * arch.head_dim // arch.o_groups
        self.o_a_proj = GroupedProjection(arch.o_groups, group_width, arch.o_lora_rank, dtype, device)
        self.o_b_proj = Projection(arch.o_groups * arch.o_lora_rank, arch.hidden_size, dtype, device)
        self.sinks = parameter(arch.num_heads, dtype=dtype, device=device, keep_fp32=True)
        self.compressor: Any = None if sliding else Compressor(arch, layer, dtype, device, backend)

    def forward(self, x: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        """x [T, h] (normed) -> [T, h]."""
        latent = self.q_a_norm(self.q_a_proj(x))
        keys = rotate(self.kv_norm(self.kv_proj(x)), *token_table(self.rope, packed))
        attend = self._attend_fused if self.backend == "triton" else self._attend_plain
        return self.o_b_proj(self.o_a_proj(attend(keys, x, latent, packed)))

    def _attend_fused(self, keys, x, latent, packed: PackedSequences) -> torch.Tensor:
        from moe_rl.models.deepseek_v4 import fused_attention, fused_indexer

        c, seen = self.compressor, fused_attention.Visible(packed.positions, self.arch.sliding_window)
        if c is not None and packed.windows(c.ratio).count:
            keys = torch.cat((keys, c.entries(x, packed)))
            chosen = fused_indexer.choose(c, x, latent, packed)
            seen = replace(seen, first=packed.first_windows(c.ratio), ratio=c.ratio, chosen=chosen)
        table, weight = token_table(self.rope, packed), self.q_b_proj.weight
        attend = fused_attention.attend
        return attend(latent, keys, self.sinks, *table, seen, self.arch.norm_eps, weight=weight).flatten(1)

    def _attend_plain(self, keys, x, latent, packed: PackedSequences) -> torch.Tensor:
        queries = self.q_b_proj(latent).split(self.chunk)
        entries, index_keys = self._compressed(x, packed)
        recompute = torch.is_grad_enabled() and len(queries) > 1
        outs = []
        for i, q in enumerate(queries):
            args = (q, keys, entries, index_keys, x, latent, packed, i * self.chunk)
            # No randomness inside, so there is no generator state to keep.
            outs.append(
                checkpoint(self._attend, *args, use_reentrant=False, preserve_rng_state=False)
                if recompute
                else self._attend(*args)
            )
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def _compressed(self, x, packed) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Entries [N, head_dim] and the indexer's keys [N, index_head_dim]; None where there are none."""
        c = self.compressor
        if c is None or packed.windows(c.ratio).count == 0:
            return None, None
        index_keys = None
        if c.indexer is not None and max(packed.lengths) // c.ratio > c.top_k:
            with torch.no_grad():
                index_keys = c.indexer.entries(x, packed)
        return c.entries(x, packed), index_keys

    def _attend(self, q, keys, entries, index_keys, x, latent, packed: PackedSequences, start: int) -> torch.Tensor:
        """One chunk of C queries [C, heads * head_dim] (before norm and rotation) -> [C, heads * head_dim]."""
        stop, band = start + len(q), max(0, start - self.arch.sliding_window + 1)
        cos, sin = (t[start:stop, None] for t in token_table(self.rope, packed))
        q = unit_rms(q.unflatten(-1, (self.arch.num_heads, -1)), self.arch.norm_eps)
        q = rotate(q, cos, sin)
        seen, allowed = keys[band:stop], self._window_mask(packed, start, stop, band)
        if entries is not None:
            chosen, mask = self._entries(entries, index_keys, x, latent, packed, start, stop)
            seen, allowed = torch.cat((seen, chosen)), torch.cat((allowed, mask), dim=-1)
        out = sink_attention(q, seen, allowed, self.sinks)
        return rotate(out, cos, -sin).flatten(1)

    def _entries(self, entries, index_keys, x, latent, packed: PackedSequences, start: int, stop: int):
        """The entries [M, head_dim] that tokens [start, stop) may meet, and bool [C, M]: which token meets which."""
        c: Compressor = self.compressor
        windows = packed.windows(c.ratio)
        first, end, most = packed.visible_windows(start, stop, c.ratio)
        # Own sequence, and a window that has closed by the query's position.
        closed = (packed.positions[start:stop, None] + 1) // c.ratio
        mask = packed.sequence_ids[start:stop, None] == windows.sequence[None, first:end]
        mask = mask & (windows.index[None, first:end] < closed)
        if c.indexer is not None and index_keys is not None and most > c.top_k:
            keys = index_keys[first:end]
            mask = mask & _top(c.indexer.scores(x[start:stop], latent[start:stop], keys, packed, start), mask, c.top_k)
        return entries[first:end], mask

    def _window_mask(self, packed: PackedSequences, start: int, stop: int, band: int) -> torch.Tensor:
        """bool [C, stop - band]: own sequence, not ahead, less than `sliding_window` behind."""
        rows = torch.arange(start, stop, device=packed.device)[:, None]
        columns = torch.arange(band, stop, device=packed.device)[None]
        same = packed.sequence_ids[start:stop, None] == packed.sequence_ids[None, band:stop]
        return same & (columns <= rows) & (rows - columns < self.arch.sliding_window)


def _top(scores: torch.Tensor, allowed: torch.Tensor, k: int) -> torch.Tensor:
    """bool [C, N]: the k best allowed entries of each row (all of them where fewer are allowed), the earlier of equals.

    Rectified scores are often equal (0). `topk` would choose among them by the width of the row, and a sequence would
    feel what it is packed with; a stable sort does not.
    """
    ranked = scores.masked_fill(~allowed, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    best = ranked[:, : min(k, scores.shape[-1])]
    return torch.zeros_like(allowed).scatter(1, best, True)


def sink_attention(q: torch.Tensor, kv: torch.Tensor, allowed: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """softmax(q k / sqrt(d)) v with k = v = `kv` and one extra logit per head that carries no value.

    q [C, heads, d], kv [M, d], allowed bool [C, M], sinks [heads] -> [C, heads, d]; the softmax in float32.
    """
    logits = (q @ kv.t()).float() * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~allowed[:, None], float("-inf"))
    sink = sinks.float()[None, :, None]
    peak = torch.maximum(logits.detach().amax(-1, keepdim=True), sink.detach())
    weights = torch.exp(logits - peak)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink - peak)
    return (weights / total).to(kv.dtype) @ kv
