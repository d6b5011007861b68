"""Packets over a process group: NCCL between GPUs, gloo between CPUs. What the two have alike is all of the code.

Both ends read from the plan which bytes lie where (`loads`), so nothing but buffers travels; the digests of a packet's items
are its tail. A rank goes through its bundles in the order of their rounds and never has more than one packet on its way out
and one in while the next is being encoded: two buffers a direction, each of at most one packet. Packet j of round k waits for
none but packets that come before it in (k, j), at any rank, so ranks cannot wait for each other in a circle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from moe_rl.reshard.plan import Bundle
from moe_rl.reshard.transport import PACKET_BYTES, Item, Load, Packet, loads

PEERS = 8  # receivers that a packet is on its way to at a time
DIGEST = 8  # bytes


def make_group(address: str, rank: int, size: int, *, backend: str, timeout_s: float = 600.0) -> dist.ProcessGroup:
    """A group of its own, beside whatever default group the process has; all its ranks call. `address` is host:port, where
    rank 0 listens; `backend` is "nccl" (on the process's current GPU) or "gloo".

    The first call through a NCCL communicator needs all its ranks, so one is made here.
    """
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), size, rank == 0, timeout=timedelta(seconds=timeout_s))
    store = dist.PrefixStore("moe_rl.reshard", store)
    group = dist.ProcessGroup(store, rank, size)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        made: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        device, kind = torch.device("cuda", torch.cuda.current_device()), dist.ProcessGroup.BackendType.NCCL
    else:
        made = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        device, kind = torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device(device.type), kind, made)
    group.allreduce([torch.zeros(1, device=device)]).wait()
    return group


@dataclass(frozen=True)
class Members:
    """Who is who in the group: trainer rank s is rank `sources[s]` of it, receiver r rank `receivers[r]`. One rank may be
    both: where trainer and rollout share GPUs, a trainer rank receives for the rollout beside it."""

    sources: Sequence[int]
    receivers: Sequence[int]


class Exchange:
    """One rank's part in every update of a plan."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        members: Members,
        bundles: Sequence[Bundle],
        *,
        device: torch.device | str = "cpu",
        limit: int = PACKET_BYTES,
        peers: int = PEERS,
        allocate: Callable[[int, torch.device], torch.Tensor] | None = None,
    ) -> None:
        """Allocate the buffers; `bundles` are all of the plan's (see `in_bundles`), in order. `allocate(nbytes, device)` makes
        a buffer, as `handover.shared_buffer` does for packets that go on to another process."""
        self._group, self._members, self._peers, self._limit = group, members, peers, limit
        self._me, self._device, self._turn = group.rank(), torch.device(device), 0
        steps: dict[int, tuple[Bundle | None, Bundle | None]] = {}
        for bundle in bundles:
            out, into = steps.get(bundle.round, (None, None))
            if members.sources[bundle.source] == self._me:
                out = bundle
            if any(members.receivers[r] == self._me for r in bundle.receivers):
                into = bundle
            if out or into:
                steps[bundle.round] = out, into
        self._steps = [steps[k] for k in sorted(steps)]
        self._allocate = allocate or (lambda nbytes, device: torch.empty(nbytes, dtype=torch.uint8, device=device))
        self._out = self._buffers([out for out, _ in self._steps])
        self._in = self._buffers([into for out, into in self._steps if into is not out])

    def _buffers(self, bundles: Sequence[Bundle | None]) -> list[torch.Tensor]:
        sizes = [load.nbytes + DIGEST * load.tensors for b in bundles if b for load in loads(b.cargo, self._limit)]
        most = max(sizes, default=0)
        return [self._allocate(most, self._device) for _ in range(2 if most else 0)]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All buffers that this rank keeps for packets, uint8."""
        return [*self._out, *self._in]

    def run(self, version: int, packets: Callable[..., Iterator[Packet]] | None = None) -> Iterator[Packet]:
        """Send what this rank has to and yield what comes for it. All ranks call, and take every packet that they are given.

        Args:
            version: of the weights.
            packets: called with a bundle's boxes, forms by name and the keywords `limit` and `buffer` of `pack`.

        A packet lies in a buffer that is used again once the next one is asked for.
        """
        on_their_way: deque[tuple[list[Any], Packet | None, Bundle | None, Load | None, torch.Tensor | None]] = deque()
        self._turn = 0
        for out, into in self._steps:
            local = into if into is out else None
            made = self._made(out, packets) if out else iter(())
            due = loads(into.cargo, self._limit) if into and not local else iter(())
            for packet, load in zip_longest(made, due):
                works: list[Any] = []
                slot: torch.Tensor | None = None
                operations: list[tuple[bool, torch.Tensor, int]] = []
                if load is not None and into is not None:
                    slot = self._in[self._turn % 2]
                    whole = slot[: load.nbytes + DIGEST * load.tensors]
                    operations.append((False, whole, self._members.sources[into.source]))
                if packet is not None and out is not None:
                    whole = self._with_digests(packet, self._out[self._turn % 2])
                    ranks = [self._members.receivers[r] for r in out.receivers]
                    operations += [(True, whole, rank) for rank in ranks if rank != self._me]
                for first in range(0, len(operations), self._peers):
                    if first:
                        self._wait(works)
                    works += self._post(operations[first : first + self._peers])
                on_their_way.append((works, packet if local else None, into, load, slot))
                self._turn += 1
                if len(on_their_way) == 2:
                    yield from self._arrived(version, *on_their_way.popleft())
        while on_their_way:
            yield from self._arrived(version, *on_their_way.popleft())

    def _made(self, bundle: Bundle, packets: Any) -> Iterator[Packet]:
        boxes, forms = [c.box for c in bundle.cargo], {c.box.name: c.form for c in bundle.cargo}
        return packets(boxes, forms, limit=self._limit, buffer=lambda nbytes: self._out[self._turn % 2][:nbytes])

    @staticmethod
    def _with_digests(packet: Packet, slot: torch.Tensor) -> torch.Tensor:
        """The packet with its digests behind it, as bytes of the buffer that it was made in."""
        start, count = packet.buffer.numel(), len(packet.items)
        whole = slot[: start + DIGEST * count]
        signed = [d - (1 << 64) if d >> 63 else d for d in (item.digest for item in packet.items)]
        whole[start:].view(torch.int64).copy_(torch.tensor(signed, dtype=torch.int64))
        return whole

    def _post(self, operations: Sequence[tuple[bool, torch.Tensor, int]]) -> list[Any]:
        """Begin transfers together; what to wait for."""
        group = self._group
        fused = group._get_backend(self._device).supports_coalescing
        if fused:  # NCCL makes one kernel of them
            group._start_coalescing(self._device)
        works = [(group.send if out else group.recv)([tensor], rank, 0) for out, tensor, rank in operations]
        return [group._end_coalescing(self._device)] if fused else works

    @staticmethod
    def _wait(works: list[Any]) -> None:
        for work in works:
            work.wait()  # NCCL's makes the current stream wait, not the host
        works.clear()

    def _arrived(
        self,
        version: int,
        works: list[Any],
        local: Packet | None,
        bundle: Bundle | None,
        load: Load | None,
        slot: torch.Tensor | None,
    ) -> Iterator[Packet]:
        self._wait(works)
        if local is not None:
            yield local
        if load is not None and bundle is not None and slot is not None:
            tail = slot[load.nbytes : load.nbytes + DIGEST * load.tensors].view(torch.int64).tolist()
            flat = [place for places in load.places for place in places]
            items = tuple(
                Item(t.box.name, t.dtype, t.box.extent, offset, t.nbytes, digest % (1 << 64), t.box.start)
                for (t, offset), digest in zip(flat, tail, strict=True)
            )
            yield Packet(version, bundle.source, items, slot[: load.nbytes])
