"""Runtime patches of megatron-core on all ranks alike, before the optimizer is built."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

import moe_patches
from moe_rl.errors import RunFailed


def apply_patches(disable: Sequence[str]) -> dict[str, str]:
    """Apply the ledger but for `disable` (`patches.disable`); name -> state on this rank. All ranks call.

    Raises:
        RunFailed: the ranks disagree on the state of a patch: they would train by different rules.
    """
    mine = {
        s.name: s.state if s.state != "target missing" else f"{s.state} ({s.note})" for s in moe_patches.apply(disable)
    }
    ranks: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    differ = []
    for name in sorted({name for states in ranks for name in states}):
        places: dict[str, list[int]] = {}
        for rank, states in enumerate(ranks):
            places.setdefault(states.get(name, "unknown"), []).append(rank)
        if len(places) > 1:
            differ.append(f"{name}: " + ", ".join(f"{state} on rank(s) {where}" for state, where in places.items()))
    if differ:
        raise RunFailed(
            "patches.disagree",
            "the trainer ranks disagree on runtime patches: " + "; ".join(differ),
            "They have different versions of megatron-core or moe_patches, or were told to leave out different patches.",
            "Install the same versions on all machines; leave patches out by patches.disable alone.",
        )
    return mine
