"""Packets handed to the process beside: on the CPU through a mapped file; CUDA IPC is the same code with another buffer."""

from __future__ import annotations

import multiprocessing as mp

import numpy as np
import pytest
import torch

from moe_rl.errors import RunFailed
from moe_rl.models.weights import Part, whole_parts
from moe_rl.reshard.handover import Giver, Taker, shared_buffer
from moe_rl.reshard.receive import Receiver
from moe_rl.reshard.transport import pack

SHAPES = {"a.weight": (256, 64), "b": (33,), "c": (7, 5)}


def _take(path, device, results):
    """The rollout's side: a live model, updates until the other end closes."""
    live = {name: torch.zeros(shape, device=device) for name, shape in SHAPES.items()}
    receiver = Receiver(whole_parts(live))
    for version in Taker(path, b"key").updates(receiver):
        results.put((version, {name: value.cpu().numpy().copy() for name, value in live.items()}))
    results.put((receiver.version, None))


def _hand_over(tmp_path, device):
    context = mp.get_context("spawn")
    results, path = context.Queue(), tmp_path / "socket"
    buffers = [shared_buffer(60_000, device) for _ in range(2)]
    giver = Giver(path, b"key", buffers, timeout_s=60)
    process = context.Process(target=_take, args=(str(path), device, results), daemon=True)
    process.start()
    giver.accept()
    seen = []
    for version in (1, 2, 3):
        values = {n: torch.randn(s, generator=torch.Generator().manual_seed(version)) for n, s in SHAPES.items()}
        parts = {n: [Part(v.to(device), (0,) * v.dim(), tuple(v.shape))] for n, v in values.items()}
        boxes, slots = [p[0].box(n) for n, p in parts.items()], iter(buffers * 9)
        buffer = lambda nbytes, slots=slots: next(slots)[:nbytes]  # noqa: E731
        forms = dict.fromkeys(parts, "fp32")
        for k, packet in enumerate(pack(parts, boxes, forms, version=version, source=0, limit=20_000, buffer=buffer)):
            if version == 2 and k == 1:  # a byte changes on its way
                packet.buffer[5] ^= 1
            giver.give(packet)
        if version == 2:
            with pytest.raises(RunFailed, match="differ from what was sent"):
                giver.finish(version, parts)
            continue
        giver.finish(version, parts)
        got = results.get(timeout=60)
        assert got[0] == version
        seen.append(all(np.array_equal(got[1][n], v.numpy()) for n, v in values.items()))
    giver.close()
    assert results.get(timeout=60) == (3, None)
    process.join(30)
    assert seen == [True, True] and process.exitcode == 0


def test_packets_reach_the_process_beside_and_a_changed_byte_is_named(tmp_path):
    _hand_over(tmp_path, "cpu")


@pytest.mark.gpu
def test_packets_reach_the_process_beside_by_cuda_ipc(tmp_path):
    _hand_over(tmp_path, "cuda")


def test_an_end_that_died_is_noticed(tmp_path):
    context = mp.get_context("fork")
    buffers = [shared_buffer(1000, "cpu")]
    giver = Giver(tmp_path / "socket", b"key", buffers, timeout_s=30)
    process = context.Process(target=Taker, args=(str(tmp_path / "socket"), b"key"))
    process.start()
    giver.accept()
    process.join(30)
    with pytest.raises(RunFailed, match="beside this trainer rank has ended"):
        giver.finish(1, [])
    giver.close()
