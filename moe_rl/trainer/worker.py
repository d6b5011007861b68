"""What runs inside the processes: one trainer rank, one rollout replica. The driver talks to them through Ray."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moe_rl.config import Config

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Sequences:
    """Sequences as the trainer sees them. `tokens[i]` int32 [L]; each field holds one float32 [L-1] per sequence,
    number j speaking of token j + 1. `routes[i]`, where there are some: the experts to replay, integers [L-1, layers,
    k], -1 where the router is free, or None."""

    tokens: list[np.ndarray]
    fields: dict[str, list[np.ndarray]]
    routes: list[np.ndarray | None] | None = None


Rows = dict[int, tuple[np.ndarray, "np.ndarray | None"]]
"""Sequence id -> its log-probs and entropies, float32 [L-1]."""


def by_sequence(scores: Sequence[tuple[Any, Any, Any]]) -> Rows:
    """The engine's scores of micro-batches, sequence by sequence."""
    return {i: (p, e) for ids, ps, es in scores for i, p, e in zip(ids, ps, es or [None] * len(ids), strict=True)}


class OptimizerStep(NamedTuple):
    """The engine's `UpdateStats` for the driver, which does without torch's distributed half and megatron-core."""

    loss: float
    grad_norm: float
    lr: float
    sums: dict[str, float]
    coverage: float | None


def write_output_to(log: str) -> None:
    """Send this process's output, C libraries' included, to the end of a file."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


class Worker:
    """What both kinds share."""

    def __init__(self, log: str) -> None:
        write_output_to(log)
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()} on {platform.node()} starts", flush=True)

    def free_address(self) -> str:
        """`host:port` where this process could listen, for others to meet it at."""
        import ray.util

        from moe_rl.config.host import free_port

        return f"{ray.util.get_node_ip_address()}:{free_port()}"

    def describe(self) -> dict[str, Any]:
        """Host, process id and versions, for the run's manifest."""
        from importlib.metadata import version

        packages = ("torch", "megatron-core", "transformers", "ray", "numpy")
        return {
            "host": platform.node(),
            "pid": os.getpid(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in packages},
        }

    def peak_memory_gib(self) -> dict[str, float]:
        """Peak host memory of this process, and of what it allocated and reserved of its GPU (0 without one), in GiB."""
        from moe_rl.engine.memory import GIB, gpu_peak_bytes, host_peak_bytes

        gpu, reserved = gpu_peak_bytes()
        return {"host": host_peak_bytes() / GIB, "gpu": gpu / GIB, "gpu_reserved": reserved / GIB}

    def phase_peak_gib(self) -> tuple[float, float]:
        """The most (host, GPU) memory of this process since the last call, in GiB."""
        from moe_rl.engine.memory import GIB, phase_peak_bytes

        host, gpu = phase_peak_bytes()
        return host / GIB, gpu / GIB


class TrainerWorker(Worker):
    """One rank of the trainer: its engine, and the loss of the algorithm."""

    def start(self, config: Config, rank: int, world: int, address: str, options: Mapping[str, bool]) -> dict[str, Any]:
        """Build the engine (:meth:`Engine.create`); the layout and where this rank stands in it."""
        from moe_rl.engine.parallel import pick_device

        if pick_device(config.engine.device).type == "cpu":
            from moe_patches import cpu

            cpu.install()  # before megatron-core is imported: it must not find Transformer Engine
        from moe_rl.engine.engine import Engine

        self.config = config
        self.engine = Engine.create(config, rank, world, address, **options)
        parallel = self.engine.parallel
        place = {"dp_rank": parallel.dp_rank, "pp_rank": parallel.pp_rank}
        return {**parallel.describe(), **place, **self.describe(), "patches": self.engine.patches}

    def _pack(self, batch: Sequences, cuts: Sequence[Any]) -> list[Any]:
        from moe_rl.engine.batch import MicroBatch
        from moe_rl.engine.replay import packed_routes

        packed = []
        for cut in cuts:
            fields = [{name: values[i] for name, values in batch.fields.items()} for i in cut.indices]
            if cut.filler:  # keeps the ranks in step and must not be felt
                fields = [{name: np.zeros_like(value) for name, value in each.items()} for each in fields]
            packed.append(MicroBatch.pack([batch.tokens[i] for i in cut.indices], fields, list(cut.indices)))
            if batch.routes is not None:
                routes = packed_routes([batch.routes[i] for i in cut.indices], packed[-1].lengths, self.engine.arch)
                packed[-1] = replace(packed[-1], routes=routes)
        return packed

    def score(
        self, batch: Sequences, cuts: Sequence[Any], temperature: float, entropy: bool, reference: bool
    ) -> tuple[Rows, float, dict[int, np.ndarray]]:
        """Log-probs (and entropies) float32 [L-1] of this rank's sequences by index, on the last stage; seconds; under R2
        the experts that the policy chose in this rank's layers."""
        start = time.perf_counter()
        record = self.config.rollout.router_replay == "R2" and not reference
        packed = self._pack(Sequences(batch.tokens, {}, None if reference else batch.routes), cuts)
        options: dict[str, Any] = {
            "temperature": temperature,
            "entropy": entropy,
            "reference": reference,
            "record": record,
        }
        rows = by_sequence(self.engine.log_probs(packed, **options))
        return rows, time.perf_counter() - start, self.engine.routes if record else {}

    def update(
        self, batch: Sequences, cuts: Sequence[Any], temperature: float, supervised: bool, scored: bool
    ) -> tuple[OptimizerStep, float, Rows]:
        """One optimizer step on this rank's micro-batches; seconds; with `scored` what `score` would have given before it."""
        from moe_rl.trainer.losses import grpo_loss, supervised_loss

        start = time.perf_counter()
        loss = supervised_loss if supervised else grpo_loss(self.config.algorithm)
        stats = self.engine.update(self._pack(batch, cuts), loss, temperature=temperature, scored=scored)
        done = OptimizerStep(stats.loss, stats.grad_norm, stats.lr, stats.sums, stats.coverage)
        return done, time.perf_counter() - start, by_sequence(stats.scores)

    def owned(self) -> list[Any]:
        """What this rank can send: name, shape, dtype and block of each tensor and buffer (:class:`Owned`)."""
        from moe_rl.models.weights import dtype_name
        from moe_rl.reshard.plan import Owned

        rank = self.engine.parallel.rank
        return [
            Owned(rank, name, part.shape, dtype_name(part.view), part.box(name))
            for name, parts in self.engine.weights().items()
            for part in parts
        ]

    def send(self, boxes: Sequence[Any], forms: Mapping[str, str], version: int) -> list[Any]:
        """Blocks (:class:`Box`) as packets, each in the form that its receivers keep it in: encoded here, where they lie."""
        from moe_rl.models.wire import BLOCKS
        from moe_rl.reshard.transport import pack

        names = [box.name for box in boxes]
        parts = self.engine.sent(names, encoded=[name for name in names if forms[name] in BLOCKS])
        return list(pack(parts, boxes, forms, version=version, source=self.engine.parallel.rank))

    def load_released(self, path: str) -> None:
        self.engine.load_released(path)

    def save(self, directory: str, contents: Sequence[str]) -> None:
        self.engine.save(directory, contents=contents)

    def finish_save(self) -> None:
        self.engine.finish_save()

    def load(self, directory: str, contents: Sequence[str]) -> dict[str, float]:
        return self.engine.load(directory, contents=contents)

    def digest(self) -> dict[str, int]:
        return self.engine.digest()


class RolloutWorker(Worker):
    """One rollout replica, or its part on one node; `gpus` are those of its node that it and its children may see, all by
    default."""

    def __init__(self, log: str, gpus: range | None = None) -> None:
        from moe_rl.config.host import visible_gpus

        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(gpus)
        super().__init__(log)

    def start(self, config: Config, part: int, addresses: Sequence[str]) -> dict[str, Any]:
        """Build the engine. `addresses` are `host:port` of each node of a replica of several, this one's at `part`: part 0
        waits for the others, and hears what all of them hold (:meth:`held`)."""
        if config.rollout.engine != "vllm":
            from moe_rl.rollout.transformers_engine import TransformersEngine

            self.engine: Any = TransformersEngine.from_config(config)
            return self.describe()
        from moe_rl.rollout.vllm_engine import VllmEngine
        from moe_rl.rollout.vllm_node import Replica, VllmFollower

        replica = Replica.from_config(config)
        if addresses:
            hosts, ports = zip(*(address.rsplit(":", 1) for address in addresses), strict=True)
            replica = replace(replica, addresses=hosts, port=int(ports[0]))
        self.engine = VllmFollower(replica, part, _end) if part else VllmEngine.from_config(config, replica)
        return self.describe()

    def held(self) -> list[Any]:
        """What the workers of each of the replica's nodes hold, from its leader."""
        return self.engine.held

    def hold(self, weights: Any) -> None:
        """Tell a follower what the workers of its node hold."""
        self.engine.hold(weights)

    def holdings(self, receiver: int) -> list[Any]:
        """What this node of the replica, number `receiver` of the plan, must be given."""
        return self.engine.holdings(receiver)

    def receive(self, version: int, names: Sequence[str], *packets: Sequence[Any]) -> int:
        """Take a new weight version, whole or not at all; bytes that arrived."""
        came = [packet for part in packets for packet in part]
        self.engine.receive(came, version, names)
        return sum(packet.nbytes for packet in came)

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-probs of given tokens by the rollout's own forward pass."""
        return self.engine.score(sequences)

    def digests(self) -> dict[str, int]:
        """Digests of the live weights."""
        return self.engine.digests()

    def generate(self, requests: Sequence[Any]) -> tuple[list[Any], float]:
        """One completion for each request, in their order; seconds."""
        start = time.perf_counter()
        return self.engine.generate(requests), time.perf_counter() - start


def _end(status: int) -> None:
    """A follower's life is that of its vLLM: the driver sees its death and starts the replica again."""
    print(f"vLLM ended with status {status}", flush=True)
    os._exit(1)
