"""What the planner says that a layer saves, against what autograd saves; and the tensors of a model, against its modules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_rl.config import load_config
from moe_rl.models.family import get_family, read_facts
from moe_rl.planner.activations import running_bytes, saved_bytes
from moe_rl.planner.inventory import Inventory
from tests import small_qwen, small_v4
from tests.distributed import run_ranks

TOKENS = 64


def saved(own: set[int], call: Any, *args: Any, **options: Any) -> int:
    """Bytes of the storages that autograd saves in a call, but for those at the addresses `own`."""
    import torch

    storages, kept = {}, []

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)  # so that no address is used twice
        if (place := t.untyped_storage().data_ptr()) not in own:
            storages[place] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call(*args, **options)
    return sum(storages.values())


def _measure(rank: int, world: int, port: int, path: str, cases: list[tuple[str, int]]) -> dict[str, Any]:
    """For each (dtype, chunk) and layer the bytes that autograd saves and those planned; the rank's tensors both ways."""
    import numpy as np
    import torch

    from moe_rl.engine.batch import MicroBatch
    from moe_rl.engine.engine import Engine

    facts, found = read_facts(path), {"saved": []}
    for i, (dtype, chunk) in enumerate(cases):
        config = small_v4.run_config(path, engine__dtype=dtype, engine__attention_chunk=chunk)
        engine = Engine.create(config, rank, world, f"file://{path}/meeting-{i}", random_init=True)
        model, weights = engine.chunks[0], {p.untyped_storage().data_ptr() for p in engine.chunks[0].parameters()}
        batch = MicroBatch.pack([np.arange(TOKENS) % facts.vocab_size])
        packed, b = batch.packed_sequences(), 4 if dtype == "fp32" else 2
        for width, layer in zip(facts.layers, model.layers.values(), strict=True):
            n = facts.boundary // facts.hidden_size
            x = torch.randn(TOKENS, n, facts.hidden_size, dtype=engine.transformer_config.params_dtype)
            x.requires_grad_()
            own = {x.untyped_storage().data_ptr(), *weights}
            if facts.family == "qwen":
                measured = saved(own, layer, x, attention_mask=packed, rotary_pos_emb=model._angles(packed))
            else:
                measured = saved(own, layer, x, batch.tokens, packed)
            found["saved"].append((dtype, chunk, measured, saved_bytes(width, TOKENS, b, chunk, facts.top_k)))
        inventory = Inventory.of(config, facts)
        shards = inventory.shards(inventory.stages[0])
        found["trained"] = (
            sorted(p.numel() for p in model.parameters() if p.requires_grad),
            sorted(s.numel for s in shards),
        )
        rest = [p for p in model.parameters() if not p.requires_grad] + list(model.buffers())
        found["others"] = sum(t.nbytes for t in rest), inventory.untrained_bytes(inventory.stages[0])
        engine.close()
    return found


@pytest.mark.parametrize("family", ["v4", "qwen"])
def test_layers_save_what_is_planned(tmp_path, family):
    path = (
        small_v4.write_model(tmp_path / "m") if family == "v4" else small_qwen.write_model(tmp_path / "m", "qwen3_moe")
    )
    cases = [("bf16", 1024), ("bf16", 16), ("fp32", 16)] if family == "v4" else [("bf16", 16)]
    found = run_ranks(_measure, 1, str(path), cases)[0]
    assert len(found["saved"]) == len(cases) * len(read_facts(path).layers)
    for dtype, chunk, measured, planned in found["saved"]:
        assert planned == pytest.approx(measured, rel=0.05), (dtype, chunk)
    assert found["trained"][0] == found["trained"][1]
    assert found["others"][0] == found["others"][1]


@pytest.mark.parametrize(("kind", "layer"), [("sparse", 2), ("heavy", 3)])
def test_a_pro_layer_takes_on_a_gpu_what_is_planned(kind, layer):
    """Peaks of forward and backward by the kernels on an H200, of 48 experts: beside the gradient that comes, and what the code
    of that day held more, in the backward pass of the experts."""
    file = Path(__file__).parent.parent / "benchmarks" / "results" / "layer_h200.json"
    measured = json.loads(file.read_text())["cases"][f"layer {kind}"]["triton"]["peak_gib"] * 2**30
    facts, tokens, experts = read_facts(load_config("dsv4-pro", []).model.path), 10240, 48
    weights = sum(t.numel for t in facts.tensors if t.expert and t.layer == layer) * experts * 2
    width = facts.fused_layers[layer]
    width = replace(width, fp32=width.fp32 - 2 * (facts.num_experts - experts))  # of the router
    arch = get_family(facts.family).read_arch(facts.path)
    h, m, d = arch.hidden_size, arch.moe_intermediate_size, arch.head_dim
    since = replace(
        width,
        native=width.native + arch.num_heads * d + 4 * m,  # queries; gate and up of the shared expert, by steps
        casts=2 * h + arch.q_lora_rank + d + h,  # norms and router
        fp32=width.fp32 + 2 * (2 * arch.hc_sinkhorn_iters - 1) * (arch.hc_mult + arch.hc_mult**2),  # Sinkhorn's steps
        routed_backward=4 * m,  # hidden values' gradient, and the activation's beside the activation
    )
    planned = running_bytes(facts, since, tokens, 2, 256) - 2 * facts.boundary * tokens
    assert planned == pytest.approx(measured - weights, rel=0.03)
    now = running_bytes(facts, width, tokens, 2, 256) - 2 * facts.boundary * tokens
    assert planned - now > 3 * 2**30 and now < 7.5 * 2**30
