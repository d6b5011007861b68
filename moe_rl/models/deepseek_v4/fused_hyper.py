"""Hyper-connections in Triton kernels that read the streams as they lie and keep nothing of their size for the backward.

`hyper.HyperConnection` in plain PyTorch is their reference. TRITON_INTERPRET=1 runs the kernels on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TOKENS, COLUMNS, BACK = 32, 64, 128  # tile of the streams where they meet the mixing weights, forward and backward
SHARES = 4  # programs that divide the tokens in the weights' gradient
WIDE, NARROW = 1024, 512  # columns of a token handled at once


@triton.jit
def _mix(
    x, fn, raw, rms, tokens, width, eps, OUT: tl.constexpr, PADDED: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """raw [tokens, OUT] = x fn^T and rms [tokens] = 1 / rms(x), of x [tokens, width] and fn [OUT, width]."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    out = tl.arange(0, PADDED)
    acc = tl.zeros([TOKENS, PADDED], tl.float32)
    square = tl.zeros([TOKENS], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        here = (token < tokens)[:, None] & (column < width)[None, :]
        tile = tl.load(x + token.to(tl.int64)[:, None] * width + column[None, :], mask=here, other=0.0).to(tl.float32)
        there = (out < OUT)[:, None] & (column < width)[None, :]
        weight = tl.load(fn + out[:, None] * width + column[None, :], mask=there, other=0.0)
        acc = tl.dot(tile, tl.trans(weight), acc, input_precision="tf32x3")
        square += tl.sum(tile * tile, 1)
    tl.store(raw + token[:, None] * OUT + out[None, :], acc, mask=(token < tokens)[:, None] & (out < OUT)[None, :])
    tl.store(rms + token, tl.rsqrt(square / width + eps), mask=token < tokens)


@triton.jit
def _mix_backward(
    x, fn, grad, slope, grad_x, grad_fn, tokens, width, share, OUT: tl.constexpr, PADDED: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """grad_x = grad fn - slope x; grad_fn [shares, OUT, width] = grad^T x over `share` tokens; grad [tokens, OUT]."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    out = tl.arange(0, PADDED)
    there = (out < OUT)[:, None] & (column < width)[None, :]
    weight = tl.load(fn + out[:, None] * width + column[None, :], mask=there, other=0.0)
    acc = tl.zeros([PADDED, COLUMNS], tl.float32)
    begin = tl.program_id(1) * share
    for start in range(0, share, TOKENS):
        token = begin + start + tl.arange(0, TOKENS)
        near = (token < tokens) & (start + tl.arange(0, TOKENS) < share)
        here = near[:, None] & (column < width)[None, :]
        at = token.to(tl.int64)[:, None] * width + column[None, :]
        tile = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        g = tl.load(grad + token[:, None] * OUT + out[None, :], mask=near[:, None] & (out < OUT)[None, :], other=0.0)
        by = tl.load(slope + token, mask=near, other=0.0)
        gx = tl.dot(g, weight, input_precision="tf32x3") - tile * by[:, None]
        tl.store(grad_x + at, gx.to(grad_x.dtype.element_ty), mask=here)
        acc = tl.dot(tl.trans(g), tile, acc, input_precision="tf32x3")
    tl.store(grad_fn + (tl.program_id(1) * OUT + out[:, None]) * width + column[None, :], acc, mask=there)


@triton.jit
def _weigh(x, pre, out, width, N: tl.constexpr, COLUMNS: tl.constexpr):
    """out [T, width] = sum over n of pre [T, N] * x [T, N, width]."""
    token = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, N)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < width
    tile = tl.load(x + (token * N + stream[:, None]) * width + column[None, :], mask=here[None, :], other=0.0)
    weight = tl.load(pre + token * N + stream)
    collapsed = tl.sum(tile.to(tl.float32) * weight[:, None], 0)
    tl.store(out + token * width + column, collapsed.to(out.dtype.element_ty), mask=here)


@triton.jit
def _weigh_backward(x, pre, grad, grad_x, grad_pre, width, N: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, N)
    weight = tl.load(pre + token * N + stream)
    acc = tl.zeros([N], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        here = column < width
        at = (token * N + stream[:, None]) * width + column[None, :]
        g = tl.load(grad + token * width + column, mask=here, other=0.0).to(tl.float32)
        tile = tl.load(x + at, mask=here[None, :], other=0.0).to(tl.float32)
        acc += tl.sum(tile * g[None, :], 1)
        gx = weight[:, None] * g[None, :]
        tl.store(grad_x + at, gx.to(grad_x.dtype.element_ty), mask=here[None, :])
    tl.store(grad_pre + token * N + stream, acc)


@triton.jit
def _rejoin(x, block, post, comb, out, width, N: tl.constexpr, COLUMNS: tl.constexpr):
    """out [T, N, width]: out[k] = post[k] * block + sum over j of comb[j, k] * x[j]."""
    token = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, N)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < width
    at = (token * N + stream[:, None]) * width + column[None, :]
    tile = tl.load(x + at, mask=here[None, :], other=0.0).to(tl.float32)
    mix = tl.load(comb + (token * N + stream[:, None]) * N + stream[None, :])
    new = tl.load(block + token * width + column, mask=here, other=0.0).to(tl.float32)
    new = tl.load(post + token * N + stream)[:, None] * new[None, :] + tl.sum(mix[:, :, None] * tile[:, None, :], 0)
    tl.store(out + at, new.to(out.dtype.element_ty), mask=here[None, :])


@triton.jit
def _rejoin_backward(
    x, block, post, comb, grad, grad_x, grad_block, grad_post, grad_comb, width,
    N: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, N)
    weight = tl.load(post + token * N + stream)
    corner = (token * N + stream[:, None]) * N + stream[None, :]
    mix = tl.load(comb + corner)
    acc_post = tl.zeros([N], tl.float32)
    acc_comb = tl.zeros([N, N], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        here = column < width
        at = (token * N + stream[:, None]) * width + column[None, :]
        g = tl.load(grad + at, mask=here[None, :], other=0.0).to(tl.float32)
        tile = tl.load(x + at, mask=here[None, :], other=0.0).to(tl.float32)
        own = tl.load(block + token * width + column, mask=here, other=0.0).to(tl.float32)
        acc_post += tl.sum(g * own[None, :], 1)
        acc_comb += tl.sum(tile[:, None, :] * g[None, :, :], 2)
        gx = tl.sum(mix[:, :, None] * g[None, :, :], 1)
        tl.store(grad_x + at, gx.to(grad_x.dtype.element_ty), mask=here[None, :])
        gb = tl.sum(weight[:, None] * g, 0)
        tl.store(grad_block + token * width + column, gb.to(grad_block.dtype.element_ty), mask=here)
    tl.store(grad_post + token * N + stream, acc_post)
    tl.store(grad_comb + corner, acc_comb)


@triton.jit
def _sinkhorn(matrix, steps, sums, tokens, iterations, eps, N: tl.constexpr, TOKENS: tl.constexpr):
    """Every matrix of `hyper.sinkhorn` in steps [2 * iterations - 1, tokens, N, N], and what it was divided by, in sums."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    near = token < tokens
    stream = tl.arange(0, N)
    at = (token[:, None, None] * N + stream[None, :, None]) * N + stream[None, None, :]
    line = token[:, None] * N + stream[None, :]
    m = tl.load(matrix + at, mask=near[:, None, None], other=1.0)
    for i in range(2 * iterations - 1):
        if i % 2 == 0:
            s = tl.sum(m, 1) + eps
            m = m / s[:, None, :]
        else:
            s = tl.sum(m, 2) + eps
            m = m / s[:, :, None]
        tl.store(steps + i * tokens * N * N + at, m, mask=near[:, None, None])
        tl.store(sums + i * tokens * N + line, s, mask=near[:, None])


@triton.jit
def _sinkhorn_backward(steps, sums, grad, out, tokens, iterations, N: tl.constexpr, TOKENS: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    near = token < tokens
    stream = tl.arange(0, N)
    at = (token[:, None, None] * N + stream[None, :, None]) * N + stream[None, None, :]
    line = token[:, None] * N + stream[None, :]
    g = tl.load(grad + at, mask=near[:, None, None], other=0.0)
    for back in range(2 * iterations - 1):
        i = 2 * iterations - 2 - back
        m = tl.load(steps + i * tokens * N * N + at, mask=near[:, None, None], other=0.0)
        s = tl.load(sums + i * tokens * N + line, mask=near[:, None], other=1.0)
        if i % 2 == 0:
            g = (g - tl.sum(g * m, 1)[:, None, :]) / s[:, None, :]
        else:
            g = (g - tl.sum(g * m, 2)[:, :, None]) / s[:, :, None]
    tl.store(out + at, g, mask=near[:, None, None])


class Mix(torch.autograd.Function):
    """x [T, width] / rms(x), times fn [m, width] transposed: float32 [T, m]."""

    @staticmethod
    def forward(ctx, x, fn, eps: float):
        x, (tokens, width), out = x.contiguous(), x.shape, len(fn)
        raw, rms = (torch.empty(tokens, *n, dtype=torch.float32, device=x.device) for n in ((out,), ()))
        ctx.sizes = {"OUT": out, "PADDED": max(16, triton.next_power_of_2(out)), "TOKENS": TOKENS}
        with torch.cuda.device_of(x):
            _mix[(triton.cdiv(tokens, TOKENS),)](x, fn, raw, rms, tokens, width, eps, COLUMNS=COLUMNS, **ctx.sizes)
        ctx.save_for_backward(x, fn, raw, rms)
        return raw * rms[:, None]

    @staticmethod
    def backward(ctx, grad):
        x, fn, raw, rms = ctx.saved_tensors
        tokens, width = x.shape
        share = triton.cdiv(tokens, SHARES)
        slope = (grad * raw).sum(1) * rms**3 / width
        grad_x = torch.empty_like(x)
        grad_fn = torch.empty(SHARES, *fn.shape, dtype=torch.float32, device=x.device)
        with torch.cuda.device_of(x):
            _mix_backward[(triton.cdiv(width, BACK), SHARES)](
                x, fn, grad * rms[:, None], slope, grad_x, grad_fn, tokens, width, share, COLUMNS=BACK, **ctx.sizes
            )
        return grad_x, grad_fn.sum(0), None


class Weigh(torch.autograd.Function):
    """Streams [T, n, h] and weights float32 [T, n] -> their sum [T, h]."""

    @staticmethod
    def forward(ctx, x, pre):
        x, pre, (tokens, n, width) = x.contiguous(), pre.contiguous(), x.shape
        out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
        with torch.cuda.device_of(x):
            _weigh[(tokens, triton.cdiv(width, WIDE))](x, pre, out, width, N=n, COLUMNS=WIDE)
        ctx.save_for_backward(x, pre)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, pre = ctx.saved_tensors
        tokens, n, width = x.shape
        grad_x, grad_pre = torch.empty_like(x), torch.empty_like(pre)
        with torch.cuda.device_of(x):
            _weigh_backward[(tokens,)](x, pre, grad.contiguous(), grad_x, grad_pre, width, N=n, COLUMNS=WIDE)
        return grad_x, grad_pre


class Rejoin(torch.autograd.Function):
    """As `HyperConnection.rejoin`, with its weights in float32 throughout."""

    @staticmethod
    def forward(ctx, x, block, post, comb):
        x, block, post, comb = (t.contiguous() for t in (x, block, post, comb))
        (tokens, n, width), out = x.shape, torch.empty_like(x)
        with torch.cuda.device_of(x):
            _rejoin[(tokens, triton.cdiv(width, NARROW))](x, block, post, comb, out, width, N=n, COLUMNS=NARROW)
        ctx.save_for_backward(x, block, post, comb)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, block, post, comb = ctx.saved_tensors
        tokens, n, width = x.shape
        grads = [torch.empty_like(t) for t in (x, block, post, comb)]
        with torch.cuda.device_of(x):
            _rejoin_backward[(tokens,)](x, block, post, comb, grad.contiguous(), *grads, width, N=n, COLUMNS=NARROW)
        return tuple(grads)


def _balanced(matrix: torch.Tensor, iterations: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The steps and sums of `_sinkhorn`."""
    tokens, n, _ = matrix.shape
    steps, sums = (matrix.new_empty(2 * iterations - 1, tokens, *tail) for tail in ((n, n), (n,)))
    with torch.cuda.device_of(matrix):
        _sinkhorn[(triton.cdiv(tokens, 64),)](matrix, steps, sums, tokens, iterations, eps, N=n, TOKENS=64)
    return steps, sums


class Sinkhorn(torch.autograd.Function):
    """As `hyper.sinkhorn`, float32 [T, n, n]."""

    @staticmethod
    def forward(ctx, matrix, iterations: int, eps: float):
        matrix = matrix.contiguous()
        ctx.save_for_backward(matrix)
        ctx.options = iterations, eps
        return _balanced(matrix, iterations, eps)[0][-1].clone()

    @staticmethod
    def backward(ctx, grad):
        steps, sums = _balanced(*ctx.saved_tensors, *ctx.options)
        count, tokens, n, _ = steps.shape
        out = torch.empty_like(steps[0])
        with torch.cuda.device_of(steps):
            _sinkhorn_backward[(triton.cdiv(tokens, 64),)](
                steps, sums, grad.contiguous(), out, tokens, (count + 1) // 2, N=n, TOKENS=64
            )
        return out, None, None
