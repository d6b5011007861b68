"""Seconds of a weight update on one device, by part: ours, and the whole quantised checkpoint streamed to each receiver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from moe_rl.config.host import resolve_device
from moe_rl.engine.memory import Peak
from moe_rl.models.family import get_family, read_config, read_facts
from moe_rl.models.weights import DTYPES, Part, WeightTable, whole_parts
from moe_rl.models.wire import Wire
from moe_rl.reshard.plan import Held, Owned, in_bundles, make_plan, shares
from moe_rl.reshard.receive import Receiver, place, placed_parts
from moe_rl.reshard.transport import PACKET_BYTES, Packet, pack

SHARES = (1, 8, 64)  # receivers hold one of so many parts of the experts, and all else
RATE_COPIES = 5


class _Clock:
    """Seconds by part; waits for the device at each change."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.seconds = device, {"encode": 0.0, "transfer": 0.0, "repack": 0.0}

    def time(self, part: str, work: Callable[[], Any]) -> Any:
        start = self._now()
        result = work()
        self.seconds[part] += self._now() - start
        return result

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def measure(path: str, device: str = "auto", limit: int = PACKET_BYTES) -> Iterator[dict[str, Any]]:
    """One row after the other for the model of `path`/config.json with random bf16 weights: for each of `SHARES` that the
    number of experts allows, ours and the whole checkpoint streamed. One process is source and receiver, so that the path is
    a copy inside the device (on a CPU a copy in memory); its own rate is measured on packets of the same size.
    """
    where = torch.device(resolve_device(device))
    family = get_family(read_facts(path).family)
    table, wire = family.weight_table(family.read_arch(path)), Wire.released(read_config(path))
    parts = whole_parts(_random(table, where))
    rate, arrival = _copy_rate(where, limit), torch.empty(limit + (1 << 20), dtype=torch.uint8, device=where)
    for share in SHARES:
        if share > table.experts:
            continue
        count = table.experts // share
        held = [
            Held(0, e.name, e.spec.shape, wire.form(e) or e.spec.dtype)
            for e in table.entries
            if e.spec.expert is None or e.spec.expert < count
        ]
        whole = [Held(0, e.name, e.spec.shape, wire.form(e) or e.spec.dtype) for e in table.entries]
        for name, sent in (("ours", held), ("whole checkpoint", whole)):
            yield {"share": share, "way": name, **_update(parts, sent, held, arrival, rate, where, limit)}


def _update(
    parts: dict[str, list[Part]],
    sent: list[Held],
    held: list[Held],
    arrival: torch.Tensor,
    rate: float,
    device: torch.device,
    limit: int,
) -> dict[str, Any]:
    """One update after one that is not measured; what is sent and not held is dropped where it arrives."""
    places, size = place(held)
    live = torch.zeros(size, dtype=torch.uint8, device=device)
    receiver = Receiver(placed_parts(places, live), held)
    kept = {p.tensor.box.name for p in places}
    here = [
        Owned(0, h.name, h.shape, "bf16" if not DTYPES.get(h.dtype, DTYPES["bf16"]).integer else h.dtype) for h in sent
    ]
    bundles = in_bundles(make_plan(here, sent), shares(sent))
    result: dict[str, Any] = {}
    for version in (0, 1):
        clock, nbytes, packets = _Clock(device), 0, 0
        peak = Peak()
        for bundle in bundles:
            boxes, forms = [c.box for c in bundle.cargo], {c.box.name: c.form for c in bundle.cargo}
            made = pack(
                parts, boxes, forms, version=version, source=0, limit=limit,
                buffer=lambda n: torch.empty(n, dtype=torch.uint8, device=device),
            )  # fmt: skip
            while (packet := clock.time("encode", partial(next, made, None))) is not None:
                target = arrival[: packet.buffer.numel()]
                clock.time("transfer", partial(target.copy_, packet.buffer))
                items = tuple(item for item in packet.items if item.name in kept)
                came = Packet(version, 0, items, target)
                clock.time("repack", partial(receiver.stage, came))
                nbytes, packets = nbytes + packet.nbytes, packets + 1
        clock.time("repack", partial(receiver.finish, version, [h.name for h in held]))
        peak.stop()
        seconds = clock.seconds
        result = {
            "bytes": nbytes,
            "bytes_held": sum(h.nbytes for h in held),
            "packets": packets,
            **{f"{part}_s": value for part, value in seconds.items()},
            "seconds": sum(seconds.values()),
            "transfer_gbps": nbytes / seconds["transfer"] / 1e9,
            "path_gbps": rate / 1e9,
            "transfer_over_path": nbytes / seconds["transfer"] / rate,
            "staging_bytes": arrival.numel(),
            "peak_extra_bytes": peak.gpu if device.type == "cuda" else peak.host,
        }
    return result


def _random(table: WeightTable, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    made = {}
    for e in table.entries:
        if DTYPES[e.spec.dtype].integer:
            made[e.name] = torch.zeros(e.spec.shape, dtype=torch.int32, device=device)
        else:
            made[e.name] = torch.empty(e.spec.shape, dtype=torch.bfloat16, device=device)
            made[e.name].normal_(0, 0.02, generator=generator)
    return made


def _copy_rate(device: torch.device, nbytes: int) -> float:
    """Bytes a second of one copy on the device, the best of a few."""
    a, b = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    clock, best = _Clock(device), 0.0
    for _ in range(1 + RATE_COPIES):
        clock.seconds["transfer"] = 0.0
        clock.time("transfer", lambda: b.copy_(a))
        best = max(best, nbytes / clock.seconds["transfer"])
    return best
