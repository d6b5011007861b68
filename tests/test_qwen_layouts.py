"""Qwen models in many layouts against transformers: log-probs, training, checkpoints. The reference is transformers' own
model trained one sequence at a time with torch's AdamW: no megatron-core, no packing, no split of anything."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests.distributed import run_ranks
from tests.small_qwen import save_model, token_logprobs
from tests.small_v4 import run_config, sequences
from tests.test_engine_layouts import TRAINING, _by_id, _loss, _micro_batches

LENGTHS = (13, 5, 21, 9, 17, 3, 11, 26)
STEPS, TEMPERATURE = 3, 0.8
TP2, EP2, ETP2 = {"layout__tp": 2}, {"layout__ep": 2}, {"layout__etp": 2}
PP2 = {"layout__pp": 2, "layout__stages": "Et|tttL"}
VPP2 = {"layout__pp": 2, "layout__vpp": 2, "layout__stages": "Et|t|t|tL"}
FULL = {"engine__recompute": "full"}

# name: model, ranks, keys, micro-batches per data-parallel rank
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "qwen2 one": ("qwen2", 1, {}, 2),
    "qwen2 tp2": ("qwen2", 2, TP2, 3),
    "qwen2 tp2 pp2 full": ("qwen2", 4, TP2 | PP2 | FULL, 3),
    "qwen3 tp2 full": ("qwen3", 2, TP2 | FULL, 3),
    "qwen3 vpp2": ("qwen3", 2, VPP2, 4),
    "moe one full": ("qwen3_moe", 1, FULL, 3),
    "moe tp2": ("qwen3_moe", 2, TP2, 3),
    "moe ep2": ("qwen3_moe", 2, EP2, 2),
    "moe tp2 pp2 full": ("qwen3_moe", 4, TP2 | PP2 | FULL, 3),
}
MORE: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "qwen2 pp2": ("qwen2", 2, PP2, 4),
    "qwen2 dp2": ("qwen2", 2, {}, 2),
    "qwen2 vpp2 full": ("qwen2", 2, VPP2 | FULL, 4),
    "qwen2 tp2 dp2": ("qwen2", 4, TP2, 2),
    "qwen3 one full": ("qwen3", 1, FULL, 1),
    "qwen3 tp2 pp2": ("qwen3", 4, TP2 | PP2, 3),
    "moe pp2 full": ("qwen3_moe", 2, PP2 | FULL, 3),
    "moe vpp2 full": ("qwen3_moe", 2, VPP2 | FULL, 4),
    "moe ep4": ("qwen3_moe", 4, {"layout__ep": 4}, 2),
    "moe tp2 ep2": ("qwen3_moe", 2, TP2 | EP2, 3),
    "moe tp2 etp2": ("qwen3_moe", 2, TP2 | ETP2, 3),
    "moe tp2 ep2 of dp2": ("qwen3_moe", 4, TP2 | EP2, 2),
    "moe pp2 ep2 full": ("qwen3_moe", 4, PP2 | EP2 | FULL, 2),
    "moe tp2 vpp2": ("qwen3_moe", 4, TP2 | VPP2, 4),
}
# 65 token ids: two tensor-parallel ranks have 33 and 32 of them and a row of padding
CHANGES: dict[str, dict[str, Any]] = {"qwen2": {}, "qwen3": {"vocab_size": 65}, "qwen3_moe": {"mlp_only_layers": [1]}}


# ------------------------------------------------------------------------------------------------ run by the ranks
def _engine(rank: int, world: int, port: int, path: str, keys: dict) -> Any:
    from moe_rl.engine.engine import Engine

    return Engine.create(run_config(path, world, **(TRAINING | keys)), rank, world, f"127.0.0.1:{port}")


def _save(rank: int, world: int, port: int, path: str, keys: dict, directory: str) -> dict:
    """Two steps, a save, one more step."""
    engine = _engine(rank, world, port, path, keys)
    batches = _micro_batches(engine.parallel.dp_rank, engine.parallel.dp, 2)
    for _ in range(2):
        engine.update(batches, _loss, temperature=1.0)
    engine.save(directory)
    out = {"digest": engine.digest(), "next": engine.update(batches, _loss, temperature=1.0)}
    engine.close()
    return out


def _load(rank: int, world: int, port: int, path: str, keys: dict, directory: str, again: str) -> dict:
    """A load over other weights and moments, a save, a step."""
    engine = _engine(rank, world, port, path, keys)
    batches = _micro_batches(engine.parallel.dp_rank, engine.parallel.dp, 2)
    engine.update(batches, _loss, temperature=1.0)
    engine.load(directory)
    engine.save(again)
    out = {"digest": engine.digest(), "next": engine.update(batches, _loss, temperature=1.0)}
    engine.close()
    return out


def _train(rank: int, world: int, port: int, path: str, keys: dict, count: int) -> dict:
    engine = _engine(rank, world, port, path, keys)
    batches = _micro_batches(engine.parallel.dp_rank, engine.parallel.dp, count)
    out: dict[str, Any] = {"steps": [], "scores": [], "digest": engine.digest()}
    for _ in range(STEPS):
        out["scores"].append(_by_id(engine.log_probs(batches, temperature=TEMPERATURE, entropy=True)))
        out["steps"].append(engine.update(batches, _loss, temperature=TEMPERATURE))
    engine.close()
    return out


# ------------------------------------------------------------------------------------------------------- the oracle
def _reference(path: str) -> dict:
    """Losses, gradient norms and log-probs of transformers' model trained by torch alone."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    config, total = run_config(path, **TRAINING).optimizer, sum(LENGTHS) - len(LENGTHS)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), eps=config.eps)
    out: dict[str, Any] = {"steps": [], "scores": []}
    for _ in range(STEPS):
        adam.zero_grad()
        rows = [token_logprobs(model, torch.from_numpy(s), TEMPERATURE) for s in sequences(LENGTHS)]
        loss = -sum(row.sum() for row in rows) / total
        loss.backward()
        out["scores"].append([row.detach().numpy() for row in rows])
        norm = torch.nn.utils.clip_grad_norm_(params, config.clip_grad)
        adam.step()
        out["steps"].append((float(loss), float(norm)))
    return out


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Any:
    """Kind -> (directory as transformers wrote it, what training it gives)."""

    @functools.cache
    def make(kind: str) -> tuple[str, dict]:
        path = str(save_model(tmp_path_factory.mktemp("qwen") / kind, kind, **CHANGES[kind]))
        return path, _reference(path)

    return make


def _check(models: Any, kind: str, world: int, keys: dict, count: int) -> None:
    path, expected = models(kind)
    ranks = run_ranks(_train, world, path, keys, count)
    for found, (loss, norm) in zip(ranks[0]["steps"], expected["steps"], strict=True):
        assert found.loss == pytest.approx(loss, abs=1e-5)
        assert found.grad_norm == pytest.approx(norm, rel=1e-5)
    assert all(r["steps"] == ranks[0]["steps"] for r in ranks), "the ranks report different numbers"
    for step, wanted in enumerate(expected["scores"]):
        scores = {i: row for r in ranks for i, row in r["scores"][step].items()}
        assert sorted(scores) == list(range(len(LENGTHS)))
        for i, row in enumerate(wanted):
            np.testing.assert_allclose(scores[i][0], row, rtol=0, atol=2e-5 if step == 0 else 1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_train_as_transformers_does(models, name):
    _check(models, *LAYOUTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_layouts_train_as_transformers_does(models, name):
    _check(models, *MORE[name])


@pytest.mark.parametrize("kind, last", [("qwen3_moe", EP2), ("qwen3", TP2), ("qwen2", PP2)])
def test_a_checkpoint_goes_from_layout_to_layout(models, tmp_path, kind, last):
    """TP2 x PP2 -> one process -> another layout: the same weights, moments and next step at each stop."""
    path, _ = models(kind)
    first, second, third = (str(tmp_path / str(i)) for i in range(3))
    saved = run_ranks(_save, 4, path, TP2 | PP2, first)
    one = run_ranks(_load, 1, path, {}, first, second)
    other = run_ranks(_load, 2, path, last, second, third)
    for ranks in (saved, one, other):
        for r in ranks:
            assert r["digest"].items() <= one[0]["digest"].items()
            assert r["next"].loss == pytest.approx(saved[0]["next"].loss, abs=1e-6)
            assert r["next"].grad_norm == pytest.approx(saved[0]["next"].grad_norm, abs=1e-5)
    assert set().union(*(r["digest"] for r in saved)) == one[0]["digest"].keys()
