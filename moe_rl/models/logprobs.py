"""Log-probabilities of labels without ever holding [tokens, vocabulary]: logits by chunks, recomputed in backward."""

from __future__ import annotations

import torch
import torch.distributed as dist


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    return (hidden @ weight.t()).float() / temperature


def _all_reduce(values: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op=op, group=group)
    return values


class LabelLogProbs(torch.autograd.Function):
    """Label log-probs float32 [T] and entropy [T] of softmax(hidden [T, h] @ weight [V, h]^T / temperature).

    Each rank of `group` has rows `first` and on of the weight, as many as it holds; hidden and labels are the same on all
    of them, and so are the results. The gradient of `hidden` is this rank's share, to be summed over the group.

    The entropy carries no gradient (and is empty unless wanted). Backward keeps the weight's gradient in float32
    until all chunks are in, so that it does not depend on the chunk size beyond rounding.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature, chunk, want_entropy, first, group):
        logprobs, normalisers, entropies = [], [], []
        for h, y in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            logits = _logits(h, weight, temperature)
            peak = _all_reduce(logits.amax(-1), dist.ReduceOp.MAX, group)
            place, here = _local(y, first, len(weight))
            label = logits.gather(1, place[:, None]).squeeze(1).masked_fill(~here, 0.0)
            exps = (logits - peak[:, None]).exp_()
            sums = [exps.sum(-1), label]
            if want_entropy:
                sums.append(exps.mul_(logits).sum(-1))
            total, label, *weighted = _all_reduce(torch.stack(sums), dist.ReduceOp.SUM, group)
            z = peak + total.log()
            logprobs.append(label - z)
            normalisers.append(z)
            entropies += [z - w / total for w in weighted]
        ctx.save_for_backward(hidden, weight, labels, torch.cat(normalisers))
        ctx.temperature, ctx.chunk, ctx.first = temperature, chunk, first
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
            h, g = hidden[rows], grad[rows, None] / ctx.temperature
            place, here = _local(labels[rows], ctx.first, len(weight))
            d = _logits(h, weight, ctx.temperature).sub_(normalisers[rows, None]).exp_().mul_(-g)
            d = d.scatter_add_(1, place[:, None], (g * here[:, None]).to(d.dtype)).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = d @ weight
            if grad_weight is not None:
                grad_weight += d.t() @ h
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _local(labels: torch.Tensor, first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each label's row in this rank's share of the vocabulary (0 where it has none), and whether it has one."""
    here = (labels >= first) & (labels < first + rows)
    return (labels - first).masked_fill(~here, 0), here


def label_logprobs(
    hidden, weight, labels, temperature: float, chunk: int, entropy: bool, first: int = 0, group=None
) -> torch.Tensor:
    """Natural-log probabilities of `labels` [T] under softmax(hidden @ weight^T / temperature).

    With `group` the vocabulary is split over its ranks, this one has rows `first` and on; see `LabelLogProbs`.

    Returns:
        float32 [1, T]; with `entropy` float32 [2, T], row 1 the entropy in nats of the same distribution, detached.
    """
    logp, h = LabelLogProbs.apply(hidden, weight, labels, temperature, chunk, entropy, first, group)
    return torch.stack((logp, h)) if entropy else logp[None]
