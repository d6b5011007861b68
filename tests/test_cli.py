"""The command line: explain, dry run, the plan it prints, and how each kind of ending is told."""

from __future__ import annotations

import errno
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import moe_rl
from moe_rl.cli import run
from moe_rl.config import load_config
from moe_rl.config.keys import keys
from moe_rl.errors import RunFailed, UserError
from moe_rl.models.family import read_facts
from moe_rl.planner import describe_layout, plan_stages
from moe_rl.trainer.state import RunDirectory
from tests.test_wrong_input import write_good


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("cli") / "work"
    write_good(work)
    return work


@pytest.fixture
def work(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    """Put functions in the place of those that start processes, to see what reaches them and how they may end."""

    def install(name: str = "moe_rl.trainer.api", **functions: Callable) -> types.ModuleType:
        module = types.ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return install


def test_explain_a_key(capsys: pytest.CaptureFixture[str]):
    assert run(["explain", "engine.dtype", "--recipe", "dsv4-tiny"]) == 0
    text = capsys.readouterr().out
    for line in (
        "value: 'fp32'  (profile cpu)",
        "default: 'bf16'",
        "allowed: one of fp32, bf16",
        keys()["engine.dtype"].help,
    ):
        assert line in text
    assert run(["explain", "optimizer.lr", "optimizer.lr=3e-4"]) == 0
    text = capsys.readouterr().out
    assert "value: 0.0003  (command line)" in text and "default: 1e-06" in text and "allowed: above 0" in text
    assert run(["explain", "rollout.timeout_s"]) == 0
    assert "unit: s" in capsys.readouterr().out


def test_explain_a_section_and_everything(capsys: pytest.CaptureFixture[str]):
    assert run(["explain", "trainer"]) == 0
    text = capsys.readouterr().out
    assert "trainer.steps = 50" in text and "trainer.gates.pearson_min" in text and "layout.pp" not in text
    assert run(["explain", "all"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} = " in text for name in keys())


RUN_AS_MODEL = {
    "plan": ["plan", "RUN"],
    "plan of its checkpoints": ["plan", "RUN/checkpoints"],
    "plan from inside": ["plan", "./checkpoints"],
    "audit": ["audit", "RUN"],
    "convert": ["convert", "RUN", "new"],
    "train": ["train", "mine.yaml", "model.path=RUN", "--dry-run"],
    "launch": ["launch", "mine.yaml", "model.path=RUN"],
}


@pytest.mark.parametrize("arguments", RUN_AS_MODEL.values(), ids=list(RUN_AS_MODEL))
def test_a_run_given_as_a_model_is_told_what_to_give(
    arguments: list[str], work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """One error by whichever command; what it says to give is taken by `plan`."""
    directory = work / "a run"
    RunDirectory(directory).create()
    config = load_config("mine.yaml", ["engine.device=cpu", "engine.dtype=fp32"])
    (directory / "config.resolved.yaml").write_text(config.to_yaml(origins=True))
    if "./checkpoints" in arguments:
        monkeypatch.chdir(directory)
    arguments = [a.replace("RUN", str(directory)) for a in arguments]

    def fix() -> str:
        assert run(arguments) == 2
        text = capsys.readouterr().err
        assert text.count("[model.path]") == 1 and text.count("error: ") == 1 and "is a run's directory" in text
        return text.split("  fix: ")[1].split("\n")[0]

    assert "has no checkpoint yet" in fix()
    for step in (5, 10):
        shutil.copytree(work / "model", directory / "checkpoints" / f"step_{step:06d}")
    said = fix()
    newest, recipe = directory / "checkpoints" / "step_000010", directory / "config.resolved.yaml"
    assert f"newest checkpoint, {newest}. " in said and f"As a recipe, {recipe} " in said
    assert run(["plan", str(recipe)]) == 0 and run(["plan", str(newest), "data.max_prompt=16"]) == 0
    assert "GPU memory by phase" in capsys.readouterr().out


PARTS = (["model"], ["model", "extra"], ["model", "optimizer"], ["model", "optimizer", "extra"])


@pytest.mark.parametrize("saved", PARTS, ids="+".join)
@pytest.mark.parametrize("loaded", [[], *PARTS], ids=lambda parts: "+".join(parts) or "all")
def test_what_a_resume_loads_must_be_saved_by_the_run_or_be_another_runs(
    saved: list[str], loaded: list[str], work: Path, capsys: pytest.CaptureFixture[str]
):
    """With a checkpoint of its own, without one, and by its path: refused by keys and origins; another run's may hold more."""
    mine, other = RunDirectory(work / "mine"), RunDirectory(work / "other")
    for run_directory in (mine, other):
        run_directory.create()
        (run_directory.checkpoints / "step_000001").mkdir()
    keys = [f"checkpoint.contents=[{','.join(saved)}]", f"checkpoint.load_contents=[{','.join(loaded)}]"]
    command = ["train", "mine.yaml", "engine.device=cpu", "engine.dtype=fp32", *keys, "--dry-run", "--run-dir"]
    own = {"new": "auto", "mine": "auto", "never": "never", str(mine.path): str(mine.checkpoints / "step_000001")}
    for directory, resume in own.items():
        code, said = run([*command, directory, "--resume", resume]), capsys.readouterr().err
        assert code == (0 if set(loaded) <= set(saved) else 2), said
        if code:
            assert "checkpoint.load_contents from command line, checkpoint.contents from command line" in said
            assert (
                said.count("[checkpoint.load_contents]") == 1
                and ", ".join(sorted(set(loaded) - set(saved), reverse=True)) in said
            )
    assert run([*command, "new", "--resume", str(other.checkpoints / "step_000001")]) == 0


def test_dry_run_prints_the_plan_and_starts_nothing(work: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["train", "mine.yaml", "rollout.n=4", "--dry-run"]) == 0
    text = capsys.readouterr().out
    for line in (
        "4 ranks = dp 2 * pp 2 * tp 1",
        "stages: Et*3|ttL (balanced)",
        "stage 0: embedding, layers 0-2 (hash: 0, 1)",
        "stage 1: layers 3-4, loss",
        "rank 3: dp 1, experts 2-3",
        "16 prompts * 4 samples = 64 completions of up to 16 tokens, 1 optimizer step(s)",
        f"data: 40 prompts of {work}/train.jsonl",
        "rollout.n: 4  # command line",
        "layout.pp: 2  # file mine.yaml:2",
    ):
        assert line in text, line
    assert not (work / "runs").exists()


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "etp", "world"), [(1, 2, 2, 1, 8), (2, 2, 2, 1, 8), (1, 1, 4, 2, 16), (2, 2, 2, 2, 16)]
)
def test_the_printed_ranks_are_those_of_megatron(good: Path, tp: int, pp: int, ep: int, etp: int, world: int):
    state = pytest.importorskip("megatron.core.parallel_state")
    config = load_config(str(good / "mine.yaml"), [f"layout.tp={tp}", f"layout.pp={pp}", f"layout.ep={ep}"])
    config.layout.etp, config.cluster.gpus_per_node = etp, world
    text = describe_layout(config, read_facts(config.model.path))
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("rank ")]
    order = "tp-cp-ep-dp-pp"
    dense = state.RankGenerator(tp=tp, ep=1, dp=world // (tp * pp), pp=pp, cp=1, order=order)
    experts = state.RankGenerator(tp=etp, ep=ep, dp=world // (etp * ep * pp), pp=pp, cp=1, order=order)
    for group in dense.get_ranks("dp"):
        for position, rank in enumerate(group):
            assert f"rank {rank}: dp {position}," in lines[rank]
    for group in experts.get_ranks("ep"):
        for position, rank in enumerate(group):
            held = 4 // ep
            assert lines[rank].endswith(f"experts {position * held}-{(position + 1) * held - 1}")
    for stage, group in enumerate(zip(*dense.get_ranks("pp"), strict=True)):
        before = text.split(f"stage {stage}:")[1].split("stage ")[0]
        assert all(f"rank {rank}:" in before for rank in group)


def test_virtual_stages_are_printed_by_rank(good: Path):
    config = load_config(str(good / "mine.yaml"), ["layout.vpp=2"])
    facts = read_facts(config.model.path)
    assert plan_stages(config, facts) == "Ett|t|t|tL"
    text = describe_layout(config, facts)
    assert "stage 0: embedding, layers 0-1 (hash: 0, 1)  then  layer 3" in text
    assert "stage 1: layer 2  then  layer 4, loss" in text


def test_train_hands_everything_over(work: Path, door):
    seen = {}

    def train(config, run_dir, resume):
        seen.update(config=config, run_dir=run_dir, resume=resume)
        return 75

    door(train=train)
    (work / "more.yaml").write_text("trainer: {steps: 3}\n")
    command = ["train", "mine.yaml", "rollout.n=4", "--file", "more.yaml", "--run-dir", "out", "--resume", "never"]
    assert run(command) == 75
    assert (seen["config"].rollout.n, seen["config"].trainer.steps) == (4, 3)
    assert (seen["run_dir"], seen["resume"]) == (Path("out"), "never")
    assert run(["train", "mine.yaml"]) == 75
    assert str(seen["run_dir"]).startswith("runs/mine-") and seen["resume"] == "auto"


def test_score_takes_the_configuration_of_a_run(work: Path, door):
    seen = []
    door("moe_rl.trainer.scoring", score=lambda config, source, tokens, out: seen.append((config, source)))
    (work / "t.jsonl").write_text('{"tokens": [1, 2]}\n')
    command = ["--tokens", "t.jsonl", "--out", "o.jsonl"]
    assert run(["score", "model", *command, "layout.pp=2", "cluster.gpus_per_node=2"]) == 0
    config, source = seen.pop()
    assert source == "model" and config.model.path == str(work / "model")
    assert (config.layout.pp, config.world, config.engine.dtype) == (2, 2, "fp32")
    checkpoint = work / "run" / "checkpoints" / "step_000010"
    checkpoint.mkdir(parents=True)
    (work / "run" / "config.resolved.yaml").write_text(load_config("mine.yaml", ["layout.ep=1"]).to_yaml())
    assert run(["score", str(checkpoint), *command, "layout.pp=1"]) == 0
    config, source = seen.pop()
    assert source == str(checkpoint) and config.model.path == str(work / "model")
    assert (config.layout.pp, config.layout.ep, config.world) == (1, 1, 4)
    assert config.origin("layout.ep") == "command line" and config.origin("model.path") == "file mine.yaml:1"


def ending(error: BaseException, door, run_dir: str = "out") -> int:
    def train(config, run_dir, resume):
        run_dir.mkdir(exist_ok=True)
        raise error

    door(train=train)
    return run(["train", "mine.yaml", "--run-dir", run_dir])


def test_known_endings(work: Path, door, capsys: pytest.CaptureFixture[str]):
    assert ending(UserError("a.rule", "what", "why", "fix"), door) == 2
    assert capsys.readouterr().err == "error: what [a.rule]\n  why: why\n  fix: fix\n"
    assert ending(RunFailed("b.rule", "died", log_tail="last words"), door) == 3
    assert capsys.readouterr().err == "error: died [b.rule]\n  its last lines:\nlast words\n"
    assert ending(KeyboardInterrupt(), door) == 130
    assert "Traceback" not in capsys.readouterr().err
    assert ending(OSError(errno.ENOSPC, "No space left on device", "out/x"), door) == 3
    assert "no space left for out/x [disk.full]" in capsys.readouterr().err
    assert ending(PermissionError(errno.EACCES, "Permission denied", "model/x"), door) == 3
    assert "model/x: Permission denied [file.access]" in capsys.readouterr().err
    assert not list(work.glob("out/error-*"))


def test_an_unforeseen_exception_leaves_its_traceback_in_the_run_directory(work: Path, door, capsys):
    assert ending(ZeroDivisionError("by zero"), door) == 3
    text = capsys.readouterr().err
    [file] = work.glob("out/error-*.txt")
    assert "ZeroDivisionError: by zero [internal]" in text and f"out/{file.name}" in text and "Traceback" not in text
    assert "Traceback (most recent call last)" in file.read_text() and "raise error" in file.read_text()


def test_usage_errors_and_help(capsys: pytest.CaptureFixture[str]):
    assert run(["train", "dsv4-tiny", "--nope"]) == 2
    assert "No such option" in capsys.readouterr().err
    assert run(["train"]) == 2 and run(["fly"]) == 2
    capsys.readouterr()
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("train", "score", "report", "explain"))
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"moe-rl {moe_rl.__version__}\n"


def test_public_names_are_imported_on_use(door):
    module = door(train=len, GRPOTrainer=int)
    assert moe_rl.load_config is load_config
    assert (moe_rl.train, moe_rl.GRPOTrainer) == (module.train, module.GRPOTrainer)
    with pytest.raises(AttributeError, match="no attribute 'fly'"):
        moe_rl.fly  # noqa: B018
