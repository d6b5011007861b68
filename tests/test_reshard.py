"""Weight updates: fingerprints against a plain-integer reference, plans by their invariants, faults by injection."""

from __future__ import annotations

import itertools
import pickle
import random
import subprocess
import sys
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.errors import RunFailed
from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from moe_rl.models.deepseek_v4.weights import transformers_views, weight_table
from moe_rl.models.digest import CHUNK, block_sums, digest, digest_all, whole_digest
from moe_rl.models.weights import Box, Part, whole_parts
from moe_rl.reshard.plan import Held, Owned, Topology, Transfer, make_plan
from moe_rl.reshard.receive import Receiver
from moe_rl.reshard.transport import Packet, pack, unpack
from tests.tiny_v4 import randomise, tiny_config

# Digests

M64 = (1 << 64) - 1


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


@cache
def _weight(seed: int, i: int) -> int:
    return _splitmix(((i * 0xD1342543DE82EF95) & M64) ^ seed) | 1


def reference_digest(tensor: torch.Tensor) -> int:
    """The definition in plain Python integers: one word at a time."""
    import hashlib

    size = tensor.element_size()
    kind = {1: "<u1", 2: "<i2", 4: "<i4", 8: "<i4"}[size]
    words = np.frombuffer(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()), dtype=kind)
    total = 0
    for i, word in enumerate(words.tolist()):
        table = _weight(0x6D6F655F726C, i % CHUNK)
        total += word * table * _weight(0x64696765737473, i // CHUNK)
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}".encode()
    return (total + int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")) & M64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 3, 4), (CHUNK + 7,), (3, CHUNK)])
def test_digest_is_its_definition(dtype, shape):
    generator = torch.Generator().manual_seed(3)
    if dtype.is_floating_point:
        tensor = torch.randn(shape, generator=generator).to(dtype)
    else:
        tensor = torch.randint(0, 200, shape, generator=generator, dtype=dtype) - (0 if dtype == torch.uint8 else 99)
    assert digest(tensor) == reference_digest(tensor)


def test_digest_over_several_blocks():
    tensor = torch.arange(17 * CHUNK + 5, dtype=torch.int32)
    assert digest(tensor) == reference_digest(tensor)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_swapping_any_two_different_elements_changes_the_digest(data):
    values = data.draw(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=200, unique=True))
    tensor = torch.tensor(values)
    i, j = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=2, max_size=2, unique=True))
    swapped = tensor.clone()
    swapped[[i, j]] = tensor[[j, i]]
    assert digest(swapped) != digest(tensor)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4 * 300 - 1), st.integers(1, 255))
def test_any_changed_byte_changes_the_digest(at, flip):
    tensor = torch.randn(300, generator=torch.Generator().manual_seed(0))
    changed = tensor.clone()
    changed.view(torch.uint8)[at] ^= flip
    assert digest(changed) != digest(tensor)


def test_digest_counts_bits_not_values():
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    payloads = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert payloads.isnan().all() and digest(payloads[:1]) != digest(payloads[1:])
    assert digest(torch.tensor([1, 0], dtype=torch.int32)) != digest(torch.tensor([1], dtype=torch.int64))
    bits = torch.tensor([0x3F80, 0x4000], dtype=torch.int16)
    assert digest(bits) != digest(bits.view(torch.bfloat16))


def test_digest_sees_shape_and_order():
    tensor = torch.randn(6, 4)
    assert digest(tensor) != digest(tensor.reshape(4, 6))
    assert digest(tensor) != digest(tensor.T.contiguous().reshape(6, 4))
    rows = tensor[[1, 0, 2, 3, 4, 5]]
    assert digest(rows) != digest(tensor)


def test_chunks_that_changed_places_are_seen():
    tensor = torch.randint(0, 99, (3, CHUNK))
    assert digest(tensor[[1, 0, 2]]) != digest(tensor)


def test_views_have_the_digest_of_their_copies():
    tensor = torch.randn(8, 6, 10)
    for view in (tensor[2], tensor[:, 1:3], tensor.transpose(0, 2), tensor[::2, :, ::3], tensor[3, :3]):
        assert digest(view) == digest(view.clone(memory_format=torch.contiguous_format))
    names = {"a": tensor[1], "b": tensor.int()}
    assert digest_all(names) == {name: digest(t) for name, t in names.items()}


def test_digests_do_not_collide_on_close_tensors():
    seen = {digest(torch.full((64,), i, dtype=torch.int32)) for i in range(3000)}
    assert len(seen) == 3000


# Plans


def _specs(n):
    rng = random.Random(n)
    return [(f"t{i}", (rng.randint(1, 40), 8), "fp32") for i in range(n)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 4), st.randoms(use_true_random=False))
def test_every_held_tensor_comes_once_from_an_owner(ranks, receivers, ep, rng):
    """Dense tensors with copies everywhere, experts with copies on every ep-th rank; receivers hold shares of them."""
    ep = min(ep, ranks)
    specs = _specs(25)
    owned = [Owned(r, *s) for i, s in enumerate(specs) for r in range(ranks) if i % 2 or r % ep == (i // 2) % ep]
    held = [Held(k, *s) for i, s in enumerate(specs) for k in range(receivers) if i % 3 or k == i % receivers]
    topology = rng.choice([None, Topology(1), Topology(3), Topology(4, colocated=False)])
    plan = make_plan(owned, held, topology)
    owners = {(o.rank, o.name) for o in owned}
    arrivals = Counter()
    for source, receiver, boxes, nbytes in plan.transfers:
        names = [box.name for box in boxes]
        assert all((source, name) in owners for name in names)
        assert nbytes == sum(h.nbytes for h in held if h.receiver == receiver and h.name in names)
        arrivals.update((receiver, name) for name in names)
    assert arrivals == Counter((h.receiver, h.name) for h in held)
    assert plan.names == {k: tuple(sorted(h.name for h in held if h.receiver == k)) for k in range(receivers)}
    rng.shuffle(owned)
    rng.shuffle(held)
    assert make_plan(owned, held, topology) == plan


def test_copies_are_balanced_by_bytes_when_owners_outnumber_receivers():
    specs = _specs(200)
    plan = make_plan([Owned(r, *s) for s in specs for r in range(8)], [Held(0, *s) for s in specs])
    sent = [sum(t.nbytes for t in plan.of_source(r)) for r in range(8)]
    assert max(sent) - min(sent) <= 40 * 8 * 4
    assert all(len(plan.of_source(r)) == 1 for r in range(8))


def test_a_receiver_has_one_peer_per_set_of_owners_when_receivers_outnumber_owners():
    """EP2 x DP2: dense tensors on all four ranks, experts of a half on two. Eight receivers hold everything."""
    dense = [(f"dense{i}", (64,), "fp32") for i in range(10)]
    experts = [(f"expert{i}", (256,), "fp32") for i in range(16)]
    owned = [Owned(r, *s) for s in dense for r in range(4)]
    owned += [Owned(r, *s) for i, s in enumerate(experts) for r in range(4) if r % 2 == i // 8]
    plan = make_plan(owned, [Held(k, *s) for s in dense + experts for k in range(8)])
    assert all(len([t for t in plan.transfers if t.receiver == k]) <= 3 for k in range(8))
    sent = [sum(t.nbytes for t in plan.of_source(r)) for r in range(4)]
    assert max(sent) == min(sent) == plan.nbytes // 4


def test_bytes_are_those_of_the_receivers_dtype():
    plan = make_plan([Owned(0, "a", (10,), "fp32")], [Held(0, "a", (10,), "bf16")])
    assert plan.transfers == (Transfer(0, 0, (Box("a", (0,), (10,)),), 20),)


def test_summary_in_words():
    specs = [("a", (256,), "fp32"), ("b", (256,), "fp32")]
    plan = make_plan([Owned(r, *s) for s in specs for r in (0, 1)], [Held(0, *s) for s in specs])
    assert plan.summary().splitlines() == [
        "2 trainer ranks send 2.0 KiB to 1 receivers in one update",
        "  a rank sends 1.0 KiB to 1 receivers",
        "  a receiver takes 2.0 KiB from 2 ranks",
    ]


def test_everything_that_does_not_join_is_named_at_once():
    owned = [Owned(r, n, (4,), "fp32") for r in (0, 1) for n in ("same", "shape", "kind", "lost", "twice", "drift")]
    owned[-1] = Owned(1, "drift", (5,), "fp32")
    owned.append(Owned(1, "twice", (4,), "fp32"))
    held = [
        Held(0, "same", (4,), "fp32"),
        Held(0, "shape", (2, 2), "fp32"),
        Held(0, "kind", (4,), "int64"),
        Held(0, "twice", (4,), "fp32"),
        Held(0, "drift", (4,), "fp32"),
        Held(0, "drift", (4,), "fp32"),
        Held(0, "unowned", (4,), "fp32"),
    ]
    with pytest.raises(RunFailed) as error:
        make_plan(owned, held)
    text = str(error.value)
    for line in (
        "1 tensors differ between the ranks that own them: drift",
        "1 tensors are listed twice by rank 1: twice",
        "1 tensors are listed twice by receiver 0: drift",
        "1 tensors have another shape at receiver 0: shape ([4] and [2, 2])",
        "1 tensors have another kind of dtype at receiver 0: kind (fp32 and int64)",
        "1 tensors are held by receiver 0 and owned by no rank: unowned",
        "1 tensors are owned and held by no receiver: lost",
    ):
        assert line in text
    assert "same" not in text


def test_planning_needs_no_torch():
    code = "import sys, moe_rl.reshard.plan, moe_rl.rollout.engine; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# Packets and the receiving end


@pytest.fixture
def source():
    generator = torch.Generator().manual_seed(5)
    return {
        "w": torch.randn(6, 4, generator=generator),
        "half": torch.randn(8, 4, generator=generator)[:4],
        "odd": torch.randn(3, generator=generator),
        "table": torch.randint(0, 8, (5, 2), generator=generator),
        "scalar": torch.randn((), generator=generator),
    }


@pytest.fixture
def live():
    whole = torch.full((8, 4), torch.nan)
    return {
        "w": torch.full((6, 4), torch.nan, dtype=torch.bfloat16),
        "half": whole[4:],
        "odd": torch.full((3,), torch.nan),
        "table": torch.full((5, 2), -1, dtype=torch.int32),
        "scalar": torch.tensor(torch.nan),
    }


def packets(source, receiver, version=1, names=None, **kwargs):
    parts, dtypes = whole_parts(source), {h.name: h.dtype for h in receiver.holdings(0)}
    boxes = [parts[n][0].box(n) if n in parts else Box(n, (), ()) for n in names or source]
    return list(pack(parts, boxes, dtypes, version=version, source=3, **kwargs))


def send(source, receiver, version=1, names=None):
    for packet in packets(source, receiver, version, names):
        receiver.stage(packet)
    receiver.finish(version, names or list(source))


def test_an_update_arrives_in_the_receivers_dtypes(source, live):
    receiver = Receiver(whole_parts(live))
    assert receiver.version == -1
    send(source, receiver)
    assert receiver.version == 1
    assert torch.equal(live["w"], source["w"].bfloat16())
    assert torch.equal(live["half"], source["half"]) and torch.equal(live["odd"], source["odd"])
    assert torch.equal(live["table"].long(), source["table"]) and torch.equal(live["scalar"], source["scalar"])


def test_packets_are_bounded_and_survive_pickling_with_buffers_out_of_band(source, live):
    receiver = Receiver(whole_parts(live))
    small = packets(source, receiver, limit=128)
    assert len(small) > 1 and all(p.buffer.nbytes <= 128 or len(p.items) == 1 for p in small)
    for packet in small:
        buffers = []
        wire = pickle.dumps(packet, protocol=5, buffer_callback=buffers.append)
        frozen = [bytes(b) for b in buffers]  # what shared memory hands back is read-only
        receiver.stage(pickle.loads(wire, buffers=frozen))
        assert sum(map(len, frozen)) == packet.buffer.nbytes and len(wire) < 2000
    receiver.finish(1, list(source))


def test_a_packet_is_a_snapshot(source, live):
    packet = packets(source, Receiver(whole_parts(live)), names=["odd"])[0]
    before = source["odd"].clone()
    source["odd"].zero_()
    [(item, tensor)] = unpack(packet)
    assert item.name == "odd" and torch.equal(tensor, before)


def test_a_corrupted_byte_is_found(source, live):
    receiver = Receiver(whole_parts(live))
    for packet in packets(source, receiver):
        item = next(i for i in packet.items if i.name == "half")
        packet.buffer[item.offset + 13] ^= 1
        receiver.stage(packet)
    with pytest.raises(RunFailed, match="1 tensors differ from what was sent: half"):
        receiver.finish(1, list(source))
    assert receiver.version == -1


def test_corruption_after_the_copy_is_found(source, live):
    receiver = Receiver(whole_parts(live))
    for packet in packets(source, receiver):
        receiver.stage(packet)
    live["odd"][1] += 1e-7 * live["odd"][1].abs() + 1e-7
    with pytest.raises(RunFailed, match="differ from what was sent: odd"):
        receiver.finish(1, list(source))


def test_two_names_on_one_memory_are_found(source, live):
    live["w"] = torch.zeros(6, 4)
    live["half"] = live["w"][2:]
    receiver = Receiver(whole_parts(live))
    with pytest.raises(RunFailed, match="differ from what was sent: (half|w)"):
        send(source, receiver)


def test_a_missing_tensor_is_named(source, live):
    receiver = Receiver(whole_parts(live))
    for packet in packets(source, receiver, names=["w", "half", "odd"]):
        receiver.stage(packet)
    with pytest.raises(RunFailed, match="2 tensors never arrived: scalar, table"):
        receiver.finish(1, list(source))
    assert receiver.version == -1


def test_a_tensor_outside_the_plan_is_named(source, live):
    receiver = Receiver(whole_parts(live))
    send(source, receiver)
    for packet in packets(source, receiver, 2, ["w", "odd"]):
        receiver.stage(packet)
    with pytest.raises(RunFailed, match="1 tensors were not in the plan: odd"):
        receiver.finish(2, ["w"])


@pytest.mark.parametrize("fault", ["twice", "stale", "shape", "dtype", "unknown", "index"])
def test_a_bad_packet_is_refused_and_the_engine_stays_shut(source, live, fault):
    receiver = Receiver(whole_parts(live))
    send(source, receiver, version=4)
    good = packets(source, receiver, 5, ["odd"])[0]
    item = good.items[0]
    receiver.stage(good)
    assert receiver.version == -1
    changed = {
        "twice": item,
        "stale": item,
        "shape": item._replace(shape=(3, 1), name="odd"),
        "dtype": item._replace(dtype="int32"),
        "unknown": item._replace(name="other"),
        "index": item._replace(name="scalar", offset=64),
    }[fault]
    if fault in ("shape", "dtype"):
        receiver = Receiver(whole_parts(live))
    bad = Packet(4 if fault == "stale" else 5, 3, (changed,), good.buffer)
    match = {
        "twice": "odd arrived twice",
        "stale": "version 4 arrived after version 5: odd",
        "shape": r"odd is fp32 \[3, 1\], here fp32 \[3\]",
        "dtype": r"odd is int32 \[3\], here fp32 \[3\]",
        "unknown": "other is not held here",
        "index": "damaged at scalar",
    }[fault]
    with pytest.raises(RunFailed, match=match):
        receiver.stage(bad)
    assert receiver.version == -1
    with pytest.raises(RunFailed):
        receiver.finish(5, ["odd"])
    with pytest.raises(RunFailed, match="have not been received since"):
        send(source, receiver, 6, ["odd"])
    send(source, receiver, 7)
    assert receiver.version == 7


def test_what_did_not_change_may_be_left_out_of_a_later_update(source, live):
    receiver = Receiver(whole_parts(live))
    with pytest.raises(RunFailed, match="have not been received"):
        send(source, receiver, 1, ["w"])
    send(source, receiver, 1)
    source["w"] += 1
    send(source, receiver, 2, ["w"])
    assert receiver.version == 2 and torch.equal(live["w"], source["w"].bfloat16())


def test_an_update_that_was_never_finished_leaves_nothing_trusted(source, live):
    receiver = Receiver(whole_parts(live))
    send(source, receiver)
    for packet in packets(source, receiver, 2, ["odd"]):
        receiver.stage(packet)
    with pytest.raises(RunFailed, match="have not been received"):
        send(source, receiver, 3, ["w"])


def test_finishing_another_version_is_refused(source, live):
    receiver = Receiver(whole_parts(live))
    for packet in packets(source, receiver, 2):
        receiver.stage(packet)
    with pytest.raises(RunFailed, match="packets of version 2 were staged"):
        receiver.finish(3, list(source))


def test_integers_that_the_receiver_cannot_hold_are_not_sent(source, live):
    source["table"][0, 0] = 2**35
    with pytest.raises(RunFailed, match="table holds integers"):
        packets(source, Receiver(whole_parts(live)))


def test_a_source_that_lacks_a_tensor_says_so(source, live):
    with pytest.raises(RunFailed, match="tensors it does not own: head.weight"):
        packets(source, Receiver(whole_parts(live)), names=["w", "head.weight"])


def test_a_whole_model_through_plan_packets_and_receiver():
    """Four ranks own shares of a V4; a live transformers model in another dtype gets every tensor of it."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    arch = DeepseekV4Arch.from_dict(tiny_config())
    specs = weight_table(arch).expected()
    weights = {n: torch.empty(s.shape, dtype=torch.int64 if s.dtype == "int32" else None) for n, s in specs.items()}
    randomise(weights, seed=9)
    ranks = {n: [r for r in range(4) if s.expert is None or s.expert // 4 == r % 2] for n, s in specs.items()}
    owned = [Owned(r, n, specs[n].shape, "int64" if n.endswith("tid2eid") else "fp32") for n in specs for r in ranks[n]]
    receivers = [
        Receiver(whole_parts(transformers_views(DeepseekV4ForCausalLM(DeepseekV4Config(**tiny_config())), arch)))
        for _ in range(2)
    ]
    held = [h for k, receiver in enumerate(receivers) for h in receiver.holdings(k)]
    plan = make_plan(owned, held)
    for source, receiver, boxes, nbytes in plan.transfers:
        mine = whole_parts({n: t for n, t in weights.items() if source in ranks[n]})
        dtypes = {h.name: h.dtype for h in held if h.receiver == receiver}
        sent = list(pack(mine, boxes, dtypes, version=0, source=source))
        assert sum(p.nbytes for p in sent) == nbytes
        for packet in sent:
            receivers[receiver].stage(packet)
    for k, receiver in enumerate(receivers):
        receiver.finish(0, plan.names[k])
        for name, (part,) in receiver._parts.items():
            assert torch.equal(part.view, weights[name]), name


# Blocks


def _cuts(shape, axis, count):
    """Boxes that cut a tensor into `count` unequal parts along an axis."""
    edges = [shape[axis] * i // count for i in range(count + 1)]
    for first, end in itertools.pairwise(edges):
        start, extent = [0] * len(shape), list(shape)
        start[axis], extent[axis] = first, end - first
        yield tuple(start), tuple(extent)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_blocks_of_one_cut_arrive_in_the_blocks_of_another(data):
    """Trainer ranks and receivers cut each tensor along any axis; every receiver proves what it holds, and it is right."""
    shapes = data.draw(st.lists(st.tuples(st.integers(4, 9), st.integers(4, 9)), min_size=1, max_size=4))
    source, target, copies = (data.draw(st.integers(1, 4)) for _ in range(3))
    generator = torch.Generator().manual_seed(1)
    whole = {f"t{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}
    ranks: list[dict] = [{} for _ in range(source * copies)]
    live: list[dict] = [{} for _ in range(target)]
    for name, tensor in whole.items():
        ours, theirs = data.draw(st.sampled_from((0, 1))), data.draw(st.sampled_from((0, 1)))
        for i, (start, extent) in enumerate(_cuts(tensor.shape, ours, source)):
            for copy in range(copies):
                view = tensor[Box(name, start, extent).slices]
                ranks[copy * source + i][name] = [Part(view, start, tuple(tensor.shape))]
        for receiver, (start, extent) in zip(live, _cuts(tensor.shape, theirs, target), strict=True):
            receiver[name] = [Part(torch.full(extent, torch.nan), start, tuple(tensor.shape))]
    receivers = [Receiver(parts) for parts in live]
    held = [h for k, receiver in enumerate(receivers) for h in receiver.holdings(k)]
    owned = [Owned(r, n, p.shape, "fp32", p.box(n)) for r, parts in enumerate(ranks) for n, (p,) in parts.items()]
    plan = make_plan(owned, held)
    assert plan.nbytes == 4 * sum(t.numel() for t in whole.values())
    for rank, receiver, boxes, nbytes in plan.transfers:
        for packet in pack(ranks[rank], boxes, dict.fromkeys(whole, "fp32"), version=1, source=rank, limit=200):
            receivers[receiver].stage(packet)
            nbytes -= packet.nbytes
        assert nbytes == 0
    for k, receiver in enumerate(receivers):
        receiver.finish(1, plan.names[k])
    for name, tensor in whole.items():
        for parts in live:
            part = parts[name][0]
            assert torch.equal(part.view, tensor[part.slices])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_shares_of_blocks_add_up_to_the_digest(dtype):
    tensor = (1000 * torch.randn(300, 700, generator=torch.Generator().manual_seed(2))).to(dtype)
    for axis, count in ((0, 3), (1, 4)):
        boxes = [Box("t", *cut) for cut in _cuts(tensor.shape, axis, count)]
        sums = block_sums([Part(tensor[box.slices], box.start, tuple(tensor.shape)) for box in boxes])
        assert whole_digest(str(tensor.dtype).removeprefix("torch."), tensor.shape, sums) == digest(tensor)
        moved = block_sums([Part(tensor[box.slices], (0, 0), tuple(tensor.shape)) for box in boxes])
        assert moved[0] == sums[0] and moved[1] != sums[1]


def test_blocks_that_do_not_make_up_a_tensor_are_named():
    half = Box("w", (0, 0), (2, 4))
    with pytest.raises(RunFailed, match="1 tensors are owned in blocks that leave gaps or overlap: w"):
        make_plan([Owned(0, "w", (4, 4), "fp32", half)], [Held(0, "w", (4, 4), "fp32")])
    overlapping = [Owned(0, "w", (4, 4), "fp32", half), Owned(1, "w", (4, 4), "fp32", Box("w", (1, 0), (2, 4)))]
    with pytest.raises(RunFailed, match="leave gaps or overlap: w"):
        make_plan(overlapping, [Held(0, "w", (4, 4), "fp32")])


def test_half_a_tensor_is_not_an_update(source, live):
    receiver = Receiver(whole_parts(live))
    parts, dtypes = whole_parts(source), {h.name: h.dtype for h in receiver.holdings(0)}
    boxes = [Box("w", (0, 0), (3, 4)), *(parts[n][0].box(n) for n in source if n != "w")]
    for packet in pack(parts, boxes, dtypes, version=1, source=0):
        receiver.stage(packet)
    with pytest.raises(RunFailed, match="1 tensors arrived in part: w"):
        receiver.finish(1, list(source))
    for packet in pack(parts, boxes, dtypes, version=2, source=0):
        receiver.stage(packet)
    with pytest.raises(RunFailed, match="w arrived twice"):
        for packet in pack(parts, [Box("w", (2, 0), (4, 4))], dtypes, version=2, source=0):
            receiver.stage(packet)
