"""What a Qwen layer keeps for its backward pass, term by term as the code computes it. Torch-free.

tests/test_planner_widths.py holds the sums against what autograd saves.
"""

from __future__ import annotations

from collections.abc import Iterable

from moe_rl.config.facts import LayerWidths
from moe_rl.models.qwen.arch import QwenArch


def layer_widths(arch: QwenArch, work: Iterable[tuple[int, int]]) -> tuple[LayerWidths, ...]:
    """One entry a layer; `work` gives the weights that every token meets and those of one expert."""
    return tuple(_layer(arch, layer in arch.moe_layers, *weights) for layer, weights in enumerate(work))


def _layer(arch: QwenArch, sparse: bool, dense: int, expert: int) -> LayerWidths:
    h, d, heads, kv, k = arch.hidden_size, arch.head_dim, arch.num_heads, arch.num_kv_heads, arch.top_k
    m, ffn = arch.moe_intermediate_size, arch.intermediate_size
    q_wide, normed = heads * d, (heads + kv) * d if arch.qk_norm else 0
    return LayerWidths(
        # the middle of the layer; two norms; normed queries and keys; q, k, v spread over all heads; both forms of the output
        native=h + 4 * h - (h if sparse else 0) + normed + 5 * q_wide + (h if sparse else 5 * ffn),
        fp32=2 + (heads + kv if arch.qk_norm else 0) + heads + (arch.num_experts + k if sparse else 0),
        casts=2 * h + normed + (h if sparse else 0),
        bytes=36 * k if sparse else 0,
        routed=h + 6 * m if sparse else 0,
        routed_fp32=1 if sparse else 0,
        stream=h,
        dense=dense,
        expert=expert,
        pair_work=2 * q_wide,
        cache=2.0 * kv * d,
    )
