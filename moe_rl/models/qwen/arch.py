"""The sizes of a Qwen2, Qwen3 or Qwen3-MoE model, read from its `config.json`. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_rl.errors import UserError

MODEL_TYPES = ("qwen2", "qwen3", "qwen3_moe")
_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings".split()
)
_MOE_SIZES = "num_experts num_experts_per_tok moe_intermediate_size".split()
_SWITCHES = "tie_word_embeddings norm_topk_prob use_sliding_window attention_bias".split()


@dataclass(frozen=True)
class QwenArch:
    """Sizes and switches of one model.

    `moe_layers` are the indices of the layers with experts, all others have one feed-forward network of
    `intermediate_size`; `tied` says that the output layer is the embedding; `qkv_bias` that queries, keys and values have
    biases (Qwen2), `qk_norm` that each head's queries and keys are normed (Qwen3).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    norm_topk_prob: bool
    moe_layers: tuple[int, ...]
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    rope_theta: float
    norm_eps: float
    initializer_range: float
    max_positions: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> QwenArch:
        """Read the parsed `config.json`, as released or as transformers 5 writes it.

        Raises:
            UserError: sizes are missing or contradict each other, or it asks for something this family does not do.
        """
        config = {key: value for key, value in config.items() if value is not None}
        config.setdefault("num_experts", config.get("num_local_experts"))  # transformers 5 writes it so
        kind = config.get("model_type")
        if kind not in MODEL_TYPES:
            raise _bad(f"model_type {kind!r}", f"this family is {', '.join(MODEL_TYPES)}")
        _check_types(config, is_moe=kind == "qwen3_moe")
        _refuse(config, kind)
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        arch = cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            moe_intermediate_size=config["moe_intermediate_size"] if kind == "qwen3_moe" else 0,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim", 128 if kind == "qwen3" else config["hidden_size"] // heads),
            num_experts=config["num_experts"] if kind == "qwen3_moe" else 0,
            top_k=config["num_experts_per_tok"] if kind == "qwen3_moe" else 0,
            norm_topk_prob=config.get("norm_topk_prob", False),
            moe_layers=_moe_layers(config, layers) if kind == "qwen3_moe" else (),
            qkv_bias=kind == "qwen2",
            qk_norm=kind != "qwen2",
            tied=config.get("tie_word_embeddings", False),
            rope_theta=_rope_theta(config),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            initializer_range=float(config.get("initializer_range", 0.02)),
            max_positions=config["max_position_embeddings"],
        )
        arch._check()
        return arch

    def _check(self) -> None:
        problems = []
        if self.num_heads % self.num_kv_heads:
            problems.append(f"num_key_value_heads {self.num_kv_heads} does not divide {self.num_heads} heads")
        if self.head_dim % 2:
            problems.append(f"head_dim {self.head_dim} is odd, rotary embeddings turn pairs")
        if self.num_experts and not 1 <= self.top_k <= self.num_experts:
            problems.append(f"num_experts_per_tok {self.top_k} is not from 1 to num_experts {self.num_experts}")
        if problems:
            raise _bad("; ".join(problems), "the sizes of the model contradict each other")


def _bad(what: str, why: str) -> UserError:
    return UserError("model.config", f"config.json: {what}", why, "use the config.json that came with the weights")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _check_types(config: Mapping[str, Any], is_moe: bool) -> None:
    """Refuse sizes that are missing or no sizes, and switches and factors of another type."""
    sizes = [*_SIZES, *(_MOE_SIZES if is_moe else ())]
    missing = [key for key in sizes if config.get(key) is None]
    if missing:
        raise _bad(f"missing {', '.join(missing)}", "a Qwen model cannot be built without these sizes")
    sizes += [key for key in ("num_key_value_heads", "head_dim", "decoder_sparse_step") if key in config]
    wrong = [f"{key} is {config[key]!r}" for key in sizes if not _is_count(config[key])]
    wrong += [f"{key} is {config[key]!r}" for key in _SWITCHES if type(config.get(key, False)) is not bool]
    wrong += [
        f"{key} is {config[key]!r}"
        for key in ("rms_norm_eps", "initializer_range", "rope_theta")
        if key in config and not (type(config[key]) in (int, float) and 0 < config[key] < math.inf)
    ]
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key, {}), dict):
            wrong.append(f"{key} is {config[key]!r}")
    if wrong:
        raise _bad("; ".join(wrong), "sizes are whole numbers, factors positive ones, switches true or false")


def _refuse(config: Mapping[str, Any], kind: str) -> None:
    """Refuse what there is no code for: it would be left out without a word."""
    if config.get("hidden_act", "silu") != "silu":
        raise _bad(f"hidden_act {config['hidden_act']!r}", "Qwen models use silu")
    if kind != "qwen2" and config.get("attention_bias"):
        raise _bad("attention_bias true", "no Qwen3 release has biases in attention and they are not implemented")
    kinds = config.get("layer_types", ["full_attention"])
    if config.get("use_sliding_window") or any(kind != "full_attention" for kind in kinds):
        raise _bad(
            "use_sliding_window or layer_types asks for sliding-window attention",
            "every layer attends to its whole sequence here, and a window would change the log-probs",
        )


def _moe_layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Every `decoder_sparse_step`-th layer, but for those of `mlp_only_layers`."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise _bad(f"mlp_only_layers is {dense!r}", "it is a list of layer indices")
    found = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    if not found:
        raise _bad(
            f"decoder_sparse_step {step} and mlp_only_layers {dense} leave no layer with experts", "none is sparse"
        )
    return found


def _rope_theta(config: Mapping[str, Any]) -> float:
    """The rotary base; frequencies that are scaled are refused."""
    rope = {**config.get("rope_scaling", {}), **config.get("rope_parameters", {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise _bad(
            f"rope type {kind!r}", "only plain rotary embeddings are implemented for Qwen (long context uses YaRN)"
        )
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    if type(theta) not in (int, float) or not 0 < theta < math.inf:
        raise _bad(f"rope_theta is {theta!r}", "it is a positive number")
    return float(theta)
