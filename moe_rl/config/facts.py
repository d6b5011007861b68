"""What the preflight rules need to know of a model, read from its directory without torch."""

from __future__ import annotations

from dataclasses import dataclass


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
