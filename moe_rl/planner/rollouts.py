"""What the rollout engine takes on a GPU and on a node. Imports no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from moe_rl.config import Config, ModelFacts
from moe_rl.config.facts import TensorSize
from moe_rl.config.host import resolve_device
from moe_rl.config.replicas import nodes_of_replica

from .inventory import is_tied_copy, parameters, released_bytes

GIB = 2**30
SHARE = 1 / 3  # of a GPU's memory for weights of rollouts that a configuration says nothing of


@dataclass(frozen=True)
class Rollout:
    """One replica's shape and bytes a rank: `weights`, `layer` of them the most in one layer, `kv_token` for a token of
    context and `kv_sequence` for a sequence; `copy` is what each of a replica's `span` nodes keeps of its weights on the host.

    `ranks` make a replica, `replicas` of them sample; `vllm` says which engine, `colocated` whether its ranks are the
    trainer's GPUs, `share` how much of a GPU vLLM is given (None: what the sequences of a step need).
    """

    vllm: bool
    replicas: int
    tp: int
    dp: int
    ep: int
    weights: int
    layer: int
    copy: int
    span: int
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
        layer = copy = 0
        span = nodes_of_replica(config) if config.cluster.nodes > 1 else 1
        if vllm:
            by_layer = _served(facts, tp, dp, ep)
            weights, layer = sum(by_layer.values()), max(by_layer.values(), default=0)
            copy = _copy(facts, ep, span) if described else 0
            b = 1 if r.kv_cache_dtype == "fp8" or not described else 2
        else:
            weights = parameters(facts)[0] * b
        kv = sum(w.cache for w in facts.layers) * b, sum(w.cache_fixed for w in facts.layers) * b
        return cls(vllm, replicas, tp, dp, ep, weights, layer, copy, span, kv[0], kv[1], share, colocated)


def _copy(facts: ModelFacts, ep: int, span: int) -> int:
    """Host bytes of a replica's weights on each of `span` nodes: those of its own ranks' experts, and all others, whole."""
    dense, experts = released_bytes(facts)
    return dense + (experts // span if ep > 1 else experts)


def served_bytes(facts: ModelFacts, t: TensorSize, tp: int, dp: int, ep: int) -> int:
    """Bytes that a rank of a vLLM replica holds of a tensor, as released: experts are dealt to all ranks or cut over `tp`,
    which cuts only some of the others (`TensorSize.served_split`) and leaves each rank the rest whole."""
    if t.expert:
        return t.released * facts.num_experts // (tp * dp if ep > 1 else tp)
    return t.released // (tp if t.served_split else 1)


def _served(facts: ModelFacts, tp: int, dp: int, ep: int) -> Counter[int | None]:
    """A rank's bytes by layer; a tied output layer is the embedding."""
    found: Counter[int | None] = Counter()
    for t in facts.tensors:
        if not (t.place == "head" and is_tied_copy(facts, t)):
            found[t.layer] += served_bytes(facts, t, tp, dp, ep)
    return found


def _propose(config: Config, facts: ModelFacts) -> tuple[int, int, int]:
    node, room = config.cluster.gpus_per_node, config.machine.gpu_memory_gib * GIB * SHARE
    size = 1
    while True:
        fit = min(size, node)
        tp = fit if facts.num_kv_heads == 1 or facts.num_kv_heads % fit == 0 else 1
        shape = tp, size // tp, size if facts.num_experts and facts.num_experts % size == 0 else 1
        if 2 * size > config.world or sum(_served(facts, *shape).values()) <= room:
            return shape
        size *= 2
