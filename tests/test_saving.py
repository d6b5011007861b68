"""A run's saves: what they say of themselves, what a resume takes of them, and the same run whichever way it saves."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import pytest

from moe_rl import GRPOTrainer, load_config
from moe_rl.errors import RunFailed, UserError
from moe_rl.trainer.saving import REPORT, Checkpoints
from moe_rl.trainer.state import SHARD_DIGESTS, RunDirectory, RunState, read_state, verify
from tests.run_process import comparable, latest
from tests.short_runs import ONE, SMALL, short_run

NUMBERS = {"bytes": 7, "write_seconds": 0.5, "staged_gib": 0.25, "host_peak_gib": 0.125, "gpu_peak_gib": 0.0}


class Ranks:
    """Writers that finish a save when they are told to, or fail."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault, self.released, self.threads = fault, threading.Event(), []

    def write(self, directory: Path) -> None:
        self.threads.append(threading.Thread(target=self._write, args=(directory,)))
        self.threads[-1].start()

    def _write(self, directory: Path) -> None:
        assert self.released.wait(20)
        (directory / "__0_0.distcp").write_bytes(b"weights")
        (directory / REPORT).write_text(json.dumps(NUMBERS))
        if self.fault is None:
            digests = {"__0_0.distcp": hashlib.sha256(b"weights").hexdigest()}
            (directory / "partial").write_text(json.dumps(digests))
            (directory / "partial").rename(directory / SHARD_DIGESTS)

    def finish(self) -> None:
        for thread in self.threads:
            thread.join()
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def test_a_background_save_counts_once_it_is_whole_and_holds_the_state_of_its_moment(run: RunDirectory) -> None:
    ranks, state = Ranks(), RunState(step=1, cursor={"position": 1}, metrics={"step": 1})
    saves = Checkpoints(run, ranks.finish, keep=2, background=True)
    saves.save(state, ranks.write)
    state.step, state.cursor["position"] = 2, 2
    assert saves.durable() == {} and run.latest() is None
    ranks.released.set()
    saves.wait()
    found = saves.durable()
    assert found["checkpoint/durable"] == 1 and found["checkpoint/bytes"] == 7
    assert found["checkpoint/durable_seconds"] > 0 and saves.durable() == {}
    path = run.latest()
    assert path is not None and path.name == "step_000001"
    verify(path)
    assert read_state(path) == RunState(step=1, cursor={"position": 1}, metrics={"step": 1})


def test_a_background_save_that_fails_is_raised_and_leaves_the_one_before(run: RunDirectory) -> None:
    good = Ranks()
    good.released.set()
    saves = Checkpoints(run, good.finish, keep=2, background=True)
    saves.save(RunState(step=1), good.write)
    saves.wait()
    bad = Ranks(RunFailed("checkpoint.io", "the disk is full"))
    bad.released.set()
    saves.finish = bad.finish
    saves.save(RunState(step=2), bad.write)
    with pytest.raises(RunFailed, match="the disk is full"):
        saves.wait()
    saves.abandon()
    run.clear_unfinished()
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["latest", "step_000001"]
    assert run.latest() == run.checkpoints / "step_000001"


def test_a_save_that_cannot_be_published_is_raised_at_the_next_step(run: RunDirectory) -> None:
    ranks = Ranks()
    saves = Checkpoints(run, ranks.finish, keep=2, background=True)
    saves.save(RunState(step=1), ranks.write)
    (run.checkpoints / ".writing_step_000001" / "state.json").mkdir()  # in the way
    ranks.released.set()
    saves.settle(20)
    with pytest.raises(RunFailed, match="saving step 1"):
        saves.durable()
    assert run.latest() is None


def test_a_run_that_ends_by_another_fault_lets_its_save_become_durable(run: RunDirectory) -> None:
    ranks = Ranks()
    saves = Checkpoints(run, ranks.finish, keep=2, background=True)
    saves.save(RunState(step=1), ranks.write)
    saves.settle(0.1)
    assert run.latest() is None
    ranks.released.set()
    saves.settle(20)
    assert run.latest() == run.checkpoints / "step_000001"


# ------------------------------------------------------------------------------------------------------- whole runs
EVERY = ["checkpoint.every=1", "checkpoint.keep=3", "trainer.steps=3"]


@pytest.fixture(scope="module")
def at_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_run(tmp_path_factory.mktemp("once") / "run", *EVERY).run_dir


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_run(tmp_path_factory.mktemp("beside") / "run", *EVERY, "checkpoint.async_save=true").run_dir


def shards(run_dir: Path) -> dict[str, str]:
    """SHA-256 of every shard of every checkpoint, by the name of both."""
    listed = {
        p.parent.name: json.loads(p.read_text())["files"] for p in run_dir.glob("checkpoints/step_*/manifest.json")
    }
    return {f"{step}/{n}": f["sha256"] for step, files in listed.items() for n, f in files.items() if ".distcp" in n}


def test_every_checkpoint_is_the_same_to_the_bit_whichever_way_it_was_saved(at_once: Path, beside: Path) -> None:
    assert comparable(at_once) == comparable(beside)
    assert shards(at_once) == shards(beside) and len(shards(beside)) == 3
    assert latest(beside).name == "step_000003"
    states = [[read_state(d / f"checkpoints/step_00000{k}") for k in (1, 2, 3)] for d in (at_once, beside)]
    for once, later in zip(*states, strict=True):
        assert (once.step, once.cursor, once.weight_version) == (later.step, later.cursor, later.weight_version)


def test_no_line_claims_a_checkpoint_that_was_not_durable(at_once: Path, beside: Path) -> None:
    for run_dir, lag in ((at_once, 0), (beside, 1)):
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        claimed = [row["checkpoint/durable"] for row in rows if "checkpoint/durable" in row]
        assert claimed == sorted(set(claimed)) and claimed[-1] == 3
        for row in (row for row in rows if "checkpoint/durable" in row):
            assert row["step"] - lag <= row["checkpoint/durable"] <= row["step"]
            assert row["checkpoint/bytes"] > 1e6 and row["checkpoint/write_seconds"] > 0
            assert (row["checkpoint/staged_gib"] > 0) is bool(lag)
            assert row["checkpoint/durable_seconds"] >= row["checkpoint/write_seconds"]


def test_a_resume_loads_what_it_is_told(beside: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    found = short_run(
        tmp_path / "run",
        "trainer.steps=4",
        "checkpoint.contents=[model]",
        resume=beside / "checkpoints" / "step_000002",
        layout=[*ONE, "checkpoint.load_contents=[model]"],
    )
    said = capsys.readouterr().out
    assert "checkpoint.load_contents leaves optimizer out: the moments" in said and "leaves extra out" in said
    assert [m["step"] for m in found.metrics] == [2, 3, 4]
    loaded = json.loads((found.run_dir / "manifest.json").read_text())["loaded"]
    assert loaded["contents"] == ["model"] and loaded["host_peak_gib"] >= 0 and loaded["seconds"] > 0

    config = load_config("dsv4-tiny", [*SMALL, *ONE, "trainer.steps=6", "checkpoint.load_contents=[model,optimizer]"])
    with pytest.raises(UserError, match="holds model, not optimizer.*load_contents, from command line") as refused:
        GRPOTrainer(config, run_dir=found.run_dir)
    assert refused.value.rule == "checkpoint.load_contents"
    again = short_run(found.run_dir, "trainer.steps=5")  # a checkpoint of weights alone
    assert [m["step"] for m in again.metrics] == [2, 3, 4, 5]
