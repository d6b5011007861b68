"""Qwen from a trainer in tensor-parallel shards to a live rollout: exact weights, equal log-probs, sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_rl.models.digest import digest_all
from moe_rl.models.qwen.arch import QwenArch
from moe_rl.models.qwen.weights import weight_table
from moe_rl.models.weights import Part
from moe_rl.reshard.plan import Owned, make_plan
from moe_rl.reshard.transport import pack
from moe_rl.rollout.engine import Request
from tests.distributed import run_ranks
from tests.small_qwen import VOCAB, model_config, token_logprobs, write_model
from tests.small_v4 import run_config, sequences

SEQUENCES = sequences((23, 9, 40, 14))
LAYOUTS = {
    "qwen2": {"layout__tp": 2, "layout__pp": 2},
    "qwen3": {"layout__tp": 2},
    "qwen3_moe": {"layout__tp": 2, "layout__ep": 2, "layout__pp": 2},
}


def _trained_shards(rank: int, world: int, port: int, path: str, keys: dict) -> tuple:
    """One update; what this rank owns afterwards and its values, digests, and log-probs where this rank has them."""
    from moe_rl.engine.batch import MicroBatch
    from moe_rl.engine.engine import Engine
    from moe_rl.models.weights import dtype_name

    engine = Engine.create(run_config(path, world, **keys), rank, world, f"127.0.0.1:{port}", random_init=True)
    batches = [MicroBatch.pack([s], [{"weight": np.full(len(s) - 1, 0.01)}], [i]) for i, s in enumerate(SEQUENCES)]
    engine.update(batches, lambda logprobs, _, fields: (-(logprobs * fields["weight"]).sum(), {}), temperature=1.0)
    scores = {ids[0]: logprobs[0] for ids, logprobs, *_ in engine.log_probs(batches, temperature=1.0)}
    flat = [(name, part) for name, parts in engine.weights().items() for part in parts]
    owned = [Owned(rank, name, part.shape, dtype_name(part.view), part.box(name)) for name, part in flat]
    arrays = [(name, part.view.numpy().copy(), part.start, part.shape) for name, part in flat]
    out = owned, arrays, engine.digest(), scores
    engine.close()
    return out


@pytest.mark.parametrize("kind", LAYOUTS)
def test_shards_become_one_rollout_that_scores_alike_and_samples(tmp_path, kind):
    from moe_rl.rollout.transformers_engine import TransformersEngine

    path = write_model(tmp_path / "model", kind, eos_token_id=1)
    keys = LAYOUTS[kind]
    ranks = run_ranks(_trained_shards, keys["layout__tp"] * keys.get("layout__pp", 1), str(path), keys)
    assert any(owned.box.extent != owned.shape for owned in ranks[0][0]), "nothing is split"
    engine = TransformersEngine(path)
    held = engine.holdings(0)
    plan = make_plan([o for owned, *_ in ranks for o in owned], held)
    assert plan.nbytes == sum(h.nbytes for h in held)
    packets = []
    for source, _, boxes, _ in plan.transfers:
        parts: dict[str, list[Part]] = {}
        for name, array, start, shape in ranks[source][1]:
            parts.setdefault(name, []).append(Part(torch.from_numpy(array), start, shape))
        packets += pack(parts, boxes, {h.name: h.dtype for h in held}, version=1, source=source)
    engine.receive(packets, 1, plan.names[0])
    live = digest_all({name: part.view for name, (part,) in engine._receiver._parts.items()})
    assert live.keys() == weight_table(QwenArch.from_dict(model_config(kind))).expected().keys()
    assert all(live[name] == value for *_, digests, _ in ranks for name, value in digests.items())
    scores = {i: row for *_, found in ranks for i, row in found.items()}
    with torch.no_grad():
        for i, sequence in enumerate(SEQUENCES):
            expected = token_logprobs(engine._model, torch.from_numpy(sequence))
            np.testing.assert_allclose(scores[i], expected, atol=1e-5)
    requests = [Request(i, tuple(map(int, s[:5])), 7 + i, 12) for i, s in enumerate(SEQUENCES)]
    for request, done in zip(requests, engine.generate(requests), strict=True):
        assert 1 <= len(done.tokens) <= 12 and done.tokens.max() < VOCAB
        with torch.no_grad():
            whole = torch.tensor([*request.prompt, *done.tokens.tolist()])
            expected = token_logprobs(engine._model, whole)[len(request.prompt) - 1 :]
        np.testing.assert_allclose(done.logprobs, expected, atol=1e-5)
