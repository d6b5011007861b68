"""RMSNorm in a Triton kernel each way that keeps its input and one number a row; `layers.RMSNorm` in plain PyTorch is the
reference. TRITON_INTERPRET=1 runs the kernels on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 256  # that share the rows in the backward pass, each with its own sum for the weight's gradient


@triton.jit
def _norm(x, weight, out, rms, width, eps, COLUMNS: tl.constexpr):
    """out [R, width] = weight * x * rms, with rms [R] = 1 / rms(x)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    here = column < width
    value = tl.load(x + row * width + column, mask=here, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    scaled = value * r * tl.load(weight + column, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, scaled.to(out.dtype.element_ty), mask=here)
    tl.store(rms + row, r)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward(x, weight, rms, grad, grad_x, grad_weight, rows, width, COLUMNS: tl.constexpr):
    """grad_x [R, width], and of every program its part of the weight's gradient, float32 [programs, width]."""
    column = tl.arange(0, COLUMNS)
    here = column < width
    w = tl.load(weight + column, mask=here, other=0.0).to(tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * width + column
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        g = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
        r = tl.load(rms + row)
        total += g * value * r
        g = g * w
        slope = tl.sum(g * value, 0) / width * r * r * r
        tl.store(grad_x + at, (g * r - value * slope).to(grad_x.dtype.element_ty), mask=here)
    tl.store(grad_weight + tl.program_id(0) * width + column, total, mask=here)


def _sizes(width: int) -> dict[str, int]:
    columns = triton.next_power_of_2(width)
    return {"COLUMNS": columns, "num_warps": max(1, min(16, columns // 512))}


class Norm(torch.autograd.Function):
    """x [..., width], weight [width] -> weight * x / rms(x); float32 inside, rounded once."""

    @staticmethod
    def forward(ctx, x, weight, eps: float):
        x, width = x.contiguous(), x.shape[-1]
        out, rms = torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        if rms.numel():
            with torch.cuda.device_of(x):
                _norm[(rms.numel(),)](x, weight, out, rms, width, eps, **_sizes(width))
        ctx.save_for_backward(x, weight, rms)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, rms = ctx.saved_tensors
        rows, width, grad_x = rms.numel(), x.shape[-1], torch.empty_like(x)
        grad_weight = torch.zeros(min(rows, PROGRAMS), width, dtype=torch.float32, device=x.device)
        if rows:
            with torch.cuda.device_of(x):
                _norm_backward[(len(grad_weight),)](
                    x, weight, rms, grad.contiguous(), grad_x, grad_weight, rows, width, **_sizes(width)
                )
        return grad_x, grad_weight.sum(0).to(weight.dtype), None
