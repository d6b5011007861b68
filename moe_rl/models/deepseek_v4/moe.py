"""Mixture of experts on megatron-core's layer: a router that looks experts up by token id or scores them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch.nn import functional as F

from moe_rl.models.chunk import build_device
from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from moe_rl.models.routing import choose


def route(
    logits: torch.Tensor, scale: float, chosen: torch.Tensor | Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert weights from router logits float32 [T, E].

    score = sqrt(softplus(logit)); the experts are `chosen` int64 [T, k], or what it makes of the scores [T, E]; weight =
    scale * score / (sum of the chosen scores + 1e-20).

    Returns:
        probs float32 [T, E] (0 where not chosen) and the bool map [T, E] of the choice.
    """
    scores = F.softplus(logits).sqrt()
    if not isinstance(chosen, torch.Tensor):
        chosen = chosen(scores.detach())
    weights = scores.gather(1, chosen)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale
    probs = torch.zeros_like(scores).scatter(1, chosen, weights)
    return probs, torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)


class Float32Linear(torch.autograd.Function):
    """x [..., h] times weight [E, h] transposed, all in float32 -> [..., E]; it keeps its inputs as they came."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float())

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2).float()
        return (grad @ weight.float()).to(x.dtype), grad_weight.to(weight.dtype)


class Router(TopKRouter):
    """Chooses experts by table (buffer `tid2eid` int64 [vocab, k]) or score (buffer `expert_bias` float32 [E])."""

    def __init__(self, config, pg_collection=None, is_mtp_layer=False, *, is_hash: bool) -> None:
        super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        arch: DeepseekV4Arch = config.arch
        device = build_device(config)
        # megatron-core's gradient finalisation looks for the attribute itself, so a hash router must not have it.
        del self.expert_bias, self.local_tokens_per_expert
        self.is_hash = is_hash
        self.weight.data = self.weight.data.to(device)
        if is_hash:
            table = torch.zeros(arch.vocab_size, arch.top_k, dtype=torch.int64, device=device)
            self.register_buffer("tid2eid", table)
        else:
            self.register_buffer("expert_bias", torch.zeros(arch.num_experts, dtype=torch.float32, device=device))

    def forward(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [T, 1, h], token_ids [T] -> probs float32 [T, E], map bool [T, E]."""
        arch = self.config.arch
        # Not megatron-core's router_gating_linear: where Transformer Engine is installed it runs on GPUs alone.
        logits = Float32Linear.apply(hidden, self.weight).view(-1, arch.num_experts)
        if self.is_hash:
            return route(logits, arch.routed_scaling_factor, self.tid2eid[token_ids])
        # The bias only chooses
        return route(logits, arch.routed_scaling_factor, lambda s: choose(self, s + self.expert_bias, arch.top_k))


class MixtureOfExperts(MoELayer):
    """megatron-core's layer with a forward that hands the token ids to the router (the stock one has no way)."""

    def forward(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """hidden [T, 1, h], token_ids [T] -> [T, 1, h], the shared expert included."""
        shared = self.shared_experts_compute(hidden)
        probs, routing_map = self.router(hidden, token_ids)
        out, probs = self.preprocess(hidden, probs, routing_map)
        out, probs = self.dispatch(out, probs)
        out, _ = self.routed_experts_compute(out, probs)
        return self.postprocess(self.combine(out), shared)


def _experts(config) -> tuple[Any, Any]:
    """The classes of the routed experts and of the shared one."""
    if config.attention_backend != "triton":
        return SequentialMLP, SharedExpertMLP
    from moe_rl.models.deepseek_v4.fused_experts import FusedExperts, FusedSharedExpert

    return FusedExperts, FusedSharedExpert


def build_moe(config, layer: int, pg_collection) -> MixtureOfExperts:
    """The experts of decoder layer `layer` (0-based, global)."""
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts, shared = _experts(config)
    parts = MoESubmodules(
        experts=partial(experts, submodules=mlp),
        shared_experts=partial(shared, submodules=mlp),
        router=partial(Router, is_hash=config.arch.is_hash(layer)),
    )
    moe = MixtureOfExperts(config, parts, layer_number=layer + 1, pg_collection=pg_collection)
    moe.set_layer_number(layer + 1)
    return moe
