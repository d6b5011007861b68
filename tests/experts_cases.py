"""A rank's experts by the fused operation and by plain PyTorch, against float64.

TRITON_INTERPRET=1 python -m tests.experts_cases     # the kernels, interpreted on a CPU
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from tests.attention_cases import check


def plain(x, probs, counts, limit: float, first, second) -> torch.Tensor:
    """As megatron-core's `SequentialMLP` does it."""
    outs = []
    for a, p, w1, w2 in zip(x.split(counts), probs.split(counts), first, second, strict=True):
        gate, up = (a @ w1.t()).chunk(2, -1)
        active = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        outs.append((active * p[:, None]).to(a.dtype) @ w2.t())
    return torch.cat(outs)


def errors(
    counts: Sequence[int], hidden: int, width: int, dtype=torch.float32, device: str = "cpu"
) -> dict[str, tuple[float, float]]:
    """Of output and gradients: plain's and fused's distance from float64, as shares; many values meet the clamp."""
    from moe_rl.models.deepseek_v4.fused_experts import run

    generator, counts, limit = torch.Generator(device).manual_seed(1), list(counts), 1.0

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    inputs = [normal(sum(counts), hidden).to(dtype), normal(sum(counts)).sigmoid()]
    inputs += [(normal(2 * width, hidden) * hidden**-0.5).to(dtype) for _ in counts]
    inputs += [(normal(hidden, width) * width**-0.5).to(dtype) for _ in counts]
    grad = normal(sum(counts), hidden).to(dtype)

    def results(of, exact: bool) -> list[torch.Tensor]:
        leaves = [(t.double() if exact else t.detach()).requires_grad_() for t in inputs]
        out = of(*leaves[:2], counts, limit, leaves[2 : 2 + len(counts)], leaves[2 + len(counts) :])
        found = torch.autograd.grad(out, leaves, grad.to(out.dtype))
        return [out.detach(), *found[:2], *(torch.stack(found[i : i + len(counts)]) for i in (2, 2 + len(counts)))]

    wanted, slow, fast = results(plain, True), results(plain, False), results(run, False)
    return {
        name: tuple(float((t.double() - w).norm() / w.norm()) for t in pair)  # type: ignore[misc]
        for name, w, *pair in zip(("out", "x", "probs", "fc1", "fc2"), wanted, slow, fast, strict=True)
    }


def main() -> None:
    found = errors((3, 0, 9, 1), 16, 24)
    print(*(f"{name} {slow:.1e} {fast:.1e}" for name, (slow, fast) in found.items()), sep="; ")
    check(found)


if __name__ == "__main__":
    main()
