"""What log-probs need of a chunk of logits, each in one pass over them: two Triton kernels.

`logprobs.LabelLogProbs` in plain PyTorch is their reference. TRITON_INTERPRET=1 runs them on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS, WARPS = 4096, 8


@triton.jit
def _statistics(logits, places, out, rows, columns, inverse_temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * columns
    peak = tl.full([BLOCK], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        here = column < columns
        x = tl.load(line + column, mask=here, other=-3.0e38) * inverse_temperature
        higher = tl.maximum(peak, x)
        shrink = tl.exp(peak - higher)
        weight = tl.where(here, tl.exp(x - higher), 0.0)
        weighted = (weighted + (peak - higher) * total) * shrink + weight * tl.where(here, x - higher, 0.0)
        total = total * shrink + weight
        peak = higher
    top = tl.max(peak, 0)
    shrink = tl.exp(peak - top)
    place = tl.load(places + row)
    label = tl.load(line + place, mask=place >= 0, other=0.0) * inverse_temperature
    tl.store(out + row, top)
    tl.store(out + rows + row, tl.sum(total * shrink, 0))
    tl.store(out + 2 * rows + row, label)
    tl.store(out + 3 * rows + row, tl.sum((weighted + (peak - top) * total) * shrink, 0))


@triton.jit
def _gradient(logits, places, normalisers, grad, out, columns, inverse_temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < columns
    at = row.to(tl.int64) * columns + column
    p = tl.exp(tl.load(logits + at, mask=here, other=0.0) * inverse_temperature - tl.load(normalisers + row))
    hit = tl.where(column == tl.load(places + row), 1.0, 0.0)
    d = (hit - p) * (tl.load(grad + row) * inverse_temperature)
    tl.store(out + at, d.to(out.dtype.element_ty), mask=here)


def statistics(logits: torch.Tensor, places: torch.Tensor, temperature: float) -> torch.Tensor:
    """float32 [4, C] from logits float32 [C, V] and the labels' columns int64 [C] (-1: none).

    With x = logits / temperature: its peak, the sum of exp(x - peak), x of the label (or 0), the sum of exp(x - peak) (x - peak).
    """
    rows, columns = logits.shape
    out = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    block = min(COLUMNS, triton.next_power_of_2(columns))
    with torch.cuda.device_of(logits):
        _statistics[(rows,)](logits, places, out, rows, columns, 1 / temperature, BLOCK=block, num_warps=WARPS)
    return out


def gradient(logits, places, normalisers, grad, temperature: float, dtype: torch.dtype) -> torch.Tensor:
    """`dtype` [C, V]: the gradient of the logits, given that of the labels' log-probs and x's log-sum-exp, float32 [C]."""
    rows, columns = logits.shape
    out = torch.empty(rows, columns, dtype=dtype, device=logits.device)
    block = min(COLUMNS, triton.next_power_of_2(columns))
    with torch.cuda.device_of(logits):
        _gradient[(rows, triton.cdiv(columns, block))](
            logits, places, normalisers, grad.contiguous(), out, columns, 1 / temperature, BLOCK=block, num_warps=WARPS
        )
    return out
