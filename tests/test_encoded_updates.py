"""Updates that travel encoded: made once where the weights lie, over a process group, whole in checkpoint layout."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from moe_rl.errors import RunFailed, UserError
from moe_rl.models import codec
from moe_rl.models.weights import Box, Part
from moe_rl.models.wire import BLOCKS, cut_inside, stored, wire_bytes
from moe_rl.reshard.group import Exchange, Members, make_group
from moe_rl.reshard.plan import Cargo, Held, Owned, Share, in_bundles, make_plan, plan_shares, shares
from moe_rl.reshard.receive import Receiver, place, placed_parts
from moe_rl.reshard.transport import loads, pack
from tests.distributed import run_ranks

EXPERTS, LIMIT = 4, 36_000
# name -> shape, form of the receiver, owning ranks of four (experts: two of each half; dense: all; a stage each for the rest)
SHAPES = {
    **{f"layers.0.ffn.experts.{e}.w1.weight": ((96, 64), "mxfp4", (e % 2, 2 + e % 2)) for e in range(EXPERTS)},
    "layers.0.attn.wq_a.weight": ((300, 256), "fp8", (0, 1, 2, 3)),
    "layers.0.attn.wo_b.weight": ((130, 256), "fp8_f32", (0, 1)),
    "layers.0.attn_norm.weight": ((64,), "bf16", (2, 3)),
    "layers.0.attn.attn_sink": ((8,), "fp32", (0, 1, 2, 3)),
    "layers.0.ffn.gate.tid2eid": ((50, 2), "int32", (1,)),
}


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        name: torch.randint(0, EXPERTS, shape, generator=generator)
        if form == "int32"
        else torch.randn(shape, generator=generator) * 0.1
        for name, (shape, form, _) in SHAPES.items()
    }


def owned(rank: int) -> list[Owned]:
    return [
        Owned(rank, n, shape, "int64" if form == "int32" else "fp32")
        for n, (shape, form, ranks) in SHAPES.items()
        if rank in ranks
    ]


def held(receiver: int, count: int) -> list[Held]:
    """Experts dealt out, all else on every receiver; a linear cut by rows over receivers, on the edge of a block."""
    found = []
    for name, (shape, form, _) in SHAPES.items():
        box = None
        if "experts" in name and int(name.split(".")[4]) * count // EXPERTS != receiver:
            continue
        if "wq_a" in name and count == 2:
            box = Box(name, (128 * receiver, 0), (172 if receiver else 128, 256))
        found.append(Held(receiver, name, shape, form, box))
    return found


def expected(h: Held, value: torch.Tensor) -> list[torch.Tensor]:
    """What a checkpoint stores of the whole tensor, then the receiver's block of it."""
    if h.dtype == "mxfp4":
        whole = list(codec.mxfp4_encode(value))
    elif h.dtype in BLOCKS:
        codes, scales = codec.fp8_encode(value, scale_dtype="fp32" if h.dtype == "fp8_f32" else "e8m0")
        whole = [codes.view(torch.uint8), scales if h.dtype == "fp8_f32" else scales.view(torch.uint8)]
    else:
        whole = [value.to({"bf16": torch.bfloat16, "int32": torch.int32}.get(h.dtype, torch.float32))]
    boxes = [s.box for s in stored(h.dtype, h.box or Box(h.name, (0,) * len(h.shape), h.shape), h.shape)]
    return [tensor[box.slices] for tensor, box in zip(whole, boxes, strict=True)]


def _bytes(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().copy()


def _take_part(rank, world, port, sources, receivers, versions):
    """A rank of the group: what came, digests proven, and how often each tensor was encoded here."""
    torch.set_num_threads(1)
    calls = Counter()
    encode = {name: getattr(codec, name) for name in ("mxfp4_encode", "fp8_encode")}
    for name, real in encode.items():
        setattr(codec, name, lambda *a, real=real, **k: (calls.update([k["name"]]), real(*a, **k))[1])
    everything = [h for r in range(len(receivers)) for h in held(r, len(receivers))]
    plan = make_plan([o for s in range(len(sources)) for o in owned(s)], everything)
    bundles = in_bundles(plan, shares(everything))
    group = make_group(f"127.0.0.1:{port}", rank, world, backend="gloo", timeout_s=60)
    exchange = Exchange(group, Members(sources, receivers), bundles, limit=LIMIT, peers=2)
    mine = next((r for r, at in enumerate(receivers) if at == rank), None)
    receiver, buffer, places = None, None, []
    if mine is not None:
        places, size = place(held(mine, len(receivers)))
        buffer = torch.zeros(size, dtype=torch.uint8)
        receiver = Receiver(placed_parts(places, buffer), held(mine, len(receivers)))
    found = []
    for version in versions:
        calls.clear()
        values = weights(version)
        source = sources.index(rank) if rank in sources else None
        names = [] if source is None else [o.name for o in owned(source)]
        parts = {n: [Part(values[n], (0,) * values[n].dim(), tuple(values[n].shape))] for n in names}

        def packets(boxes, forms, *, parts=parts, version=version, source=source, **keywords):
            return pack(parts, boxes, forms, version=version, source=source, **keywords)

        for packet in exchange.run(version, packets):
            assert packet.buffer.nbytes <= LIMIT
            receiver.stage(packet)
        if receiver is not None:
            receiver.finish(version, plan.names[mine])
        mine_to_make = [b for b in bundles if source == b.source]
        made = Counter(c.box.name for b in mine_to_make for load in loads(b.cargo, LIMIT) for c in load.cargo)
        assert calls == Counter({n: k for n, k in made.items() if SHAPES[n][1] in BLOCKS})  # once, however many take it
        found.append(({p.tensor.box.name: _bytes(p.within(buffer)) for p in places}, dict(calls)))
    return found, sum(buffer.nbytes for buffer in exchange.buffers)


@pytest.mark.parametrize(
    "world, sources, receivers",
    [(4, (0, 1, 2, 3), (2, 0)), (4, (0, 1, 2, 3), (3, 1, 0, 2))],
    ids=["two of four ranks receive", "every rank is both"],
)
def test_two_updates_over_a_group_are_the_bytes_of_the_whole_tensors_encoded(world, sources, receivers):
    ranks = run_ranks(_take_part, world, sources, receivers, (1, 2), timeout=120)
    for at, version in enumerate((1, 2)):
        values, encoded = weights(version), Counter()
        for receiver, rank in enumerate(receivers):
            got = ranks[rank][0][at][0]
            for h in held(receiver, len(receivers)):
                for piece, value in zip(
                    stored(h.dtype, Box(h.name, (0,) * len(h.shape), h.shape), h.shape),
                    expected(h, values[h.name]),
                    strict=True,
                ):
                    assert np.array_equal(got[piece.box.name], _bytes(value)), (receiver, piece.box.name)
        for found, _ in ranks:
            encoded.update(found[at][1].keys())
        assert encoded.keys() == {n for n, (_, form, _) in SHAPES.items() if form in BLOCKS}
    assert all(0 < staging <= 4 * (LIMIT + 8 * 40) for _, staging in ranks)


def test_each_block_is_made_once_for_all_who_take_it_and_rounds_have_no_conflict():
    everything = [h for r in range(4) for h in held(r, 4)]
    plan = make_plan([o for rank in range(4) for o in owned(rank)], everything)
    bundles = in_bundles(plan, shares(everything))
    made = Counter((b.source, c.box, c.form) for b in bundles for c in b.cargo)
    assert set(made.values()) == {1}
    arrivals = Counter((r, c.box) for b in bundles for r in b.receivers for c in b.cargo)
    assert arrivals == Counter((t.receiver, box) for t in plan.transfers for box in t.boxes)
    for k in {b.round for b in bundles}:
        now = [b for b in bundles if b.round == k]
        assert (
            max(Counter(b.source for b in now).values())
            == max(Counter(r for b in now for r in b.receivers).values())
            == 1
        )
    assert list(bundles) == sorted(bundles)


def test_blocks_that_share_a_scale_are_not_planned():
    """A weight cut over ranks inside a block of 128, and one that receivers cut so."""
    name, shape = "layers.0.attn.wq_b.weight", (256, 128)
    halves = [Box(name, (0, 0), (100, 128)), Box(name, (100, 0), (156, 128))]
    with pytest.raises(RunFailed) as fault:
        make_plan([Owned(r, name, shape, "bf16", box) for r, box in enumerate(halves)], [Held(0, name, shape, "fp8")])
    assert fault.value.rule == "reshard.blocks" and "is cut at 0:100, inside a block of 128" in fault.value.what
    with pytest.raises(RunFailed, match="inside a block of 32"):
        make_plan([Owned(0, name, shape, "bf16")], [Held(0, name, shape, "mxfp4", Box(name, (0, 16), (256, 112)))])
    make_plan([Owned(r, name, shape, "bf16", box) for r, box in enumerate(halves)], [Held(0, name, shape, "bf16")])
    assert cut_inside("fp8", Box(name, (128, 0), (128, 128)), shape) == ""
    assert cut_inside("mxfp4", Box(name, (0, 96), (1, 32)), shape) == ""


def test_what_is_too_large_for_a_packet_travels_in_runs_of_rows_on_edges_of_blocks():
    cargo = [
        Cargo(Box("a.weight", (128, 0), (700, 256)), "fp8", (1000, 256)),
        Cargo(Box("b", (0, 0), (9, 50)), "fp32", (9, 50)),
    ]
    for limit in (40_000, 100_000, 1 << 20):
        found = list(loads(cargo, limit))
        assert all(load.nbytes <= limit + 64 for load in found)
        rows = [c.box for load in found for c in load.cargo if c.box.name == "a.weight"]
        assert [b.start[0] for b in rows] == [128, *(b.start[0] + b.extent[0] for b in rows)][:-1]
        assert sum(b.extent[0] for b in rows) == 700 and all(b.start[0] % 128 == 0 for b in rows)
        sizes = sum(t.nbytes for load in found for places in load.places for t, _ in places)
        assert sizes == wire_bytes("fp8", (128, 0), (700, 256)) + 9 * 50 * 4


def test_a_weight_that_is_not_finite_is_not_encoded():
    value = torch.zeros(128, 128)
    value[3, 5] = torch.nan
    with pytest.raises(UserError, match=r"not finite in x\.weight"):
        list(
            pack(
                {"x.weight": [Part(value, (0, 0), (128, 128))]},
                [Box("x.weight", (0, 0), (128, 128))],
                {"x.weight": "fp8"},
                version=1,
                source=0,
            )
        )


@pytest.mark.parametrize("lost", ["layers.0.attn.wq_a.weight", "layers.0.attn.wq_a.scale", "layers.0.ffn.gate.tid2eid"])
def test_codes_scales_or_tables_that_did_not_come_are_named(lost):
    """Of an encoded weight both tensors must come; a second update that leaves one out is as wrong as a first."""
    everything = held(0, 1)
    places, size = place(everything)
    receiver = Receiver(placed_parts(places, torch.zeros(size, dtype=torch.uint8)), everything)
    assert receiver.holdings(7) == [h._replace(receiver=7) for h in everything]
    for version in (1, 2):
        values = weights(version)
        parts = {n: [Part(v, (0,) * v.dim(), tuple(v.shape))] for n, v in values.items()}
        boxes, forms = [p[0].box(n) for n, p in parts.items()], {h.name: h.dtype for h in everything}
        for packet in pack(parts, boxes, forms, version=version, source=0):
            if version == 2:
                packet = type(packet)(2, 0, tuple(i for i in packet.items if i.name != lost), packet.buffer)
            receiver.stage(packet)
        if version == 1:
            receiver.finish(1, parts)
    with pytest.raises(RunFailed, match=f"1 tensors never arrived: {lost}"):
        receiver.finish(2, parts)
    assert receiver.version == -1


def test_shares_of_an_encoded_model_plan_as_its_ranks_do():
    everything = [h for r in range(2) for h in held(r, 2)]
    one = plan_shares(shares(o for rank in range(4) for o in owned(rank)), shares(everything))
    assert one.nbytes == sum(h.nbytes for h in everything)
    assert all(isinstance(share, Share) for share in shares(everything))
