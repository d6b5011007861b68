"""The Python API: rows and functions of one's own through real runs, and rewards that fail in them."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import pytest

import moe_rl
from moe_rl import GRPOTrainer, load_config
from moe_rl.errors import RunFailed, UserError
from tests.short_runs import ONE, PROMPTS, SMALL, N, Result, read, short_run

ROWS = [{"question": f"sort {n}", "answer": "".join(sorted(str(n))), "level": n % 3} for n in range(3121, 3133)]
HELD_OUT = [{"question": f"sort {n}", "answer": "".join(sorted(str(n)))} for n in range(71, 77)]


def trainer(run_dir: Path, *overrides: str, **objects) -> GRPOTrainer:
    return GRPOTrainer(load_config("dsv4-tiny", [*SMALL, *ONE, *overrides]), run_dir=run_dir, **objects)


# -------------------------------------------------------------------------------------------- before a run is started
def test_rows_take_the_place_of_the_files(tmp_path: Path):
    made = trainer(tmp_path, dataset=(row for row in ROWS))
    assert [r.answer for r in made.inputs.records] == [row["answer"] for row in ROWS]
    assert made.inputs.records[0].prompt_text == "sort 3121=" and made.inputs.records[0].extra == {"level": 1}
    assert made.inputs.validation == []  # the recipe's validation set is of the recipe's task
    assert len(trainer(tmp_path).inputs.validation) == 256
    assert len(trainer(tmp_path, dataset=ROWS, validation=HELD_OUT).inputs.validation) == len(HELD_OUT)
    own = tmp_path / "own.jsonl"
    own.write_text('{"question": "sort 21", "answer": "12"}\n')
    assert len(trainer(tmp_path, f"data.validation={own}", dataset=ROWS).inputs.validation) == 1
    assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "checkpoints").exists()


def test_wrong_objects_are_refused(tmp_path: Path):
    def rule(*overrides: str, **objects) -> str:
        with pytest.raises(UserError) as error:
            trainer(tmp_path, *overrides, **objects)
        return error.value.rule + ": " + str(error.value)

    assert "data.record: " in (text := rule(dataset=[*ROWS, {"question": "sort 1"}])) and "record 12: " in text
    assert "data.source: " in rule(dataset=7)
    assert "data.empty: " in rule(dataset=[])
    assert "data.overlap: " in rule(dataset=ROWS, validation=ROWS[:1])
    assert "reward.signature: " in rule(dataset=ROWS, reward=lambda completion: 1.0)
    lock = threading.Lock()
    assert "reward.pickle: " in rule(dataset=ROWS, reward=lambda completion, answer: float(lock.locked()))
    assert "data.template: " in rule("data.template=x", dataset=ROWS)
    assert "model.path: " in rule("model.path=/nowhere", dataset=ROWS)


def test_public_names():
    assert {"GRPOTrainer", "load_config", "train"} <= set(moe_rl.__all__)
    assert dataclasses.is_dataclass(load_config("dsv4-tiny"))


# ------------------------------------------------------------------------------------------------------------ a real run
@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Two steps with a closure as the reward, rows to train on and rows to validate on."""
    bonus = {0: 0.25, 1: 0.5, 2: 0.75}

    def reward(completion: str, answer: str, *, extra: dict) -> dict[str, float]:
        share = sum(a == b for a, b in zip(completion, answer, strict=False)) / len(answer)
        return {"reward": share + bonus.get(extra.get("level"), 0.0), "accuracy": float(completion == answer)}

    run_dir = tmp_path_factory.mktemp("api") / "run"
    return short_run(run_dir, "trainer.validate_every=1", reward=reward, dataset=ROWS, validation=HELD_OUT)


@pytest.mark.slow
def test_a_closure_and_a_list_of_dicts_train(finished: Result):
    assert finished.code == 0 and [m["step"] for m in finished.metrics] == [1, 2]
    answers = {row["question"] + "=": (row["answer"], 0.25 * (1 + row["level"])) for row in ROWS}
    for metrics, samples in zip(finished.metrics, finished.samples, strict=True):
        assert len(samples) == PROMPTS * N
        for s in samples:
            answer, bonus = answers[s["prompt"]]
            share = sum(a == b for a, b in zip(s["response"], answer, strict=False)) / len(answer)
            assert s["reward"] == pytest.approx(share + bonus) and s["accuracy"] == float(s["response"] == answer)
        assert metrics["reward/mean"] == pytest.approx(sum(s["reward"] for s in samples) / len(samples))
        assert metrics["eval/samples"] == len(HELD_OUT) and 0 <= metrics["eval/accuracy"] <= 1
    assert {s["prompt"] for step in finished.samples for s in step} <= set(answers)


@pytest.mark.slow
def test_fit_again_and_go_on(finished: Result, capsys: pytest.CaptureFixture[str]):
    config = load_config("dsv4-tiny", [*SMALL, *ONE])
    again = GRPOTrainer(config, dataset=ROWS, reward=lambda completion, answer: 1.0, run_dir=finished.run_dir)
    assert again.fit() == 0 and "all 2 steps are done" in capsys.readouterr().out
    config.trainer.steps = 3
    codes = []
    more = GRPOTrainer(config, dataset=ROWS, reward=lambda completion, answer: 1.0, run_dir=finished.run_dir)
    thread = threading.Thread(target=lambda: codes.append(more.fit()))  # as in a notebook's or a server's thread
    thread.start()
    thread.join()
    lines = read(finished.run_dir / "metrics.jsonl")
    assert codes == [0] and [line["step"] for line in lines] == [1, 2, 3]
    assert lines[:2] == finished.metrics and lines[2]["reward/mean"] == 1.0 and lines[2]["attempt"] == 2


# ----------------------------------------------------------------------------------------------- rewards that fail in it
def brittle(completion: str, answer: str) -> float:
    """Hangs where the answer has no 2, raises where it ends with an odd digit."""
    if "2" not in answer:
        time.sleep(600)
    if answer[-1] in "13579":
        raise KeyError(f"no rule for {answer}")
    return float(completion == answer)


@pytest.mark.slow
def test_a_reward_that_fails_stops_the_run(tmp_path: Path):
    rows = [row for row in ROWS if "2" in row["answer"]]
    with pytest.raises(RunFailed) as error:
        short_run(tmp_path / "run", reward=brittle, dataset=rows)
    assert error.value.rule == "reward.error" and error.value.exit_code == 3
    assert "brittle raised KeyError" in str(error.value) and "no rule for 12" in str(error.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()  # no step was finished
    with pytest.raises(RunFailed, match="gave no answer within 0.5 s and was killed"):
        short_run(
            tmp_path / "hang", "reward.timeout_s=0.5", reward=lambda completion, answer: time.sleep(600), dataset=ROWS
        )


@pytest.mark.slow
def test_a_reward_that_fails_leaves_its_samples_out(tmp_path: Path):
    overrides = ["reward.on_error=exclude", "reward.timeout_s=1", "data.prompts_per_step=12", "rollout.n=2"]
    result = short_run(tmp_path / "run", *overrides, "observe.samples_per_step=24", reward=brittle, dataset=ROWS)
    assert result.code == 0
    for metrics, samples in zip(result.metrics, result.samples, strict=True):
        fails = ["2" not in s["answer"] or s["answer"][-1] in "13579" for s in samples]
        assert metrics["reward/errors"] == sum(fails) > 0 and not all(fails)
        for s, failed in zip(samples, fails, strict=True):
            assert (s["reward"] is None and s["accuracy"] is None and s["advantage"] == 0.0) == failed
            assert ("error" in s) == failed
        judged = [s["reward"] for s, failed in zip(samples, fails, strict=True) if not failed]
        assert metrics["reward/mean"] == pytest.approx(sum(judged) / len(judged))
    with pytest.raises(RunFailed, match="no completion of the batch has a reward"):
        short_run(tmp_path / "none", "reward.on_error=exclude", reward=lambda completion, answer: None, dataset=ROWS)
