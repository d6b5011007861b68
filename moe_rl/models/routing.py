"""What the routers of a micro-batch are to choose, and what they chose, on megatron-core's RouterReplay.

A micro-batch's choices travel with its packed sequences into each layer, and into each layer's recomputation: whatever
order the pipeline's schedule runs micro-batches in, a router never meets another one's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplayAction as Action
from torch.nn import functional as F


class Routing:
    """The choices of one micro-batch in one model chunk.

    Attributes:
        target: int16 [T, layers, k], experts by the model's layers, -1 where the router chooses itself; None: everywhere.
        recorded: layer -> int64 [T', k], what its router chose, with `record`.
        replayed: layer -> int64 scalar, for how many tokens its router took the target.
        strangers: layer -> int64 scalar, how many targets of a layer that routes by token id are not of its table.
    """

    def __init__(self, target: torch.Tensor | None, record: bool = False) -> None:
        self.target, self.record = target, record
        self.rows = slice(None)
        self.recorded: dict[int, torch.Tensor] = {}
        self.replayed: dict[int, torch.Tensor] = {}
        self.strangers: dict[int, torch.Tensor] = {}

    def share(self, total: int, rank: int, size: int) -> None:
        """The layers see part `rank` of `size` of a row that is filled up to `total` tokens (sequence parallelism)."""
        if self.target is not None:
            self.target = F.pad(self.target, (0, 0, 0, 0, 0, total - len(self.target)), value=-1)
        self.rows = slice(total // size * rank, total // size * (rank + 1))

    def of(self, layer: int) -> torch.Tensor | None:
        """int64 [T', k] of a layer, for the tokens that it sees."""
        return None if self.target is None else self.target[self.rows, layer].long()


@contextmanager
def routed(router: Any, layer: int, packed: Any, token_ids: torch.Tensor | None = None) -> Iterator[None]:
    """Inside, `router` of the model's `layer` does what the routing of `packed` says; it must be entered anew in a
    recomputation. A router that looks experts up by token id is only compared with it."""
    routing, replay = packed.routing, getattr(router, "router_replay", None)
    if routing is None or replay is None:
        yield
        return
    target = routing.of(layer)
    if getattr(router, "is_hash", False):
        if target is not None:
            own = router.tid2eid[token_ids].sort(-1).values
            differ = (target.sort(-1).values != own).any(-1) & (target >= 0).all(-1)
            routing.strangers[layer] = differ.sum()
        yield
        return
    if target is not None:
        routing.replayed[layer] = (target >= 0).all(-1).sum()
        replay.target_topk_idx = target
        replay.set_router_replay_action(Action.REPLAY_FORWARD)
    elif routing.record:
        replay.set_router_replay_action(Action.RECORD)
    yield
    if routing.record:
        routing.recorded[layer] = replay.get_recorded_indices()
    replay.clear_indices()
    replay.clear_router_replay_action()


def choose(router: Any, scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """int64 [T, k]: the experts of the highest scores [T, E], or those that are replayed."""

    def best(scores: torch.Tensor, k: int, *groups: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = scores.topk(k, dim=-1, sorted=False)
        return values, indices

    replay = router.router_replay
    if replay is None:
        return best(scores, top_k)[1]
    if replay.router_replay_action == Action.REPLAY_FORWARD:
        own, target = best(scores, top_k)[1], replay.target_topk_idx
        replay.target_topk_idx = torch.where(target < 0, own, target)
    return replay.get_replay_topk(scores, top_k, default_compute_topk=best)[1]
