"""Log-probabilities of labels without ever holding [tokens, vocabulary]: logits by chunks, recomputed in backward."""

from __future__ import annotations

import torch


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    return (hidden @ weight.t()).float() / temperature


class LabelLogProbs(torch.autograd.Function):
    """Label log-probs float32 [T] and entropy [T] of softmax(hidden [T, h] @ weight [V, h]^T / temperature).

    The entropy carries no gradient (and is empty unless wanted). Backward keeps the weight's gradient in float32
    until all chunks are in, so that it does not depend on the chunk size beyond rounding.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature, chunk, want_entropy):
        logprobs, normalisers, entropies = [], [], []
        for h, y in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            logits = _logits(h, weight, temperature)
            z = logits.logsumexp(-1)
            logprobs.append(logits.gather(1, y[:, None]).squeeze(1) - z)
            normalisers.append(z)
            if want_entropy:
                p = (logits - z[:, None]).exp_()
                entropies.append(z - p.mul_(logits).sum(-1))
        ctx.save_for_backward(hidden, weight, labels, torch.cat(normalisers))
        ctx.temperature, ctx.chunk = temperature, chunk
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
            h, y, g = hidden[rows], labels[rows, None], grad[rows, None] / ctx.temperature
            d = _logits(h, weight, ctx.temperature).sub_(normalisers[rows, None]).exp_().mul_(-g)
            d = d.scatter_add_(1, y, g.to(d.dtype)).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = d @ weight
            if grad_weight is not None:
                grad_weight += d.t() @ h
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def label_logprobs(hidden, weight, labels, temperature: float, chunk: int, entropy: bool) -> torch.Tensor:
    """Natural-log probabilities of `labels` [T] under softmax(hidden @ weight^T / temperature).

    Returns:
        float32 [1, T]; with `entropy` float32 [2, T], row 1 the entropy in nats of the same distribution, detached.
    """
    logp, h = LabelLogProbs.apply(hidden, weight, labels, temperature, chunk, entropy)
    return torch.stack((logp, h)) if entropy else logp[None]
