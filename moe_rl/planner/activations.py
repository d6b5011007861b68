"""Bytes that forward and backward passes need on one rank beside weights and gradients. Imports no torch.

Three parts. What lies between the passes: each micro-batch in flight keeps, for each layer of the rank, the layer's
input (recompute) or all that the layer saves. What one layer needs while it is run backward: all that it saves, made
anew under recompute, and the gradients around it. What the loss needs: logits of one chunk of tokens, and the output
weight's gradient in fp32 until all chunks are in (models/logprobs.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_rl.config import Config
from moe_rl.config.facts import LayerWidths, ModelFacts
from moe_rl.config.host import resolve_device

from .inventory import Inventory, Stage

# What the bytes of each backend rest on besides the code that they are counted from
EVIDENCE = {
    "triton": "counted from the code, as those 1 to 2 % above the peaks of Pro layers on an H200 were, which kept more then"
    " (benchmarks/results/layer_h200.json)",
    "plain": "within 2 % of updates of 512-token sequences on an H200 (benchmarks/results/planner_memory_h200.json)",
}
TOO_OLD = ("sm80",)  # of cluster.gpu_arch: before compute capability 9.0, where the kernels do not run

# Of a (query, key) pair attention's backward holds besides what it saved, in fp32: the weights' gradient, its product with
# them and the logits' gradient; in the model's dtype: the weights' gradient once more (deepseek_v4/attention.py: sink_attention)
PAIR_BACKWARD_FP32, PAIR_BACKWARD_NATIVE = 3, 1
# While a hyper-connection is run backward: gradients of the streams normed, squared and as they came, fp32
STREAM_BACKWARD_FP32 = 3


@dataclass(frozen=True)
class Activations:
    """Bytes: `kept` between the passes, `layer` of the layer being run, `loss` of the loss; of them `peak` at a time."""

    kept: int
    layer: int
    loss: int

    @property
    def peak(self) -> int:
        return self.kept + max(self.layer, self.loss)


def on_gpu(config: Config) -> bool:
    """Whether the trainer runs on GPUs."""
    return resolve_device(config.engine.device) == "cuda"


def backend(config: Config, facts: ModelFacts) -> str:
    """What `engine.attention_backend` comes to: "triton", where the family has kernels for this model and they run, or "plain"."""
    e = config.engine
    runs = on_gpu(config) and e.dtype == "bf16" and config.cluster.gpu_arch not in TOO_OLD and facts.fused_layers
    return "triton" if runs and e.attention_backend != "plain" else "plain"


def activations(inventory: Inventory, stage: Stage, tokens: int, in_flight: int, train: bool) -> Activations:
    """Of a micro-batch of `tokens` on a rank of `stage`; `in_flight` are kept at once when `train`, none otherwise."""
    facts, engine, tp = inventory.facts, inventory.config.engine, inventory.config.layout.tp
    b = 4 if engine.dtype == "fp32" else 2
    boundary = b * facts.boundary * tokens // tp
    every = facts.fused_layers if backend(inventory.config, facts) == "triton" else facts.layers
    layers = [every[i] for i in stage.layers]
    saved = [saved_bytes(w, tokens, b, engine.attention_chunk, facts.top_k, tp) for w in layers]
    running = max((running_bytes(facts, w, tokens, b, engine.attention_chunk, tp) for w in layers), default=0)
    if not train:
        forward = max((_forward_bytes(facts, w, tokens, b, engine.attention_chunk) for w in layers), default=0)
        return Activations(boundary, boundary + forward // tp, _loss(inventory, tokens, b, False) if stage.loss else 0)
    if engine.recompute == "full":
        kept = in_flight * (len(stage.layers) + 1) * boundary
        layer = running
    else:
        kept = in_flight * (sum(saved) + (len(stage.layers) + 1) * boundary)
        layer = running - (max(saved) if saved else 0)
    return Activations(kept, layer, _loss(inventory, tokens, b, True) if stage.loss else 0)


def saved_bytes(w: LayerWidths, tokens: int, b: int, chunk: int, top_k: int, tp: int = 1) -> int:
    """What autograd saves of one layer beside its input, for `tokens` tokens in values of `b` bytes."""
    casts = 4 * w.casts if b == 2 else 0
    total = tokens * (b * w.native + 4 * w.fp32 + casts + w.bytes + top_k * (b * w.routed + 4 * w.routed_fp32))
    if w.chunked and tokens <= chunk:  # several chunks are recomputed one by one
        total += _chunk_bytes(w, tokens, tokens, b)
    return total // tp


def running_bytes(facts: ModelFacts, w: LayerWidths, tokens: int, b: int, chunk: int, tp: int = 1) -> int:
    """The most that a layer needs while it is run backward: its saved values and the gradients around them."""
    saved, copies = saved_bytes(w, tokens, b, chunk, facts.top_k, tp), tokens * facts.top_k // tp
    experts = copies * (b * w.routed + 4 * w.routed_fp32)
    streams = 2 * b * facts.boundary * tokens // tp  # the gradient that came, and the one that is summed up
    at_experts = saved + streams + b * copies * (2 * facts.hidden_size + w.routed_backward)  # outputs, sorted and not
    at_streams = saved - experts + streams + STREAM_BACKWARD_FP32 * 4 * w.stream * tokens // tp
    at_attention = saved - experts + streams + b * w.query_backward * tokens
    if w.chunked:
        queries = min(tokens, chunk)
        fresh = _chunk_bytes(w, queries, tokens, b) if tokens > chunk else 0
        pairs = queries * keys_of(w, queries, tokens)
        gradients = pairs * w.pair * (4 * PAIR_BACKWARD_FP32 + b * PAIR_BACKWARD_NATIVE)
        at_attention = saved - experts + streams + fresh + gradients
    return max(at_experts, at_streams, at_attention)


def _forward_bytes(facts: ModelFacts, w: LayerWidths, tokens: int, b: int, chunk: int) -> int:
    """The most that a layer makes at a time when nothing is saved: the streams three times in fp32 (cast, squared or
    weighed, normed); all queries and outputs beside one chunk's logits, three times in fp32; or the copies of tokens that
    experts get, three times (sorted, their outputs, and those put back), or sorted, with hidden values and outputs."""
    queries = min(tokens, chunk)
    pairs = queries * keys_of(w, queries, tokens) * w.pair if w.chunked else 0
    return max(
        3 * 4 * w.stream * tokens,
        2 * b * w.query * tokens + 3 * 4 * pairs,
        b * tokens * facts.top_k * (w.routed_forward or 3 * facts.hidden_size),
    )


def keys_of(w: LayerWidths, queries: int, tokens: int) -> int:
    """Keys that a chunk of queries meets: the window before it, itself, and compressed entries."""
    return min(tokens, queries + w.window) + (tokens // w.ratio if w.ratio else 0)


def _chunk_bytes(w: LayerWidths, queries: int, tokens: int, b: int) -> int:
    casts = 4 * w.query_casts if b == 2 else 0
    pairs = queries * keys_of(w, queries, tokens)
    return queries * (b * w.query + 4 * w.query_fp32 + casts) + pairs * (b * w.pair + 4 * w.pair_fp32 + w.pair_bytes)


def _loss(inventory: Inventory, tokens: int, b: int, train: bool) -> int:
    """Logits of one chunk twice in fp32, and the last layer's output. Backward beside them the output weight's gradient in
    fp32 and in the weight's type, and what the head saved: streams cast and normed in fp32, the final norm."""
    facts, engine, tp = inventory.facts, inventory.config.engine, inventory.config.layout.tp
    vocab, h = -(-facts.vocab_size // tp), facts.hidden_size
    chunk = min(tokens, engine.logprob_chunk) * vocab
    if not train:
        return 8 * chunk + b * tokens * h
    head = tokens * (2 * 4 * facts.boundary + (8 + 2 * b) * h)
    return max(8 * chunk + 4 * vocab * h, (4 + b) * (chunk + vocab * h)) + head
