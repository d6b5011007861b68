"""The routed experts of a rank as one operation: a product per expert into shared buffers, the activation by a kernel.

It keeps the experts' inputs and what the activation read, no more, and the latter's gradient takes its place;
megatron-core's `SequentialMLP` is its reference.
TRITON_INTERPRET=1 runs the kernels on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

COLUMNS = 1024


@triton.jit
def _swiglu(hidden, probs, out, width, limit, COLUMNS: tl.constexpr):
    """out [R, width] = silu(min(gate, limit)) * clamp(up, +-limit) * prob, of hidden [R, 2 * width]: gate, then up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < width
    gate = tl.load(hidden + row * 2 * width + column, mask=here, other=0.0).to(tl.float32)
    up = tl.load(hidden + row * 2 * width + width + column, mask=here, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    value = gate / (1.0 + tl.exp(-gate)) * up * tl.load(probs + row)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=here)


@triton.jit
def _swiglu_backward(hidden, probs, out, grad_probs, width, limit, COLUMNS: tl.constexpr):
    """In place: hidden becomes its gradient, and out, which holds the gradient of out, becomes out. Gradient of probs."""
    row = tl.program_id(0).to(tl.int64)
    prob = tl.load(probs + row)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        here = column < width
        x = tl.load(hidden + row * 2 * width + column, mask=here, other=0.0).to(tl.float32)
        y = tl.load(hidden + row * 2 * width + width + column, mask=here, other=0.0).to(tl.float32)
        g = tl.load(out + row * width + column, mask=here, other=0.0).to(tl.float32)
        gate = tl.minimum(x, limit)
        up = tl.minimum(tl.maximum(y, -limit), limit)
        s = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * s
        total += g * silu * up
        tl.store(out + row * width + column, (silu * up * prob).to(out.dtype.element_ty), mask=here)
        gx = tl.where(x <= limit, g * prob * up * (s + silu * (1.0 - s)), 0.0)
        gy = tl.where((y <= limit) & (y >= -limit), g * prob * silu, 0.0)
        tl.store(hidden + row * 2 * width + column, gx.to(hidden.dtype.element_ty), mask=here)
        tl.store(hidden + row * 2 * width + width + column, gy.to(hidden.dtype.element_ty), mask=here)
    tl.store(grad_probs + row, tl.sum(total, 0))


class WeightGradient(torch.autograd.Function):
    """An empty tensor that stands for expert `e` in `ExpertRows`, whose backward leaves in `left` what this one multiplies.

    One expert's gradients are made, and added up, before the next one's: all at once they would be as large as the weights.
    """

    @staticmethod
    def forward(ctx, first, second, e: int, left: dict):
        ctx.e, ctx.left = e, left
        return first.new_empty(0)

    @staticmethod
    def backward(ctx, _):
        x, grad_hidden, active, grad = ctx.left.pop(ctx.e)
        return grad_hidden.t() @ x, grad.t() @ active, None, None


class ExpertRows(torch.autograd.Function):
    """x [R, h] in order of experts, probs float32 [R], rows of each, clamp, every fc1 [2 m, h], then fc2 [h, m]; see `run`."""

    @staticmethod
    def forward(ctx, x, probs, counts: list[int], limit: float, first, second, left: dict, *stand_ins):
        x, probs, rows, width = x.contiguous(), probs.contiguous(), len(x), second[0].shape[1]
        hidden, out = x.new_empty(rows, 2 * width), torch.empty_like(x)
        active = x.new_empty(rows, width)
        for a, w, b in zip(x.split(counts), first, hidden.split(counts), strict=True):
            torch.mm(a, w.t(), out=b)
        if rows:
            with torch.cuda.device_of(x):
                grid = (rows, triton.cdiv(width, COLUMNS))
                _swiglu[grid](hidden, probs, active, width, limit, COLUMNS=COLUMNS)
        for a, w, b in zip(active.split(counts), second, out.split(counts), strict=True):
            torch.mm(a, w.t(), out=b)
        ctx.save_for_backward(x, probs, hidden)
        ctx.weights, ctx.counts, ctx.limit, ctx.left, ctx.spent = (first, second), counts, limit, left, False
        return out

    @staticmethod
    def backward(ctx, grad):
        (x, probs, hidden), (first, second), counts = ctx.saved_tensors, ctx.weights, ctx.counts
        if ctx.spent:
            raise RuntimeError("backward through the experts a second time: the first one overwrote what they kept")
        ctx.spent = True
        grad, rows, width = grad.contiguous(), len(x), second[0].shape[1]
        active, grad_probs, grad_x = x.new_empty(rows, width), torch.empty_like(probs), torch.empty_like(x)
        for g, w, b in zip(grad.split(counts), second, active.split(counts), strict=True):
            torch.mm(g, w, out=b)
        if rows:
            with torch.cuda.device_of(x):
                _swiglu_backward[(rows,)](hidden, probs, active, grad_probs, width, ctx.limit, COLUMNS=COLUMNS)
        for g, w, b in zip(hidden.split(counts), first, grad_x.split(counts), strict=True):
            torch.mm(g, w, out=b)
        if any(ctx.needs_input_grad[7:]):
            ctx.left.update(enumerate(zip(*(t.split(counts) for t in (x, hidden, active, grad)), strict=True)))
        return grad_x, grad_probs, None, None, None, None, None, *(x.new_empty(0) for _ in counts)


def run(x, probs, counts: list[int], limit: float, first, second) -> torch.Tensor:
    """x [R, h] in order of experts, probs float32 [R], rows of each expert, clamp, fc1 [2 m, h] and fc2 [h, m] of each.

    Returns:
        [R, h]: fc2 of silu(min(gate, limit)) * clamp(up, +-limit) * prob, with gate and up the halves of fc1 of x.
    """
    left: dict = {}
    stand_ins = [WeightGradient.apply(*pair, e, left) for e, pair in enumerate(zip(first, second, strict=True))]
    return ExpertRows.apply(x, probs, counts, limit, first, second, left, *stand_ins)


class FusedExperts(SequentialMLP):
    """megatron-core's experts, parameters and checkpoints included, with a forward of ours. Without tensor parallelism."""

    def forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs):
        """x [R, h] in order of experts, int [E], float32 [R] -> [R, h], None."""
        first, second = ([getattr(e, n).weight for e in self.local_experts] for n in ("linear_fc1", "linear_fc2"))
        counts, limit = tokens_per_expert.tolist(), self.config.activation_func_clamp_value
        return run(permuted_local_hidden_states, permuted_probs.float(), counts, limit, first, second), None


class FusedSharedExpert(SharedExpertMLP):
    """megatron-core's shared expert as the one expert of `run`. Without tensor parallelism, gate and overlap."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, 1, h] -> [T, 1, h]."""
        x, limit = hidden_states.flatten(0, 1), self.config.activation_func_clamp_value
        probs = torch.ones(len(x), dtype=torch.float32, device=x.device)
        out = run(x, probs, [len(x)], limit, [self.linear_fc1.weight], [self.linear_fc2.weight])
        return out.view_as(hidden_states)
