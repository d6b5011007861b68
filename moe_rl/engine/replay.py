"""Router replay: an update takes the experts that its tokens took before, in the trainer's own log-probs (R2) or in the
rollout (R3, arXiv 2510.11370), and it is counted that all of them were taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from moe_rl.engine.batch import MicroBatch
from moe_rl.engine.parallel import Parallel
from moe_rl.errors import RunFailed
from moe_rl.models.routing import Routing


def packed_routes(routes: Sequence[np.ndarray | None], lengths: Sequence[int], arch: Any) -> torch.Tensor:
    """int16 [T, layers, k]: the experts of each position of a micro-batch, -1 where none are given.

    Args:
        routes: integers [L-1, layers, k] of each sequence of L tokens, or None; the last token has none.

    Raises:
        RunFailed: an array of another shape, or with what is no expert of the model.
    """
    whole = np.full((sum(lengths), arch.num_layers, arch.top_k), -1, np.int16)
    start = 0
    for length, route in zip(lengths, routes, strict=True):
        if route is not None:
            wanted = (length - 1, arch.num_layers, arch.top_k)
            if route.shape != wanted:
                what = f"the experts of a sequence have shape {route.shape}, not {wanted}"
                raise RunFailed("replay.shape", what, "They are (tokens less the last, layers, experts per token).")
            if route.size and not -1 <= int(route.min()) <= int(route.max()) < arch.num_experts:
                what = f"experts {int(route.min())} to {int(route.max())} of a model with {arch.num_experts}"
                raise RunFailed("replay.experts", what, "The rollout runs another model, or another dtype was read.")
            whole[start : start + length - 1] = route
        start += length
    return torch.from_numpy(whole)


class Replay:
    """One pass over micro-batches in which routers replay or record."""

    def __init__(self, arch: Any, record: bool = False) -> None:
        self.arch, self.record = arch, record
        self.passed: list[tuple[MicroBatch, Routing, list[int]]] = []

    def routing(self, micro_batch: MicroBatch, chunk: nn.Module) -> Routing:
        """What goes along with a micro-batch through a chunk."""
        routing = Routing(micro_batch.routes, self.record)
        self.passed.append((micro_batch, routing, _scored_layers(chunk)))
        return routing

    def coverage(self, parallel: Parallel) -> float:
        """The share of the given choices that routers took, of all ranks; all must call.

        Raises:
            RunFailed: it is not 1, or a layer that routes by token id was given others than its table has.
        """
        total = torch.zeros(3, dtype=torch.float64, device=parallel.device)
        for m, routing, layers in self.passed:
            total[0] += sum(routing.replayed.values())
            total[1] += sum(routing.strangers.values())
            if m.routes is not None:  # tensor-parallel ranks share the tokens of a layer
                total[2] += len(layers) / parallel.tp * (m.routes >= 0).all(-1).any(-1).sum()
        dist.all_reduce(total)
        taken, strangers, wanted = total.tolist()
        if strangers:
            raise RunFailed(
                "replay.hash",
                f"{strangers:.0f} tokens took other experts in a hash-routed layer than its table tid2eid names",
                "The rollout holds another table, or its layers are counted from another one.",
                "Compare the two sides' tid2eid; or rollout.router_replay=none.",
            )
        if taken != wanted or not wanted:
            raise RunFailed(
                "replay.coverage",
                f"{taken:.0f} of {wanted:.0f} choices of experts were replayed",
                "A layer's router did not take them, or tokens came without.",
                "rollout.router_replay=none trains without replay.",
            )
        return taken / wanted

    def recorded(self, parallel: Parallel) -> dict[int, np.ndarray]:
        """Sequence id -> int16 [L-1, layers, k], -1 for the layers of other ranks; tensor-parallel ranks must all call."""
        found: dict[int, np.ndarray] = {}
        for m, routing, _ in self.passed:
            whole = np.full((len(m.tokens), self.arch.num_layers, self.arch.top_k), -1, np.int16)
            for layer, indices in sorted(routing.recorded.items()):
                if parallel.tp > 1:
                    parts = [torch.empty_like(indices) for _ in range(parallel.tp)]
                    dist.all_gather(parts, indices.contiguous(), group=parallel.groups.tp)
                    indices = torch.cat(parts)
                whole[:, layer] = indices[: len(m.tokens)].cpu().numpy()
            ends = np.cumsum(m.lengths)
            for i, end, length in zip(m.ids, ends, m.lengths, strict=True):
                found[i] = (
                    np.maximum(found[i], whole[end - length : end - 1]) if i in found else whole[end - length : end - 1]
                )
        return found


def _scored_layers(chunk: nn.Module) -> list[int]:
    """The model's layers in a chunk whose router chooses by score."""
    routers = (m for m in chunk.modules() if isinstance(m, TopKRouter))
    return [router.layer_number - 1 for router in routers if not getattr(router, "is_hash", False)]
