"""What the rollout engine takes on a GPU and on a node. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from moe_rl.config import Config, ModelFacts
from moe_rl.config.host import resolve_device

from .inventory import parameters, released_bytes

GIB = 2**30
SHARE = 0.25  # of a GPU's memory for weights of rollouts that a configuration says nothing of


@dataclass(frozen=True)
class Rollout:
    """One replica's shape and bytes a rank: `weights`, `kv_token` for a token of context and `kv_sequence` for a sequence.

    `ranks` make a replica, `replicas` of them sample; `vllm` says which engine, `colocated` whether its ranks are the
    trainer's GPUs, `share` how much of a GPU vLLM is given (None: what the sequences of a step need).
    """

    vllm: bool
    replicas: int
    tp: int
    dp: int
    ep: int
    weights: int
    kv_token: float
    kv_sequence: float
    share: float | None
    colocated: bool

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @classmethod
    def of(cls, config: Config, facts: ModelFacts) -> Rollout:
        """As configured. A run on GPUs whose replica is not described gets the smallest one, over whole nodes where it is
        larger than one, whose weights fill at most `SHARE` of a GPU: what `plan` proposes."""
        r = config.rollout
        on_gpu = config.engine.device == "cuda" or resolve_device(config.engine.device) == "cuda"
        described = r.engine == "vllm" or r.tp * r.dp > 1
        colocated = getattr(r, "placement", "colocated") == "colocated" and on_gpu
        share = r.gpu_memory_utilization if described else None
        if described or not on_gpu:
            tp, dp, ep = r.tp, r.dp, r.ep
            vllm, replicas = r.engine == "vllm", r.replicas
        else:
            tp, dp, ep = _propose(config, facts)
            vllm, replicas = True, max(1, config.world // (tp * dp))
        b = 2 if config.engine.dtype == "bf16" else 4
        if vllm:
            dense, experts = released_bytes(facts)
            weights = dense // tp + experts // max(ep, tp)
            b = 1 if r.kv_cache_dtype == "fp8" or not described else 2
        else:
            weights = parameters(facts)[0] * b
        kv = sum(w.cache for w in facts.layers) * b, sum(w.cache_fixed for w in facts.layers) * b
        return cls(vllm, replicas, tp, dp, ep, weights, kv[0], kv[1], share, colocated)


def _propose(config: Config, facts: ModelFacts) -> tuple[int, int, int]:
    dense, experts = released_bytes(facts)
    node, room = config.cluster.gpus_per_node, config.machine.gpu_memory_gib * GIB * SHARE
    size = 1
    while size < config.world and dense // min(size, node) + experts // size > room:
        size *= 2
    size = min(size, config.world)
    tp = min(size, node) if facts.num_kv_heads == 1 or facts.num_kv_heads % min(size, node) == 0 else 1
    return tp, size // tp, size if facts.num_experts % size == 0 and facts.num_experts else 1
