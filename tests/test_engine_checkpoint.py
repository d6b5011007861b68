"""Checkpoints: exact resume in the same layout, equal weights and losses in any other, damage named before use."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from moe_rl.errors import RunFailed, UserError
from tests.distributed import run_ranks
from tests.small_v4 import run_config, write_model
from tests.test_engine_layouts import EP2, FULL, PP2, TRAINING, VPP2, _loss, _micro_batches

SAVED = (4, PP2 | EP2 | FULL)
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep2": (2, EP2),
    "dp2": (2, {}),
    "pp2 other split": (2, FULL | {"layout__pp": 2, "layout__stages": "Ett|tttL"}),
}
MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "vpp2": (2, VPP2),
    "ep4": (4, {"layout__ep": 4}),
    "pp2 dp2": (4, PP2),
    "pp5": (5, {"layout__pp": 5, "layout__pin_hash_layers": False}),
}


def _engine(rank: int, world: int, port: int, path: str, keys: dict) -> Any:
    from moe_rl.engine.engine import Engine

    return Engine.create(
        run_config(path, world, **(TRAINING | keys)), rank, world, f"127.0.0.1:{port}", random_init=True
    )


def _steps(engine: Any, count: int) -> list[tuple[float, float]]:
    batches = _micro_batches(engine.parallel.dp_rank, engine.parallel.dp, 2)
    stats = [engine.update(batches, _loss, temperature=1.0) for _ in range(count)]
    return [(s.loss, s.grad_norm) for s in stats]


def _save(rank: int, world: int, port: int, path: str, keys: dict, directory: str) -> dict:
    """Two steps, a save, two more steps."""
    import torch

    engine = _engine(rank, world, port, path, keys)
    _steps(engine, 2)
    engine.save(directory)
    out = {"digest": engine.digest(), "random": torch.get_rng_state().sum().item()}
    out |= {"next": _steps(engine, 2), "digest after": engine.digest()}
    engine.close()
    return out


def _load(rank: int, world: int, port: int, path: str, keys: dict, directory: str, again: str = "") -> dict:
    """Fresh engine, other weights, a load, two steps; with `again` the loaded state is saved before the steps."""
    import torch

    engine = _engine(rank, world, port, path, keys)
    _steps(engine, 1)  # moments and weights of its own, all of which must go
    torch.manual_seed(99)
    engine.load(directory)
    if again:
        engine.save(again)
    out = {"digest": engine.digest(), "steps": engine.steps, "random": torch.get_rng_state().sum().item()}
    out |= {"next": _steps(engine, 2), "digest after": engine.digest()}
    engine.close()
    return out


def _together(ranks: list[dict], key: str) -> dict[str, int]:
    """Digests of all ranks; ranks that hold the same tensor must agree."""
    all_of_them: dict[str, int] = {}
    for r in ranks:
        for name, value in r[key].items():
            assert all_of_them.setdefault(name, value) == value, name
    return all_of_them


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp("v4")))


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory) -> tuple[str, list[dict]]:
    directory = str(tmp_path_factory.mktemp("checkpoints") / "step_000002")
    world, keys = SAVED
    return directory, run_ranks(_save, world, model, keys, directory)


def test_same_layout_resumes_bit_by_bit(model, saved):
    directory, before = saved
    world, keys = SAVED
    after = run_ranks(_load, world, model, keys, directory)
    for b, a in zip(before, after, strict=True):
        assert a["steps"] == 2 and a["random"] == b["random"]
        assert a["digest"] == b["digest"] and a["next"] == b["next"] and a["digest after"] == b["digest after"]
    assert _together(after, "digest") != _together(after, "digest after")


def _check_other(model: str, saved: tuple[str, list[dict]], world: int, keys: dict) -> None:
    directory, before = saved
    after = run_ranks(_load, world, model, keys, directory)
    assert _together(after, "digest") == _together(before, "digest")
    for (loss, norm), (wanted_loss, wanted_norm) in zip(after[0]["next"], before[0]["next"], strict=True):
        assert loss == pytest.approx(wanted_loss, abs=1e-6)
        assert norm == pytest.approx(wanted_norm, abs=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts_load_it(model, saved, name):
    _check_other(model, saved, *OTHERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_layouts_load_it(model, saved, name):
    _check_other(model, saved, *MORE[name])


def _all_tensors(rank: int, world: int, port: int, directories: list[str]) -> list[dict[str, bytes]]:
    import torch
    from megatron.core import dist_checkpointing as dc

    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    stored = [
        {n: t.numpy().tobytes() for n, t in dc.load_plain_tensors(d).items() if torch.is_tensor(t)} for d in directories
    ]
    torch.distributed.destroy_process_group()
    return stored


def test_saving_again_from_another_layout_changes_no_bit(model, saved, tmp_path):
    again = str(tmp_path / "again")
    run_ranks(_load, 2, model, {}, saved[0], again)
    ((first, second),) = run_ranks(_all_tensors, 1, [saved[0], again])
    assert len(first) > 300 and any("exp_avg_sq" in n for n in first) and first == second


# ------------------------------------------------------------------------------------------------- released weights
def _write_released(rank: int, world: int, port: int, path: str, target: str) -> dict:
    from moe_rl.models.family import read_config
    from moe_rl.models.load import save_released

    engine = _engine(rank, world, port, path, {})
    _steps(engine, 1)
    table = engine.family.weight_table(engine.arch)
    save_released(
        target,
        [(name, part.view) for name, (part,) in engine.weights().items()],
        table,
        read_config(path),
        dtype="fp32",
    )
    out = {"digest": engine.digest()}
    engine.close()
    return out


def _from_released(rank: int, world: int, port: int, path: str, keys: dict) -> dict:
    """An engine that starts from the files, and scores with them."""
    from moe_rl.engine.engine import Engine

    config = run_config(path, world, **(TRAINING | keys))
    engine = Engine.create(config, rank, world, f"127.0.0.1:{port}", train=False, reference=True)
    batches = _micro_batches(engine.parallel.dp_rank, engine.parallel.dp, 2)
    scores = [engine.log_probs(batches, temperature=1.0, reference=r) for r in (False, True)]
    parts = [{i: lp.tolist() for ids, lps, _ in s for i, lp in zip(ids, lps, strict=True)} for s in scores]
    with pytest.raises(UserError, match="scoring only"):
        engine.update(batches, _loss, temperature=1.0)
    out = {"digest": engine.digest(), "scores": parts[0], "same": parts[0] == parts[1]}
    engine.close()
    return out


def test_released_weights_start_any_layout(model, tmp_path):
    target = str(tmp_path / "released")
    written = run_ranks(_write_released, 1, model, target)
    one = run_ranks(_from_released, 1, target, {})
    many = run_ranks(_from_released, 4, target, PP2 | EP2)
    assert _together(one, "digest") == _together(many, "digest") == written[0]["digest"]
    scores = {i: row for r in many for i, row in r["scores"].items()}
    assert scores.keys() == one[0]["scores"].keys() and all(r["same"] for r in many)
    for i, row in scores.items():
        assert row == pytest.approx(one[0]["scores"][i], abs=1e-5)


# -------------------------------------------------------------------------------------------------- partial contents
def _weights_only(rank: int, world: int, port: int, path: str, directory: str) -> dict:
    """bf16: the masters are tensors of their own, so that a load of weights alone must refresh them."""
    engine = _engine(rank, world, port, path, {"engine__dtype": "bf16"})
    dtypes = {str(p.dtype): bool(getattr(p, "keep_fp32", False)) for c in engine.chunks for p in c.parameters()}
    groups = [{str(p.dtype) for p in g["params"]} for o in engine.optimizer.chained_optimizers for g in o.param_groups]
    engine.save(directory, contents=["model", "extra"])
    start = engine.digest()
    _steps(engine, 2)
    moved = engine.digest()
    engine.load(directory, contents=["model", "extra"])
    loaded, steps = engine.digest(), engine.steps
    batches = _micro_batches(engine.parallel.dp_rank, engine.parallel.dp, 2)
    engine.update(batches, _loss, temperature=1.0, lr=0.0)
    after = engine.digest()
    with pytest.raises(UserError) as lacking:
        engine.load(directory, contents=["model", "optimizer", "extra"])
    engine.close()
    return {
        "dtypes": dtypes,
        "groups": groups,
        "digests": [start, moved, loaded, after],
        "steps": steps,
        "lacking": str(lacking.value),
    }


def test_loading_weights_alone_refreshes_the_masters(model, tmp_path):
    for r in run_ranks(_weights_only, 2, model, str(tmp_path / "weights")):
        start, moved, loaded, after = r["digests"]
        assert moved != start and loaded == start
        assert after == start, "a step at rate 0 brought back old masters"
        assert r["steps"] == 0 and "not optimizer" in r["lacking"]
        assert r["dtypes"] == {"torch.bfloat16": False, "torch.float32": True}


def _bf16_resume(rank: int, world: int, port: int, path: str, directory: str) -> bool:
    engine = _engine(rank, world, port, path, {"engine__dtype": "bf16"} | EP2)
    _steps(engine, 2)
    engine.save(directory)
    first = _steps(engine, 2), engine.digest()
    engine.load(directory)
    second = _steps(engine, 2), engine.digest()
    engine.close()
    return first == second


def test_bf16_with_fp32_parameters_resumes_bit_by_bit(model, tmp_path):
    assert run_ranks(_bf16_resume, 2, model, str(tmp_path / "bf16")) == [True, True]


# ------------------------------------------------------------------------------------------------------------ damage
def _try_load(rank: int, world: int, port: int, path: str, directories: list[str]) -> list[str]:
    engine = _engine(rank, world, port, path, {})
    said = []
    for directory in directories:
        try:
            engine.load(directory)
            said.append("loaded")
        except (UserError, RunFailed) as error:
            said.append(f"{type(error).__name__} {error}")
    engine.close()
    return said


def _damage(directory: str, kind: str, target: Path) -> Path:
    shutil.copytree(directory, target)
    file = sorted(target.glob("*.distcp"))[0]
    if kind == "flipped":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif kind == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif kind == "missing":
        file.unlink()
    elif kind == "unfinished":
        file = target / "integrity.json"
        file.unlink()
    elif kind == "index":
        file = target / "integrity.json"
        file.write_text("{")
    elif kind == "metadata":
        file = target / ".metadata"
        file.unlink()
    return file


def test_damage_is_named_on_every_rank(model, saved, tmp_path):
    kinds = ["flipped", "truncated", "missing", "metadata", "index", "unfinished"]
    files = [_damage(saved[0], kind, tmp_path / kind) for kind in kinds]
    for said in run_ranks(_try_load, 2, model, [*(str(f.parent) for f in files), str(tmp_path / "nothing"), saved[0]]):
        for kind, file, text in zip(kinds, files, said, strict=False):
            assert file.name in text, (kind, text)
            assert text.startswith("UserError" if kind == "unfinished" else "RunFailed"), (kind, text)
        assert "has changed" in said[0] and "is missing" in said[2]
        assert said[-2].startswith("UserError") and "does not exist" in said[-2]
        assert said[-1] == "loaded"


def test_another_model_is_refused(saved, tmp_path):
    other = str(write_model(tmp_path / "other", moe_intermediate_size=24))
    (said,) = run_ranks(_try_load, 1, other, [saved[0]])
    assert "checkpoint.model" in said[0] and "moe_intermediate_size 16 there, 24 here" in said[0]


def _unwritable(rank: int, world: int, port: int, path: str, directory: str) -> str:
    engine = _engine(rank, world, port, path, {})
    with pytest.raises((UserError, RunFailed)) as error:
        engine.save(directory)
    engine.close()
    return str(error.value)


def test_a_directory_that_cannot_be_written_is_named_on_every_rank(model, tmp_path):
    (tmp_path / "file").write_text("in the way")
    directory = str(tmp_path / "file" / "step_000001")
    for text in run_ranks(_unwritable, 2, model, directory):
        assert directory in text and "checkpoint.io" in text


def _out_of_space(rank: int, world: int, port: int, path: str, directory: str) -> str:
    """Rank 1 may write 64 KiB a file and no more, as on a full disk."""
    import resource
    import signal

    engine = _engine(rank, world, port, path, {})
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    with pytest.raises(RunFailed) as error:
        engine.save(directory)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with pytest.raises(UserError, match="never finished"):
        engine.load(directory)
    engine.save(directory + "_again")  # the engine is none the worse
    engine.load(directory + "_again")
    engine.close()
    return str(error.value)


def test_a_rank_that_cannot_write_fails_the_save_on_all(model, tmp_path):
    directory = str(tmp_path / "step_000001")
    for text in run_ranks(_out_of_space, 2, model, directory):
        assert directory in text and "checkpoint.io" in text and "free" in text
