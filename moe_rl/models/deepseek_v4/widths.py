"""What a DeepSeek-V4 layer keeps for its backward pass, term by term as the code computes it. Torch-free.

tests/test_planner_widths.py holds the sums against what autograd saves, those of the kernels also against peaks on an H200.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from moe_rl.config.facts import LayerWidths
from moe_rl.models.deepseek_v4.arch import SLIDING, SPARSE, DeepseekV4Arch


def layer_widths(arch: DeepseekV4Arch, work: Iterable[tuple[int, int]]) -> tuple[LayerWidths, ...]:
    """One entry a layer; `work` gives the weights that every token meets and those of one expert."""
    return tuple(_layer(arch, layer, *weights) for layer, weights in enumerate(work))


def _layer(arch: DeepseekV4Arch, layer: int, dense: int, expert: int) -> LayerWidths:
    n, h, m, d = arch.hc_mult, arch.hidden_size, arch.moe_intermediate_size, arch.head_dim
    heads, q_wide, q_lora, k = arch.num_heads, arch.num_heads * arch.head_dim, arch.q_lora_rank, arch.top_k
    kind, ratio = arch.attention_kinds[layer], arch.compress_ratios[layer]
    series = 0 if kind == SLIDING else 2 if kind == SPARSE else 1  # of the compressor
    # hyper.py, twice: mixing weights, and Sinkhorn's matrices and sums; the streams once more, fp32, normed
    mixing = arch.hc_mix + 3 * n + n * n + (n + n * n) * (2 * arch.hc_sinkhorn_iters - 1)
    index_pairs = arch.index_num_heads * arch.index_head_dim if kind == SPARSE else 0
    return LayerWidths(
        # the streams between attention and experts; outputs rejoined; two norms; latents; q, o, grouped o; compressor
        native=n * h
        + 2 * (h + n + n * n)
        + 4 * h
        + 2 * q_lora
        + 2 * d
        + 2 * q_wide
        + arch.o_groups * arch.o_lora_rank
        + 2 * series * d
        + 6 * m,
        fp32=2 * (n * h + 1 + mixing) + 4 + series * d + 2 * arch.num_experts + 2 * k,
        casts=2 * n * h + 2 * h + q_lora + d,
        bytes=36 * k,  # int64 expert ids, and the order that sorts copies by expert (Tk ids, sorted and not)
        routed=h + 7 * m,
        routed_fp32=1,
        query=q_wide + heads,
        query_fp32=3 * heads,
        query_casts=q_wide,
        pair=heads,
        pair_fp32=heads,
        pair_bytes=1,
        window=arch.sliding_window - 1,
        ratio=ratio,
        chunked=True,
        stream=n * h,
        dense=dense,
        expert=expert,
        pair_work=2 * q_wide + index_pairs,
        index_work=index_pairs,
        chosen=arch.index_top_k if kind == SPARSE else 0,
        # a rollout engine keeps the window, each compressed entry, and the indexer's keys beside sparse ones
        cache=(d + (arch.index_head_dim if kind == SPARSE else 0)) / ratio if ratio else 0.0,
        cache_fixed=arch.sliding_window * d,
    )


def fused_widths(arch: DeepseekV4Arch, plain: tuple[LayerWidths, ...]) -> tuple[LayerWidths, ...]:
    """The same with the Triton kernels (fused_*.py), in bf16; none where they do not run this model."""
    return () if arch.kernels_lack() else tuple(_fused(arch, layer, w) for layer, w in enumerate(plain))


def _fused(arch: DeepseekV4Arch, layer: int, plain: LayerWidths) -> LayerWidths:
    n, h, m, d, k = arch.hc_mult, arch.hidden_size, arch.moe_intermediate_size, arch.head_dim, arch.top_k
    q_wide, kind, ratio = arch.num_heads * arch.head_dim, arch.attention_kinds[layer], arch.compress_ratios[layer]
    series = 0 if kind == SLIDING else 2 if kind == SPARSE else 1
    return replace(
        plain,
        # streams between attention and experts; of both halves input, normed input and output; latents; keys; output, grouped
        # output; the compressor's values and weights, its entries before and after their norm; the shared expert
        native=n * h
        + 6 * h
        + 2 * arch.q_lora_rank
        + 2 * d
        + q_wide
        + arch.o_groups * arch.o_lora_rank
        + 2 * series * d
        + (-(-2 * d // ratio) if ratio else 0)
        + 2 * m,
        # twice the mix raw and scaled, its inverse rms, pre and post, and comb before, amid and after; inverse rms of four norms
        fp32=2 * (2 * arch.hc_mix + 1 + 4 * n + 3 * n * n)
        + 4
        # log-sum-exp; the compressor's softmax; router; weights of the shared expert
        + arch.num_heads
        + series * d
        + 2 * arch.num_experts
        + 3 * k
        + 1
        + 1,
        casts=0,
        # expert ids and tokens in the order of experts, the order as it was sorted; entries chosen
        bytes=16 * k + 8 * arch.num_experts + (4 * arch.index_top_k if kind == SPARSE else 0),
        routed=h + 2 * m,
        query=q_wide,
        chunked=False,
        stream=0,
        # queries made anew, gradients of them and of the output, one in quarters; what the feed-forward half kept is gone
        query_backward=max(0, 3 * q_wide + q_wide // 4 - (n * h + 3 * h + 2 * m)),
        routed_backward=m,  # activations, in the place of their gradient
        routed_forward=2 * h + 3 * m,
    )
