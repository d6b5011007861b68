"""Packets to the process beside this one: on a GPU by CUDA IPC, on a CPU through memory that both have mapped.

NCCL refuses two ranks on one GPU. Where trainer and rollout share GPUs, the trainer rank therefore receives for the rollout
worker beside it (`group.Members`) and hands over the buffers it receives into; only their names and the packets' indices go
through a Unix socket. The buffers belong to the trainer's process, so they lie outside the memory pool that vLLM's sleep frees.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch

from moe_rl.errors import RunFailed
from moe_rl.reshard.transport import Packet


def shared_buffer(nbytes: int, device: torch.device | str) -> torch.Tensor:
    """uint8 [nbytes] that a process beside this one can map: on a CPU a file without a name."""
    if torch.device(device).type == "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    handle = os.memfd_create("moe_rl")
    os.truncate(handle, max(nbytes, 1))
    buffer = torch.frombuffer(mmap.mmap(handle, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]
    buffer.handle = handle  # type: ignore[attr-defined]
    return buffer


def _exported(buffer: torch.Tensor) -> tuple[Any, ...]:
    if buffer.is_cuda:
        from torch.multiprocessing.reductions import reduce_tensor

        return reduce_tensor(buffer)
    return _map_file, (f"/proc/{os.getpid()}/fd/{buffer.handle}", buffer.numel())  # type: ignore[attr-defined]


def _map_file(path: str, nbytes: int) -> torch.Tensor:
    with open(path, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


def _settle(device: torch.device) -> None:
    """Wait until what was written or read on the device is."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Giver:
    """The end that has the packets. `buffers` (of `shared_buffer`) are all in which one may lie."""

    def __init__(self, path: str | Path, key: bytes, buffers: Sequence[torch.Tensor], timeout_s: float = 600.0) -> None:
        self._listener = Listener(str(path), "AF_UNIX", authkey=key)
        self._buffers, self._timeout_s = list(buffers), timeout_s
        self._end: Connection | None = None

    def accept(self) -> None:
        """Wait for the other end and tell it of the buffers."""
        self._end = self._listener.accept()
        self._end.send([_exported(buffer) for buffer in self._buffers])

    def give(self, packet: Packet) -> None:
        """Hand one over; its buffer may be used again when this returns.

        Raises:
            RunFailed: the other end refused it, ended, or gave no answer in time.
        """
        number = next(i for i, b in enumerate(self._buffers) if b.data_ptr() == packet.buffer.data_ptr())
        _settle(packet.buffer.device)
        self._ask(("packet", packet.version, packet.source, packet.items, number, packet.buffer.numel()))

    def finish(self, version: int, names: Iterable[str]) -> None:
        """Have the other end prove the update whole; RunFailed as `Receiver.finish`."""
        self._ask(("finish", version, sorted(names)))

    def _ask(self, message: tuple[Any, ...]) -> None:
        assert self._end is not None
        try:
            self._end.send(message)
            if not self._end.poll(self._timeout_s):
                raise RunFailed("reshard.handover", f"the rollout gave no answer in {self._timeout_s:.0f} s")
            fault = self._end.recv()
        except (EOFError, OSError) as error:
            raise RunFailed("reshard.handover", "the rollout beside this trainer rank has ended") from error
        if fault is not None:
            raise fault

    def close(self) -> None:
        """End the connection: the other end's `updates` end with it."""
        for end in (self._end, self._listener):
            if end is not None:
                end.close()


class Taker:
    """The end that takes packets into a `Receiver`, or anything with its `stage` and `finish`."""

    def __init__(self, path: str | Path, key: bytes) -> None:
        self._end = Client(str(path), "AF_UNIX", authkey=key)
        self._buffers = [rebuild(*arguments) for rebuild, arguments in self._end.recv()]

    def updates(self, receiver: Any) -> Iterator[int]:
        """Take updates until the other end closes; each version that was proven whole. A fault goes to the other end, which
        raises it, and this end waits for what it does next."""
        while True:
            try:
                kind, version, *rest = self._end.recv()
            except EOFError:
                return
            try:
                if kind == "packet":
                    source, items, number, nbytes = rest
                    buffer = self._buffers[number][:nbytes]
                    receiver.stage(Packet(version, source, items, buffer))
                    _settle(buffer.device)
                else:
                    receiver.finish(version, *rest)
                fault = None
            except RunFailed as error:
                fault = error
            self._end.send(fault)
            if kind == "finish" and fault is None:
                yield version
