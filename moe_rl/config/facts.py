"""What the preflight rules need to know of a model, read from its directory without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSize:
    """One tensor of the trainer's model; of an expert's, one for all experts of the layer.

    `place` is "embedding" (first stage), "head" (last stage) or "layer", and then `layer` its global index. `numel` counts
    the values of one expert's where `expert` is set. `bytes` is the size of a value in a bf16 model, `fp32` says that it is
    a parameter kept in fp32; only a `trained` tensor has a gradient (not buffers, not frozen ones). `split` says that
    tensor parallelism cuts it, `released` is the bytes of it in a released, quantised checkpoint, `served_split` says that
    vLLM's tensor parallelism cuts it.
    """

    place: str
    layer: int | None
    expert: bool
    numel: int
    bytes: int
    fp32: bool
    trained: bool
    split: bool
    released: int
    served_split: bool


@dataclass(frozen=True)
class LayerWidths:
    """What one layer keeps for its backward pass beside its input, and what it computes; counts of values, not bytes.

    A token keeps `native` values of the model's dtype, `fp32` ones, `casts` (fp32 copies, which an fp32 model has no need
    of) and `bytes` single bytes; `routed` and `routed_fp32` for each expert it goes to. Attention takes queries by chunks:
    a query of the chunk keeps `query`, `query_fp32` and `query_casts`, and each (query, key) pair `pair`, `pair_fp32` and
    `pair_bytes`; the keys of a chunk are the chunk itself, a `window` before it, and T // `ratio` compressed ones (ratio 0:
    none); without `chunked` attention no pair is kept. `stream` is the fp32 width of what backward makes anew of the
    residual streams; `query_backward` values a token and `routed_backward` a copy of one are what kernels make in the
    backward pass of attention and of experts, `routed_forward` the copies that those of experts hold in the forward pass.
    Work: `dense` weights that every token meets, `expert` weights of one expert, `pair_work`
    multiplications a pair, of which `index_work` are the indexer's, which chooses `chosen` compressed keys for a query (0: it
    meets all). A rollout engine keeps `cache` values a token and `cache_fixed` a sequence.
    """

    native: int = 0
    fp32: int = 0
    casts: int = 0
    bytes: int = 0
    routed: int = 0
    routed_fp32: int = 0
    query: int = 0
    query_fp32: int = 0
    query_casts: int = 0
    pair: int = 0
    pair_fp32: int = 0
    pair_bytes: int = 0
    window: int = 0
    ratio: int = 0
    chunked: bool = False
    stream: int = 0
    query_backward: int = 0
    routed_backward: int = 0
    routed_forward: int = 0
    dense: int = 0
    expert: int = 0
    pair_work: int = 0
    index_work: int = 0
    chosen: int = 0
    cache: float = 0.0
    cache_fixed: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """Facts of one model directory; every size comes from its `config.json`.

    `hash_layers` holds the 0-based indices of the decoder layers routed by token id. `tokenizer_vocab` is the
    number of ids that the tokenizer can produce (highest id + 1), None when the directory has no tokenizer.
    `supports_tp` says whether the family can split a layer over tensor-parallel ranks; `tp_reason` says why not.
    `weight_files` counts the files of weights, safetensors or of a dist-checkpoint (0: the directory holds no weights),
    and `num_parameters` the values of the whole model, buffers included. What tensor parallelism must divide: the
    key-value heads, the width `ffn_size` of feed-forward layers and `expert_size` of an expert (0: the model has none).
    `experts_format` and `linears_format` say how releases (and rollouts) store them: "mxfp4", "fp8" or "" (as they are).
    For the planner: every tensor, every layer's `LayerWidths` (in `fused_layers` with the family's kernels, where they can
    run this model), `boundary`, the values that a token is between layers, and
    `tied`, whether the output layer is the embedding.
    """

    family: str
    num_layers: int
    hash_layers: tuple[int, ...]
    vocab_size: int
    max_positions: int
    num_experts: int
    top_k: int
    hidden_size: int
    num_heads: int
    tokenizer_vocab: int | None
    supports_tp: bool
    path: str
    tp_reason: str = ""
    weight_files: int = 0
    num_parameters: int = 0
    num_kv_heads: int = 1
    ffn_size: int = 0
    expert_size: int = 0
    experts_format: str = ""
    linears_format: str = ""
    tensors: tuple[TensorSize, ...] = ()
    layers: tuple[LayerWidths, ...] = ()
    fused_layers: tuple[LayerWidths, ...] = ()
    boundary: int = 0
    tied: bool = False
