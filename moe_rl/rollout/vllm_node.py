"""One node of a vLLM replica: what vLLM is started with there, and the weights of the node's ranks.

The process here keeps the weights of the last update in a file in memory, in checkpoint layout: the books of an update are
kept there (`Receiver`), and vLLM's workers on the node load from it. Of several nodes the first leads (`VllmEngine`): it
alone takes requests, and asks all ranks. The others follow (`VllmFollower`).
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from moe_rl.config.facts import ModelFacts
from moe_rl.config.host import free_port, resolve_device
from moe_rl.config.schema import Config
from moe_rl.errors import UserError
from moe_rl.lifetime import end_with_parent
from moe_rl.models.family import Model, get_family, read_config, read_facts
from moe_rl.reshard.plan import Held
from moe_rl.reshard.receive import Receiver, place, placed_parts
from moe_rl.reshard.transport import Packet
from moe_rl.rollout.vllm_args import Node, kernel_options, replica_nodes
from moe_rl.rollout.vllm_worker import Scratch

EXTENSION = "moe_rl.rollout.vllm_worker.WeightExtension"
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine has a process all the same; on a CPU its worker stays inside it
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
Weights = Mapping[str, tuple[tuple[int, ...], str]]
"""Released name -> shape, and the form that it is loaded in."""


@dataclass(frozen=True)
class Replica:
    """A replica of tp x dp ranks, as each of its nodes is told of it.

    Attributes:
        source: a model directory, or a run's `model`; its weight files are not read.
        max_tokens: longest sequence, prompt and completion.
        tp, dp, ep: ranks of the replica; `ep` is 1 or tp * dp.
        dtype: "fp32" or "bf16", of what the checkpoint does not quantise.
        device: "cpu" or "cuda".
        batch_size: most sequences decoded at a time by a data-parallel rank.
        routed_experts: record the experts of every token (`Completion.routed_experts`).
        options: further fields of vLLM's AsyncEngineArgs.
        addresses: one for each node, the leader's first; the ranks are spread over them evenly.
        port: where the nodes meet at the leader; 0 is a free one, for a replica of one node.
    """

    source: Model
    max_tokens: int
    tp: int = 1
    dp: int = 1
    ep: int = 1
    dtype: str = "fp32"
    device: str = "cpu"
    batch_size: int = 256
    routed_experts: bool = False
    options: Mapping[str, Any] | None = None
    addresses: Sequence[str] = ("127.0.0.1",)
    port: int = 0

    @classmethod
    def from_config(cls, config: Config) -> Replica:
        """As a run's configuration asks for it, on one node."""
        rollout, device = config.rollout, resolve_device(config.engine.device)
        options: dict[str, Any] = {}
        if device == "cuda":
            options = dict(kernel_options(config, read_facts(config.model, config.model.family)))
            options |= {"gpu_memory_utilization": rollout.gpu_memory_utilization}
            options |= {"kv_cache_dtype": rollout.kv_cache_dtype, "enforce_eager": rollout.enforce_eager}
            if rollout.max_num_batched_tokens:
                options["max_num_batched_tokens"] = rollout.max_num_batched_tokens
        return cls(
            config.model,
            max_tokens=config.data.max_prompt + rollout.max_response,
            tp=rollout.tp,
            dp=rollout.dp,
            ep=rollout.ep,
            dtype=config.engine.dtype,
            device=device,
            batch_size=rollout.batch_size,
            routed_experts=rollout.router_replay == "R3",
            options=options,
        )

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // len(self.addresses)

    def node(self, index: int, facts: ModelFacts) -> Node:
        """What vLLM is given on a node, without the model's directory.

        Raises:
            UserError: no vLLM is installed, or it has no such form.
        """
        common: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": {"fp32": "float32", "bf16": "bfloat16"}[self.dtype],
            "max_model_len": self.max_tokens + 1,  # scoring samples one token beyond the sequence
            "max_num_seqs": self.batch_size,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": EXTENSION,
            "disable_log_stats": True,
            **({} if self.tp > 1 else {"distributed_executor_backend": "uni"}),
            **(_cpu_options(self.max_tokens, self.batch_size) if self.device == "cpu" else {}),
            **({"enable_return_routed_experts": True} if self.routed_experts and self.device == "cuda" else {}),
            **(self.options or {}),
        }
        (nodes,) = replica_nodes(
            _version(),
            addresses=self.addresses,
            gpus_per_node=self.ranks_per_node,
            replicas=1,
            tp=self.tp,
            dp=self.dp,
            ep=self.ep,
            num_experts=facts.num_experts,
            port=self.port or free_port(),
            options=common,
        )
        return nodes[index]


class NodeWeights:
    """The model directory of one node, without weights, and the weights of the node's ranks in a file in memory."""

    def __init__(self, replica: Replica) -> None:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        self.facts = read_facts(replica.source)
        self.receiver = Receiver({})
        self._directory = tempfile.TemporaryDirectory(prefix="moe_rl_vllm_")
        self._scratch = Scratch(Path(self._directory.name))
        self.model = self._scratch.model
        self.model.mkdir()
        family = get_family(self.facts.family)
        config = family.export_config(read_config(replica.source), family.read_arch(replica.source))
        config.setdefault("architectures", [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]])
        (self.model / "config.json").write_text(json.dumps(config))

    def hold(self, weights: Weights) -> None:
        """Make room for what the node's ranks hold, each tensor once."""
        held = [Held(0, name, tuple(shape), form) for name, (shape, form) in weights.items()]
        index, size = place(held)
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            os.truncate(file.fileno(), max(size, 1))
            self._handle = os.dup(file.fileno())
        # the file has no name of its own: nothing is left of it after a kill
        self._scratch.staging.symlink_to(f"/proc/{os.getpid()}/fd/{self._handle}")
        self._scratch.index.write_bytes(pickle.dumps(index))
        buffer = torch.from_numpy(np.memmap(self._scratch.staging, np.uint8, mode="r+"))
        self.receiver = Receiver(placed_parts(index, buffer), held)

    def stage(self, packets: Iterable[Packet], version: int, names: Iterable[str]) -> None:
        """Take one whole update; the node's workers may load it then. RunFailed as `Receiver.finish`."""
        for packet in packets:
            self.receiver.stage(packet)
        self.receiver.finish(version, names)
        self._scratch.publish(version)

    def close(self) -> None:
        self._directory.cleanup()


class VllmFollower:
    """A node of a replica that another one leads: vLLM's headless process, and the weights of its ranks.

    vLLM there says nothing to this process: it answers the leader, which `hold` hears of what this node's ranks hold.
    """

    def __init__(self, replica: Replica, index: int, ended: Callable[[int], None]) -> None:
        """Start vLLM; it waits for the leader. `ended` is called with its exit status should it end before `close`."""
        self._weights = NodeWeights(replica)
        node = replica.node(index, self._weights.facts)
        command = [sys.executable, "-m", "moe_rl.rollout.vllm_headless", str(self._weights.model), *node.argv]
        environment = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
        self._process = subprocess.Popen(command, env=os.environ | environment, preexec_fn=end_with_parent)
        self._closing = False
        threading.Thread(target=self._watch, args=(ended,), daemon=True).start()

    def _watch(self, ended: Callable[[int], None]) -> None:
        status = self._process.wait()
        if not self._closing:
            ended(status)

    @property
    def weight_version(self) -> int:
        """Version of the weights staged here; the leader knows whether its ranks took them."""
        return self._weights.receiver.version

    def hold(self, weights: Weights) -> None:
        """Make room for the weights of this node's ranks, as the leader was told by them."""
        self._weights.hold(weights)

    def holdings(self, receiver: int) -> list[Held]:
        """Every tensor that a worker of this node holds a part of."""
        return self._weights.receiver.holdings(receiver)

    def receive(self, packets: Iterable[Packet], version: int, names: Iterable[str]) -> None:
        """Take this node's part of an update; its ranks load it when the leader has them. RunFailed as `Receiver.finish`."""
        self._weights.stage(packets, version, names)

    def digests(self) -> dict[str, int]:
        """Digests of what is staged here; those of the live weights are the leader's to ask for."""
        return self._weights.receiver.digests()

    def close(self) -> None:
        """End vLLM's processes on this node."""
        self._closing = True
        processes = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=10)
        self._weights.close()


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    raise UserError(
        "rollout.vllm",
        "no vLLM is installed here",
        "rollout.engine is vllm.",
        "Run `make setup`; on GPUs the extra `gpu`.",
    )


def _cpu_options(max_tokens: int, batch_size: int) -> dict[str, Any]:
    """What vLLM's CPU build needs: no chunked prefill, which its seeded sampler does not survive, and no graphs."""
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_tokens, batch_size) * 8,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 256 << 20,
    }
