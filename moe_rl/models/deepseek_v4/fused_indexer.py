"""The indexer's choice in two Triton kernels: scores of a chunk of tokens, then the best of each row by a search for the
score of the last one taken, ties to the earlier entry. `Indexer.scores` and `attention._top` are their reference.

TRITON_INTERPRET=1 runs the kernels on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_rl.models.deepseek_v4.compressor import Compressor
from moe_rl.models.packed import PackedSequences

CHUNK = 1024  # tokens whose scores exist at once
KEYS, TOKENS = 128, 16  # a program scores so many entries for so many tokens, one after the other


@triton.jit(do_not_specialize=["start", "tokens", "low", "high"])
def _scores(
    q, weights, keys, positions, first, out, start, tokens, low, high, scale,
    RATIO: tl.constexpr, TOP_K: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    KEYS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """out[i, j] = sum over heads h of weights[i, h] * relu(q[i, h] . keys[low + j]) * scale, for tokens start + i.

    q [tokens, HEADS, D], weights float32 [tokens, HEADS], keys [N, D], out float32 [tokens, high - low]; what a token
    cannot see, or need not choose from, is left unwritten.
    """
    entry = low + tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    head = tl.arange(0, HEADS)
    channel = tl.arange(0, D)
    k = tl.load(keys + entry[:, None] * D + channel[None, :], mask=(entry < high)[:, None], other=0.0)
    for j in range(TOKENS):
        i = tl.minimum(tl.program_id(1) * TOKENS + j, tokens - 1)  # the last one again and again, past the end
        base = tl.load(first + start + i)
        closed = (tl.load(positions + start + i).to(tl.int32) + 1) // RATIO
        if (closed > TOP_K) & (low + tl.program_id(0) * KEYS < base + closed):
            x = tl.load(q + (i * HEADS + head[:, None]) * D + channel[None, :])
            w = tl.load(weights + i * HEADS + head)
            hits = tl.maximum(tl.dot(x, tl.trans(k), input_precision="ieee"), 0.0) * scale
            total = tl.sum(hits * w[:, None], 0)
            place = out + i.to(tl.int64) * (high - low) + entry - low
            tl.store(place, total, mask=(entry >= base) & (entry < base + closed))


@triton.jit(do_not_specialize=["start", "low", "high"])
def _select(
    scores, positions, first, chosen, start, low, high,
    RATIO: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """chosen[start + i]: the TOP_K best entries of row i, in their order; rows of tokens that see no more are left."""
    i = tl.program_id(0)
    token = start + i
    base = tl.load(first + token)
    closed = (tl.load(positions + token).to(tl.int32) + 1) // RATIO
    if closed > TOP_K:
        index = tl.arange(0, WIDTH)
        there = index < closed
        score = tl.load(scores + i.to(tl.int64) * (high - low) + base - low + index, mask=there, other=0.0)
        score = tl.where(score == 0.0, 0.0, score)  # -0 ties with 0
        # Integers in the order of the floats; what is not there comes last.
        key = score.to(tl.int32, bitcast=True)
        key = tl.where(there, key ^ ((key >> 31) & 0x7FFFFFFF), -2147483648)
        last = tl.where(tl.sum((key >= 0).to(tl.int32), 0) >= TOP_K, 0, -2147483648)
        for bit in range(31):
            higher = last + (1 << (30 - bit))
            last = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= TOP_K, higher, last)
        above = key > last
        ties = (key == last) & there
        spare = TOP_K - tl.sum(above.to(tl.int32), 0)
        taken = above | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= spare))
        place = tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(chosen + token.to(tl.int64) * TOP_K + place, base + index, mask=taken)


@torch.no_grad()
def choose(c: Compressor, x: torch.Tensor, latent: torch.Tensor, packed: PackedSequences) -> torch.Tensor | None:
    """int32 [T, top_k]: the entries chosen for each token that sees more than top_k; other rows are not set.

    x [T, h] is the normed input, latent [T, q_lora_rank]. None where no token has to choose.
    """
    indexer, ratio = c.indexer, c.ratio
    if indexer is None or max(packed.lengths) // ratio <= c.top_k:
        return None
    keys, first = indexer.entries(x, packed).contiguous(), packed.first_windows(ratio)
    chosen = torch.empty(len(x), c.top_k, dtype=torch.int32, device=x.device)
    for start in range(0, len(x), CHUNK):
        stop = min(start + CHUNK, len(x))
        low, high, most = packed.visible_windows(start, stop, ratio)
        if most <= c.top_k:
            continue
        q, weights = indexer.queries(x[start:stop], latent[start:stop], packed, start)
        scores = torch.empty(stop - start, high - low, dtype=torch.float32, device=x.device)
        grid = (triton.cdiv(high - low, KEYS), triton.cdiv(stop - start, TOKENS))
        with torch.cuda.device_of(x):
            _scores[grid](
                q.contiguous(), weights.contiguous(), keys, packed.positions, first, scores, start, stop - start, low,
                high, indexer.width**-0.5, RATIO=ratio, TOP_K=c.top_k, HEADS=q.shape[1], D=q.shape[2], KEYS=KEYS,
                TOKENS=TOKENS,
            )  # fmt: skip
            _select[(stop - start,)](
                scores, packed.positions, first, chosen, start, low, high,
                RATIO=ratio, TOP_K=c.top_k, WIDTH=triton.next_power_of_2(most), num_warps=8,
            )  # fmt: skip
    return chosen
