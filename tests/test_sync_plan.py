"""Plans at scale: Pro for all ranks, bytes of quantised blocks, senders that are near or peers already."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.sync_plan import case
from moe_rl.config import load_config
from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from moe_rl.models.deepseek_v4.weights import weight_table
from moe_rl.models.family import read_facts
from moe_rl.models.wire import SIZES, Wire, wire_bytes
from moe_rl.planner.comm import sync_plan
from moe_rl.planner.plan import Plan
from moe_rl.reshard.plan import Held, Owned, Topology, make_plan
from moe_rl.reshard.traffic import Traffic
from tests.released_v4 import released_config


@pytest.mark.slow
def test_pro_for_every_rank_of_every_replica():
    """PP32 x EP8 to eight replicas of EP64: complete, minimal, balanced, few peers, in well under two minutes."""
    found = case("h100, hash layers spread")
    assert found["seconds_building_ranks"] + found["seconds_planning"] < 120
    assert found["trainer_ranks"] == found["receivers"] == 512
    assert found["received_over_held"] == 1.0
    assert found["bytes_total"] > 512 * 0.9 * 851e9 / 64  # every receiver holds its 64th of the experts, and more
    assert max(found["balance"].values()) < 1.1
    planned = Plan.of(
        config := load_config("dsv4-pro", ["layout.pin_hash_layers=false"]), read_facts(config.model.path)
    )
    rollout = replace(planned.memory.rollout, vllm=True, replicas=8, tp=8, dp=8, ep=64)
    sync = sync_plan(config, planned.facts, planned.memory.inventory, rollout)
    assert sync.bytes_total == pytest.approx(found["bytes_total"], rel=1e-4)
    assert sync.bytes_out_max == pytest.approx(max(found["sent"]), rel=0.03)
    for side in ("peers_out", "peers_in"):
        assert found["least_and_most_of_a_rank"][side][1] <= 40
    assert 0.3 < found["critical_path"]["seconds"] < 3


def test_bytes_of_blocks_are_those_of_the_released_tensors():
    table = weight_table(DeepseekV4Arch.from_dict(released_config()))
    wire = Wire.released(released_config())
    for entry in table.entries:
        form = wire.kind(entry) or entry.spec.dtype
        pieces = sum(SIZES[p.dtype] * math.prod(p.shape) for p in wire.pieces(entry))
        assert wire_bytes(form, (0,) * len(entry.spec.shape), entry.spec.shape) == pieces, entry.name
    # a block that begins inside a scale's block needs that scale, too
    assert wire_bytes("fp8", (100, 0), (60, 200)) == 60 * 200 + 2 * 2
    assert wire_bytes("mxfp4", (3, 48), (5, 32)) == 5 * (16 + 2)


def test_a_sender_is_near_where_one_is():
    """Two nodes of four, every rank owns and holds all: nothing crosses a link; apart, all of it does."""
    items = [(f"t{i}", (64, 8), "bf16") for i in range(6)]
    owned = [Owned(r, *t) for r in range(8) for t in items]
    held = [Held(r, *t) for r in range(8) for t in items]
    together, apart = Topology(4), Topology(4, colocated=False)
    plan = make_plan(owned, held, together)
    assert [(t.source, t.receiver) for t in plan.transfers] == [(r, r) for r in range(8)]
    traffic = Traffic.of(plan, together)
    assert set(traffic.local.values()) == {6 * 1024} and not any(traffic.nic_in.values())
    assert set(Traffic.of(plan, apart).nic_out.values()) == {6 * 1024}
    # half of the owners: the node's other half comes over NVLink, still balanced
    half = make_plan([o for o in owned if o.rank % 4 < 2], held, together)
    traffic = Traffic.of(half, together)
    assert not any(traffic.nic_out.values()) and set(traffic.peers_out.values()) == {2}
    assert sum(traffic.nvlink_in.values()) == 4 * 6 * 1024
    assert traffic.critical(50.0, 0.001, 0.5)[0] == pytest.approx(6 * 1024 / (0.001e9 * 0.5))
    assert "NVLink" in traffic.critical(50.0, 0.001, 0.5)[1] and "peers" in traffic.lines()[-1]


def test_what_every_rank_owns_comes_from_the_rank_that_sends_already():
    """EP2 with two copies: each receiver has its experts from one of two ranks, and the dense part from that one too."""
    dense = [(f"d{i}", (64, 8), "bf16") for i in range(4)]
    owned = [Owned(r, *t) for r in range(4) for t in dense]
    owned += [Owned(r, f"e{r % 2}", (64, 64), "bf16") for r in range(4)]
    held = [Held(k, *t) for k in range(8) for t in dense] + [Held(k, f"e{k % 2}", (64, 64), "mxfp4") for k in range(8)]
    plan = make_plan(owned, held)
    assert len(plan.transfers) == 8 and all(t.receiver % 2 == t.source % 2 for t in plan.transfers)
    assert {len(plan.of_source(r)) for r in range(4)} == {2}
    assert {t.nbytes for t in plan.transfers} == {4 * 64 * 8 * 2 + 64 * (32 + 2)}
