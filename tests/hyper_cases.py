"""Hyper-connections and RMSNorm by the fused kernels and by plain PyTorch, against float64.

TRITON_INTERPRET=1 python -m tests.hyper_cases     # the kernels, interpreted on a CPU
"""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from moe_rl.models.deepseek_v4.hyper import HyperConnection
from moe_rl.models.deepseek_v4.layers import RMSNorm
from tests.attention_cases import check
from tests.tiny_v4 import tiny_config


class Float64(HyperConnection):
    """The plain one, whose rounding to float32 is taken out."""

    def forward(self, streams):
        flat = streams.flatten(-2)
        mixed = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.arch.norm_eps) @ self.fn.t()
        pre, post, comb = self._weights(mixed, balanced_exactly)
        return (pre.unsqueeze(-1) * streams).sum(-2), post, comb


def balanced_exactly(matrix: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    for i in range(2 * iterations - 1):
        matrix = matrix / (matrix.sum(-2 + i % 2, keepdim=True) + eps)
    return matrix


def errors(tokens: int, width: int, dtype=torch.float32, device: str = "cpu") -> dict[str, tuple[float, float]]:
    """Of a collapse and a rejoin with a block between them: plain's and fused's distance from float64, as shares."""
    arch = replace(DeepseekV4Arch.from_dict(tiny_config()), hidden_size=width)
    generator = torch.Generator(device).manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    # Norms that differ from token to token, and weights that move the mix well away from its middle.
    streams = (normal(tokens, 4, width) * normal(tokens, 1, 1).exp()).to(dtype)
    weights = [normal(24, 4 * width) * width**-0.5, normal(24), 1 + 0.3 * normal(3)]
    grad = normal(tokens, 4, width).to(dtype)

    def results(kind: type, backend: str, cast: torch.dtype) -> list[torch.Tensor]:
        module = kind(arch, torch.device(device), backend)
        exact = cast == torch.float64
        for p, value in zip((module.fn, module.base, module.scale), weights, strict=True):
            p.data = value.double() if exact else value.clone()
        x = streams.to(cast).requires_grad_()
        collapsed, post, comb = module(x)
        out = module.rejoin(x, collapsed * 0.5, post, comb)
        leaves = (x, module.fn, module.base, module.scale)
        return [collapsed.detach(), out.detach(), *torch.autograd.grad(out, leaves, grad.to(cast))]

    wanted = results(Float64, "plain", torch.float64)
    slow, fast = (results(HyperConnection, backend, dtype) for backend in ("plain", "triton"))
    names = ("collapsed", "streams", "grad of streams", "fn", "base", "scale")
    return {
        name: tuple(float((t.double() - w).norm() / w.norm()) for t in pair)  # type: ignore[misc]
        for name, w, *pair in zip(names, wanted, slow, fast, strict=True)
    }


def norm_errors(rows: int, width: int, dtype=torch.float32, device: str = "cpu") -> dict[str, tuple[float, float]]:
    """Of RMSNorm's output and gradients: plain's and fused's distance from float64, as shares."""
    generator = torch.Generator(device).manual_seed(rows)
    x, grad = torch.randn(2, rows, width, generator=generator, device=device).mul(3).to(dtype)
    weight = (1 + 0.3 * torch.randn(width, generator=generator, device=device)).to(dtype)

    def results(norm) -> list[torch.Tensor]:
        a = x.clone().requires_grad_()
        out = norm(a)
        return [out.detach(), *torch.autograd.grad(out, (a, norm.weight), grad)]

    def norm(backend: str) -> RMSNorm:
        made = RMSNorm(width, 1e-6, dtype, torch.device(device), backend)
        made.weight.data.copy_(weight)
        return made

    a, w = x.double().requires_grad_(), weight.double().requires_grad_()
    out = w * a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1e-6)
    wanted = [out.detach(), *torch.autograd.grad(out, (a, w), grad.double())]
    pairs = zip(("norm", "x", "weight"), wanted, results(norm("plain")), results(norm("triton")), strict=True)
    return {
        name: tuple(float((t.double() - right).norm() / right.norm()) for t in pair)  # type: ignore[misc]
        for name, right, *pair in pairs
    }


def main() -> None:
    for of, rows, width in ((errors, 5, 32), (errors, 37, 80), (norm_errors, 300, 24)):
        found = of(rows, width)
        print(*(f"{name} {slow:.1e} {fast:.1e}" for name, (slow, fast) in found.items()), sep="; ")
        check(found)


if __name__ == "__main__":
    main()
