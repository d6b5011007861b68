"""The sizes of a DeepSeek-V4 model, read from its `config.json` in either of the two spellings in use. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_rl.errors import UserError

SLIDING = "sliding_attention"
SPARSE = "compressed_sparse_attention"
HEAVY = "heavily_compressed_attention"
KINDS = (SLIDING, SPARSE, HEAVY)
_KIND_OF_RATIO = {0: SLIDING, 4: SPARSE}
_DEFAULT_RATES = {SPARSE: 4, HEAVY: 128}
_SIZES = (
    "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads head_dim q_lora_rank"
    " o_groups o_lora_rank n_routed_experts num_experts_per_tok sliding_window hc_mult max_position_embeddings"
).split()
_COUNTS = (  # 0 is allowed
    "num_hash_layers num_nextn_predict_layers qk_rope_head_dim index_n_heads index_head_dim index_topk"
).split()
_NUMBERS = (
    "routed_scaling_factor swiglu_limit hc_eps rms_norm_eps initializer_range rope_theta compress_rope_theta"
    " partial_rotary_factor"
).split()
_OTHERS = {
    list: ("layer_types", "compress_ratios", "mlp_layer_types"),
    dict: ("compress_rates", "rope_scaling", "rope_parameters"),
}


@dataclass(frozen=True)
class Rope:
    """One rotary base. `yarn` stretches the slow frequencies by `factor`; `attention_factor` scales cos and sin."""

    theta: float
    dim: int
    yarn: bool = False
    factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True)
class DeepseekV4Arch:
    """Sizes and switches of one model; per-layer tuples have `num_layers` entries.

    `attention_kinds[l]` is one of `KINDS`, `compress_ratios[l]` the tokens per compressed entry (0 for sliding
    layers); `hash_layers` are the indices of the layers whose experts are looked up by token id.
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    num_experts: int
    top_k: int
    routed_scaling_factor: float
    swiglu_limit: float
    sliding_window: int
    attention_kinds: tuple[str, ...]
    compress_ratios: tuple[int, ...]
    hash_layers: tuple[int, ...]
    index_num_heads: int
    index_head_dim: int
    index_top_k: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    norm_eps: float
    initializer_range: float
    max_positions: int
    main_rope: Rope
    compress_rope: Rope
    mtp_layers: int = 0

    @property
    def hc_mix(self) -> int:
        """Mixing weights that a hyper-connection computes per token: n for pre, n for post, n*n for comb."""
        return (2 + self.hc_mult) * self.hc_mult

    def is_hash(self, layer: int) -> bool:
        return layer in self.hash_layers

    def compressor_width(self, layer: int) -> int:
        """Columns of a layer's compressor projections: two overlapping series where sparse, one where heavy."""
        return {SLIDING: 0, SPARSE: 2 * self.head_dim, HEAVY: self.head_dim}[self.attention_kinds[layer]]

    def kernels_lack(self) -> str:
        """What the sizes that the Triton kernels of attention ask for are, where these are others; empty if nothing."""
        widths = [
            self.head_dim,
            *([self.index_num_heads, self.index_head_dim] if SPARSE in self.attention_kinds else []),
        ]
        if any(n < 16 or n & (n - 1) for n in widths) or not 128 <= self.head_dim <= 512:
            return "index heads, their width and head_dim (128 to 512) that are powers of 2"
        return "" if 4 * self.rope_dim <= self.head_dim else "a rotary width of at most head_dim / 4"

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DeepseekV4Arch:
        """Read the parsed `config.json`, released spelling or transformers'.

        Raises:
            UserError: sizes are missing, contradict each other, or ask for something this family does not do.
        """
        config = {key: value for key, value in config.items() if value is not None}
        _require(config)
        _check_types(config)
        n = int(config["num_hidden_layers"])
        kinds, ratios = _attention(config, n)
        rope_dim = _rope_dim(config)
        main, compress = _ropes(config, rope_dim)
        arch = cls(
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            moe_intermediate_size=int(config["moe_intermediate_size"]),
            num_layers=n,
            num_heads=int(config["num_attention_heads"]),
            head_dim=int(config["head_dim"]),
            rope_dim=rope_dim,
            q_lora_rank=int(config["q_lora_rank"]),
            o_groups=int(config["o_groups"]),
            o_lora_rank=int(config["o_lora_rank"]),
            num_experts=int(config["n_routed_experts"]),
            top_k=int(config["num_experts_per_tok"]),
            routed_scaling_factor=float(config.get("routed_scaling_factor", 1.0)),
            swiglu_limit=float(config.get("swiglu_limit", 10.0)),
            sliding_window=int(config["sliding_window"]),
            attention_kinds=kinds,
            compress_ratios=ratios,
            hash_layers=_hash_layers(config, n),
            index_num_heads=int(config.get("index_n_heads", 0)),
            index_head_dim=int(config.get("index_head_dim", 0)),
            index_top_k=int(config.get("index_topk", 0)),
            hc_mult=int(config["hc_mult"]),
            hc_sinkhorn_iters=int(config.get("hc_sinkhorn_iters", 20)),
            hc_eps=float(config.get("hc_eps", 1e-6)),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            initializer_range=float(config.get("initializer_range", 0.02)),
            max_positions=int(config["max_position_embeddings"]),
            main_rope=main,
            compress_rope=compress,
            mtp_layers=int(config.get("num_nextn_predict_layers") or 0),
        )
        arch._check()
        return arch

    def _check(self) -> None:
        problems = []
        if self.num_heads * self.head_dim % self.o_groups:
            problems.append(
                f"o_groups {self.o_groups} does not divide heads x head_dim {self.num_heads * self.head_dim}"
            )
        if self.top_k > self.num_experts:
            problems.append(f"num_experts_per_tok {self.top_k} is more than n_routed_experts {self.num_experts}")
        if self.rope_dim % 2 or not 0 < self.rope_dim <= self.head_dim:
            problems.append(f"the rotary width {self.rope_dim} must be even and at most head_dim {self.head_dim}")
        if SPARSE in self.attention_kinds:
            if min(self.index_num_heads, self.index_head_dim, self.index_top_k) < 1:
                problems.append("sparse layers need index_n_heads, index_head_dim and index_topk")
            elif self.index_head_dim < self.rope_dim:
                problems.append(f"index_head_dim {self.index_head_dim} is less than the rotary width {self.rope_dim}")
        if self.sliding_window < 1:
            problems.append(f"sliding_window {self.sliding_window} must be at least 1")
        if problems:
            raise _bad("; ".join(problems), "the sizes of the model contradict each other")


def released_spelling(config: Mapping[str, Any], arch: DeepseekV4Arch) -> dict[str, Any]:
    """A parsed `config.json` as the released checkpoints spell it, where their spelling says it all.

    vLLM refuses `mlp_layer_types`, knows layers by `compress_ratios` and `num_hash_layers`, and without `topk_method` makes
    no correction bias.
    """
    hashed = len(arch.hash_layers)
    if not set(arch.compress_ratios) <= {0, 4, 128} or arch.hash_layers != tuple(range(hashed)):
        return dict(config)
    known = {k: v for k, v in config.items() if k not in ("layer_types", "mlp_layer_types", "compress_rates")}
    ratios = known.get("compress_ratios") or list(arch.compress_ratios)
    return known | {"compress_ratios": ratios, "num_hash_layers": hashed, "topk_method": "noaux_tc"}


def _bad(what: str, why: str) -> UserError:
    return UserError("model.config", f"config.json: {what}", why, "use the config.json that came with the weights")


def _require(config: Mapping[str, Any]) -> None:
    """Refuse a config without its sizes, and the switches that this implementation has no code for."""
    missing = [key for key in _SIZES if key not in config]
    if missing:
        raise _bad(f"missing {', '.join(missing)}", "a DeepSeek-V4 model cannot be built without these sizes")
    only = {
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    wrong = [
        f"{key}={config[key]!r} (supported: {value!r})"
        for key, value in only.items()
        if config.get(key, value) != value
    ]
    if wrong:
        raise _bad("; ".join(wrong), "no DeepSeek-V4 release uses other values and they are not implemented")


def _check_types(config: Mapping[str, Any]) -> None:
    """Refuse values of another type than their key's, and sizes and factors that no model has."""
    wrong = [f"{key} is {config[key]!r}" for key in _SIZES if not _is_count(config[key], 1)]
    wrong += [f"{key} is {config[key]!r}" for key in _COUNTS if not _is_count(config.get(key, 0), 0)]
    wrong += [f"{key} is {config[key]!r}" for key in _NUMBERS if not _is_positive(config.get(key, 1.0))]
    if not _is_count(config.get("hc_sinkhorn_iters", 1), 1):
        wrong.append(f"hc_sinkhorn_iters is {config['hc_sinkhorn_iters']!r}")
    for kind, names in _OTHERS.items():
        wrong += [f"{key} is {config[key]!r}" for key in names if not isinstance(config.get(key, kind()), kind)]
    if wrong:
        raise _bad("; ".join(wrong), "sizes are whole numbers, factors positive ones, and layers are given by lists")


def _is_count(value: Any, low: int) -> bool:
    return type(value) is int and value >= low


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _attention(config: Mapping[str, Any], n: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Kind and compress ratio of each layer; per-layer lists may run on past the decoder (prediction layers)."""
    rates = {**_DEFAULT_RATES, **(config.get("compress_rates") or {})}
    for key, kind in (("compress_rate_csa", SPARSE), ("compress_rate_hca", HEAVY)):
        rates[kind] = config[key] if config.get(key) is not None else rates[kind]
    wrong = [rate for rate in rates.values() if not _is_count(rate, 1)]
    wrong += [ratio for ratio in config.get("compress_ratios", ()) if not _is_count(ratio, 0)]
    if wrong:
        raise _bad(f"a compress ratio is {wrong[0]!r}", "ratios are whole numbers, 0 for sliding layers")
    rates[SLIDING] = 0
    ratios, kinds = config.get("compress_ratios"), config.get("layer_types")
    kinds = None if kinds is None else _per_layer("layer_types", kinds, n)
    ratios = None if ratios is None else _per_layer("compress_ratios", ratios, n)
    if kinds is None and ratios is None:
        raise _bad("neither compress_ratios nor layer_types", "the attention kind of each layer is not known")
    if kinds is None:
        assert ratios is not None
        told = {rates[SPARSE]: SPARSE, rates[HEAVY]: HEAVY} if config.get("compress_rates") else {}
        kinds = [told.get(r) or _KIND_OF_RATIO.get(r, HEAVY) if r else SLIDING for r in ratios]
    unknown = sorted({str(k) for k in kinds if k not in KINDS})
    if unknown:
        raise _bad(f"layer_types {', '.join(unknown)} unknown", f"known kinds: {', '.join(KINDS)}")
    if ratios is None:
        ratios = [rates[k] for k in kinds]
    for layer, (kind, ratio) in enumerate(zip(kinds, ratios, strict=True)):
        if (ratio == 0) != (kind == SLIDING):
            raise _bad(f"layer {layer} is {kind} with compress ratio {ratio}", "only sliding layers have ratio 0")
    return tuple(kinds), tuple(ratios)


def _per_layer(key: str, values: Sequence[Any], n: int) -> list[Any]:
    if len(values) < n:
        raise _bad(f"{key} has {len(values)} entries for {n} layers", "each decoder layer needs one")
    return list(values[:n])


def _hash_layers(config: Mapping[str, Any], n: int) -> tuple[int, ...]:
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        if config.get("num_hash_layers") is None:
            raise _bad(
                "neither num_hash_layers nor mlp_layer_types", "which layers are routed by token id is not known"
            )
        return tuple(range(min(n, int(config["num_hash_layers"]))))
    kinds = _per_layer("mlp_layer_types", kinds, n)
    unknown = sorted({str(k) for k in kinds} - {"hash_moe", "moe"})
    if unknown:
        raise _bad(f"mlp_layer_types {', '.join(unknown)} unknown", "known kinds: hash_moe, moe")
    return tuple(i for i, kind in enumerate(kinds) if kind == "hash_moe")


def _rope_dim(config: Mapping[str, Any]) -> int:
    if config.get("partial_rotary_factor") is not None:
        return int(config["head_dim"] * config["partial_rotary_factor"])
    if config.get("qk_rope_head_dim") is None:
        raise _bad("neither qk_rope_head_dim nor partial_rotary_factor", "the rotary width is not known")
    return int(config["qk_rope_head_dim"])


def _ropes(config: Mapping[str, Any], dim: int) -> tuple[Rope, Rope]:
    """The plain base of sliding layers and the base of the compressed ones, which YaRN may stretch."""
    nested = config.get("rope_parameters") or {}
    if isinstance(nested.get("main"), dict) and isinstance(nested.get("compress"), dict):
        # Written out by transformers: an absent attention_factor means YaRN's own there.
        return _rope(nested["main"], 10000.0, dim, None), _rope(nested["compress"], 160000.0, dim, None)
    scaling = config.get("rope_scaling") or {k: v for k, v in nested.items() if k not in ("main", "compress")} or {}
    theta = float(config.get("rope_theta", 10000.0))
    flat = {k: v for k, v in scaling.items() if k != "rope_theta"}
    # The released models do not scale cos and sin by YaRN's attention factor.
    return Rope(theta, dim), _rope(flat, float(config.get("compress_rope_theta", 160000.0)), dim, 1.0)


def _rope(p: Mapping[str, Any], theta: float, dim: int, attention_factor: float | None) -> Rope:
    kind = p.get("rope_type", p.get("type", "default"))
    numbers = ("rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")
    wrong = [f"{key} is {p[key]!r}" for key in numbers if p.get(key) is not None and not _is_positive(p[key])]
    if wrong:
        raise _bad(f"rope parameters: {'; '.join(wrong)}", "they are positive numbers")
    theta = float(p.get("rope_theta", theta))
    if kind in (None, "default"):
        return Rope(theta, dim)
    if kind != "yarn":
        raise _bad(f"rope type {kind!r}", "DeepSeek-V4 uses plain or YaRN rotary embeddings")
    if p.get("factor") is None or p.get("original_max_position_embeddings") is None:
        raise _bad("YaRN without factor or original_max_position_embeddings", "the frequencies need both")
    factor = float(p["factor"])
    scale = p.get("attention_factor", attention_factor)
    if scale is None:
        scale = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    return Rope(
        theta,
        dim,
        True,
        factor,
        int(p["original_max_position_embeddings"]),
        float(p.get("beta_fast") or 32),
        float(p.get("beta_slow") or 1),
        bool(p.get("truncate", True)),
        float(scale),
    )
