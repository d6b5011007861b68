"""A run that is killed, stopped or refused a write goes on as if nothing had been, to the last bit; and leaves nothing.

Real runs of the shipped model: one is never interrupted, the others are, and must end with the same records. The moments
are drawn at random; KILL_SEED repeats them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest

from moe_rl import cli
from moe_rl.trainer.state import RunDirectory
from tests.run_process import Run, comparable, damage, latest, metrics, samples, seeded
from tests.wrong_during_run import check_documented

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

STEPS = 10
JUDGE = "def score(completion, answer):\n    return float(completion.strip() == answer.strip())\n"
# every part of a run whose state a resume must restore: a schedule, a reference, minibatches, validation, shuffled data
ARGUMENTS = [
    "dsv4-tiny",
    f"trainer.steps={STEPS}",
    "trainer.validate_every=3",
    "trainer.validation_prompts=16",
    "checkpoint.every=2",
    "data.prompts_per_step=8",
    "rollout.n=4",
    "algorithm.kl=k3",
    "algorithm.minibatches=2",
    "optimizer.lr=2e-4",
    "optimizer.schedule=linear",
    "optimizer.warmup_steps=3",
    "observe.samples_per_step=32",
]
TWO_RANKS = ["layout.pp=2", "layout.ep=1", "cluster.gpus_per_node=2"]
ONE_RANK = ["layout.pp=1", "layout.ep=1", "cluster.gpus_per_node=1"]
WITHIN_S = 60.0  # a dead worker ends the run in this time
GONE_S = 5.0  # and nothing of the run is left after this one

Start = Callable[..., Run]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The verifier is a file of the user's, so that rewards have worker processes."""
    judge = tmp_path_factory.mktemp("judge") / "judge.py"
    judge.write_text(JUDGE)
    return [*ARGUMENTS, *TWO_RANKS, f"reward.name={judge}:score"]


@pytest.fixture(scope="module")
def uninterrupted(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory that all others are held against."""
    run = Run(tmp_path_factory.mktemp("reference") / "run", *arguments)
    try:
        assert run.wait() == 0, run.stderr()
        check_nothing_left(run)
    finally:
        run.clean()
    assert len({row["actor/lr"] for row in metrics(run.run_dir)}) == STEPS
    assert all(row["actor/grad_norm"] > 0 for row in metrics(run.run_dir))
    return run.run_dir


@pytest.fixture
def start(arguments: list[str]) -> Iterator[Start]:
    """Start runs, and clear them away at the end of the test whatever happened."""
    runs: list[Run] = []

    def begin(run_dir: Path, *more: str, **options: Any) -> Run:
        runs.append(Run(run_dir, *arguments, *more, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.clean()


# ---------------------------------------------------------------------------------------------------------- what holds
def check_nothing_left(run: Run) -> None:
    """No process, temporary file or shared memory of an ended run."""
    seconds = run.seconds_until_gone(GONE_S)
    print(f"exit code {run.process.returncode}, all processes gone after {seconds:.2f} s")
    assert [name for name in run.temporary_files() if name.startswith("moe_rl")] == []
    assert run.shared_memory() == set()
    assert list((run.run_dir / "checkpoints").glob(".*")) == []


def check_message(run: Run, rule: str) -> None:
    """One message, of this rule, on standard error."""
    text = run.stderr()
    print(text)
    assert text.startswith("error: ") and sum(line.startswith("error: ") for line in text.splitlines()) == 1, text
    assert f"[{rule}]" in text and "Traceback" not in text.split("its last lines")[0]


def check_death(run: Run, victim: str) -> None:
    """The run ended in time, named the dead worker with the tail of its log, and left nothing."""
    killed = time.monotonic()
    assert run.wait(WITHIN_S) == 3
    print(f"{victim} killed: exit after {time.monotonic() - killed:.1f} s")
    check_message(run, "worker.died")
    assert f"error: {victim} died while " in run.stderr()
    assert f"logs/{victim}.log" in run.stderr() and "its last lines:" in run.stderr()
    check_documented("a trainer or rollout process dies", run)
    check_nothing_left(run)
    assert damage(latest(run.run_dir)) == []


def check_same(run_dir: Path, uninterrupted: Path, attempts: int) -> None:
    """Records and last checkpoint equal those of the run that was never interrupted."""
    found, expected = comparable(run_dir), comparable(uninterrupted)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == theirs
    assert {"actor/loss", "actor/grad_norm", "reward/accuracy", "kl/reference", "sync/bytes"} <= set(found[0])
    assert [row["step"] for row in found if "eval/accuracy" in row] == [1, 3, 6, 9, 10]
    assert samples(run_dir) == samples(uninterrupted)
    assert len(samples(run_dir)) == 32 * STEPS
    counted = [row["attempt"] for row in metrics(run_dir)]
    assert counted == sorted(counted) and counted[0] == 1 and counted[-1] == attempts
    assert damage(latest(run_dir)) == [] and latest(run_dir).name == latest(uninterrupted).name
    check_same_tensors(latest(run_dir), latest(uninterrupted))
    check_tensorboard(run_dir)


def check_same_tensors(checkpoint: Path, other: Path) -> None:
    """Weights and optimizer states are equal to the last bit."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    states = []
    for directory in (checkpoint, other):
        with tempfile.NamedTemporaryFile() as file:
            dcp_to_torch_save(directory, file.name)
            state = torch.load(file.name, weights_only=False)
        states.append({name: value for name, value in state.items() if isinstance(value, torch.Tensor)})
    assert states[0].keys() == states[1].keys() and len(states[0]) > 100
    assert [name for name, value in states[0].items() if not torch.equal(value, states[1][name])] == []


def check_tensorboard(run_dir: Path) -> None:
    """TensorBoard shows each step once, as metrics.jsonl does."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(run_dir / "tensorboard")).Reload().Scalars("actor/grad_norm")
    assert [event.step for event in shown] == list(range(1, STEPS + 1))


def moment(run: Run, name: str, first: int = 3, last: int = 8, most: float = 1.0) -> None:
    """Wait for a random moment in the first `most` of a random step from `first` to `last`."""
    draw = seeded(name)
    step, share = draw.randint(first, last), draw.uniform(0.0, most)
    run.wait_inside(step, share)
    print(f"{name}: step {step}, after {share:.0%} of it; written: {run.step()}")


# ------------------------------------------------------------------------------------------------------ kills and stops
def test_driver_killed_in_a_step_and_in_saves(start: Start, tmp_path: Path, uninterrupted: Path) -> None:
    """Saves in the step, and beside the training; each attempt goes on from what the one before left."""
    run_dir = tmp_path / "run"
    run = start(run_dir)
    moment(run, "driver", last=5)  # steps enough are left for two more attempts
    run.process.kill()
    assert run.wait() == -signal.SIGKILL
    print(f"driver killed: all gone after {run.seconds_until_gone(GONE_S):.2f} s")
    assert not any(name.startswith("moe_rl") for name in run.temporary_files()) and run.shared_memory() == set()

    for how in ([], ["checkpoint.async_save=true"]):
        run, draw, before = start(run_dir, *how), seeded("save"), latest(run_dir)
        run.wait_for(run.running, "its workers")
        run.wait_for(lambda: list((run_dir / "checkpoints").glob(".writing_*")), "a save")
        time.sleep(draw.uniform(0.0, 0.5))
        run.process.kill()
        run.wait()
        run.seconds_until_gone(GONE_S)
        unfinished = list((run_dir / "checkpoints").glob(".writing_*"))
        print(f"killed in a save, which leaves {sorted(p.name for p in (run_dir / 'checkpoints').iterdir())}")
        assert damage(latest(run_dir)) == []
        assert latest(run_dir) == before or not unfinished
        assert f"resuming from {before}" in run.stdout()

    before = latest(run_dir)
    run = start(run_dir)
    assert run.wait() == 0, run.stderr()
    assert f"resuming from {before}" in run.stdout()
    check_nothing_left(run)
    check_same(run_dir, uninterrupted, attempts=4)


def test_trainer_killed_and_then_asked_to_stop(start: Start, tmp_path: Path, uninterrupted: Path) -> None:
    run_dir = tmp_path / "run"
    run = start(run_dir)
    moment(run, "trainer")
    victim = f"trainer_{seeded('which trainer').randrange(2)}"
    os.kill(run.worker(victim), signal.SIGKILL)
    check_death(run, victim)

    run = start(run_dir)
    run.wait_for(run.running, "its workers")
    moment(run, "stop", first=run.step() + 1, last=STEPS - 1, most=0.5)  # well before the run is done
    done = run.step()
    os.killpg(run.process.pid, signal.SIGTERM)  # as timeout and batch systems do: to the whole group
    assert run.wait() == 75, run.stderr()
    assert run.stderr() == ""
    check_nothing_left(run)
    assert run.step() in (done + 1, done + 2)  # the step it was in; a step may have ended as the signal was sent
    assert latest(run_dir).name == f"step_{run.step():06d}"

    run = start(run_dir)
    assert run.wait() == 0, run.stderr()
    check_same(run_dir, uninterrupted, attempts=3)


def rollout_process(run: Run) -> int:
    """The process that is rollout_0 now: the last that its log tells of."""
    return int(re.findall(r"process (\d+) on", (run.run_dir / "logs" / "rollout_0.log").read_text())[-1])


def test_rollouts_killed_and_hung_are_replaced_and_then_interrupted(
    start: Start, tmp_path: Path, uninterrupted: Path
) -> None:
    """Two losses change nothing of what is sampled and trained; the third is one more than may be."""
    run_dir = tmp_path / "run"
    run = start(run_dir, "rollout.timeout_s=20")
    for restarts, (number, step) in enumerate(((signal.SIGKILL, 2), (signal.SIGSTOP, 4)), 1):
        moment(run, "rollout", step, step)
        os.kill(rollout_process(run), number)
        run.wait_for(lambda step=step: run.step() > step, "a step with another process")
        assert metrics(run_dir)[-1]["rollout/restarts"] == restarts
    os.kill(rollout_process(run), signal.SIGKILL)
    check_death(run, "rollout_0")
    assert "It had been started again 2 times, as rollout.max_restarts allows." in run.stderr()

    run = start(run_dir)
    run.wait_for(run.running, "its workers")
    moment(run, "interrupt", first=run.step() + 1, last=STEPS - 1, most=0.5)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
    assert run.wait() == 130, run.stderr()
    assert "Traceback" not in run.stderr()
    run.seconds_until_gone(GONE_S)
    assert not any(name.startswith("moe_rl") for name in run.temporary_files()) and run.shared_memory() == set()

    run = start(run_dir)
    assert run.wait() == 0, run.stderr()
    check_nothing_left(run)
    check_same(run_dir, uninterrupted, attempts=3)


# ------------------------------------------------------------------------------------------------------- a full disk
@contextmanager
def small_disk(path: Path) -> Iterator[bool]:
    """A file system of 96 MiB at `path`; False where none may be mounted."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "none", str(path)], capture_output=True)
    yield mounted.returncode == 0
    if mounted.returncode == 0:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture(scope="module")
def full_disk(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run on one rank whose second checkpoint finds no room."""
    disk = tmp_path_factory.mktemp("full") / "disk"
    with small_disk(disk) as mounted:
        run = Run(disk / "run", *arguments, *ONE_RANK)
        try:
            run.wait_for(lambda: run.step() >= 2, "step 2")
            if mounted:  # leave a tenth of a checkpoint, which is enough for the records
                (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - 2**20))
            else:
                psutil.Process(run.worker("trainer_0")).rlimit(psutil.RLIMIT_FSIZE, (2**20, 2**20))
            run.wait()
            yield run
        finally:
            run.clean()


def test_a_full_disk_keeps_the_previous_checkpoint(full_disk: Run) -> None:
    assert full_disk.process.returncode == 3
    check_message(full_disk, "checkpoint.io")
    check_documented("the disk is full when a checkpoint is saved", full_disk)
    check_nothing_left(full_disk)
    assert latest(full_disk.run_dir).name == "step_000002" and damage(latest(full_disk.run_dir)) == []
    assert [row["step"] for row in metrics(full_disk.run_dir)] == [1, 2, 3]


# --------------------------------------------------------------------------------------------- what a checkpoint lacks
def test_killed_before_the_first_checkpoint_and_then_without_the_optimizer(
    start: Start, tmp_path: Path, full_disk: Run
) -> None:
    """With no checkpoint a run starts over. With one that holds no optimizer the weights are the checkpoint's: the next
    step samples as the whole run does; the moments are not: the step after does not."""
    run_dir, partly = tmp_path / "run", "checkpoint.contents=[model,extra]"
    run = start(run_dir, *ONE_RANK, partly)
    run.wait_for(lambda: run.step() >= 1, "step 1")
    run.process.kill()
    run.seconds_until_gone(GONE_S)
    assert not (run_dir / "checkpoints" / "latest").exists() and len(samples(run_dir)) >= 32

    run = start(run_dir, *ONE_RANK, partly)
    run.wait_for(lambda: (run_dir / "checkpoints" / "latest").is_file(), "the first checkpoint")
    run.process.kill()
    run.seconds_until_gone(GONE_S)

    run = start(run_dir, *ONE_RANK, partly)
    run.wait_for(lambda: run.running() and run.step() >= 4, "step 4")
    run.process.kill()
    print(run.stdout())
    assert "it holds no optimizer: the moments of the optimizer start from zero" in run.stdout()
    assert [(row["step"], row["attempt"]) for row in metrics(run_dir)][:4] == [(1, 2), (2, 2), (3, 3), (4, 3)]
    for step, same in ((1, True), (2, True), (3, True), (4, False)):
        mine, theirs = ([s for s in samples(d) if s["step"] == step] for d in (run_dir, full_disk.run_dir))
        assert len(mine) == len(theirs) == 32 and (mine == theirs) is same, step
    assert comparable(run_dir)[:2] == comparable(full_disk.run_dir)[:2]
    mine, theirs = (unmoved(comparable(d)[2]) for d in (run_dir, full_disk.run_dir))
    assert mine == theirs


def unmoved(row: dict[str, Any]) -> dict[str, Any]:
    """What a step's update does not change: the canary scores the weights after it."""
    return {k: v for k, v in row.items() if not k.startswith(("actor/", "sync/canary_")) and k != "kl/old"}


# ------------------------------------------------------------------------------------------------------ damaged files
def test_a_flipped_bit_in_a_shard_is_found_and_an_older_checkpoint_resumed(
    start: Start, tmp_path: Path, uninterrupted: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted, run_dir)
    before = (run_dir / "metrics.jsonl").read_bytes()
    shard = max(latest(run_dir).glob("*.distcp"), key=lambda p: p.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[seeded("bit").randrange(len(content))] ^= 0x10
    shard.write_bytes(content)
    run = start(run_dir, *ONE_RANK, "trainer.steps=12")  # another layout may load it
    assert run.wait() == 3
    check_message(run, "checkpoint.corrupt")
    assert shard.name in run.stderr()
    check_documented("one bit of a shard has changed", run)
    check_nothing_left(run)
    assert (run_dir / "metrics.jsonl").read_bytes() == before

    older = run_dir / "checkpoints" / "step_000008"
    run = start(run_dir, *ONE_RANK, resume=str(older))
    assert run.wait() == 0, run.stderr()
    assert f"resuming from {older}: step 8, attempt 2" in run.stdout()
    assert latest(run_dir).name == "step_000010" and damage(latest(run_dir)) == []
    assert [(row["step"], row["attempt"]) for row in metrics(run_dir)] == [(i, 1 + (i > 8)) for i in range(1, 11)]
    assert samples(run_dir)[: 8 * 32] == samples(uninterrupted)[: 8 * 32] and len(samples(run_dir)) == 10 * 32


# ----------------------------------------------------------------------------------------- refused before any process
class Refusal:
    """The command, in this process, where it must end before any worker starts."""

    def __init__(self, arguments: list[str], run_dir: Path, *more: str, resume: str = "auto") -> None:
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            self.code = cli.run(["train", *arguments, *more, "--run-dir", str(run_dir), "--resume", resume])
        self.run_dir, self.text = run_dir, err.getvalue()
        assert "starting the workers" not in out.getvalue()

    def stderr(self) -> str:
        return self.text


@pytest.fixture
def used(uninterrupted: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be resumed for two steps more."""
    shutil.copytree(uninterrupted, tmp_path / "run")
    return tmp_path / "run"


def truncate(checkpoint: Path) -> None:
    shard = checkpoint / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])


def without_optimizer(checkpoint: Path) -> None:
    """Make the checkpoint say that it was saved without one."""
    from moe_rl.trainer.state import STATE, _own_digest, sha256

    state, manifest = (json.loads((checkpoint / name).read_text()) for name in (STATE, "manifest.json"))
    (checkpoint / STATE).write_text(json.dumps(state | {"contents": ["model", "extra"]}))
    manifest["files"][STATE] = {"sha256": sha256(checkpoint / STATE), "bytes": (checkpoint / STATE).stat().st_size}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"sha256": _own_digest(manifest["files"])}))


def other_model(work: Path) -> list[str]:
    from moe_rl.config.load import ASSETS
    from tests.test_wrong_input import rewrite_json

    shutil.copytree(ASSETS / "models" / "dsv4-tiny", work / "model")
    rewrite_json("model/config.json", sliding_window=7)(work)
    return [f"model.path={work / 'model'}"]


def other_data(work: Path) -> list[str]:
    from moe_rl.config.load import ASSETS

    lines = (ASSETS / "data" / "sort" / "train.jsonl").read_text().splitlines(keepends=True)
    (work / "train.jsonl").write_text("".join(lines[1:]))
    return [f"data.train={work / 'train.jsonl'}"]


def step(name: str) -> Callable[[Path], Path]:
    return lambda run: run / "checkpoints" / name


REFUSALS: dict[str, tuple[str, int, Callable[[Path], Any], Callable[[Path], list[str]], Callable[[Path], Any]]] = {
    # what is wrong: rule, exit code, edit of the run directory, overrides, --resume
    "a shard is shorter than it was": (
        "checkpoint.damaged", 3, lambda run: truncate(latest(run)), lambda w: [], lambda run: "auto",
    ),
    "a shard is missing": (
        "checkpoint.damaged", 3, lambda run: (latest(run) / "__0_0.distcp").unlink(), lambda w: [], lambda run: "auto",
    ),
    "the latest checkpoint is missing": (
        "checkpoint.missing", 3, lambda run: shutil.rmtree(latest(run)), lambda w: [], lambda run: "auto",
    ),
    "the checkpoint is another model's": ("checkpoint.model", 2, lambda run: None, other_model, lambda run: "auto"),
    "a resume of what the checkpoint does not hold": (
        "checkpoint.load_contents", 2, lambda run: without_optimizer(latest(run)),
        lambda w: ["checkpoint.load_contents=[model,optimizer]"], lambda run: "auto",
    ),
    "the checkpoint is of a run on other data": ("data.resume", 2, lambda run: None, other_data, lambda run: "auto"),
    "the checkpoint is of a run with another seed": (
        "data.resume", 2, lambda run: None, lambda w: ["trainer.seed=5"], lambda run: "auto",
    ),
    "--resume names no checkpoint": ("checkpoint.path", 2, lambda run: None, lambda w: [], lambda run: run / "logs"),
    "--resume names what is not there": ("checkpoint.path", 2, lambda run: None, lambda w: [], step("step_000777")),
    "--resume never in a used directory": ("run_dir.taken", 2, lambda run: None, lambda w: [], lambda run: "never"),
    "--resume with another run's checkpoint in a used directory": (
        "run_dir.taken", 2, lambda run: shutil.copytree(latest(run), run.parent / "other"), lambda w: [],
        lambda run: run.parent / "other",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", REFUSALS)
def test_refused_before_anything_starts(wrong: str, used: Path, tmp_path: Path, arguments: list[str]) -> None:
    rule, code, edit, overrides, resume = REFUSALS[wrong]
    edit(used)
    before = (used / "metrics.jsonl").read_bytes()
    more = [*overrides(tmp_path), "trainer.steps=12"]
    refusal = Refusal(arguments, used, *more, resume=str(resume(used)))
    assert refusal.code == code, refusal.text
    check_message(refusal, rule)  # type: ignore[arg-type]
    assert "fix: " in refusal.text
    check_documented(wrong, refusal)
    assert (used / "metrics.jsonl").read_bytes() == before


def test_two_runs_do_not_share_a_directory(used: Path, arguments: list[str]) -> None:
    with RunDirectory(used).held():
        refusal = Refusal(arguments, used, "trainer.steps=12")
    assert refusal.code == 2
    check_message(refusal, "run_dir.busy")  # type: ignore[arg-type]
    check_documented("another run is in the directory", refusal)


def test_a_finished_run_is_left_alone_but_for_a_line_that_a_kill_lost(
    used: Path, arguments: list[str], uninterrupted: Path
) -> None:
    lines = (used / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (used / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))
    again = Refusal(arguments, used)
    assert (again.code, again.text) == (0, "")
    assert comparable(used) == comparable(uninterrupted)
