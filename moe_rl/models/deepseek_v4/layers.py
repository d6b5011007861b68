"""Small parameter holders: each builds its weight in its final dtype on its final device, uninitialised."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def parameter(*shape: int, dtype: torch.dtype, device: torch.device, keep_fp32: bool = False) -> nn.Parameter:
    """An uninitialised parameter; `keep_fp32` makes it float32 whatever `dtype` says and marks it so."""
    weight = nn.Parameter(torch.empty(shape, dtype=torch.float32 if keep_fp32 else dtype, device=device))
    if keep_fp32:
        weight.keep_fp32 = True
    return weight


class RMSNorm(nn.Module):
    """y = weight * x / rms(x) over the last axis; float32 inside, the product with the weight in the dtype of x.

    `backend` "triton" runs the kernel of `fused_norm`; "plain", its reference, is PyTorch alone.
    """

    def __init__(
        self, width: int, eps: float, dtype: torch.dtype, device: torch.device, backend: str = "plain"
    ) -> None:
        super().__init__()
        self.eps, self.backend = eps, backend
        self.weight = parameter(width, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.backend == "triton":
            from moe_rl.models.deepseek_v4.fused_norm import Norm

            return Norm.apply(x, self.weight, self.eps)
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) over the last axis, without a weight; the mean in float32, the product in the dtype of x."""
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)


class Projection(nn.Module):
    """y = x W^T without a bias; weight [out, in]."""

    def __init__(self, width_in: int, width_out: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(width_out, width_in, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class GroupedProjection(nn.Module):
    """Block-diagonal projection: group g of the input meets its own rows of the weight.

    x [T, groups * width] -> [T, groups * rank]; weight [groups * rank, width].
    """

    def __init__(self, groups: int, width: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.groups = groups
        self.weight = parameter(groups * rank, width, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = self.weight.unflatten(0, (self.groups, -1))
        out = torch.bmm(x.unflatten(-1, (self.groups, -1)).transpose(0, 1), blocks.transpose(1, 2))
        return out.transpose(0, 1).flatten(1)
