"""Log-probabilities of labels without ever holding [tokens, vocabulary]: logits by chunks, recomputed in backward."""

from __future__ import annotations

import torch
import torch.distributed as dist


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 [C, V]; on a GPU bf16 products are summed and kept in float32."""
    if hidden.is_cuda and hidden.dtype == torch.bfloat16:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return (hidden @ weight.t()).float()


def _all_reduce(values: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op=op, group=group)
    return values


def _chunk_sums(logits, place, here, temperature: float, group, fused: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of x = logits / temperature: its peak [C], and over all ranks the sums of exp(x - peak), of the label's x, and of
    exp(x - peak) (x - peak), [3, C]."""
    if fused:
        from moe_rl.models.fused_logprobs import statistics

        own, *sums = statistics(logits, place.where(here, -1), temperature)
        peak = _all_reduce(own.clone(), dist.ReduceOp.MAX, group)
        shrink = torch.exp(own - peak)
        total, label, weighted = sums
        sums = [total * shrink, label, (weighted + (own - peak) * total) * shrink]
    else:
        logits = logits.div_(temperature)
        peak = _all_reduce(logits.amax(-1), dist.ReduceOp.MAX, group)
        label = logits.gather(1, place[:, None]).squeeze(1).masked_fill(~here, 0.0)
        exps = logits.sub_(peak[:, None]).exp()
        sums = [exps.sum(-1), label, exps.mul_(logits).sum(-1)]
    return peak, _all_reduce(torch.stack(sums), dist.ReduceOp.SUM, group)


def _logit_grad(logits, place, here, normalisers, grad, temperature: float, dtype, fused: bool) -> torch.Tensor:
    """Gradient of the logits [C, V] in `dtype`, from that of the labels' log-probs [C]."""
    if fused:
        from moe_rl.models.fused_logprobs import gradient

        return gradient(logits, place.where(here, -1), normalisers, grad, temperature, dtype)
    g = grad[:, None] / temperature
    d = logits.div_(temperature).sub_(normalisers[:, None]).exp_().mul_(-g)
    return d.scatter_add_(1, place[:, None], (g * here[:, None]).to(d.dtype)).to(dtype)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, in float32."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


class LabelLogProbs(torch.autograd.Function):
    """Label log-probs float32 [T] and entropy [T] of softmax(hidden [T, h] @ weight [V, h]^T / temperature).

    Each rank of `group` has rows `first` and on of the weight, as many as it holds; hidden and labels are the same on all
    of them, and so are the results. The gradient of `hidden` is this rank's share, to be summed over the group.

    The entropy carries no gradient (and is empty unless wanted). Backward keeps the weight's gradient in float32
    until all chunks are in, so that it does not depend on the chunk size beyond rounding.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature, chunk, want_entropy, first, group, fused):
        logprobs, normalisers, entropies = [], [], []
        for h, y in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            place, here = _local(y, first, len(weight))
            peak, sums = _chunk_sums(_logits(h, weight), place, here, temperature, group, fused)
            total, label, weighted = sums
            normalisers.append(peak + total.log())
            logprobs.append(label - normalisers[-1])
            entropies.append(total.log() - weighted / total)
        ctx.save_for_backward(hidden, weight, labels, torch.cat(normalisers))
        ctx.temperature, ctx.chunk, ctx.first, ctx.fused = temperature, chunk, first, fused
        entropy = torch.cat(entropies) if want_entropy else logprobs[0].new_empty(0)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, labels, normalisers = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            h, (place, here) = hidden[rows], _local(labels[rows], ctx.first, len(weight))
            logits = _logits(h, weight)
            d = _logit_grad(
                logits, place, here, normalisers[rows], grad[rows], ctx.temperature, weight.dtype, ctx.fused
            )
            del logits
            if grad_hidden is not None:
                grad_hidden[rows] = d @ weight
            if grad_weight is not None:
                _add_product(grad_weight, d.t(), h)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None, None


def _local(labels: torch.Tensor, first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each label's row in this rank's share of the vocabulary (0 where it has none), and whether it has one."""
    here = (labels >= first) & (labels < first + rows)
    return (labels - first).masked_fill(~here, 0), here


def label_logprobs(
    hidden,
    weight,
    labels,
    temperature: float,
    chunk: int,
    entropy: bool,
    first: int = 0,
    group=None,
    fused: bool | None = None,
) -> torch.Tensor:
    """Natural-log probabilities of `labels` [T] under softmax(hidden @ weight^T / temperature).

    With `group` the vocabulary is split over its ranks, this one has rows `first` and on; see `LabelLogProbs`.
    `fused` reads each chunk of logits once, by the kernels of `fused_logprobs`; by default on a GPU in bf16.

    Returns:
        float32 [1, T]; with `entropy` float32 [2, T], row 1 the entropy in nats of the same distribution, detached.
    """
    if fused is None:
        fused = hidden.is_cuda and hidden.dtype == torch.bfloat16
    logp, h = LabelLogProbs.apply(hidden, weight, labels, temperature, chunk, entropy, first, group, fused)
    return torch.stack((logp, h)) if entropy else logp[None]
