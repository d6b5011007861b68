"""The run directory: whole checkpoints or none, the pointer, pruning, damage found and named."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_rl.durable import write_atomic
from moe_rl.errors import RunFailed, UserError
from moe_rl.trainer.state import SHARD_DIGESTS, RunDirectory, RunState, read_state, verify


def shards(content: bytes = b"weights"):
    def write(directory: Path) -> None:
        (directory / "__0_0.distcp").write_bytes(content)
        (directory / SHARD_DIGESTS).write_text(json.dumps({"__0_0.distcp": hashlib.sha256(content).hexdigest()}))

    return write


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def test_a_checkpoint_round_trips_its_state(run: RunDirectory) -> None:
    state = RunState(step=10, weight_version=20, attempt=2, cursor={"epoch": 1}, metrics={"step": 10, "x": 0.1})
    path = run.save(state, shards(), keep=2)
    assert path.name == "step_000010" and run.latest() == path
    assert read_state(path) == state
    verify(path)


def test_only_the_newest_are_kept(run: RunDirectory) -> None:
    for step in (1, 2, 3):
        run.save(RunState(step=step), shards(), keep=2)
    assert sorted(p.name for p in run.checkpoints.glob("step_*")) == ["step_000002", "step_000003"]


def test_a_failed_save_leaves_the_previous_one(run: RunDirectory) -> None:
    run.save(RunState(step=1), shards(), keep=2)

    def full(directory: Path) -> None:
        (directory / "__0_0.distcp").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunFailed, match="No space left"):
        run.save(RunState(step=2), full, keep=2)
    assert run.latest() == run.checkpoints / "step_000001"
    assert [p.name for p in run.checkpoints.iterdir() if p.is_dir()] == ["step_000001"]


def test_an_interrupted_save_is_cleared_and_ignored(run: RunDirectory) -> None:
    run.save(RunState(step=1), shards(), keep=2)
    (run.checkpoints / ".writing_abc").mkdir()
    RunDirectory(run.path).create()
    assert not (run.checkpoints / ".writing_abc").exists()
    assert run.latest() == run.checkpoints / "step_000001"


def test_a_step_saved_again_replaces_the_old_one(run: RunDirectory) -> None:
    run.save(RunState(step=1), shards(b"old"), keep=2)
    path = run.save(RunState(step=1), shards(b"newer"), keep=2)
    assert (path / "__0_0.distcp").read_bytes() == b"newer"
    verify(path)


@pytest.mark.parametrize("name", ["state.json", SHARD_DIGESTS, "manifest.json"])
def test_one_flipped_byte_is_found_and_the_file_named(run: RunDirectory, name: str) -> None:
    path = run.save(RunState(step=1), shards(), keep=2)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 0x01
    (path / name).write_bytes(content)
    with pytest.raises(RunFailed, match=name):
        verify(path)


@pytest.mark.parametrize("name", ["__0_0.distcp", "state.json"])
def test_a_missing_or_truncated_file_is_named(run: RunDirectory, name: str) -> None:
    path = run.save(RunState(step=1), shards(), keep=2)
    (path / name).write_bytes((path / name).read_bytes()[:-1])
    with pytest.raises(RunFailed, match=f"{name} has"):
        verify(path)
    (path / name).unlink()
    with pytest.raises(RunFailed, match=f"{name} is missing"):
        verify(path)


def test_the_pointer_to_a_checkpoint_that_is_gone_names_the_others(run: RunDirectory) -> None:
    run.save(RunState(step=1), shards(), keep=2)
    write_atomic(run.checkpoints / "latest", "step_000009\n")
    with pytest.raises(RunFailed, match="step_000001"):
        run.latest()


def test_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint"):
        read_state(tmp_path)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        RunDirectory(tmp_path / "file" / "run").create()


def test_a_run_cut_back_forgets_the_later_checkpoints(run: RunDirectory) -> None:
    for step in (2, 4, 6):
        run.save(RunState(step=step), shards(), keep=3)
    run.cut_back(2)
    assert run.latest() == run.checkpoints / "step_000002"
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["latest", "step_000002"]
    path = run.save(RunState(step=3), shards(), keep=1)  # and does not take the new one for the oldest
    assert run.latest() == path and path.is_dir()


def test_a_run_without_a_checkpoint_drops_one_whose_pointer_was_never_written(run: RunDirectory) -> None:
    run.save(RunState(step=2), shards(), keep=2)
    (run.checkpoints / "latest").unlink()
    assert run.latest() is None
    run.cut_back(0)
    assert list(run.checkpoints.iterdir()) == []


def test_one_process_at_a_time_and_never_after_its_death(run: RunDirectory) -> None:
    code = (
        "import sys, time; from pathlib import Path; from moe_rl.trainer.state import RunDirectory\n"
        "with RunDirectory(Path(sys.argv[1])).held():\n    print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"in use by process {holder.pid} on ") as caught, run.held():
        pass
    assert caught.value.rule == "run_dir.busy"
    holder.kill()
    holder.wait()
    with run.held():
        assert str(os.getpid()) in (run.path / ".lock").read_text()


def test_attempts_are_counted_by_the_manifest(run: RunDirectory) -> None:
    assert run.attempts() == 0
    write_atomic(run.path / "manifest.json", json.dumps({"attempt": 3}))
    assert run.attempts() == 3


def test_an_atomic_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()  # a rename onto a directory fails
    with pytest.raises(OSError):
        write_atomic(tmp_path / "file", "text")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
