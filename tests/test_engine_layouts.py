"""One training, many layouts: losses, gradient norms and log-probs must not depend on how the model is cut.

The reference of the references is a plain torch loop over one sequence at a time: no pipeline schedule, no gradient
buffers, no packing, torch's own AdamW and gradient clipping.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moe_rl.errors import RunFailed, UserError
from tests.distributed import run_ranks
from tests.small_v4 import run_config, sequences, write_model

LENGTHS = (13, 5, 21, 9, 17, 3, 11, 26)
STEPS = 4
TEMPERATURE = 0.8

# Adam's epsilon is well above rounding noise: the first layer's streams are equal, so that part of its hyper-connection
# has a gradient of zero, whose noise a tiny epsilon would turn into steps of their own.
TRAINING = {"optimizer__lr": 2e-3, "optimizer__eps": 1e-5, "optimizer__weight_decay": 0.1, "optimizer__clip_grad": 1.0}

PP2 = {"layout__pp": 2, "layout__stages": "Ettt|ttL"}
UNEVEN = {"layout__pp": 2, "layout__stages": "Et*4|tL"}
SPREAD = {"layout__pp": 2, "layout__stages": "Et|t*4L", "layout__pin_hash_layers": False}
VPP2 = {"layout__pp": 2, "layout__vpp": 2, "layout__stages": "Ett|t|t|tL"}
VPP2_SPREAD = VPP2 | {"layout__stages": "Et|t|tt|tL", "layout__pin_hash_layers": False}
EP2 = {"layout__ep": 2}
FULL = {"engine__recompute": "full"}

# name: ranks, keys, micro-batches per data-parallel rank
LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "one full": (1, FULL, 1),
    "one cut 8": (1, {}, 8),
    "dp2": (2, {}, 4),
    "pp2 full": (2, PP2 | FULL, 4),
    "pp2 uneven": (2, UNEVEN, 4),
    "pp2 spread full": (2, SPREAD | FULL, 5),
    "vpp2 full": (2, VPP2 | FULL, 4),
    "ep2": (2, EP2, 2),
    "pp2 ep2 full": (4, PP2 | EP2 | FULL, 4),
}
MORE: dict[str, tuple[int, dict[str, Any], int]] = {
    "one cut 3": (1, FULL, 3),
    "dp2 full": (2, FULL, 3),
    "dp4": (4, {}, 2),
    "pp2": (2, PP2, 4),
    "pp2 uneven full": (2, UNEVEN | FULL, 4),
    "pp2 spread": (2, SPREAD, 4),
    "pp3 default": (3, {"layout__pp": 3}, 4),
    "vpp2": (2, VPP2, 4),
    "vpp2 cut 6": (2, VPP2, 6),
    "vpp2 spread full": (2, VPP2_SPREAD | FULL, 8),
    "ep2 full": (2, EP2 | FULL, 4),
    "ep4": (4, {"layout__ep": 4}, 2),
    "ep2 of dp4": (4, EP2, 2),
    "pp2 dp2 full": (4, PP2 | FULL, 4),
    "pp2 ep2": (4, PP2 | EP2, 4),
    "vpp2 ep2 full": (4, VPP2 | EP2 | FULL, 4),
}


# ------------------------------------------------------------------------------------------------ run by the ranks
def _loss(logprobs, entropy, fields):
    weights = fields["weight"]
    sums = {"entropy": (entropy * weights).sum(), "tokens": (weights > 0).sum(), "max_logprob": logprobs.max().detach()}
    return -(logprobs * weights).sum(), sums


def _micro_batches(rank: int, ranks: int, count: int) -> list:
    """Every ranks-th sequence, cut into `count` micro-batches of unequal lengths; weights make the loss a token mean."""
    from moe_rl.engine.batch import MicroBatch

    everything, total = sequences(LENGTHS), sum(LENGTHS) - len(LENGTHS)
    mine = range(rank, len(everything), ranks)
    parts = [list(mine)[i::count] for i in range(count)]
    return [
        MicroBatch.pack([everything[i] for i in p], [{"weight": np.full(LENGTHS[i] - 1, 1 / total)} for i in p], p)
        for p in parts
    ]


def _by_id(scores: list) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    return {i: (lp, ent) for ids, lps, ents in scores for i, lp, ent in zip(ids, lps, ents, strict=True)}


def _biases(engine) -> dict[str, int]:
    return {n: d for n, d in engine.digest().items() if n.endswith("gate.bias")}


def _train(rank: int, world: int, port: int, path: str, keys: dict, count: int, score_between: bool) -> dict:
    import torch

    from moe_rl.engine.engine import Engine

    engine = Engine.create(run_config(path, world, **keys), rank, world, f"127.0.0.1:{port}", random_init=True)
    batches = _micro_batches(engine.parallel.dp_rank, engine.parallel.dp, count)
    biases, random_state = _biases(engine), torch.get_rng_state()
    out: dict[str, Any] = {"steps": [], "scores": []}
    for _ in range(STEPS):
        if score_between:
            scores = engine.log_probs(batches, temperature=TEMPERATURE, entropy=True)
            assert bool(scores) == engine.parallel.is_last
            out["scores"].append(_by_id(scores))
        stats = engine.update(batches, _loss, temperature=TEMPERATURE, scored=score_between)
        own = _by_id(stats.scores)  # what the update's forward passes found is what was scored before it, bit for bit
        assert own.keys() == (out["scores"][-1] if score_between else {}).keys()
        assert all(np.array_equal(a, b) for i in own for a, b in zip(own[i], out["scores"][-1][i], strict=True))
        out["steps"].append(replace(stats, scores=[]))
    out["bias_kept"] = biases == _biases(engine) and (bool(biases) or not engine.parallel.is_last)
    out["random_kept"] = torch.equal(random_state, torch.get_rng_state())
    out["training"] = all(chunk.training for chunk in engine.chunks)
    out["digest"] = engine.digest()
    engine.close()
    return out


def _plain_torch(rank: int, world: int, port: int, path: str, keys: dict) -> dict:
    """The same training by hand: one sequence at a time through the bare model, torch's AdamW and clipping."""
    import torch

    from moe_rl.engine.engine import Engine
    from moe_rl.models.packed import PackedSequences

    config = run_config(path, **keys)
    engine = Engine.create(config, rank, world, f"127.0.0.1:{port}", random_init=True, train=False)
    model, total = engine.chunks[0], sum(LENGTHS) - len(LENGTHS)
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": config.optimizer.weight_decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=config.optimizer.lr, betas=(0.9, 0.95), eps=config.optimizer.eps)
    out: dict[str, Any] = {"steps": [], "scores": []}
    for _ in range(STEPS):
        adam.zero_grad()
        loss, scores = 0.0, {}
        for i, tokens in enumerate(sequences(LENGTHS)):
            row = torch.from_numpy(tokens)[None]
            logits = model(row, PackedSequences.from_lengths([len(tokens)]))[0, :-1]
            logp = torch.log_softmax(logits / TEMPERATURE, -1)
            scores[i] = (logp.gather(1, row[0, 1:, None])[:, 0], -(logp.exp() * logp).sum(-1))
            part = -scores[i][0].sum() / total
            part.backward()
            loss += float(part)
        out["scores"].append({i: tuple(v.detach().numpy() for v in s) for i, s in scores.items()})
        norm = torch.nn.utils.clip_grad_norm_(params, config.optimizer.clip_grad)
        adam.step()
        out["steps"].append((loss, float(norm)))
    engine.close()
    return out


# ------------------------------------------------------------------------------------------------------------ tests
@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp("v4")))


@functools.cache
def _reference(path: str) -> dict:
    return run_ranks(_plain_torch, 1, path, TRAINING)[0]


def _check(ranks: list[dict], expected: dict) -> None:
    assert all(r["bias_kept"] and r["random_kept"] and r["training"] for r in ranks)
    for r in ranks:
        assert r["steps"] == ranks[0]["steps"], "the ranks report different numbers"
    for found, (loss, norm) in zip(ranks[0]["steps"], expected["steps"], strict=True):
        assert found.loss == pytest.approx(loss, abs=1e-5)
        assert found.grad_norm == pytest.approx(norm, abs=1e-4)
        assert found.sums["tokens"] == sum(LENGTHS) - len(LENGTHS)
    for step, wanted in enumerate(expected["scores"]):
        scores: dict[int, tuple] = {}
        for r in ranks:
            scores.update(r["scores"][step])
        assert scores.keys() == wanted.keys()
        # from the second step on the weights differ by the rounding of the updates before
        tolerance = 1e-5 if step == 0 else 3e-5
        for i, values in wanted.items():
            for ours, theirs in zip(scores[i], values, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)
    entropy = sum(e.sum() for _, e in expected["scores"][0].values()) / ranks[0]["steps"][0].sums["tokens"]
    assert ranks[0]["steps"][0].sums["entropy"] == pytest.approx(entropy, abs=1e-5)
    highest = max(lp.max() for lp, _ in expected["scores"][0].values())
    # positions without a next token stand in the row with label 0, so the row's maximum may be higher
    assert ranks[0]["steps"][0].sums["max_logprob"] >= highest - 1e-5


def _run(path: str, world: int, keys: dict, count: int, score_between: bool = True) -> list[dict]:
    return _run_once(path, world, tuple(keys.items()), count, score_between)


@functools.cache
def _run_once(path: str, world: int, keys: tuple, count: int, score_between: bool) -> list[dict]:
    return run_ranks(_train, world, path, TRAINING | dict(keys), count, score_between)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_train_alike(model, name):
    _check(_run(model, *LAYOUTS[name]), _reference(model))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_layouts_train_alike(model, name):
    _check(_run(model, *MORE[name]), _reference(model))


def test_scoring_leaves_no_trace(model):
    scored = _run(model, 2, PP2 | FULL, 4, True)
    alone = _run(model, 2, PP2 | FULL, 4, False)
    for a, b in zip(scored, alone, strict=True):
        assert a["steps"] == b["steps"] and a["digest"] == b["digest"]


def _misuse(rank: int, world: int, port: int, path: str) -> list[str]:
    """What the engine refuses, on every rank at once; none of it may hang."""
    from moe_rl.engine.engine import Engine

    config = run_config(path, world, **(VPP2 | TRAINING))
    engine = Engine.create(config, rank, world, f"127.0.0.1:{port}", random_init=True)
    four = _micro_batches(0, 1, 4)
    said = []

    def refused(call) -> None:
        with pytest.raises((UserError, RunFailed)) as error:
            call()
        said.append(error.value.rule)

    refused(lambda: engine.log_probs(four[: 2 + 2 * rank], temperature=1.0))
    refused(lambda: engine.log_probs(four[:3], temperature=1.0))
    refused(lambda: engine.update([], _loss, temperature=1.0))
    refused(lambda: engine.log_probs(four, temperature=1.0, reference=True))
    refused(lambda: engine.update(four, lambda lp, e, f: (lp.sum() * float("nan"), {}), temperature=1.0))
    engine.close()
    return said


def test_misuse_is_refused_on_every_rank(model):
    counts = "engine.micro_batches"
    expected = [counts, counts, counts, "engine.reference", "engine.not_finite"]
    assert run_ranks(_misuse, 2, model) == [expected, expected]


def _reference_model(rank: int, world: int, port: int, path: str) -> tuple[list, list, list, bool]:
    from moe_rl.engine.engine import Engine

    config = run_config(path, world, **(PP2 | TRAINING))
    engine = Engine.create(config, rank, world, f"127.0.0.1:{port}", random_init=True, reference=True)
    batches = _micro_batches(0, 1, 4)

    def scores(**kw) -> list:
        return [lp.tolist() for _, lps, ents in engine.log_probs(batches, temperature=1.0, **kw) for lp in lps]

    before = scores()
    engine.update(batches, _loss, temperature=1.0)
    same = all(
        bool((w[0].view == r[0].view).all())
        for w, r in zip(engine.weights().values(), engine.weights(reference=True).values(), strict=True)
    )
    out = before, scores(reference=True), scores(), same
    engine.close()
    return out


def test_the_reference_stays_while_the_policy_moves(model):
    _, (before, reference, after, same_weights) = run_ranks(_reference_model, 2, model)
    assert reference == before and after != before and not same_weights


def test_layouts_that_do_not_fit_are_refused(model):
    from moe_rl.engine.parallel import check_layout
    from moe_rl.models.family import read_facts

    facts = read_facts(model)
    cases = [
        (1, {"layout__tp": 2}, "layout.tp"),
        (3, {"layout__pp": 2}, "layout.world"),
        (4, {"layout__pp": 2, "layout__ep": 4}, "layout.ep"),
        (3, {"layout__ep": 3}, "layout.experts"),
        (2, {"layout__vpp": 2}, "layout.vpp"),
        (2, SPREAD | {"layout__pin_hash_layers": True}, "layout.hash_layers"),
    ]
    for world, keys, rule in cases:
        with pytest.raises(UserError) as error:
            check_layout(run_config(model, world, **keys), facts, world)
        assert rule in str(error.value)
    assert check_layout(run_config(model, 2, **PP2), facts, 2) == "Ettt|ttL"


def _port_in_use(rank: int, world: int, port: int, path: str) -> str:
    import socket

    from moe_rl.engine.engine import Engine

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(UserError) as error:
            Engine.create(run_config(path), rank, world, f"127.0.0.1:{port}", random_init=True)
    return error.value.rule


def test_a_port_in_use_is_named(model):
    assert run_ranks(_port_in_use, 1, model) == ["cluster.port"]


def test_a_model_without_weights_is_refused(model):
    from moe_rl.engine.engine import Engine

    with pytest.raises(UserError, match="holds no weights"):
        Engine.create(run_config(model), 0, 1, "127.0.0.1:1")
