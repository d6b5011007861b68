"""Router replay: given experts are taken in every layout, recomputed or not, and all of them; what comes from the rollout
or from the trainer's own log-probs reaches the update of a whole run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_rl import GRPOTrainer, load_config
from moe_rl.errors import RunFailed
from tests import small_qwen, small_v4
from tests.distributed import run_ranks
from tests.short_runs import ONE, SMALL, read, short_run
from tests.small_v4 import run_config, sequences
from tests.test_engine_layouts import EP2, FULL, PP2, _loss

LENGTHS = (13, 5, 21, 9, 17, 3, 11, 26)
REPLAY = {"rollout__router_replay": "R2"}
QWEN_PP2, TP2 = {"layout__pp": 2, "layout__stages": "Et|tttL"}, {"layout__tp": 2}
# name: family, ranks, keys, micro-batches per data-parallel rank
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "v4 pp2 full": ("v4", 2, PP2 | FULL, 4),
    "moe tp2 full": ("qwen3_moe", 2, TP2 | FULL, 3),
}
MORE: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "v4 pp2 ep2 full": ("v4", 4, PP2 | EP2 | FULL, 3),
    "v4 vpp2 full": ("v4", 2, {"layout__pp": 2, "layout__vpp": 2, "layout__stages": "Ett|t|t|tL"} | FULL, 4),
    "moe pp2 ep2 full": ("qwen3_moe", 4, QWEN_PP2 | EP2 | FULL, 2),
}


def _free(rank: int, arch: Any) -> list[np.ndarray]:
    """For each sequence distinct random experts, of layers that have no scored router too."""
    rng = np.random.default_rng(11)
    shape = [(n - 1, arch.num_layers, arch.num_experts) for n in LENGTHS]
    return [rng.random(s).argsort(-1)[..., : arch.top_k].astype(np.uint8) for s in shape]


def _run(
    rank: int, world: int, port: int, path: str, keys: dict[str, Any], count: int, hashed: tuple[int, ...]
) -> dict:
    """Recorded routes, and under random ones: log-probs, loss, gradient norm, coverage."""
    from dataclasses import replace

    from moe_rl.engine.batch import MicroBatch
    from moe_rl.engine.engine import Engine
    from moe_rl.engine.replay import packed_routes

    config = run_config(path, world, **(REPLAY | keys))
    engine = Engine.create(config, rank, world, f"127.0.0.1:{port}", random_init=True)
    parallel, everything = engine.parallel, sequences(LENGTHS)
    mine = range(parallel.dp_rank, len(everything), parallel.dp)
    parts = [list(mine)[i::count] for i in range(count)]
    fields = [{"weight": np.full(n - 1, 0.01)} for n in LENGTHS]
    free = [MicroBatch.pack([everything[i] for i in p], [fields[i] for i in p], p) for p in parts]

    def scores(batches: list[Any], **options: Any) -> dict[int, np.ndarray]:
        found = engine.log_probs(batches, temperature=1.0, **options)
        return {i: row for ids, rows, _ in found for i, row in zip(ids, rows, strict=True)}

    own = scores(free, record=True)
    recorded = engine.routes
    routes = _free(rank, engine.arch)
    for route in routes:
        route[:, list(hashed)] = 0  # repeated experts: no row of a table
    told = [route.astype(np.int16) for route in routes]
    for route in told:
        route[:, list(hashed)] = -1
    batches = [replace(m, routes=packed_routes([told[i] for i in m.ids], m.lengths, engine.arch)) for m in free]
    replayed = scores(batches)
    stats = engine.update(batches, _loss, temperature=1.0)
    after = scores(batches)
    found = {"own": own, "recorded": recorded, "replayed": replayed, "after": after}
    found |= {"coverage": stats.coverage, "loss": stats.loss, "norm": stats.grad_norm}
    if hashed and parallel.is_first:
        wrong = [replace(m, routes=packed_routes([routes[i] for i in m.ids], m.lengths, engine.arch)) for m in free]
        if world == 1:
            with pytest.raises(RunFailed, match="hash-routed"):
                engine.log_probs(wrong, temperature=1.0)
    return found


def _model(family: str, directory: Any) -> tuple[str, tuple[int, ...]]:
    if family == "v4":
        return str(small_v4.write_model(directory)), (0, 1)
    return str(small_qwen.write_model(directory, family, mlp_only_layers=[1])), ()


def _merged(ranks: list[dict], name: str) -> dict[int, np.ndarray]:
    out: dict[int, np.ndarray] = {}
    for rank in ranks:
        for i, value in rank[name].items():
            out[i] = np.maximum(out[i], value) if i in out and name == "recorded" else value
    return out


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each family on one rank without recompute, every sequence alone."""
    found: dict[str, tuple[str, tuple[int, ...], dict]] = {}

    def get(family: str) -> tuple[str, tuple[int, ...], dict]:
        if family not in found:
            path, hashed = _model(family, tmp_path_factory.mktemp(family))
            found[family] = path, hashed, run_ranks(_run, 1, path, {}, len(LENGTHS), hashed)[0]
        return found[family]

    return get


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)])
def test_given_experts_are_taken_in_every_layout(reference, name):
    family, ranks, keys, count = (LAYOUTS | MORE)[name]
    path, hashed, one = reference(family)
    results = run_ranks(_run, ranks, path, keys, count, hashed)
    for step in ("own", "replayed", "after"):
        for i, row in _merged(results, step).items():
            np.testing.assert_allclose(row, one[step][i], atol=2e-5, err_msg=f"{step} {i}")
    assert max(np.abs(one["own"][i] - one["replayed"][i]).max() for i in one["own"]) > 0.01
    for result in [one, *results]:
        assert result["coverage"] == 1.0
        assert result["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert result["norm"] == pytest.approx(one["norm"], rel=1e-4)
    recorded = _merged(results, "recorded")
    free = [
        layer for layer in range(recorded[0].shape[1]) if layer not in hashed and not (family != "v4" and layer == 1)
    ]
    for i, route in recorded.items():
        assert np.array_equal(np.sort(route[:, free]), np.sort(one["recorded"][i][:, free]))
        assert (route[:, free] >= 0).all() and (np.delete(route, free, 1) == -1).all()


def test_experts_that_do_not_fit_are_refused():
    from moe_rl.engine.replay import packed_routes

    arch = SimpleNamespace(num_layers=2, num_experts=384, top_k=2)
    route = np.full((3, 2, 2), 383, np.int16)
    packed = packed_routes([route, None], [4, 2], arch)
    assert packed[:3].unique().tolist() == [383] and packed[3:].unique().tolist() == [-1]
    for wrong in (route[:2], route.astype(np.uint8)[:, :1], route + 1):
        with pytest.raises(RunFailed):
            packed_routes([wrong], [4], arch)


def test_a_router_that_does_not_replay_is_noticed(megatron_world):
    """Fewer choices taken than were given: the run says so, and does not go on."""
    import torch

    from moe_rl.engine.replay import Replay
    from moe_rl.models.routing import Routing

    batch = SimpleNamespace(routes=torch.zeros(3, 2, 2, dtype=torch.int16))
    replay = Replay(SimpleNamespace())
    routing = Routing(batch.routes)
    routing.replayed[0] = torch.tensor(3)
    replay.passed.append((batch, routing, [0, 1]))  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match="3 of 6 choices"):
        replay.coverage(SimpleNamespace(tp=1, device="cpu"))  # type: ignore[arg-type]


def test_a_run_replays_what_the_rollout_chose(tmp_path):
    """On two stages with experts over two ranks; log-probs agree as ever, for the experts are the same ones in fp32."""
    layout = ["layout.pp=2", "layout.ep=2", "cluster.gpus_per_node=4", "engine.recompute=full"]
    result = short_run(tmp_path / "run", "rollout.router_replay=R3", layout=layout)
    assert result.code == 0
    for step in result.metrics:
        assert step["replay/coverage"] == 1.0
        assert step["mismatch/logprob_abs_max"] < 1e-4


@pytest.mark.slow
def test_a_run_of_qwen_replays_what_the_trainer_chose(tmp_path):
    config = load_config(
        "qwen3-moe-tiny", [*SMALL, *ONE, "layout.tp=1", "rollout.router_replay=R2", "algorithm.minibatches=2"]
    )
    assert GRPOTrainer(config, run_dir=tmp_path / "run").fit() == 0
    for step in read(tmp_path / "run" / "metrics.jsonl"):
        assert step["replay/coverage"] == 1.0 and step["mismatch/logprob_abs_max"] < 1e-4
