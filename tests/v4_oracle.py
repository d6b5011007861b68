"""transformers' DeepSeek-V4 beside ours, with the same random weights; and how near each of its choices was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from moe_rl.models.deepseek_v4.build import build_chunk, make_transformer_config
from moe_rl.models.deepseek_v4.model import DeepseekV4Model
from moe_rl.models.deepseek_v4.weights import trainer_views, transformers_views
from moe_rl.models.packed import PackedSequences
from tests.tiny_v4 import tiny_config

YARN = dict(type="yarn", factor=8, beta_fast=32, beta_slow=1, original_max_position_embeddings=32)
MARGIN = 1e-6


def parity_config(ratios: Sequence[int], **overrides: Any) -> dict[str, Any]:
    """A released-style config with these compress ratios (0, 4 or 128), enough index heads that exact ties are rare."""
    base = dict(
        num_hidden_layers=len(ratios),
        layer_types=None,
        compress_rates=None,
        compress_ratios=list(ratios),
        index_n_heads=32,
        index_head_dim=16,
        index_topk=6,
        sliding_window=32,
        num_hash_layers=1,
        rope_scaling=YARN,
        swiglu_limit=0.6,
        pad_token_id=None,  # the oracle's embedding gives a padding row no gradient
    )
    return tiny_config(**(base | overrides))


def fill(views: dict[str, torch.Tensor], seed: int, experts: int) -> None:
    """Random weights that keep activations near 1, with nothing left at zero: sinks, biases, bases and scales too."""
    generator = torch.Generator().manual_seed(seed)
    for name, view in sorted(views.items()):  # whatever the order of the weight table
        noise = torch.randn(view.shape, generator=generator)
        if name.endswith("tid2eid"):
            view.copy_(torch.rand(view.shape[0], experts, generator=generator).argsort(1)[:, : view.shape[1]])
        elif "norm" in name or name.endswith("scale"):
            view.copy_(1 + 0.2 * noise)
        elif view.ndim == 1:
            view.copy_(0.3 * noise)
        else:
            # Routers and indexers spread their scores wider, so that two candidates are seldom as good as equal.
            wide = 4.0 if name.endswith(("ffn.gate.weight", "weights_proj.weight")) else 1.0
            view.copy_(wide * noise * view.shape[-1] ** -0.5)


@dataclass
class Pair:
    """The oracle and our model with equal weights; `margins` holds the oracle's top-k margins of its last forward."""

    arch: DeepseekV4Arch
    oracle: DeepseekV4ForCausalLM
    ours: DeepseekV4Model
    margins: list[float]

    def oracle_logprobs(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, float]:
        """One sequence [T] alone and unpadded -> log-probs of the labels [T], smallest margin of any choice in it."""
        self.margins.clear()
        logits = self.oracle(tokens[None], use_cache=False).logits[0].float()
        return logits.log_softmax(-1).gather(1, labels[:, None])[:, 0], min(self.margins, default=float("inf"))

    def our_logprobs(self, tokens: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same for sequences packed together, one result each."""
        lengths = [len(t) for t in tokens]
        out = self.ours(
            torch.cat(list(tokens))[None], PackedSequences.from_lengths(lengths), torch.cat(list(labels))[None]
        )
        return list(out[0].split(lengths))


def make_pair(config: dict[str, Any], seed: int = 0, **build: Any) -> Pair:
    """Both models from one config.json; `build` goes to `make_transformer_config`."""
    hf_config = DeepseekV4Config(**{k: v for k, v in config.items() if v is not None and k != "model_type"})
    hf_config._attn_implementation = hf_config._experts_implementation = "eager"
    oracle = DeepseekV4ForCausalLM(hf_config).float().train()
    arch = DeepseekV4Arch.from_dict(config)
    ours = build_chunk(arch, make_transformer_config(arch, **build)).train()
    with torch.no_grad():
        theirs, views = transformers_views(oracle, arch), trainer_views(ours, arch)
        assert theirs.keys() == views.keys()
        fill(theirs, seed, arch.num_experts)
        for name, view in views.items():
            view.copy_(theirs[name])
    margins: list[float] = []
    _watch(oracle, arch, margins)
    return Pair(arch, oracle, ours, margins)


def _watch(oracle: torch.nn.Module, arch: DeepseekV4Arch, margins: list[float]) -> None:
    """Hooks on the oracle's routers and indexers: the gap between the last score taken and the first left out."""

    def router(module, args, output):
        scores = module.score_fn(output[0].detach()) + module.e_score_correction_bias
        margins.append(_gap(scores, torch.full((len(scores),), scores.shape[-1]), arch.top_k))

    def scorer(ratio):
        def hook(module, args, output):
            visible = (torch.arange(output.shape[1]) + 1) // ratio
            hidden = torch.arange(output.shape[2]) >= visible[:, None]
            margins.append(_gap(output[0].masked_fill(hidden, float("-inf")), visible, arch.index_top_k))

        return hook

    for index, layer in enumerate(oracle.model.layers):
        if isinstance(layer.mlp.gate, hf.DeepseekV4TopKRouter):
            layer.mlp.gate.register_forward_hook(router)
        compressor = layer.self_attn.compressor
        if getattr(compressor, "indexer", None) is not None:
            compressor.indexer.scorer.register_forward_hook(scorer(arch.compress_ratios[index]))


def _gap(scores: torch.Tensor, visible: torch.Tensor, k: int) -> float:
    choosing = visible > k
    if not choosing.any():
        return float("inf")
    top = scores[choosing].detach().topk(k + 1, dim=-1).values
    return float((top[:, k - 1] - top[:, k]).min())


def released_grads(model: torch.nn.Module, views: Callable[[torch.nn.Module], dict]) -> dict[str, torch.Tensor | None]:
    """Gradients under the released names; None where the parameter has none."""
    kept = {name: p.data for name, p in model.named_parameters()}
    buffers = {id(b) for b in model.buffers()}
    try:
        for p in model.parameters():
            p.data = torch.full_like(p, float("nan")) if p.grad is None else p.grad.clone()
        found = {k: v for k, v in views(model).items() if id(v) not in buffers and v.is_floating_point()}
        return {k: None if v.isnan().all() else v.clone() for k, v in found.items() if not k.endswith("gate.bias")}
    finally:
        for name, p in model.named_parameters():
            p.data = kept[name]


def both_grads(pair: Pair) -> tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]:
    """(oracle's, ours) under the released names."""
    theirs = released_grads(pair.oracle, lambda m: transformers_views(m, pair.arch))
    return theirs, released_grads(pair.ours, lambda m: trainer_views(m, pair.arch))


def random_sequences(lengths: Sequence[int], vocab: int, seed: int) -> tuple[list, list, list]:
    """Tokens, labels (the next token; any token at the end) and weights of a random loss, per sequence."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]
    labels = [torch.cat((t[1:], torch.randint(0, vocab, (1,), generator=generator))) for t in tokens]
    return tokens, labels, [torch.randn(n, generator=generator) for n in lengths]
