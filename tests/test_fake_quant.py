"""engine.fake_quant: the forward pass computes with the values of the exported checkpoint, to the bit, and gradients pass
straight through; with experts over ranks and recompute as on one rank."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_rl.convert.job import convert
from moe_rl.convert.plan import Request
from moe_rl.errors import UserError
from tests.distributed import run_ranks
from tests.released_v4 import dequantised
from tests.small_v4 import run_config, sequences, write_model
from tests.test_engine_layouts import EP2, FULL, _loss

LENGTHS = (9, 6, 11, 7)
ALL, EXPERTS = {"engine__fake_quant": "all"}, {"engine__fake_quant": "experts"}


def _used(engine: Any) -> dict[int, torch.Tensor]:
    """What forward passes will find under `weight` in each module, by the parameter's identity."""
    seen: dict[int, torch.Tensor] = {}
    for chunk in engine.chunks:
        for module in chunk.modules():
            if "weight" in module._parameters and module._parameters["weight"] is not None:
                key = module._parameters["weight"].data_ptr()
                module.register_forward_pre_hook(lambda m, args, key=key: seen.update({key: m.weight.detach().clone()}))
    return seen


def _run(rank: int, world: int, port: int, path: str, directory: str, keys: dict[str, Any], export: bool) -> dict:
    """Log-probs by sequence, and by released name: values sent, values used, gradients, digests before and after."""
    from moe_rl.engine.batch import MicroBatch
    from moe_rl.engine.engine import Engine

    config = run_config(path, world, optimizer__lr=0.1, **keys)
    engine = Engine.create(config, rank, world, f"127.0.0.1:{port}", random_init=True)
    with torch.no_grad():  # what a release keeps in bf16 is exact there
        for chunk in engine.chunks:
            for param in chunk.parameters():
                param.copy_(param.bfloat16())
    engine.reload_master()
    before, used = engine.digest(), _used(engine)
    everything = sequences(LENGTHS)
    packed = [
        MicroBatch.pack([everything[i]], [{"weight": np.full(LENGTHS[i] - 1, 0.02)}], [i])
        for i in range(rank, len(LENGTHS), world)
    ]
    scores = {ids[0]: lps[0] for ids, lps, _ in engine.log_probs(packed, temperature=1.0)}
    assert engine.digest() == before
    if export:
        engine.save(f"{directory}/dist", contents=["model"])
    parts = engine.weights()
    sent = {name: torch.cat([p.view for p in blocks]).numpy().copy() for name, blocks in engine.sent(parts).items()}
    seen = {}
    for name, blocks in parts.items():
        pieces = []
        for block in blocks:
            for key, value in used.items():
                offset = (block.view.data_ptr() - key) // 4
                if 0 <= offset < value.numel():
                    pieces.append(value.flatten()[offset : offset + block.view.numel()].view(block.view.shape))
        if pieces:
            seen[name] = torch.cat(pieces).numpy()
    engine.update(packed, _loss, temperature=1.0, lr=0.0)
    if keys:  # a step at rate 0 makes 0 of -0, which decoded weights have
        assert engine.digest() == before, "a rounded value reached the weights"
    with torch.no_grad():
        for param in engine.chunks[0].parameters():
            param.copy_(getattr(param, "main_grad", torch.zeros(())))  # the indexer has none
    grads = {name: torch.cat([p.view for p in blocks]).numpy().copy() for name, blocks in engine.weights().items()}
    return {"scores": scores, "sent": sent, "seen": seen, "grads": grads}


def test_the_forward_pass_is_that_of_the_export_and_gradients_pass_straight(tmp_path: Path):
    path = str(write_model(tmp_path / "model", hidden_size=160, moe_intermediate_size=96))
    one = run_ranks(_run, 1, path, str(tmp_path), ALL, True)[0]
    shutil.copy(f"{path}/config.json", tmp_path / "dist")
    convert(Request(tmp_path / "dist", tmp_path / "released", "released"))
    exported = dequantised(tmp_path / "released")
    for name, value in one["sent"].items():
        assert np.array_equal(value, exported[name].astype(value.dtype)), name
    experts = [name for name in one["seen"] if ".experts." in name]
    assert len(experts) == 5 * 4 * 3
    for name, value in one["seen"].items():
        assert np.array_equal(value, one["sent"][name]), name

    plain = run_ranks(_run, 1, str(tmp_path / "released"), str(tmp_path), {}, False)[0]
    for i, scores in plain["scores"].items():
        np.testing.assert_allclose(one["scores"][i], scores, atol=1e-5, rtol=0)
    for name, grad in plain["grads"].items():
        np.testing.assert_allclose(one["grads"][name], grad, atol=1e-6, err_msg=name)

    spread = run_ranks(_run, 2, path, str(tmp_path), ALL | EP2 | FULL, False)
    for rank in spread:
        for i, scores in rank["scores"].items():
            np.testing.assert_allclose(scores, one["scores"][i], atol=1e-5, rtol=0)
        for name in (n for n in rank["grads"] if ".experts." in n):
            np.testing.assert_allclose(rank["grads"][name], one["grads"][name], atol=1e-6, err_msg=name)


def test_experts_alone(tmp_path: Path):
    path = str(write_model(tmp_path / "model", moe_intermediate_size=32))
    found = run_ranks(_run, 1, path, str(tmp_path), EXPERTS, False)[0]
    plain = run_ranks(_run, 1, path, str(tmp_path), {}, False)[0]
    changed = {n for n, value in found["seen"].items() if not np.array_equal(value, plain["seen"][n])}
    assert changed == {n for n in found["seen"] if ".experts." in n}
    assert max(np.abs(found["scores"][i] - plain["scores"][i]).max() for i in range(len(LENGTHS))) > 1e-3


def test_a_block_on_two_ranks_is_refused():
    from moe_rl.engine.fake_quant import install
    from moe_rl.models.weights import Part

    weight = torch.nn.Linear(96, 8, bias=False)
    for start, width, kind in ((48, 48, "mxfp4"), (64, 96, "fp8")):
        part = Part(weight.weight[:, :width], (0, start), (8, 256))
        with pytest.raises(UserError, match="inside a block"):
            install(weight, {"w": [part]}, {"w": kind}, "F8_E8M0")


def test_a_layer_that_reads_its_modules_weights_itself_finds_them_rounded():
    """As the fused experts do."""
    from moe_rl.engine.fake_quant import install, rounded
    from moe_rl.models.weights import Part

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(64, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.inner.weight.t()

    layer, x = Layer(), torch.randn(3, 64)
    weight = layer.inner.weight
    assert install(layer, {"w": [Part(weight, (0, 0), (4, 64))]}, {"w": "mxfp4"}, "F8_E8M0") == 1
    layer(x).sum().backward()
    with torch.no_grad():
        assert torch.equal(layer(x), x @ rounded(weight, "mxfp4", "F8_E8M0").t())
        assert not torch.equal(layer(x), x @ weight.t()) and layer.inner.weight is weight
    torch.testing.assert_close(weight.grad, x.sum(0).expand(4, 64))
