"""What a plan asks of each GPU's links: bytes over the network, over NVLink and on the GPU itself, peers, seconds. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moe_rl.reshard.plan import Plan, Topology, peers_text, range_text


@dataclass(frozen=True)
class Traffic:
    """Bytes by rank (senders) or receiver, every one of them listed; `peers_*` count the ranks of the other side."""

    nic_out: dict[int, int]
    nic_in: dict[int, int]
    nvlink_out: dict[int, int]
    nvlink_in: dict[int, int]
    local: dict[int, int]
    peers_out: dict[int, int]
    peers_in: dict[int, int]

    @classmethod
    def of(cls, plan: Plan, topology: Topology) -> Traffic:
        sides: dict[str, Counter[int]] = {name: Counter() for name in cls.__dataclass_fields__}
        for source, receiver, _, nbytes in plan.transfers:
            near = topology.near(source, receiver)
            if near == 2:
                sides["local"][receiver] += nbytes
            else:
                link = ("nic", "nvlink")[near]
                sides[f"{link}_out"][source] += nbytes
                sides[f"{link}_in"][receiver] += nbytes
            sides["peers_out"][source] += 1
            sides["peers_in"][receiver] += 1
        receivers = sorted({t.receiver for t in plan.transfers})
        return cls(
            **{n: {r: counts[r] for r in (plan.sources if "out" in n else receivers)} for n, counts in sides.items()}
        )

    def sent(self) -> list[int]:
        """Bytes out of each rank's GPU, over both links."""
        return [self.nic_out[rank] + self.nvlink_out[rank] for rank in self.nic_out]

    def critical(self, nic_gbps: float, nvlink_gbps: float, efficiency: float) -> tuple[float, str]:
        """Seconds that the busiest link takes at `efficiency` of its rate in GB/s (each way), and which link that is."""
        links = {"NIC": (self.nic_out, self.nic_in, nic_gbps), "NVLink": (self.nvlink_out, self.nvlink_in, nvlink_gbps)}
        worst = (0.0, "none")
        for link, (out, into, rate) in links.items():
            for way, side in (("out of rank", out), ("into receiver", into)):
                who, most = max(side.items(), key=lambda item: item[1], default=(0, 0))
                worst = max(worst, (most / (rate * 1e9 * efficiency), f"{link} {way} {who}"))
        return worst

    def lines(self) -> list[str]:
        """For people."""
        rows: Sequence[tuple[str, dict[int, int], dict[int, int]]] = (
            ("NIC", self.nic_out, self.nic_in),
            ("NVLink", self.nvlink_out, self.nvlink_in),
        )
        out = [f"{name}: {range_text(a.values())} out of a GPU, {range_text(b.values())} in" for name, a, b in rows]
        return [
            *out,
            f"on the GPU itself: {range_text(self.local.values())}",
            f"peers: a rank sends to {peers_text(self.peers_out.values())} receivers,"
            f" a receiver takes from {peers_text(self.peers_in.values())} ranks",
        ]
