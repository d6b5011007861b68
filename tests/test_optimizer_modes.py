"""Every way to hold Adam's state trains alike, resumes bit by bit, and moves between layouts and between modes.

Modes: plain, or a share of the states offloaded, the latter with masters in the hybrid optimizer (precision-aware) or
beside it; gradient buffers in fp32 or bf16; parameters all fp32, bf16 with native-fp32 ones among them, or all bf16. On
a CPU offloading moves nothing, but runs through the same optimizer, the same copies and the same checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_rl.errors import UserError
from tests.distributed import run_ranks
from tests.small_v4 import run_config, sequences, write_model
from tests.test_engine_layouts import EP2, PP2, TRAINING, _loss
from tests.test_grad_dtypes import exact_l2, strict

LENGTHS = (9, 6, 11, 7)
BEFORE, AFTER = 2, 5  # optimizer steps before a save, and after it

Mode = dict[str, Any]


def mode(weights: str, grads: str = "fp32", offload: float = 0.0, aware: bool = False, **keys: Any) -> Mode:
    """Keys of a mode; `weights` is fp32, mixed (bf16 with native-fp32 ones) or bf16 (the native-fp32 ones frozen)."""
    return {
        "weights": weights,
        "engine__dtype": "fp32" if weights == "fp32" else "bf16",
        "optimizer__grad_dtype": grads,
        "optimizer__offload_fraction": offload,
        "optimizer__precision_aware": aware,
        # bf16 buffers that the optimizer reads are scaled in bf16: without clipping all modes compute the same
        "optimizer__clip_grad": 0.0 if aware and grads == "bf16" else 1.0,
        **keys,
    }


def describe(keys: Mode) -> str:
    kind = "precision-aware" if keys["optimizer__precision_aware"] else "plain"
    return f"{keys['weights']}-{keys['optimizer__grad_dtype']} grads-{kind}-{keys['optimizer__offload_fraction']}"


def baseline(keys: Mode) -> Mode:
    """The mode that `keys` must train like: the same parameters, gradients and clipping, nothing offloaded."""
    return keys | {"optimizer__offload_fraction": 0.0, "optimizer__precision_aware": False}


ALL = [mode("fp32", offload=f) for f in (0.0, 0.5, 1.0)] + [
    mode(weights, grads, offload, aware)
    for weights in ("mixed", "bf16")
    for grads in ("fp32", "bf16")
    for offload, aware in ((0.0, False), (0.5, False), (1.0, False), (0.5, True), (1.0, True))
]
FAST = [
    mode("fp32", offload=0.5),
    mode("mixed", "bf16", 0.5, True),
    mode("mixed", "fp32", 0.5),
    mode("bf16", "bf16", 1.0, True),
]
SAME_LAYOUT = {"checkpoint__optimizer_format": "same_layout"}


# ------------------------------------------------------------------------------------------------ run by the ranks
def _engine(rank: int, world: int, meeting: str, path: str, keys: Mode, weights: list[dict] | None = None) -> Any:
    """An engine of a mode. With `weights`, the chunks hold them before an optimizer is built, and nothing is drawn."""
    import torch

    from moe_rl.engine import build
    from moe_rl.engine.engine import Engine
    from moe_rl.engine.parallel import init_distributed
    from moe_rl.models.family import get_family, read_facts

    chunks_of, keys = build.build_chunks, TRAINING | keys
    frozen = keys.pop("weights") == "bf16"

    def chunks_with(*args: Any) -> list[Any]:
        chunks = chunks_of(*args)
        for param in (p for chunk in chunks for p in chunk.parameters() if p.dtype == torch.float32 and frozen):
            param.requires_grad_(False)
        for chunk, state in zip(chunks, weights or (), strict=weights is not None):
            chunk.load_state_dict(state)
        return chunks

    build.build_chunks, config = chunks_with, run_config(path, world, **keys)
    try:
        if weights is None:
            return Engine.create(config, rank, world, meeting, random_init=True)
        facts = read_facts(path)
        parallel = init_distributed(config, facts, rank, world, meeting)
        return Engine(config, parallel, get_family(facts.family), train=True, reference=False)
    finally:
        build.build_chunks = chunks_of


def _steps(engine: Any, count: int, **options: Any) -> list[tuple[float, float]]:
    from moe_rl.engine.batch import MicroBatch

    everything, total = sequences(LENGTHS), sum(LENGTHS) - len(LENGTHS)
    mine = list(range(engine.parallel.dp_rank, len(LENGTHS), engine.parallel.dp))
    parts = [part for part in (mine[0::2], mine[1::2]) if part]
    batches = [
        MicroBatch.pack([everything[i] for i in p], [{"weight": np.full(LENGTHS[i] - 1, 1 / total)} for i in p], p)
        for p in parts
    ]
    stats = [engine.update(batches, _loss, temperature=1.0, **options) for _ in range(count)]
    return [(s.loss, s.grad_norm) for s in stats]


def _train(rank: int, world: int, port: int, path: str, directory: str, modes: list[Mode]) -> list[list]:
    results = []
    for i, keys in enumerate(modes):
        engine = _engine(rank, world, f"file://{directory}/{i}-train", path, keys)
        results.append(_steps(engine, BEFORE + AFTER))
        engine.close()
    return results


def _train_baselines(
    rank: int, world: int, port: int, path: str, directory: str, modes: list[tuple[Mode, bool]]
) -> list[tuple[list[float], dict[str, int]]]:
    """For each mode, by torch's fused AdamW or its other: the losses of all steps, and digests of the last weights."""
    results = []
    for i, (keys, fused) in enumerate(modes):
        engine = _engine(rank, world, f"file://{directory}/{i}-baseline", path, keys)
        for group in engine.optimizer.param_groups:
            group["fused"] = fused
        losses = [loss for loss, _ in _steps(engine, BEFORE + AFTER)]
        results.append((losses, engine.digest()))
        engine.close()
    return results


def _gradients_on_the_device(engine: Any) -> list[Any]:
    """Gradients that a step left beside the buffers, those of copies on the CPU left out: they are pinned for good."""
    found = []
    for part in engine.optimizer.chained_optimizers:
        inner = part.optimizer
        hybrid = hasattr(inner, "param_to_inner_param")
        pairs = (
            inner.param_to_inner_param.items() if hybrid else ((p, p) for g in inner.param_groups for p in g["params"])
        )
        for param, used in pairs:
            own = hybrid and param in inner.gpu_params_map_cpu_copy
            found += [g for g in (param.grad, getattr(param, "decoupled_grad", None)) if g is not None]
            found += [used.grad] if used.grad is not None and not own else []
    return found


def _save(rank: int, world: int, port: int, path: str, directory: str, modes: list[Mode]) -> list[dict]:
    """For each mode: steps, a save, more steps."""
    results = []
    for i, keys in enumerate(modes):
        engine = _engine(rank, world, f"file://{directory}/{i}-save", path, keys)
        out = {"start": _steps(engine, BEFORE)}
        assert not _gradients_on_the_device(engine)
        engine.save(f"{directory}/{i}")
        results.append(out | {"digest": engine.digest(), "next": _steps(engine, AFTER), "end": engine.digest()})
        engine.close()
    return results


def _load(
    rank: int, world: int, port: int, path: str, directory: str, modes: list[Mode], name: str, again: str = ""
) -> list[dict]:
    """For each mode: a fresh engine that has stepped elsewhere, a load, more steps; with `again` a save before them."""
    results = []
    for i, keys in enumerate(modes):
        engine = _engine(rank, world, f"file://{directory}/{i}-{name}", path, keys)
        _steps(engine, 1)
        engine.load(f"{directory}/{i}")
        if again:
            engine.save(f"{again}/{i}")
        out = {"steps": engine.steps, "digest": engine.digest()}
        results.append(out | {"next": _steps(engine, AFTER), "end": engine.digest()})
        engine.close()
    return results


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp("v4")))


# ----------------------------------------------------------------------------------------- training and exact resume
def _check_mode(model: str, directory: Path, modes: list[Mode], world: int = 1, **layout: Any) -> list[list[dict]]:
    """All modes resume bit by bit in one layout; what the saving ranks returned."""
    modes = [m | layout for m in modes]
    saved = run_ranks(_save, world, model, str(directory), modes)
    loaded = run_ranks(_load, world, model, str(directory), modes, "load")
    for before, after in zip(saved, loaded, strict=True):
        for keys, b, a in zip(modes, before, after, strict=True):
            assert a["steps"] == BEFORE, describe(keys)
            assert [a[k] for k in ("digest", "next", "end")] == [b[k] for k in ("digest", "next", "end")], describe(
                keys
            )
            assert b["end"] != b["digest"]
    return saved


def _check_baseline(model: str, directory: Path, modes: list[Mode], saved: list[dict]) -> None:
    """Losses and last weights as the mode's baseline, bit for bit, wherever the states lie.

    The optimizer on the CPU is torch's fused AdamW, whose weights differ from the other's in the last bit from the first
    step on. A weight in bf16 turns that into 1e-2 of the loss within seven steps, so the baseline of an offloaded mode
    is fused as well.
    """
    wanted = [(baseline(m), m["optimizer__offload_fraction"] > 0) for m in modes]
    todo = list({str(w): w for w in wanted}.values())
    trained = run_ranks(_train_baselines, 1, model, str(directory), todo)[0]
    known = {str(w): result for w, result in zip(todo, trained, strict=True)}
    for keys, want, got in zip(modes, wanted, saved, strict=True):
        losses, end = known[str(want)]
        assert [loss for loss, _ in got["start"] + got["next"]] == losses, describe(keys)
        assert got["end"] == end, describe(keys)
        assert losses[-1] < 0.75 * losses[0]


def test_modes_train_alike_and_resume_bit_by_bit(model, tmp_path):
    (saved,) = _check_mode(model, tmp_path, FAST)
    _check_baseline(model, tmp_path, FAST, saved)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
def test_all_modes_train_alike_and_resume_bit_by_bit(model, tmp_path):
    (saved,) = _check_mode(model, tmp_path, ALL)
    _check_baseline(model, tmp_path, ALL, saved)


def test_buffers_as_they_lie_resume_bit_by_bit(model, tmp_path):
    _check_mode(model, tmp_path, [FAST[1], mode("mixed", offload=0.5)], 2, **EP2, **SAME_LAYOUT)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_modes_resume_bit_by_bit_from_buffers_as_they_lie(model, tmp_path):
    modes = [m for m in ALL if (m["weights"], m["optimizer__grad_dtype"]) in (("fp32", "fp32"), ("mixed", "bf16"))]
    _check_mode(model, tmp_path, modes, **SAME_LAYOUT)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_modes_resume_bit_by_bit_on_four_ranks(model, tmp_path):
    for name, keys in {"reshardable": {}, "same": SAME_LAYOUT}.items():
        (tmp_path / name).mkdir()
        _check_mode(model, tmp_path / name, FAST[:3], 4, **PP2, **EP2, **keys)


def test_clipping_bf16_buffers_costs_their_rounding(model, tmp_path):
    """The precision-aware optimizer's gradients are clipped where they lie, in bf16: a relative error below 2^-8."""
    aware = mode("mixed", "bf16", 1.0, True, optimizer__clip_grad=1.0)
    one, other = run_ranks(_train, 1, model, str(tmp_path), [aware, baseline(aware)])[0]
    assert [loss for loss, _ in one] == pytest.approx([loss for loss, _ in other], rel=1e-2)
    assert one[0] == pytest.approx(other[0], rel=1e-6) and one != other


# ---------------------------------------------------------------------------------------------------- other layouts
RESHARD = [
    mode("fp32", offload=0.5),
    mode("mixed", "fp32", 0.5),
    mode("mixed", "fp32", 1.0, True),
    mode("mixed", "bf16", 0.5, True),
    mode("bf16", "bf16", 0.5),
]
PAIRWISE = RESHARD[::2]  # every weight type, gradient type, share and kind of optimizer once more
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"ep2": (2, EP2), "pp2": (2, PP2), "dp2 ep2": (4, EP2)}


def _stored(rank: int, world: int, port: int, directories: list[str]) -> list[dict[str, bytes]]:
    """The bits of every tensor in each checkpoint, by its name."""
    import torch
    from megatron.core import dist_checkpointing as dc

    def bits(tensor: torch.Tensor) -> bytes:
        return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()

    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    found = [{n: bits(t) for n, t in dc.load_plain_tensors(d).items() if torch.is_tensor(t)} for d in directories]
    torch.distributed.destroy_process_group()
    return found


def _together(ranks: list[list[dict]], i: int) -> dict[str, int]:
    return {name: value for r in ranks for name, value in r[i]["digest"].items()}


def _check_reshard(model: str, tmp_path: Path, modes: list[Mode], layouts: list[str]) -> None:
    """From pp2 ep2 into other layouts: equal weights, and every tensor saved again without a bit of difference.

    Losses follow to 1e-5 where the arithmetic of the layouts allows it: in bf16 the first, and all of them where tokens
    stand together in the same matrix products (ep2); later ones then differ by bf16's rounding, checkpoint or not, as
    tests/test_reshard_round_trip.py proves.
    """
    saved = run_ranks(_save, 4, model, str(tmp_path), [m | PP2 | EP2 for m in modes])
    for name in layouts:
        world, layout = LAYOUTS[name]
        again = tmp_path / f"again {name}"
        again.mkdir()
        loaded = run_ranks(_load, world, model, str(tmp_path), [m | layout for m in modes], name, str(again))
        for i, keys in enumerate(modes):
            assert _together(loaded, i) == _together(saved, i), (name, describe(keys))
            count = AFTER if keys["weights"] == "fp32" or name == "ep2" else 1
            got, wanted = (np.array(side[0][i]["next"])[:count, 0] for side in (loaded, saved))
            assert got == pytest.approx(wanted, abs=1e-5), (name, describe(keys))
        pairs = [str(d / str(i)) for i in range(len(modes)) for d in (tmp_path, again)]
        (stored,) = run_ranks(_stored, 1, pairs)
        for i in range(len(modes)):
            assert len(stored[2 * i]) > 300 and stored[2 * i] == stored[2 * i + 1], (name, describe(modes[i]))


def test_an_offloaded_optimizer_moves_to_another_layout(model, tmp_path):
    _check_reshard(model, tmp_path, [mode("mixed", "bf16", 0.5, True)], ["ep2"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_modes_move_to_other_layouts(model, tmp_path):
    _check_reshard(model, tmp_path, RESHARD, list(LAYOUTS))


def _same_layout_elsewhere(rank: int, world: int, port: int, path: str, directory: str, keys: Mode) -> list[str]:
    engine = _engine(rank, world, f"file://{directory}/0-elsewhere", path, keys)
    with pytest.raises(UserError) as refused:
        engine.load(f"{directory}/0")
    engine.load(f"{directory}/0", contents=["model"])
    engine.close()
    return [str(refused.value), *sorted(str(v) for v in engine.digest().values())]


def test_buffers_as_they_lie_are_refused_elsewhere(model, tmp_path):
    keys = mode("mixed", "fp32", 0.5, **SAME_LAYOUT)
    saved = run_ranks(_save, 1, model, str(tmp_path), [keys])
    for world, changes, says in (
        (2, EP2, "ep 1 there, 2 here"),
        (
            1,
            {"optimizer__grad_dtype": "bf16"},
            "gradients fp32 True there, weights torch.bfloat16, gradients fp32 False",
        ),
    ):
        for message, *digests in run_ranks(_same_layout_elsewhere, world, model, str(tmp_path), keys | changes):
            assert says in message and "checkpoint.optimizer_format" in message
            if world == 1:
                assert digests == sorted(str(v) for v in saved[0][0]["digest"].values())


# ------------------------------------------------------------------------------------------------------ other modes
def test_a_checkpoint_of_one_mode_loads_in_another(model, tmp_path):
    plain = mode("mixed")
    (saved,) = run_ranks(_save, 1, model, str(tmp_path), [plain, mode("mixed", "fp32", 0.5, True)])
    for name, modes in {
        "aware": [mode("mixed", "fp32", 0.5, True), plain],
        "offloaded": [mode("mixed", "fp32", 1.0), mode("mixed", "fp32", 0.5)],
    }.items():
        (loaded,) = run_ranks(_load, 1, model, str(tmp_path), modes, name)
        for before, after in zip(saved, loaded, strict=True):
            assert after["digest"] == before["digest"] and after["steps"] == BEFORE
            assert np.array(after["next"])[:, 0] == pytest.approx(np.array(before["next"])[:, 0], abs=1e-5)


# ------------------------------------------------------------------------------------------------------ weights only
SEED = {"trainer__seed": 7}  # other weights than those that are loaded


def _masters(directory: str) -> dict[str, Any]:
    """The fp32 masters in a checkpoint, by the name of their weight, and the weights of the same names."""
    from megatron.core import dist_checkpointing as dc

    prefix, stored = "optimizer.state.param.", dc.load_plain_tensors(directory)
    names = [name.removeprefix(prefix) for name in stored if name.startswith(prefix)]
    return {name: (stored[prefix + name], stored[name].float()) for name in names}


def _weights_only(rank: int, world: int, port: int, path: str, directory: str, modes: list[Mode]) -> list[dict]:
    """For each mode: weights saved after steps; loaded into an engine of other weights, with and without its masters
    refreshed; and an engine whose optimizer was built on these weights. Digests of each before and after one step."""
    import torch

    results = []
    for i, keys in enumerate(modes):
        at = f"{directory}/{i}"
        engine = _engine(rank, world, f"file://{at}-save", path, keys)
        _steps(engine, BEFORE)
        engine.save(at, contents=["model"])
        out, weights = {"saved": engine.digest()}, [chunk.state_dict() for chunk in engine.chunks]
        weights = [{n: v.clone() if torch.is_tensor(v) else v for n, v in state.items()} for state in weights]
        engine.close()
        for name in ("loaded", "stale"):
            engine = _engine(rank, world, f"file://{at}-{name}", path, keys | SEED)
            if name == "stale":
                engine.optimizer.reload_model_params = lambda: None
            other = engine.digest()
            engine.load(at)
            out[name] = [other, engine.digest()]
            if name == "loaded":
                engine.save(f"{at}-again")
                out["masters"] = [float((m - w).abs().max()) for m, w in _masters(f"{at}-again").values()]
            out[name] += [_steps(engine, 1), engine.digest()]
            engine.close()
        engine = _engine(rank, world, f"file://{at}-fresh", path, keys, weights)
        out["fresh"] = [engine.digest(), _steps(engine, 1), engine.digest()]
        engine.close()
        results.append(out)
    return results


def _check_weights_only(model: str, tmp_path: Path, modes: list[Mode]) -> None:
    for keys, out in zip(modes, run_ranks(_weights_only, 1, model, str(tmp_path), modes)[0], strict=True):
        other, loaded, *after = out["loaded"]
        assert other != out["saved"] == loaded, describe(keys)
        assert out["masters"] and max(out["masters"]) == 0, describe(keys)
        assert [loaded, *after] == out["fresh"] and after[-1] != loaded, describe(keys)
        other, loaded, *after = out["stale"]  # equal weights and loss, and the old weights after the first step
        assert loaded == out["saved"] and after[0] == out["fresh"][1], describe(keys)
        moved = [name for name in loaded if loaded[name] != out["fresh"][-1][name]]
        # fp32 weights that are their own masters have nothing to go stale, but for copies on the CPU
        own = keys["weights"] == "fp32" and not keys["optimizer__offload_fraction"]
        assert any(after[-1][name] != out["fresh"][-1][name] for name in moved) is not own, describe(keys)


def test_weights_alone_reach_every_master(model, tmp_path):
    _check_weights_only(model, tmp_path, FAST)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
def test_weights_alone_reach_every_master_in_all_modes(model, tmp_path):
    _check_weights_only(model, tmp_path, ALL)


# --------------------------------------------------------------------------------------- what fails without a patch
def _with_patches(rank: int, world: int, port: int, path: str, directory: str, keys: Mode, disable: list[str]) -> Any:
    """A step at rate 0, a step, a save and a load: the text of the error that ends it, or the names that each step moved."""
    try:
        engine = _engine(rank, world, f"file://{directory}/first", path, keys | {"patches__disable": disable})
        assert all(engine.patches[name] == ("disabled" if name in disable else "applied") for name in engine.patches)
        moved, digest = [], engine.digest()
        for options in ({"lr": 0.0}, {}):
            _steps(engine, 1, **options)
            before, digest = digest, engine.digest()
            moved.append({name for name in digest if digest[name] != before[name]})
        engine.save(f"{directory}/saved")
        engine.load(f"{directory}/saved")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return moved


@pytest.mark.parametrize(
    "name, keys, says",
    [
        ("no_grad_main_params", mode("fp32", offload=0.5), "ValueError: can't optimize a non-leaf Tensor"),
        ("hybrid_masters", mode("fp32", offload=0.5), "KeyError"),
        ("optimizer_states", mode("fp32", offload=0.5), "KeyError: 'master_param'"),
        ("hybrid_reload", mode("mixed", offload=0.5), "engine.not_finite"),  # the weights from before they were set
    ],
)
def test_a_mode_fails_without_its_patch(model, tmp_path, name, keys, says):
    assert says in run_ranks(_with_patches, 1, model, str(tmp_path), keys, [name])[0]


def test_native_fp32_parameters_on_the_gpu_need_their_patch(model, tmp_path):
    """Silent without it: the weights that the optimizer leaves alone are those of native fp32 outside the CPU's share."""
    keys, moved = mode("mixed", "fp32", 0.3, True), {}
    for disable in ([], ["hybrid_gradients"]):
        target = tmp_path / str(len(disable))
        target.mkdir()
        idle, moved[len(disable)] = run_ranks(_with_patches, 1, model, str(target), keys, disable)[0]
        assert idle == set()
    assert moved[1] < moved[0]
    assert {name.split(".", 2)[-1].split("_")[0] for name in moved[0] - moved[1]} <= {
        "hc",
        "attn.attn",
        "attn.compressor.ape",
    }


def _strict(rank: int, world: int, port: int, path: str, directory: str, disable: list[str]) -> Any:
    """Two steps with kernels that refuse lists of several dtypes; the error's text, or losses and norms."""
    from megatron.core.optimizer import clip_grads

    clip_grads.l2_norm_impl = strict(exact_l2)
    clip_grads.multi_tensor_scale_impl = strict(clip_grads.multi_tensor_scale_impl)
    keys = mode("mixed", "bf16", 1.0, True, optimizer__clip_grad=1.0, patches__disable=disable)
    engine = _engine(rank, world, f"file://{directory}/strict", path, keys)
    try:
        return _steps(engine, 2)
    except RuntimeError as error:
        return str(error)


def test_real_kernels_refuse_mixed_gradients_without_their_patch(model, tmp_path):
    for name in ("without", "with", "plain"):
        (tmp_path / name).mkdir()
    assert "several dtypes" in run_ranks(_strict, 1, model, str(tmp_path / "without"), ["dtype_safe_gradients"])[0]
    ((loss, norm), second) = run_ranks(_strict, 1, model, str(tmp_path / "with"), [])[0]
    (plain,) = run_ranks(_train, 1, model, str(tmp_path / "plain"), [mode("mixed", "bf16")])[0]
    assert (loss, norm) == pytest.approx(plain[0], rel=1e-6) and second[0] < loss


def _disagree(rank: int, world: int, port: int, path: str, directory: str) -> str:
    from moe_rl.errors import RunFailed

    keys = mode("fp32", patches__disable=["hybrid_masters"] if rank == 1 else [])
    with pytest.raises(RunFailed) as stopped:
        _engine(rank, world, f"file://{directory}/disagree", path, keys)
    return str(stopped.value)


def test_ranks_that_disagree_on_patches_stop(model, tmp_path):
    for said in run_ranks(_disagree, 2, model, str(tmp_path)):
        assert "hybrid_masters: applied on rank(s) [0], disabled on rank(s) [1]" in said
