"""Released-layout DeepSeek-V4 checkpoints of any size, made of random codes and scales, and what they mean in numbers.

Bytes are drawn, not encoded, so that they hold what an encoder of ours would never choose: codes under a larger scale
than needed, negative zeros, blocks of zeros under any scale, scales at the end of the range. Names and shapes are
written out here once more, apart from the weight table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
INDEX = "model.safetensors.index.json"


def released_config(**changes: Any) -> dict[str, Any]:
    """config.json of five layers of all kinds (two hash layers) and one prediction layer; sizes at odds with the blocks."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": 150,
        "hidden_size": 160,
        "moe_intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 40,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 48,
        "o_groups": 2,
        "o_lora_rank": 24,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "sliding_window": 8,
        "compress_ratios": [0, 4, 8, 4, 0],
        "num_hash_layers": 2,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 2,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "expert_dtype": "fp4",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        **changes,
    }


def shapes(c: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name without `.weight`/`.scale` where quantised, kind, shape) of everything; kinds: mxfp4 fp8 bf16 fp32 table."""
    h, i, v, heads, d = (
        c[k] for k in "hidden_size moe_intermediate_size vocab_size num_attention_heads head_dim".split()
    )
    hc, mix, q, o = c["hc_mult"], c["hc_mult"] * (2 + c["hc_mult"]), c["q_lora_rank"], c["o_groups"] * c["o_lora_rank"]
    ih, idim, layers = c["index_n_heads"], c["index_head_dim"], c["num_hidden_layers"]
    yield from (("embed.weight", "bf16", (v, h)), ("head.weight", "bf16", (v, h)), ("norm.weight", "bf16", (h,)))
    yield from (("hc_head_fn", "fp32", (hc, hc * h)), ("hc_head_base", "fp32", (hc,)), ("hc_head_scale", "fp32", (1,)))
    for layer in range(layers + c["num_nextn_predict_layers"]):
        p = f"layers.{layer}." if layer < layers else f"mtp.{layer - layers}."
        if layer >= layers:
            yield from (
                (p + "e_proj", "fp8", (h, h)),
                (p + "h_proj", "fp8", (h, h)),
                (p + "enorm.weight", "bf16", (h,)),
            )
        for part in ("attn", "ffn"):
            yield p + f"{part}_norm.weight", "bf16", (h,)
            yield p + f"hc_{part}_fn", "fp32", (mix, hc * h)
            yield from ((p + f"hc_{part}_base", "fp32", (mix,)), (p + f"hc_{part}_scale", "fp32", (3,)))
        a = p + "attn."
        yield from ((a + "wq_a", "fp8", (q, h)), (a + "wq_b", "fp8", (heads * d, q)), (a + "wkv", "fp8", (d, h)))
        yield from ((a + "wo_a", "fp8", (o, heads * d // c["o_groups"])), (a + "wo_b", "fp8", (h, o)))
        yield from ((a + "q_norm.weight", "bf16", (q,)), (a + "kv_norm.weight", "bf16", (d,)))
        yield a + "attn_sink", "fp32", (heads,)
        ratio = c["compress_ratios"][layer] if layer < layers else 0
        for name, width in ((a + "compressor.", d), (a + "indexer.compressor.", idim))[
            : 2 if ratio == 4 else bool(ratio)
        ]:
            wide = 2 * width if ratio == 4 else width
            yield from ((name + "wkv.weight", "bf16", (wide, h)), (name + "wgate.weight", "bf16", (wide, h)))
            yield from ((name + "norm.weight", "bf16", (width,)), (name + "ape", "fp32", (ratio, wide)))
        if ratio == 4:
            yield from (
                (a + "indexer.wq_b", "fp8", (ih * idim, q)),
                (a + "indexer.weights_proj.weight", "bf16", (ih, h)),
            )
        f = p + "ffn."
        yield f + "gate.weight", "bf16", (c["n_routed_experts"], h)
        hashed = layer < c["num_hash_layers"]
        yield (
            (f + "gate.tid2eid", "table", (v, c["num_experts_per_tok"]))
            if hashed
            else (
                f + "gate.bias",
                "fp32",
                (c["n_routed_experts"],),
            )
        )
        expert = "fp8" if c["expert_dtype"] == "fp8" else "mxfp4"
        for e in [*range(c["n_routed_experts"]), None]:
            x, kind = (f"{f}experts.{e}.", expert) if e is not None else (f + "shared_experts.", "fp8")
            yield from ((x + "w1", kind, (i, h)), (x + "w2", kind, (h, i)), (x + "w3", kind, (i, h)))


def _draw(rng: np.random.Generator, name: str, kind: str, shape: tuple[int, ...], c: dict[str, Any]) -> dict:
    """The tensors on disk of one entry."""
    if kind == "table":
        rows = rng.random((shape[0], c["n_routed_experts"])).argsort(1)[:, : shape[1]]
        return {name: torch.from_numpy(rows.astype(np.int32))}
    if kind in ("bf16", "fp32"):
        values = rng.standard_normal(shape, np.float32) * np.float32(0.1 if "norm" in name else 0.2)
        values += np.float32("norm" in name)
        return {name: torch.from_numpy(values).to(torch.bfloat16 if kind == "bf16" else torch.float32)}
    m, k = shape
    if kind == "mxfp4":
        packed = np.frombuffer(rng.bytes(m * k // 2), np.uint8).reshape(m, k // 2).copy()
        scale = rng.integers(119, 122, (m, k // 32)).astype(np.uint8)
        packed[0, :16], scale[0, 0] = 0, 130  # a block of zeros
        packed[1, :16] &= 0x99  # codes 0, 1, 8 and 9 alone: +-0 and +-0.5 under a scale larger than it need be
        scale[2 % m, 0], scale[3 % m, 0] = 0, 1
        return {
            name + ".weight": torch.from_numpy(packed).view(torch.int8),
            name + ".scale": torch.from_numpy(scale).view(torch.float8_e8m0fnu),
        }
    codes = np.frombuffer(rng.bytes(m * k), np.uint8).reshape(m, k).copy()
    codes[(codes & 0x7F) == 0x7F] = 0x80  # NaN becomes a negative zero
    grid = (-(-m // 128), -(-k // 128))
    if c["expert_dtype"] == "fp8":
        scales = torch.from_numpy((rng.random(grid, np.float32) + 0.5) * np.float32(2.0**-11))
    else:
        scales = torch.from_numpy(rng.integers(115, 118, grid).astype(np.uint8)).view(torch.float8_e8m0fnu)
    if rng.random() < 0.3:
        codes[:128, :128] &= 0x80 | 0x6F  # nothing above 224 in this block: an encoder would choose a smaller scale
    return {name + ".weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), name + ".scale": scales}


def write_released(path: Path, *, seed: int = 0, shard_bytes: int = 200_000, **changes: Any) -> Path:
    """Write a whole checkpoint of files of about `shard_bytes`; a weight and its scale may be in two files."""
    config = released_config(**changes)
    rng = np.random.default_rng(seed)
    path.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    waiting: dict[str, torch.Tensor] = {}
    files = total = 0

    def flush() -> None:
        nonlocal files
        files += 1
        save_file(waiting, path / f"model-{files:05d}.safetensors", metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(waiting, f"model-{files:05d}.safetensors"))
        waiting.clear()

    for name, kind, shape in shapes(config):
        for key, tensor in _draw(rng, name, kind, shape, config).items():
            waiting[key] = tensor.contiguous()
            total += tensor.numel() * tensor.element_size()
            if sum(t.numel() * t.element_size() for t in waiting.values()) >= shard_bytes:
                flush()
    if waiting:
        flush()
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def raw_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory as it is stored."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as reader:
            found.update({name: reader.get_tensor(name) for name in reader.keys()})
    return found


def dequantised(path: Path) -> dict[str, np.ndarray]:
    """Name -> value of every weight, float32 (tables int64), by tables of codes; the slow way, for comparison."""
    raw = raw_tensors(path)
    out = {}
    for name, tensor in raw.items():
        if name.endswith(".scale"):
            continue
        scale = raw.get(name.removesuffix("weight") + "scale") if name.endswith(".weight") else None
        if scale is None:
            out[name] = tensor.to(torch.int64 if not tensor.is_floating_point() else torch.float32).numpy()
            continue
        if scale.dtype == torch.float32:
            factors = scale.numpy().astype(np.float64)
        else:
            factors = np.ldexp(1.0, scale.view(torch.uint8).numpy().astype(np.int64) - 127)
        if tensor.dtype == torch.float8_e4m3fn:
            codes = tensor.view(torch.uint8).numpy()
            factors = factors.repeat(128, 0).repeat(128, 1)[: codes.shape[0], : codes.shape[1]]
            values = _e4m3()[codes]
        else:
            packed = tensor.view(torch.uint8).numpy()
            values = E2M1[np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)]
            factors = factors.repeat(32, 1)
        out[name] = (values * factors).astype(np.float32)
    return out


def _e4m3() -> np.ndarray:
    """The 256 values of E4M3 from its definition: sign, exponent with bias 7, three bits of mantissa."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    value[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code >> 7, -value, value)
