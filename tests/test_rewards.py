"""Rewards: what the shipped verifiers accept, and that no verifier of a user can hang, crash or fake a batch."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from decimal import Decimal
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from moe_rl.errors import RunFailed, UserError
from moe_rl.rewards import BatchScorer, RewardItem, describe
from moe_rl.rewards import score_all as score_batch
from moe_rl.rewards.judge import as_verdict
from moe_rl.rewards.verifiers import FACTORIES, find_last_number

score_all = partial(score_batch, workers=1)


def items(*completions: str, answer: str = "4", **fields) -> list[RewardItem]:
    return [RewardItem(id=f"s{i}", completion=c, answer=answer, **fields) for i, c in enumerate(completions)]


class TestShipped:
    @pytest.mark.parametrize(
        "text, number",
        [
            ("the answer is 42.", "42"),
            ("3 + 4 = 7", "7"),
            ("x=-3", "-3"),
            ("5-3", "3"),
            ("f(2)-1", "1"),
            ("it is \u22127", "-7"),
            ("$1,234,567.50", "1234567.5"),
            ("1,2,3", "3"),
            ("1, 2, -3", "-3"),
            ("12,", "12"),
            ("10%", "10"),
            (".5", "0.5"),
            ("1/2", "2"),
            ("7.0", "7"),
            ("no number", None),
            ("", None),
            ("-", None),
            ("\u0663", None),
        ],
    )
    def test_last_number(self, text, number):
        assert find_last_number(text) == (None if number is None else Decimal(number))

    def test_last_number_is_linear(self):
        start = time.perf_counter()
        for text in ("1," * 200_000, "9" * 300_000, "-" * 300_000, "1,111" * 100_000):
            FACTORIES["last_number"]()(text, "4")
        assert time.perf_counter() - start < 5

    def test_last_number_in_a_batch(self):
        got = score_all("last_number", items("2+2 = 4", "5", "", answer="so #### 4"))
        assert got.rewards.tolist() == got.accuracies.tolist() == [1, 0, 0] and got.valid.all() and not got.errors
        with pytest.raises(RunFailed, match="holds no number"):
            score_all("last_number", items("4", answer="four"))

    def test_exact(self):
        assert score_all("exact", items(" 4\n", "4.0", "")).rewards.tolist() == [1, 0, 0]

    def test_answer_line(self):
        cases = {
            "Answer: 4": 1,
            "answer:$\\boxed{4}$.": 1,
            "Answer: 5\nAnswer: 4.0": 1,
            "Answer: 4\nAnswer: 5": 0,
            "4": 0,
        }
        assert score_all("answer_line", items(*cases)).rewards.tolist() == list(cases.values())
        assert score_all("answer_line", items("Answer: x + 1", answer="x+1")).rewards.tolist() == [1]

    def test_dapo_by_hand(self):
        # L = 20, B = 8: free up to 12 tokens, half the penalty at 16, all of it at 20
        wanted = {5: (1.0, -1.0), 12: (1.0, -1.0), 16: (0.5, -1.5), 20: (0.0, -2.0)}
        for tokens, (right, wrong) in wanted.items():
            batch = items("Answer: 4", "Answer: 5", completion_tokens=(0,) * tokens, max_response=20)
            got = score_all("dapo", batch, args={"overlong_buffer": 8, "penalty_factor": 1.0})
            assert got.rewards.tolist() == [right, wrong] and got.accuracies.tolist() == [1, 0]
        batch = items("4", "5", completion_tokens=(0,) * 16, max_response=20)
        got = score_all("dapo", batch, args={"overlong_buffer": 8, "penalty_factor": 0.5, "base": "last_number"})
        assert got.rewards.tolist() == [0.75, -1.25]
        assert score_all("dapo", items("Answer: 4", max_response=1, completion_tokens=(1,))).rewards.tolist() == [1]

    def test_math(self):
        batch = items(
            "So $\\frac{2}{4}$.",
            "\\boxed{0.5}",
            "it is \\boxed{1/2}",
            "\\boxed{\\frac{1}{3}}",
            "",
            "\\frac{",
            answer="\\frac{1}{2}",
        )
        with BatchScorer("math", workers=1) as scorer:
            results = []  # a thread that is not the main one, where SIGALRM could not be used
            thread = threading.Thread(target=lambda: results.append(scorer.score(batch)))
            thread.start()
            thread.join()
            assert results[0].rewards.tolist() == [1, 1, 1, 0, 0, 0]
            assert scorer.score(items("$x=3$", "$\\{1,2\\}$", answer="3")).rewards.tolist() == [1, 0]
            with pytest.raises(RunFailed, match="cannot parse the reference answer"):
                scorer.score(items("4", answer=""))

    def test_dapo_on_math_runs_in_workers(self):
        assert not describe("dapo", {"base": "math"}).trusted and describe("dapo").trusted
        got = score_all("dapo", items("\\boxed{\\frac{8}{2}}", "\\boxed{5}", max_response=9), args={"base": "math"})
        assert got.rewards.tolist() == [1, -1]

    def test_reasoning_gym(self):
        gym = pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")
        entry = gym.create_dataset("chain_sum", size=1, seed=5)[0]
        extra = {"entry": entry, "task": "chain_sum"}
        batch = items(f" {entry['answer']}\n", "no", answer=entry["answer"], extra=extra)
        with BatchScorer("reasoning_gym", workers=1) as scorer:
            assert scorer.score(batch).accuracies.tolist() == [1, 0]
            with pytest.raises(RunFailed, match="names no reasoning-gym task"):
                scorer.score(items("1"))


class TestNames:
    @pytest.mark.parametrize(
        "name, args, message",
        [
            ("last_numbr", {}, "did you mean last_number"),
            ("nothing", {}, "as module:function"),
            (":f", {}, "there is no verifier"),
            ("exact", {"strict": True}, "has no argument strict"),
            ("dapo", {"overlong": 4}, "It takes base, overlong_buffer, penalty_factor"),
            ("dapo", {"overlong_buffer": -1}, "overlong_buffer=-1"),
            ("dapo", {"base": "maths"}, "base='maths'"),
            ("dapo", {"penalty_factor": "big"}, "penalty_factor='big'"),
            ("no/such/file.py:reward", {}, "there is no file"),
            (lambda completion: 1.0, {}, "cannot be called"),
            (lambda completion, answer, *, style: 1.0, {}, "argument: 'style'"),
            (lambda completion, answer: 1.0, {"weight": 2}, "unexpected keyword argument 'weight'"),
        ],
    )
    def test_refused_at_once(self, name, args, message):
        with pytest.raises(UserError) as e:
            describe(name, args)
        assert message in str(e.value) and e.value.exit_code == 2

    def test_buffer_longer_than_the_response(self):
        describe("dapo", {"overlong_buffer": 16}, max_response=16)
        with pytest.raises(UserError, match="overlong_buffer=17"):
            describe("dapo", {"overlong_buffer": 17}, max_response=16)

    def test_a_callable_that_cannot_be_pickled(self):
        lock = threading.Lock()
        with pytest.raises(UserError, match="cannot be sent") as e:
            describe(lambda completion, answer: float(lock.locked()))
        assert e.value.rule == "reward.pickle"

    @pytest.mark.parametrize(
        "body, function, rule, message",
        [
            ("def other(completion, answer): return 1", "reward", "reward.import", "Its functions are other"),
            ("reward = 3", "reward", "reward.import", "is not callable"),
            ("import not_there", "reward", "reward.import", "No module named 'not_there'"),
            ("1 +", "reward", "reward.import", "SyntaxError"),
            ("def reward(text): return 1", "reward", "reward.signature", "cannot be called"),
            ("raise SystemExit(1)", "reward", "reward.import", "cannot be loaded"),
        ],
    )
    def test_a_file_that_cannot_be_used(self, tmp_path, body, function, rule, message):
        (tmp_path / "mine.py").write_text(body)
        with pytest.raises(UserError) as e:
            BatchScorer(f"{tmp_path}/mine.py:{function}")
        assert e.value.rule == rule and message in str(e.value)

    def test_a_file_that_ends_the_process(self, tmp_path):
        (tmp_path / "mine.py").write_text("import os; os._exit(7)")
        with pytest.raises(RunFailed, match="exit code 7"):
            BatchScorer(f"{tmp_path}/mine.py:reward")


@pytest.mark.parametrize(
    "value, reward, accuracy",
    [
        (1, 1, 1),
        (0.5, 0.5, 0),
        (True, 1, 1),
        (False, 0, 0),
        (np.float32(2), 2, 1),
        (np.bool_(True), 1, 1),
        (np.array(1.0), 1, 1),
        (torch.tensor(1.0), 1, 1),
        (torch.tensor(True), 1, 1),
        (Decimal("0.25"), 0.25, 0),
        ({"reward": -1}, -1, 0),
        ({"reward": 0.2, "accuracy": True}, 0.2, 1),
        ({"reward": -3.0, "accuracy": 0.5}, -3, 0.5),
    ],
)
def test_what_counts_as_a_reward(value, reward, accuracy):
    got = as_verdict(value)
    assert (got.reward, got.accuracy, got.problem) == (reward, accuracy, "")


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            math.nan,
            math.inf,
            -math.inf,
            "1",
            b"1",
            [1.0],
            (),
            1j,
            10**400,
            np.array([1.0]),
            torch.ones(1),
            Decimal("NaN"),
        ),
        *({}, {"score": 1}, {"reward": None}, {"reward": 1, "acc": 1}, {"reward": 1, "accuracy": None}),
        *({"reward": 1, "accuracy": 2}, {"reward": 1, "accuracy": "yes"}, {"reward": math.nan, "accuracy": 1}),
    ],
    ids=repr,
)
def test_what_does_not(value):
    got = as_verdict(value)
    assert got.problem and math.isnan(got.reward) and math.isnan(got.accuracy)


USERS = """
import ctypes, os, re, subprocess, sys, time
from helper import VALUE

def reward(completion, answer, *, weight=1.0):
    print("scoring", completion)
    print("x" * 10_000, file=sys.stderr)
    kind, _, rest = completion.partition(" ")
    if kind == "raise":
        raise KeyError(rest)
    if kind == "exit":
        sys.exit(3)
    if kind == "die":
        os._exit(9)
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "loop":
        while True:
            pass
    if kind == "regex":  # in C, with the interpreter lock held, deaf to signals' Python handlers
        re.match("(a+)+b", "a" * 60)
    if kind == "child":
        subprocess.run(["sleep", "1234.5"])
    if kind == "none":
        return None
    return VALUE * weight * (completion == answer)

def context(completion, answer, *, prompt_text, extra, completion_tokens, truncated, max_response):
    return {"reward": len(completion_tokens) + max_response, "accuracy": truncated and extra["level"] == prompt_text}

def everything(completion, answer, **context):
    return len(context)
"""


@pytest.fixture
def users(tmp_path, monkeypatch) -> str:
    (tmp_path / "users.py").write_text(USERS)
    (tmp_path / "helper.py").write_text("VALUE = 2.0")
    monkeypatch.chdir(tmp_path)
    return f"{tmp_path}/users.py"


class TestUsersOwn:
    def test_module_and_file(self, users):
        for name in ("users:reward", "users.py:reward", f"{users}:reward"):
            assert score_all(name, items("4", "5"), args={"weight": 0.25}).rewards.tolist() == [0.5, 0]

    def test_context(self, users):
        batch = items(
            "a", prompt_text="hard", extra={"level": "hard"}, completion_tokens=(7, 8), truncated=True, max_response=5
        )
        got = score_all("users:context", batch)
        assert (got.rewards.tolist(), got.accuracies.tolist()) == ([7], [1])
        assert score_all("users:everything", batch).rewards.tolist() == [5]

    def test_every_failure_is_named_and_none_is_a_zero(self, users):
        bad = {
            "raise it": "raised KeyError: 'it' (users.py:",
            "exit": "raised SystemExit: 3",
            "die": "ended its process (exit code 9)",
            "segfault": "ended its process (SIGSEGV)",
            "loop": "gave no answer within 2 s and was killed",
            "regex": "gave no answer within 2 s and was killed",
            "child": "gave no answer within 2 s and was killed",
            "none": "returned None, which is no finite number",
        }
        with BatchScorer("users:reward", timeout_s=2.0, on_error="exclude", workers=2) as scorer:
            start = time.monotonic()
            got = scorer.score(items("4", *bad, "wrong"))
            assert time.monotonic() - start < 30
            assert got.rewards[0] == 2 and got.rewards[-1] == 0
            assert got.valid.tolist() == [True] + [False] * len(bad) + [True]
            assert np.isnan(got.rewards[1:-1]).all() and np.isnan(got.accuracies[1:-1]).all()
            assert [e.id for e in got.errors] == [f"s{i + 1}" for i in range(len(bad))]
            for error, message in zip(got.errors, bad.values(), strict=True):
                assert error.verifier == "users:reward" and message in error.problem
            assert scorer.score(items("4", "die", "4")).rewards[[0, 2]].tolist() == [2, 2]  # whole again
        assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "1234.5"]]

    def test_stop_raises_with_all_of_them(self, users):
        with pytest.raises(RunFailed) as e:
            score_all("users:reward", items("4", "none", "raise x"))
        assert "gave no reward for 2 of 3" in e.value.what and e.value.exit_code == 3
        assert (
            "sample s1: users:reward returned None" in e.value.why and "sample s2: users:reward raised" in e.value.why
        )

    def test_exclude_with_nothing_left_raises(self, users):
        with pytest.raises(RunFailed, match="no completion of the batch has a reward"):
            score_all("users:reward", items("none", "none"), on_error="exclude")

    def test_prints_go_to_the_log(self, users, tmp_path, capfd):
        with BatchScorer("users:reward", log=tmp_path / "reward.log", workers=1) as scorer:
            scorer.score(items("4"))
        assert "scoring 4" in (tmp_path / "reward.log").read_text() and capfd.readouterr() == ("", "")

    def test_an_item_that_cannot_be_pickled(self, users):
        batch = items("a") + items("4", extra={"lock": threading.Lock()})
        got = score_all("users:everything", batch, on_error="exclude")
        assert got.valid.tolist() == [True, False] and "cannot pickle" in got.errors[0].problem


class TestCallables:
    def test_closure_over_a_local_class(self):
        class Scale:
            factor = 3.0

        def reward(completion, answer, *, extra):
            return Scale.factor * (completion == answer) * extra["of"].factor

        batch = [RewardItem("a", "4", "4", extra={"of": Scale()}), RewardItem("b", "5", "4", extra={"of": Scale()})]
        assert score_all(reward, batch).rewards.tolist() == [9, 0]

    def test_in_a_script_without_a_main_guard(self, tmp_path):
        """The script must not be run again by its workers, and what it defines must reach them."""
        script = tmp_path / "run.py"
        script.write_text(
            textwrap.dedent("""
            from moe_rl.rewards import RewardItem, score_all
            print("started")
            BONUS = 5
            def reward(completion, answer):
                print("noise")
                return BONUS * (completion == answer)
            print(score_all(reward, [RewardItem("a", "4", "4")]).rewards.tolist())
            """)
        )
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, timeout=60)
        assert done.stdout.split() == ["started", "[5.0]"] and "noise" in done.stderr


def test_trusted_verifiers_start_no_process():
    before = psutil.Process().children()
    with BatchScorer("last_number") as scorer:
        scorer.score(items("4"))
        assert psutil.Process().children() == before


def test_workers_die_with_a_killed_parent(tmp_path):
    """SIGKILL of the driver while a worker hangs in C code: nothing is left behind."""
    (tmp_path / "hang.py").write_text("import re\ndef reward(completion, answer): re.match('(a+)+b', 'a' * 60)")
    code = (
        f"from moe_rl.rewards import RewardItem, score_all\n"
        f"score_all('{tmp_path}/hang.py:reward', [RewardItem('a', '', '')], timeout_s=100)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    driver = psutil.Popen([sys.executable, "-c", code], env=env)
    deadline = time.monotonic() + 30
    while not (workers := [c for c in driver.children() if c.cpu_times().user > 0.8]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert workers
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    gone, alive = psutil.wait_procs(workers, timeout=5)
    for process in alive:
        process.kill()
    assert not alive
