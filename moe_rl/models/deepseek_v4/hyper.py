"""Manifold-constrained hyper-connections: n residual streams, mixed by a doubly stochastic matrix. All in float32."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from moe_rl.models.deepseek_v4.layers import parameter, unit_rms


def sinkhorn(matrix: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Bring positive [..., n, n] towards unit row and column sums; a column step first, then `iterations` - 1 pairs."""
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


class HyperConnection(nn.Module):
    """Computes, per token, how the streams collapse to a block's input and how its output rejoins them.

    `backend` "triton" runs the kernels of `fused_hyper`; "plain", their reference, is PyTorch alone.
    """

    def __init__(self, arch: DeepseekV4Arch, device: torch.device, backend: str = "plain") -> None:
        super().__init__()
        self.arch, self.backend = arch, backend
        kept = {"dtype": torch.float32, "device": device, "keep_fp32": True}
        self.fn = parameter(arch.hc_mix, arch.hc_mult * arch.hidden_size, **kept)
        self.base = parameter(arch.hc_mix, **kept)
        self.scale = parameter(3, **kept)

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """streams [T, n, h] -> block input [T, h] (dtype of streams), post [T, n] and comb [T, n, n] (float32)."""
        if self.backend == "triton":
            from moe_rl.models.deepseek_v4.fused_hyper import Mix, Sinkhorn, Weigh

            mixed = Mix.apply(streams.flatten(-2), self.fn, self.arch.norm_eps)
            pre, post, comb = self._weights(mixed, Sinkhorn.apply)
            return Weigh.apply(streams, pre), post, comb
        mixed = F.linear(unit_rms(streams.flatten(-2).float(), self.arch.norm_eps), self.fn)
        pre, post, comb = self._weights(mixed, sinkhorn)
        return (pre.unsqueeze(-1) * streams).sum(-2).to(streams.dtype), post, comb

    def _weights(self, mixed: torch.Tensor, balanced) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """pre [T, n], post [T, n] and comb [T, n, n] from the mix [T, 2n + n * n]; `balanced` is Sinkhorn's iteration."""
        n, eps = self.arch.hc_mult, self.arch.hc_eps
        sizes = [n, n, n * n]
        pre, post, comb = (
            w * s + b
            for w, s, b in zip(mixed.split(sizes, -1), self.scale.unbind(), self.base.split(sizes), strict=True)
        )
        pre = torch.sigmoid(pre) + eps
        comb = balanced(torch.softmax(comb.unflatten(-1, (n, n)), -1) + eps, self.arch.hc_sinkhorn_iters, eps)
        return pre, 2 * torch.sigmoid(post), comb

    def rejoin(self, streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        """New streams [T, n, h]: stream k gets post[k] * out + sum over j of comb[j, k] * streams[j]."""
        if self.backend == "triton":
            from moe_rl.models.deepseek_v4.fused_hyper import Rejoin

            return Rejoin.apply(streams, out, post, comb)
        dtype = streams.dtype
        return post.to(dtype).unsqueeze(-1) * out.unsqueeze(-2) + comb.to(dtype).transpose(-1, -2) @ streams


class HyperHead(nn.Module):
    """Collapses the streams of the last layer, [T, n, h] -> [T, h]."""

    def __init__(self, arch: DeepseekV4Arch, device: torch.device) -> None:
        super().__init__()
        self.arch = arch
        kept = {"dtype": torch.float32, "device": device, "keep_fp32": True}
        self.hc_fn = parameter(arch.hc_mult, arch.hc_mult * arch.hidden_size, **kept)
        self.hc_base = parameter(arch.hc_mult, **kept)
        self.hc_scale = parameter(1, **kept)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        mixed = F.linear(unit_rms(streams.flatten(-2).float(), self.arch.norm_eps), self.hc_fn)
        pre = torch.sigmoid(mixed * self.hc_scale + self.hc_base) + self.arch.hc_eps
        return (pre.unsqueeze(-1) * streams).sum(-2).to(streams.dtype)
