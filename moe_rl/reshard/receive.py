"""The receiving end of a weight update: copy into the live model, then prove that all of it arrived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from moe_rl.errors import RunFailed
from moe_rl.models.digest import digest_all
from moe_rl.models.weights import dtype_name
from moe_rl.reshard.plan import Held
from moe_rl.reshard.transport import Item, Packet, unpack


class Receiver:
    """Puts packets into the live tensors of one model and keeps the books of each update.

    `version` is that of the last update that was proven whole, or -1: before the first, and from the first packet of
    an update until `finish` has proven it. What serves requests must look at it.
    """

    def __init__(self, views: Mapping[str, torch.Tensor]) -> None:
        """`views`: released name -> view onto the live tensor, the whole of what this receiver holds."""
        self._views = dict(views)
        self._staged: dict[str, Item] = {}
        self._pending: int | None = None
        self._last = -1
        self._proven: set[str] = set()
        self.version = -1

    def holdings(self, receiver: int) -> list[Held]:
        """What this end must be given, read from the live model; `receiver` is its number in the plan."""
        return [Held(receiver, name, tuple(v.shape), dtype_name(v)) for name, v in self._views.items()]

    def stage(self, packet: Packet) -> None:
        """Copy a packet's tensors into the live model. The first packet of a version begins an update.

        Raises:
            RunFailed: the packet is of an older version, or its tensors are unknown, arrived before, or of another
                shape or dtype (all named). Nothing of such a packet is copied, and the update cannot be finished.
        """
        if packet.version <= self._last or (self._pending is not None and packet.version < self._pending):
            newest = max(self._last, self._pending or 0)
            names = ", ".join(item.name for item in packet.items)
            raise self._fail(f"weights of version {packet.version} arrived after version {newest}: {names}")
        if packet.version != self._pending:
            self._staged, self._pending = {}, packet.version
            if self.version == -1:  # an update before this one was begun and never proven
                self._proven.clear()
        self.version = -1
        try:
            tensors = list(unpack(packet))
        except RunFailed as fault:
            raise self._fail(fault.what) from None
        problems = self._problems(packet.items)
        if problems:
            raise self._fail(f"version {packet.version} from rank {packet.source}: {'; '.join(problems)}")
        with torch.no_grad():
            for item, tensor in tensors:
                self._views[item.name].copy_(tensor)
                self._staged[item.name] = item

    def _problems(self, items: Iterable[Item]) -> list[str]:
        problems, seen = [], set(self._staged)
        for item in items:
            view = self._views.get(item.name)
            if view is None:
                problems.append(f"{item.name} is not held here")
            elif item.name in seen:
                problems.append(f"{item.name} arrived twice")
            elif (item.shape, item.dtype) != (tuple(view.shape), dtype_name(view)):
                here = f"{dtype_name(view)} {list(view.shape)}"
                problems.append(f"{item.name} is {item.dtype} {list(item.shape)}, here {here}")
            seen.add(item.name)
        return problems

    def finish(self, version: int, names: Iterable[str]) -> None:
        """Prove update `version` whole: each of `names` arrived once, nothing else did, every bit is in place.

        Digests are recomputed from the live model after the last copy, so a copy that went elsewhere, a view that is
        no view and two names that share memory are seen too. The first update, and the first after a failed one, must
        bring every tensor; a later one may leave out what did not change.

        Raises:
            RunFailed: with every tensor at fault; `version` stays -1 until a later update is proven.
        """
        wanted = set(names)
        problems = []
        if version != self._pending:
            problems.append(f"packets of version {self._pending} were staged")
        problems += _named("never arrived", wanted - self._staged.keys())
        problems += _named("were not in the plan", self._staged.keys() - wanted)
        problems += _named("have not been received since the start or the last fault", self._unproven(wanted))
        live = digest_all({name: self._views[name] for name in self._staged})
        problems += _named(
            "differ from what was sent", [n for n, item in self._staged.items() if live[n] != item.digest]
        )
        if problems:
            raise self._fail(f"weight version {version} is not whole: {'; '.join(problems)}")
        self._proven |= wanted
        self._staged, self._pending = {}, None
        self.version = self._last = version

    def _unproven(self, wanted: set[str]) -> set[str]:
        return self._views.keys() - self._proven - wanted

    def _fail(self, what: str) -> RunFailed:
        """Forget the update, trust no tensor any more, and word the error."""
        self._staged, self._pending, self.version = {}, None, -1
        self._proven.clear()
        return RunFailed(
            "reshard.receive", what, "the rollout would sample from weights that are not the trainer's", "send it again"
        )


def _named(what: str, names: Iterable[str]) -> list[str]:
    names = sorted(names)
    return [f"{len(names)} tensors {what}: {', '.join(names)}"] if names else []
