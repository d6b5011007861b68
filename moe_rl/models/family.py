"""Model families by name, and the facts of a model directory. Torch-free until a chunk is built."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from moe_rl.config.facts import ModelFacts
from moe_rl.config.figures import overridden
from moe_rl.config.schema import ModelConfig
from moe_rl.errors import UserError
from moe_rl.models.wire import PLAIN, Wire

Model = str | Path | ModelConfig  # a model directory, or a run's `model`, which may override figures of its config.json


@dataclass(frozen=True)
class Family(ABC):
    """What the rest of the project may ask of a model family, whose modules lie in the package of its name."""

    name: str
    model_types: tuple[str, ...]
    supports_tp: bool
    tp_reason: str

    @abstractmethod
    def read_arch(self, model: Model) -> Any:
        """The architecture in the model's config.json (UserError where it is missing or wrong)."""

    def facts(self, arch: Any) -> dict[str, Any]:
        """The fields of `ModelFacts` that the architecture gives."""
        names = ("num_layers", "vocab_size", "max_positions", "num_experts", "top_k", "hidden_size", "num_heads")
        return {name: getattr(arch, name) for name in names} | self.own_facts(arch)

    @abstractmethod
    def own_facts(self, arch: Any) -> dict[str, Any]:
        """Those that not every architecture has under the same name."""

    @abstractmethod
    def sizes(self, arch: Any) -> dict[str, Any]:
        """The fields of `ModelFacts` that the planner reads: every tensor, every layer's widths, and the boundary's."""

    def make_transformer_config(self, arch: Any, **options: Any) -> Any:
        """megatron-core's configuration; `options` are the fields of `models.options.Options`."""
        return self._module("build").make_transformer_config(arch, **options)

    def build_chunk(self, arch: Any, config: Any, pre: bool, post: bool, vp_stage: int | None = None) -> Any:
        """One pipeline chunk, its parameters uninitialised."""
        return self._module("build").build_chunk(arch, config, pre, post, vp_stage)

    def init_weights(self, chunk: Any, seed: int) -> None:
        """Fresh weights, the same in every layout."""
        self._module("build").init_weights(chunk, seed)

    def weight_table(self, arch: Any) -> Any:
        """The weight map: released name <-> megatron-core name <-> transformers name."""
        return self._module("weights").weight_table(arch)

    def _module(self, name: str) -> Any:
        """A module of the family, imported when it is needed: some import torch."""
        return import_module(f"moe_rl.models.{self.name}.{name}")

    @abstractmethod
    def transformers_model(self, model: Model, dtype: Any, device: str) -> Any:
        """transformers' model for the model's config.json with arbitrary weights of that torch dtype, to sample from."""

    def export_config(self, config: dict[str, Any], arch: Any) -> dict[str, Any]:
        """A parsed config.json in the spelling that vLLM reads, and transformers too."""
        return config

    def check_weights(self, model: Model) -> None:
        """Check the weight files of a model against its config.json by their headers (UserError lists what is wrong).

        Of a dist-checkpoint it is checked that its files are there; the ranks that load it check their content.
        """
        from moe_rl.models.headers import check_dist_files, recognise
        from moe_rl.models.load import check_released

        path = directory(model)
        if recognise(path) == "dist":
            check_dist_files(path)
        else:
            check_released(path, self.weight_table(self.read_arch(model)))


class _DeepseekV4(Family):
    def read_arch(self, model: Model) -> Any:
        from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch

        return DeepseekV4Arch.from_dict(read_config(model))

    def own_facts(self, arch: Any) -> dict[str, Any]:
        return {"hash_layers": arch.hash_layers}

    def sizes(self, arch: Any) -> dict[str, Any]:
        from moe_rl.models.deepseek_v4.weights import is_served_split
        from moe_rl.models.deepseek_v4.widths import fused_widths, layer_widths
        from moe_rl.models.sizes import tensor_sizes, work

        # the indexer is frozen; expert ids by token and correction biases are buffers
        tensors = tensor_sizes(
            self.weight_table(arch), (".indexer.", ".tid2eid", ".expert_bias"), served=is_served_split
        )
        layers = layer_widths(arch, work(tensors, arch.num_layers))
        boundary = arch.hc_mult * arch.hidden_size
        return {"tensors": tensors, "layers": layers, "fused_layers": fused_widths(arch, layers), "boundary": boundary}

    def export_config(self, config: dict[str, Any], arch: Any) -> dict[str, Any]:
        from moe_rl.models.deepseek_v4.arch import released_spelling

        return released_spelling(config, arch)

    def transformers_model(self, model: Model, dtype: Any, device: str) -> Any:
        from moe_rl.models.deepseek_v4.transformers_model import build_transformers_model

        return build_transformers_model(read_config(model), self.read_arch(model), dtype=dtype, device=device)


class _Qwen(Family):
    def read_arch(self, model: Model) -> Any:
        from moe_rl.models.qwen.arch import QwenArch

        return QwenArch.from_dict(read_config(model))

    def own_facts(self, arch: Any) -> dict[str, Any]:
        return {
            "hash_layers": (),
            "num_kv_heads": arch.num_kv_heads,
            "ffn_size": arch.intermediate_size if len(arch.moe_layers) < arch.num_layers else 0,
            "expert_size": arch.moe_intermediate_size,
        }

    def sizes(self, arch: Any) -> dict[str, Any]:
        from moe_rl.models.qwen.widths import layer_widths
        from moe_rl.models.sizes import tensor_sizes, work

        tensors = tensor_sizes(self.weight_table(arch), tied=arch.tied)
        layers = layer_widths(arch, work(tensors, arch.num_layers))
        return {"tensors": tensors, "layers": layers, "boundary": arch.hidden_size, "tied": arch.tied}

    def transformers_model(self, model: Model, dtype: Any, device: str) -> Any:
        from moe_rl.models.qwen.transformers_model import build_transformers_model

        return build_transformers_model(read_config(model), dtype=dtype, device=device)


FAMILIES = {
    "deepseek_v4": _DeepseekV4(
        "deepseek_v4",
        ("deepseek_v4",),
        supports_tp=False,
        tp_reason="all query heads share one key-value head, so attention is not split; use layout.ep and layout.pp",
    ),
    "qwen": _Qwen("qwen", ("qwen2", "qwen3", "qwen3_moe"), supports_tp=True, tp_reason=""),
}


def get_family(name: str) -> Family:
    """The family of that name.

    Raises:
        UserError: no such family.
    """
    if name not in FAMILIES:
        raise UserError(
            "model.family", f"model.family={name}", f"known families: {', '.join(FAMILIES)}", "use one of them"
        )
    return FAMILIES[name]


def directory(model: Model) -> Path:
    """Where a model's files lie."""
    return Path(model.path if isinstance(model, ModelConfig) else model)


def read_config(model: Model) -> dict[str, Any]:
    """The parsed config.json of a model, with the figures that its run gives instead.

    Raises:
        UserError: the directory or the file is missing, the file is not a JSON object, or has no such figure.
    """
    path = model.path if isinstance(model, ModelConfig) else model
    file = Path(path) / "config.json"
    if not str(path) or not file.is_file():
        raise UserError(
            "model.path", f"no config.json in {path!s}", "model.path must be a model directory", "set model.path"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError("model.config", f"{file} is not JSON", str(error), "copy the file again") from None
    if not isinstance(config, dict):
        raise UserError(
            "model.config", f"{file} is not a JSON object", f"it holds a {type(config).__name__}", "copy it again"
        )
    config, wrong = overridden(config, model.config if isinstance(model, ModelConfig) else {})
    if wrong:
        raise UserError("model.config", "; ".join(what for _, what in wrong), f"it replaces a figure of {file}")
    return config


def special_ids(model: Model, vocab_size: int) -> tuple[tuple[int, ...], int]:
    """End-of-sequence ids (generation_config.json before config.json) and the id fed to rows that have ended.

    Raises:
        UserError: one of them is no token id of the model, or generation_config.json cannot be read.
    """
    config, path = read_config(model), directory(model)
    file = path / "generation_config.json"
    try:
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    except (ValueError, AttributeError) as error:
        raise UserError("model.config", f"{file} is not a JSON object", str(error), "copy the file again") from None
    eos = config.get("eos_token_id") if eos is None else eos
    ids, pad = eos if isinstance(eos, list) else [] if eos is None else [eos], config.get("pad_token_id")
    for name, number in [*(("eos_token_id", i) for i in ids), ("pad_token_id", 0 if pad is None else pad)]:
        if type(number) is not int or not 0 <= number < vocab_size:
            raise UserError(
                "model.special_ids",
                f"{name} of {path} is {json.dumps(number)}, which is no token id",
                f"They go from 0 to {vocab_size - 1}.",
                "use the config.json and generation_config.json that came with the weights",
            )
    return tuple(ids), pad if pad is not None else ids[0] if ids else 0


def read_facts(model: Model, family: str = "auto") -> ModelFacts:
    """What preflight needs to know of a model, from config.json, tokenizer.json and the file names alone.

    Raises:
        UserError: no config.json, sizes missing, or a model type of no known family.
    """
    config, path = read_config(model), directory(model)
    if family == "auto":
        kind = config.get("model_type")
        family = next((f.name for f in FAMILIES.values() if kind in f.model_types), "")
        if not family:
            known = ", ".join(t for f in FAMILIES.values() for t in f.model_types)
            raise UserError(
                "model.family", f"model_type {kind!r} in {path}", f"known model types: {known}", "use one of them"
            )
    chosen = get_family(family)
    arch = chosen.read_arch(model)
    table = chosen.weight_table(arch)
    wire = Wire.released(config) if any(row.quant for row in table.rows) else PLAIN
    return ModelFacts(
        family=chosen.name,
        path=str(path),
        tokenizer_vocab=_tokenizer_vocab(path),
        supports_tp=chosen.supports_tp,
        tp_reason=chosen.tp_reason,
        weight_files=sum(len(list(path.glob(kind))) for kind in ("*.safetensors", "*.distcp")),
        num_parameters=sum(spec.numel for spec in table.expected().values()),
        experts_format=wire.experts,
        linears_format=wire.linears,
        **chosen.facts(arch),
        **chosen.sizes(arch),
    )


def _tokenizer_vocab(path: Path) -> int | None:
    """Highest token id of tokenizer.json + 1, None where the directory has no such file."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        tokenizer = json.loads(file.read_text(encoding="utf-8"))
        vocab = tokenizer.get("model", {}).get("vocab", {})
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        added = [token["id"] for token in tokenizer.get("added_tokens", [])]
        return max([*ids, *added], default=-1) + 1
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise UserError("model.tokenizer", f"{file} is not a tokenizer", str(error), "copy the file again") from None
