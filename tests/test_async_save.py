"""Saves beside the training: they hold the values of their moment, one at a time, and fail where it is heard."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from moe_rl.errors import RunFailed, UserError
from tests.distributed import run_ranks
from tests.small_v4 import write_model
from tests.test_engine_layouts import EP2
from tests.test_optimizer_modes import ALL, FAST, SAME_LAYOUT, Mode, _engine, _steps, _stored, describe, mode

SAVES = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp("v4")))


class Held:
    """Background writers of this process wait until `release`, so that the training is ahead of them for certain."""

    def __init__(self) -> None:
        from moe_rl.engine import shards

        self.open, write = threading.Event(), shards.write

        def held(work: Any) -> Any:
            assert threading.current_thread() is threading.main_thread() or self.open.wait(60)
            return write(work)

        shards.write = held

    def __enter__(self) -> None:
        self.open.clear()

    def __exit__(self, *_: object) -> None:
        self.open.set()


def _save_and_train(rank: int, world: int, port: int, path: str, directory: str, modes: list[Mode], copy: bool) -> list:
    """For each mode, three times: a save at once, one in the background, and steps before that is written."""
    from moe_rl.engine import shards

    held = Held()
    if not copy:
        shards.copied = lambda tensor: tensor.detach().cpu()
    results = []
    for i, keys in enumerate(modes):
        engine = _engine(rank, world, f"file://{directory}/{i}-{copy}", path, keys)
        _steps(engine, 1)
        digests = []
        for k in range(SAVES):
            engine.save(f"{directory}/{i}-{copy}-now-{k}", background=False)
            with held:
                engine.save(f"{directory}/{i}-{copy}-later-{k}", background=True)
                digests.append(engine.digest())
                after = _steps(engine, 2)
                assert not Path(f"{directory}/{i}-{copy}-later-{k}/integrity.json").exists()
            engine.finish_save()
        results.append((digests, after, engine.digest()))
        engine.close()
    return results


def _load(rank: int, world: int, port: int, path: str, directory: str, modes: list[Mode]) -> list:
    """For each mode the last save, loaded into a fresh engine, and the steps that followed."""
    results = []
    for i, keys in enumerate(modes):
        engine = _engine(rank, world, f"file://{directory}/{i}-load", path, keys)
        engine.load(f"{directory}/{i}-True-later-{SAVES - 1}")
        results.append((engine.digest(), _steps(engine, 2), engine.digest()))
        engine.close()
    return results


def _check_saves(model: str, directory: Path, modes: list[Mode], world: int = 1) -> None:
    saved = run_ranks(_save_and_train, world, model, str(directory), modes, True)
    names = [
        [str(directory / f"{i}-True-{when}-{k}") for k in range(SAVES) for when in ("now", "later")]
        for i in range(len(modes))
    ]
    (stored,) = run_ranks(_stored, 1, [name for of_mode in names for name in of_mode])
    loaded = run_ranks(_load, world, model, str(directory), modes)
    for i, keys in enumerate(modes):
        mine = stored[2 * SAVES * i : 2 * SAVES * (i + 1)]
        for now, later in zip(mine[::2], mine[1::2], strict=True):
            assert len(now) > 100 and now == later, describe(keys)
        assert all(mine[2 * k] != mine[2 * k + 2] for k in range(SAVES - 1))
        for before, after in zip(saved, loaded, strict=True):
            digests, steps, end = before[i]
            assert len({str(d) for d in digests}) == SAVES
            assert after[i] == (digests[-1], steps, end), describe(keys)


def test_three_saves_in_a_row_hold_the_values_of_their_moments(model, tmp_path):
    _check_saves(model, tmp_path, FAST[:2])


def test_they_do_on_several_ranks_and_in_both_formats(model, tmp_path):
    modes = [mode("mixed", "bf16", 0.5, True), mode("mixed", offload=0.5)]
    _check_saves(model, tmp_path, [modes[0] | EP2, modes[1] | EP2 | SAME_LAYOUT], 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
def test_they_do_in_all_modes(model, tmp_path):
    """Each in one of the two formats by turns, so that each share and kind of optimizer meets both."""
    _check_saves(model, tmp_path, [keys | (SAME_LAYOUT if i % 2 else {}) for i, keys in enumerate(ALL)])


@pytest.mark.parametrize("keys", [{}, SAME_LAYOUT], ids=["reshardable", "same layout"])
def test_without_the_copy_they_hold_later_values(model, tmp_path, keys):
    run_ranks(_save_and_train, 1, model, str(tmp_path), [mode("mixed") | keys], False)
    names = [str(tmp_path / f"0-False-{when}-0") for when in ("now", "later")]
    ((now, later),) = run_ranks(_stored, 1, names)
    changed = {name for name in now if now[name] != later[name]}
    assert {"embed", "exp_avg", "exp_avg_sq"} <= {
        part for part in ("embed", "exp_avg", "exp_avg_sq") for n in changed if part in n
    }


# --------------------------------------------------------------------------------------------------- one at a time
def _one_at_a_time(rank: int, world: int, port: int, path: str, directory: str) -> list[bool]:
    engine, held = _engine(rank, world, f"file://{directory}/meeting", path, mode("fp32")), Held()
    engine.save(f"{directory}/first", background=True)
    whole = [Path(f"{directory}/first/integrity.json").exists()]
    threading.Timer(0.3, held.open.set).start()
    engine.save(f"{directory}/second", background=True)  # waits for the first
    whole.append(Path(f"{directory}/first/integrity.json").exists())
    engine.close()  # and this for the second
    return [*whole, Path(f"{directory}/second/integrity.json").exists()]


def test_the_next_save_and_the_end_wait_for_the_one_in_flight(model, tmp_path):
    assert run_ranks(_one_at_a_time, 2, model, str(tmp_path)) == [[False, True, True]] * 2


# ----------------------------------------------------------------------------------------------------------- faults
def _out_of_space(rank: int, world: int, port: int, path: str, directory: str) -> list[str]:
    """Rank 1 may write 64 KiB a file, as on a full disk: what all ranks' next step says, and their next save."""
    import resource
    import signal

    engine = _engine(rank, world, f"file://{directory}/meeting", path, mode("fp32"))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    said = []
    engine.save(f"{directory}/step", background=True)
    engine.saver._thread.join()
    for call in (lambda: _steps(engine, 1), lambda: engine.save(f"{directory}/next", background=True)):
        with pytest.raises(RunFailed) as error:
            call()
        said.append(str(error.value))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with pytest.raises(UserError, match="never finished"):
        engine.load(f"{directory}/step")
    engine.save(f"{directory}/again", background=True)  # the engine is none the worse
    engine.finish_save()
    engine.load(f"{directory}/again")
    engine.close()
    return said


def test_a_writer_that_fails_ends_the_next_step_on_all_ranks(model, tmp_path):
    for said in run_ranks(_out_of_space, 2, model, str(tmp_path)):
        for text in said:
            assert f"{tmp_path}/step could not be written" in text and "checkpoint.io" in text
            assert "File too large" in text and "MiB are free" in text


def _peer_dies(rank: int, world: int, port: int, path: str, directory: str) -> None:
    """Rank 1 is killed while it writes: its thread ends the process."""
    import os

    from moe_rl.engine import shards

    engine = _engine(rank, world, f"file://{directory}/meeting", path, mode("fp32"))
    if rank == 1:
        shards.write = lambda work: os.kill(os.getpid(), 9)
    engine.save(f"{directory}/step", background=True)
    engine.finish_save()


def test_a_rank_that_is_killed_while_it_writes_leaves_no_checkpoint(model, tmp_path):
    with pytest.raises(RuntimeError, match="rank 0 failed(.|\n)*RunFailed(.|\n)*step could not be written"):
        run_ranks(_peer_dies, 2, model, str(tmp_path))
    assert not (tmp_path / "step" / "integrity.json").exists() and list((tmp_path / "step").glob("__0_0.distcp"))
