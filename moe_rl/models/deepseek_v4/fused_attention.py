"""Attention in two Triton kernels; `attention.Attention` in plain PyTorch is their reference.

A program takes one token and a block of its heads: all heads share their keys, so the heads are the rows of its matrix
products, and the keys of the token's window and its compressed entries, gathered row by row, are the columns. No query
meets a key that it may not see, and nothing but the row-wise log-sum-exp is kept (FlashAttention-2, arXiv:2307.08691).
The norm and rotation of the queries and the rotation back of the output happen inside, so that queries and output exist
once. Gradients of keys are summed by fp32 atomics: their last bits depend on the order of the programs.

TRITON_INTERPRET=1 runs the kernels on a CPU.
"""

# mypy: disable-error-code=assignment
# (tuples that grow in a kernel)

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional as F


class Launch(NamedTuple):
    """Keys met at once, warps and pipeline stages of a kernel; parts of the channels (backward alone)."""

    keys: int
    warps: int
    stages: int
    parts: int = 4


FORWARD, BACKWARD = Launch(64, 8, 2), Launch(32, 8, 1)


@dataclass(frozen=True)
class Visible:
    """Which rows of the keys [T + N, d] a token meets: those of its window, and entries from row T on.

    `positions` int64 [T]: place in its sequence; `first` int32 [T]: its sequence's first entry (None: there are no
    entries); `ratio`: tokens of an entry; `chosen` int32 [T, k] (or None): entries of a token that sees more than k.
    """

    positions: torch.Tensor
    window: int
    first: torch.Tensor | None = None
    ratio: int = 1
    chosen: torch.Tensor | None = None


@triton.jit
def _rotate(x, cos, sin, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Turn the pairs of neighbouring columns of x [ROWS, WIDTH] by the angles of cos, sin [WIDTH / 2]."""
    even, odd = tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2)))
    turned = tl.join(even * cos[None, :] - odd * sin[None, :], odd * cos[None, :] + even * sin[None, :])
    return tl.reshape(turned, (ROWS, WIDTH))


@triton.jit
def _angles(cos, sin, token, ROPE: tl.constexpr, HALF: tl.constexpr):
    """Cosines and sines of the pairs of the last HALF channels; pairs that are not turned have 1 and 0."""
    pair = tl.arange(0, HALF // 2) - (HALF // 2 - ROPE)
    offsets = token * ROPE + pair
    return tl.load(cos + offsets, mask=pair >= 0, other=1.0), tl.load(sin + offsets, mask=pair >= 0, other=0.0)


@triton.jit
def _seen(positions, first, token, WINDOW: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr):
    """Of a token: keys in its window, keys in all, its sequence's first entry, and whether its entries are chosen."""
    place = tl.load(positions + token).to(tl.int32)
    near = tl.minimum(place + 1, WINDOW)
    closed = 0
    base = 0
    if RATIO > 0:
        closed = (place + 1) // RATIO
        base = tl.load(first + token)
    listed = False
    if TOP_K > 0:
        listed = closed > TOP_K
        closed = tl.minimum(closed, TOP_K)
    return near, near + closed, base, listed


@triton.jit
def _rows(slot, token, tokens, near, total, base, listed, chosen, RATIO: tl.constexpr, TOP_K: tl.constexpr):
    """Row of the keys of each slot: the window's slots come first. Slots past the last have a row that exists."""
    row = token - near + 1 + slot
    if RATIO > 0:
        entry = base + slot - near
        if TOP_K > 0:
            pick = tl.load(chosen + token * TOP_K + slot - near, mask=listed & (slot >= near) & (slot < total), other=0)
            entry = tl.where(listed, pick, entry)
        row = tl.where(slot < near, row, tokens + entry)
    return tl.where(slot < total, row, token)


@triton.jit
def _staged(x, scratch, at, here):
    """x by way of global memory: the matrix instruction reads what was loaded from one copy in shared memory, either way
    round; of what was computed it would need two."""
    tl.store(scratch + at, x.to(scratch.dtype.element_ty), mask=here[:, None])
    tl.debug_barrier()
    return tl.load(scratch + at, mask=here[:, None], other=0.0)


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    q, kv, sinks, cos, sin, positions, first, chosen, out, lse, tokens, heads, scale, eps,
    WINDOW: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr, ROPE: tl.constexpr,
    D: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """q, out [T, heads, D]; kv [T + N, D]; lse float32 [T, heads], in powers of 2; ROPE pairs are turned."""
    HALF: tl.constexpr = D // 2
    token = tl.program_id(0) // BLOCKS
    head = tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS)
    here = head < heads
    column = tl.arange(0, HALF)
    at = (token.to(tl.int64) * heads + head)[:, None] * D + column[None, :]
    c, s = _angles(cos, sin, token, ROPE, HALF)
    x0 = tl.load(q + at, mask=here[:, None], other=0.0).to(tl.float32)
    x1 = tl.load(q + at + HALF, mask=here[:, None], other=0.0).to(tl.float32)
    r = tl.rsqrt((tl.sum(x0 * x0, 1) + tl.sum(x1 * x1, 1)) / D + eps)[:, None]
    q0 = _staged(x0 * r, out, at, here)
    q1 = _staged(_rotate(x1 * r, c, s, ROWS, HALF), out + HALF, at, here)
    near, total, base, listed = _seen(positions, first, token, WINDOW, RATIO, TOP_K)
    # The sink is the first key met: its logit the maximum so far, its weight 1, its value nothing.
    peak = tl.load(sinks + head, mask=here, other=0.0).to(tl.float32) * 1.4426950408889634
    weight = tl.full([ROWS], 1.0, tl.float32)
    acc0 = tl.zeros([ROWS, HALF], tl.float32)
    acc1 = tl.zeros([ROWS, HALF], tl.float32)
    for start in tl.range(0, total, KEYS, num_stages=STAGES):
        slot = start + tl.arange(0, KEYS)
        met = slot < total
        row = _rows(slot, token, tokens, near, total, base, listed, chosen, RATIO, TOP_K)
        place = row[:, None] * D + column[None, :]
        k0 = tl.load(kv + place)
        k1 = tl.load(kv + place + HALF)
        logits = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        logits = tl.dot(q1, tl.trans(k1), logits, input_precision="ieee") * (scale * 1.4426950408889634)
        logits = tl.where(met[None, :], logits, float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, 1))
        p = tl.exp2(logits - higher[:, None])
        shrink = tl.exp2(peak - higher)
        weight = weight * shrink + tl.sum(p, 1)
        peak = higher
        p = p.to(kv.dtype.element_ty)
        acc0 = tl.dot(p, k0, acc0 * shrink[:, None], input_precision="ieee")
        acc1 = tl.dot(p, k1, acc1 * shrink[:, None], input_precision="ieee")
    tl.store(lse + token * heads + head, peak + tl.log2(weight), mask=here)
    tl.store(out + at, (acc0 / weight[:, None]).to(out.dtype.element_ty), mask=here[:, None])
    back = _rotate(acc1 / weight[:, None], c, -s, ROWS, HALF)
    tl.store(out + at + HALF, back.to(out.dtype.element_ty), mask=here[:, None])


@triton.jit
def _parts(source, at, here, other, PARTS: tl.constexpr, PART: tl.constexpr):
    """Rows of `source` in PARTS parts of PART channels, `other` where they are not here."""
    found = ()
    for i in tl.static_range(PARTS):
        found = found + (tl.load(source + at + i * PART, mask=here, other=other),)
    return found


@triton.jit
def _inner(x, y, PARTS: tl.constexpr):
    """float32 sums over channels of x * y [rows]."""
    total = tl.sum(x[0].to(tl.float32) * y[0].to(tl.float32), 1)
    for i in tl.static_range(1, PARTS):
        total += tl.sum(x[i].to(tl.float32) * y[i].to(tl.float32), 1)
    return total


@triton.jit
def _products(x, k, PARTS: tl.constexpr):
    """float32 x k^T [rows, keys]."""
    out = tl.dot(x[0], tl.trans(k[0]), input_precision="ieee")
    for i in tl.static_range(1, PARTS):
        out = tl.dot(x[i], tl.trans(k[i]), out, input_precision="ieee")
    return out


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    q, kv, sinks, cos, sin, positions, first, chosen, out, lse, grad, grad_q, grad_kv, grad_sinks, scratch,
    tokens, heads, scale, eps,
    WINDOW: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr, ROPE: tl.constexpr,
    D: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """As `_forward`; grad, grad_q [T, heads, D]; grad_kv float32 [T + N, D] of zeros; grad_sinks float32 [T, heads];
    scratch [T, heads, D / PARTS], dtype of q. Channels go in PARTS parts, of which the last is rotated."""
    PART: tl.constexpr = D // PARTS
    LAST: tl.constexpr = PARTS - 1
    token = tl.program_id(0) // BLOCKS
    head = tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS)
    here = head < heads
    mask = here[:, None]
    column = tl.arange(0, PART)
    line = (token.to(tl.int64) * heads + head)[:, None]
    at = line * D + column[None, :]
    c, s = _angles(cos, sin, token, ROPE, PART)
    x = _parts(q, at, mask, 0.0, PARTS, PART)
    r = tl.rsqrt(_inner(x, x, PARTS) / D + eps)
    y = ()
    for i in tl.static_range(PARTS):
        part = x[i].to(tl.float32) * r[:, None]
        if i == LAST:
            part = _rotate(part, c, s, ROWS, PART)
        y = y + (_staged(part, grad_q + i * PART, at, here),)
    do = _parts(grad, at, mask, 0.0, PARTS, PART)
    delta = _inner(
        do, _parts(out, at, mask, 0.0, PARTS, PART), PARTS
    )  # rotating both, as one should, would not change it
    turned = _rotate(do[LAST].to(tl.float32), c, s, ROWS, PART)
    do = do[:LAST] + (_staged(turned, scratch, line * PART + column[None, :], here),)
    norm = tl.load(lse + token * heads + head, mask=here, other=0.0)
    sink = tl.load(sinks + head, mask=here, other=0.0).to(tl.float32) * 1.4426950408889634
    tl.store(grad_sinks + token * heads + head, -tl.exp2(sink - norm) * delta, mask=here)
    near, total, base, listed = _seen(positions, first, token, WINDOW, RATIO, TOP_K)
    acc = ()
    for _ in tl.static_range(PARTS):
        acc = acc + (tl.zeros([ROWS, PART], tl.float32),)
    for start in tl.range(0, total, KEYS, num_stages=STAGES):
        slot = start + tl.arange(0, KEYS)
        met = slot < total
        row = _rows(slot, token, tokens, near, total, base, listed, chosen, RATIO, TOP_K)
        k = _parts(kv, row[:, None] * D + column[None, :], None, None, PARTS, PART)
        logits = _products(y, k, PARTS) * (scale * 1.4426950408889634)
        p = tl.where(met[None, :] & mask, tl.exp2(logits - norm[:, None]), 0.0)
        ds = (p * (_products(do, k, PARTS) - delta[:, None]) * scale).to(kv.dtype.element_ty)
        p = p.to(kv.dtype.element_ty)
        new = ()
        for i in tl.static_range(PARTS):
            # As values and as keys; transposed, since the matrix instruction has 64 rows at least and there are fewer keys.
            g = tl.dot(tl.trans(do[i]), p, input_precision="ieee")
            g = tl.dot(tl.trans(y[i]), ds, g, input_precision="ieee")
            tl.atomic_add(grad_kv + row[None, :] * D + column[:, None] + i * PART, g, sem="relaxed")
            new = new + (tl.dot(ds, k[i], acc[i], input_precision="ieee"),)
        acc = new
    # The same places computed anew (no total is negative): kept through the loop they would fill the registers.
    at = ((token + tl.minimum(total, 0)).to(tl.int64) * heads + head)[:, None] * D + column[None, :]
    # Through the rotation, then through x * rsqrt(mean(x^2) + eps).
    acc = acc[:LAST] + (_rotate(acc[LAST], c, -s, ROWS, PART),)
    x = _parts(q, at, mask, 0.0, PARTS, PART)
    inner = (_inner(acc, x, PARTS) / D * r * r * r)[:, None]
    for i in tl.static_range(PARTS):
        gx = acc[i] * r[:, None] - x[i].to(tl.float32) * inner
        tl.store(grad_q + at + i * PART, gx.to(grad_q.dtype.element_ty), mask=mask)


def _shape(q: torch.Tensor, cos: torch.Tensor, seen: Visible) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and the sizes that both kernels are compiled for."""
    tokens, heads, width = q.shape
    rows = max(16, min(64, triton.next_power_of_2(heads)))
    sizes = {
        "WINDOW": seen.window,
        "RATIO": 0 if seen.first is None else seen.ratio,
        "TOP_K": 0 if seen.chosen is None else seen.chosen.shape[1],
        "ROPE": cos.shape[1],
        "D": width,
        "BLOCKS": triton.cdiv(heads, rows),
        "ROWS": rows,
    }
    return (tokens * sizes["BLOCKS"],), sizes


class FusedAttention(torch.autograd.Function):
    """q [T, heads, d] before norm and rotation, kv [T + N, d], sinks [heads] -> [T, heads, d], rotated back.

    With a weight [heads * d, r] it makes q of x [T, r], once more in the backward pass: it keeps r numbers a token for
    heads * d. Without one x is q.
    """

    @staticmethod
    def forward(ctx, x, weight, kv, sinks, cos, sin, seen: Visible, eps: float, launches: tuple[Launch, Launch]):
        q, kv = _queries(x, weight, len(sinks)), kv.contiguous()
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        grid, sizes = _shape(q, cos, seen)
        keys, warps, stages, _ = launches[0]
        with torch.cuda.device_of(q):
            _forward[grid](
                q, kv, sinks, cos, sin, seen.positions, seen.first, seen.chosen, out, lse,
                q.shape[0], q.shape[1], q.shape[2] ** -0.5, eps,
                **sizes, KEYS=keys, STAGES=stages, num_warps=warps,
            )  # fmt: skip
        ctx.save_for_backward(q if weight is None else x, weight, kv, sinks, cos, sin, out, lse)
        ctx.seen, ctx.eps, ctx.launch = seen, eps, launches[1]
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, kv, sinks, cos, sin, out, lse = ctx.saved_tensors
        q = _queries(x, weight, len(sinks))
        seen, (keys, warps, stages, parts) = ctx.seen, ctx.launch
        grad, grad_q = grad.contiguous(), torch.empty_like(q)
        grad_kv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        grad_sinks = torch.empty_like(lse)
        scratch = q.new_empty(*q.shape[:2], q.shape[2] // parts)
        grid, sizes = _shape(q, cos, seen)
        with torch.cuda.device_of(q):
            _backward[grid](
                q, kv, sinks, cos, sin, seen.positions, seen.first, seen.chosen, out, lse, grad, grad_q, grad_kv,
                grad_sinks, scratch, q.shape[0], q.shape[1], q.shape[2] ** -0.5, ctx.eps,
                **sizes, KEYS=keys, STAGES=stages, PARTS=parts, num_warps=warps,
            )  # fmt: skip
        rest = grad_kv.to(kv.dtype), grad_sinks.sum(0).to(sinks.dtype), None, None, None, None, None
        if weight is None:
            return grad_q, None, *rest
        del q, scratch
        grad_q = grad_q.flatten(1)
        return grad_q @ weight, grad_q.t() @ x, *rest


def _queries(x: torch.Tensor, weight: torch.Tensor | None, heads: int) -> torch.Tensor:
    return (x if weight is None else F.linear(x, weight).unflatten(-1, (heads, -1))).contiguous()


def attend(
    q, kv, sinks, cos, sin, seen: Visible, eps: float, forward=FORWARD, backward=BACKWARD, weight=None
) -> torch.Tensor:
    """Attention of every token over the keys it sees, its own rotary position taken off again.

    q [T, heads, d] as projected (norm over d, then rotation by cos, sin float32 [T, r] on the last 2r channels, happen
    here), kv [T + N, d] (tokens, then entries), sinks float32 [heads] -> [T, heads, d]. d is a power of 2, 8r <= d.
    With `weight` [heads * d, l] the queries are the product of it and of q [T, l], which backward makes again.
    """
    return FusedAttention.apply(q, weight, kv, sinks, cos, sin, seen, eps, (forward, backward))
