"""`moe-rl bench optimizer`: its matrix, its tables, and cases that end in every way and leave nothing behind."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from moe_rl.bench import optimizer, process
from moe_rl.bench.optimizer import CASES, DEFAULT, VARIED
from moe_rl.bench.process import watch
from moe_rl.bench.table import CURVES, JSON, TSV, Row, draw, measure, show, write
from moe_rl.cli import run
from moe_rl.config import host, load_config
from moe_rl.config.keys import keys
from moe_rl.observe.metrics import MetricsWriter
from tests.run_process import alive, environment_of, session_of

ROOT = Path(__file__).parent.parent


# ------------------------------------------------------------------------------------------------------- the matrix
def planned(*overrides: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    def load(*case: str):
        return load_config("dsv4-tiny", [*optimizer.COMMON, *overrides, *case])

    runnable, refused = optimizer._plan(list(CASES), load, 3, Path("runs"))
    assert set(runnable) | set(refused) == set(CASES) and not set(runnable) & set(refused)
    return runnable, refused


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, transformer_engine: bool = True) -> None:
    """A machine with GPUs, as the rules see it."""
    monkeypatch.setattr(host, "gpu_count", lambda: count)
    monkeypatch.setattr(host, "has_package", lambda name: transformer_engine or name != "transformer_engine")


def test_every_case_is_named_after_what_it_sets():
    assert set(DEFAULT) < set(CASES) and len(set(DEFAULT)) == len(DEFAULT) >= 6
    assert len({json.dumps(case) for case in CASES.values()}) == len(CASES) == 2 * 3 * 6
    assert VARIED <= set(keys())
    for name, case in CASES.items():
        config = load_config(None, [f"{key}={str(value).lower()}" for key, value in case.items()])
        words = name.split("-")
        assert config.cluster.gpus_per_node == {"whole": 1, "sharded": 2}[words[0]]
        assert words[1] == f"offload{config.optimizer.offload_fraction:g}"
        assert ("pa" in words, "fp32" in words) == (config.optimizer.precision_aware, config.engine.dtype == "fp32")
        assert ("bf16grad" in words) == (config.optimizer.grad_dtype == "bf16")
        assert ("bf16moments" in words) == (config.optimizer.moment_dtype == "bf16")


def test_the_default_cases_cover_the_axes():
    for axis in (optimizer.SHARDING, optimizer.OFFLOAD, optimizer.PRECISION.keys() - {"bf16-bf16grad", "pa-bf16grad"}):
        assert all(any(f"-{value}-" in f"-{name}-" for name in DEFAULT) for value in axis)
    assert sum(name.endswith("-fp32") for name in DEFAULT) == 6  # what a CPU can run


def test_on_a_cpu_fp32_runs_and_the_others_are_refused_with_the_rule():
    runnable, refused = planned()
    assert set(runnable) == {name for name in CASES if name.endswith("-fp32")}
    assert all("[engine.dtype]" in reason for reason in refused.values())
    kernel = {name for name, reason in refused.items() if "FusedAdam of Transformer Engine" in reason}
    assert kernel == {name for name in CASES if "-offload0-pa" in name}


def test_on_gpus_all_run_but_what_megatron_would_ignore(monkeypatch):
    gpus(monkeypatch, 2)
    runnable, refused = planned("engine.device=cuda")
    assert set(refused) == {n for n in CASES if "moments" in n and "offload0-" not in n}
    assert all("[optimizer.moment_dtype]" in reason for reason in refused.values())
    gpus(monkeypatch, 1)
    assert {n for n, why in planned("engine.device=cuda")[1].items() if "[cluster.gpus]" in why} == {
        n for n in CASES if n.startswith("sharded")
    }
    gpus(monkeypatch, 2, transformer_engine=False)
    assert set(planned("engine.device=cuda")[1]) - set(refused) == {n for n in CASES if "-offload0-pa" in n}


def test_ranks_follow_the_layout_and_steps_the_bound():
    runnable, _ = planned("layout.pp=2", "trainer.steps=2")
    assert "cluster.gpus_per_node=4" in runnable["sharded-offload0-fp32"]
    assert "cluster.gpus_per_node=2" in runnable["whole-offload0-fp32"]
    assert all("trainer.steps=2" in each for each in runnable.values())
    assert all("trainer.steps=3" in each for each in planned()[0].values())
    runnable, refused = planned("layout.ep=2")  # experts are spread over data-parallel ranks
    assert set(runnable) == {n for n in CASES if n.startswith("sharded") and n.endswith("fp32")}
    assert all("[layout.ep]" in refused[n] for n in CASES if n.startswith("whole"))


@pytest.mark.parametrize(
    ("arguments", "rule", "says"),
    [
        ("--cases whole-offload0-fp31", "bench.case", "nearest: whole-offload0-fp32"),
        ("--task grop", "bench.task", "nearest: grpo"),
        ("--max-step 0", "bench.max_step", "at least 1"),
        ("--case-timeout nan", "bench.timeout", "--case-timeout is nan"),
        ("optimizer.offload_fraction=1", "bench.key", "choose the cases with --cases"),
        ("--out used", "bench.out", "already holds results"),
        ("--out a_file", "bench.out", "is a file"),
        ("model.path=nowhere", "model.path", "does not exist"),
        ("dsv4-tiny engine.device=cuda", "engine.device", "no GPU"),
        ("reward.name=exakt", "reward.name", "exact"),
        ("data.prompts_per_step=9999", "data.batch", ""),
        ("layout.ppp=2", "config.unknown_key", "nearest: layout.pp"),
    ],
)
def test_wrong_input_starts_nothing(arguments, rule, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host, "gpu_count", lambda: 0)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / TSV).write_text("")
    (tmp_path / "a_file").write_text("")
    assert run(["bench", "optimizer", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert f"[{rule}]" in error and says in error and "  fix: " in error and error.count("error: ") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a_file", "used"]


def test_only_refused_cases_are_rows_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(host, "gpu_count", lambda: 0)
    command = [
        "--cases",
        "whole-offload1-bf16,whole-offload0-pa,whole-offload1-bf16",
        "--out",
        str(tmp_path / "new" / "out"),
    ]
    assert run(["bench", "optimizer", "rollout.n=4", *command]) == 0
    rows = list(csv.DictReader((tmp_path / "new" / "out" / TSV).open(), delimiter="\t"))
    assert [(row["case"], row["status"]) for row in rows] == [
        ("whole-offload1-bf16", "refused"),
        ("whole-offload0-pa", "refused"),
    ]
    assert (
        "[optimizer.precision_aware]" in rows[1]["error"] and "[optimizer.precision_aware]" in capsys.readouterr().out
    )
    assert not (tmp_path / "new" / "out" / CURVES).exists()


# -------------------------------------------------------------------------------------------------------- the table
def a_run(directory: Path, steps: int) -> Path:
    """The metrics of a run whose numbers say their step."""
    directory.mkdir()
    with MetricsWriter(directory, tensorboard=False) as writer:
        for step in range(1, steps + 1):
            loss = math.nan if step == 4 else step / 10
            values = {"reward/accuracy": step / 8, "actor/loss": loss, "actor/grad_norm": 1.0, "time/update": step}
            values |= {"tokens/per_second": 2.0**step, "memory/host_peak_gib": 3.0, "memory/gpu_peak_gib": 0.0}
            writer.write(step, values)
    return directory


def test_what_is_measured(tmp_path):
    row = Row("whole-offload0-fp32", "ok")
    measure(row, a_run(tmp_path / "seven", 7))
    assert (row.steps, row.score, row.loss) == (7, 5 / 8, 0.7)  # the last five are 3 to 7
    assert (row.tokens_per_s, row.update_s) == (2.0**5, 5.0)  # without the first two
    assert (row.workers_host_gib, row.gpu_reserved_gib, row.reward) == (3.0, None, None)
    for steps, (score, loss, tokens) in {
        1: (1 / 8, 0.1, 2.0),
        2: (1.5 / 8, 0.2, 4.0),
        4: (2.5 / 8, None, 12.0),
    }.items():
        row = Row("cut")
        measure(row, a_run(tmp_path / str(steps), steps))
        assert (row.steps, row.score, row.loss, row.tokens_per_s) == (steps, score, loss, tokens)
    row = Row("none")
    measure(row, tmp_path / "nowhere")
    assert (row.steps, row.score, row.curves) == (0, None, {})


def rows_to_show(tmp_path: Path) -> list[Row]:
    good = Row("whole-offload0-fp32", "ok", seconds=30.5, host_gib=1.25)
    measure(good, a_run(tmp_path / "run", 6))
    dead = Row(
        "sharded-offload0-fp32", "killed SIGKILL", error="no message; last\tline:\n [step] 1", log="x/output.log"
    )
    return [good, dead, Row("whole-offload1-pa", "refused", error="a [rule]: b"), Row("left")]


def test_files_hold_the_same_and_are_replaced_at_once(tmp_path):
    rows = rows_to_show(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    write(out, rows[:1], {"command": "x"})
    write(out, rows, {"command": "moe-rl bench optimizer", "hardware": {"gpus": []}})
    assert sorted(p.name for p in out.iterdir()) == [JSON, TSV]
    table = list(csv.DictReader((out / TSV).open(), delimiter="\t"))
    stored = json.loads((out / JSON).read_text())
    assert stored["command"] == "moe-rl bench optimizer" and "Ray" in stored["columns"]["host_gib"]
    assert set(stored["columns"]) == set(stored["rows"][0]) == set(table[0]) | {"curves"}
    assert [Row(**row) for row in stored["rows"]] == rows
    assert [row["status"] for row in table] == ["ok", "killed SIGKILL", "refused", "not run"]
    assert float(table[0]["score"]) == 0.5 and table[1]["score"] == "" and table[1]["error"].endswith("line: [step] 1")


def test_the_terminal_shows_every_case_and_why(tmp_path):
    text = io.StringIO()
    show(rows_to_show(tmp_path), Console(file=text, width=60))
    lines = text.getvalue().splitlines()
    assert lines[1].split()[:4] == ["whole-offload0-fp32", "ok", "6", "0.5000"] and "1.25" in lines[1]
    assert lines[2].split()[:4] == ["sharded-offload0-fp32", "killed", "SIGKILL", "-"]
    assert "killed SIGKILL: no message" in text.getvalue() and "(see x/output.log)" in text.getvalue()
    assert "refused: a [rule]: b" in text.getvalue()


def test_the_curves_have_a_line_for_each_case(tmp_path, monkeypatch):
    from moe_rl.observe import curves

    figures = []
    monkeypatch.setattr(curves, "_png", lambda figure, png=curves._png: figures.append(figure) or png(figure))
    rows = rows_to_show(tmp_path)
    rows[3] = Row("left", "ok")
    measure(rows[3], a_run(tmp_path / "short", 3))
    draw(tmp_path, rows)
    assert (tmp_path / CURVES).read_bytes().startswith(b"\x89PNG")
    panels = {axes.get_title(): axes for axes in figures[0].axes}
    assert set(panels) == {
        "reward/accuracy",
        "actor/loss",
        "actor/grad_norm",
        "tokens/per_second",
        "memory/host_peak_gib",
    }
    for axes in panels.values():
        assert [line.get_label() for line in axes.get_lines()] == ["whole-offload0-fp32", "left"]
    assert list(panels["actor/loss"].get_lines()[0].get_xdata()) == [1, 2, 3, 5, 6]  # the NaN is left out


def test_the_documented_table_is_the_stored_one():
    stored = json.loads((ROOT / "benchmarks/results/bench_optimizer_cpu.json").read_text())
    rows = [Row(**row) for row in stored["rows"]]
    assert [row.case for row in rows] == list(DEFAULT)
    text, document = io.StringIO(), (ROOT / "docs/optimizers.md").read_text()
    show(rows, Console(file=text))
    for line in text.getvalue().splitlines()[: len(rows) + 1]:
        assert f"\n    {line.strip()}\n" in document
    first, *others = (row.curves for row in rows if row.status == "ok")
    for curves in others:
        assert curves["reward/accuracy"] == first["reward/accuracy"]
        for key in ("actor/loss", "actor/grad_norm"):
            assert curves[key] == pytest.approx(first[key], rel=3e-4)


# ---------------------------------------------------------------------------------------------------- the processes
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('here', flush=True); time.sleep(60)"
)
PARENT = f"""import subprocess, sys, time
for own in (True, False):
    print(subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], start_new_session=own).pid, flush=True)
time.sleep(60)"""


def watched(tmp_path: Path, code: str, timeout_s: float, asked=lambda: False) -> tuple[process.Ended, list[str]]:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    ended = watch([sys.executable, "-c", code], tmp_path / "log", scratch, timeout_s, asked)
    return ended, (tmp_path / "log").read_text().split()


def test_a_command_that_ends(tmp_path):
    block = "import os, time; block = b'x' * (200 << 20); time.sleep(1.5); print(os.environ['TMPDIR'])"
    ended, said = watched(tmp_path, block, 60)
    assert (ended.code, ended.cut, said) == (0, "", [str(tmp_path / "tmp")])
    assert 1.5 < ended.seconds < 30 and 0.19 < ended.host_gib < 0.35
    assert optimizer._status(ended) == "ok"
    (tmp_path / "tmp").rmdir()
    ended, _ = watched(tmp_path, "import os; os.kill(os.getpid(), 9)", 60)
    assert optimizer._status(ended) == "killed SIGKILL"
    assert optimizer._status(ended._replace(code=3)) == "failed exit 3"


@pytest.mark.parametrize("cut", ["timed out", "interrupted"])
def test_a_command_that_is_cut_leaves_no_process(tmp_path, monkeypatch, cut):
    """Though this process ignores interrupts, as one started by `nohup … &` does."""
    monkeypatch.setattr(process, "CLEAR_S", 5.0)
    began = time.monotonic()
    wait = 6.0 if cut == "timed out" else 60.0
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended, said = watched(tmp_path, PARENT, wait, lambda: wait == 60.0 and time.monotonic() - began > 6.0)
    signal.signal(signal.SIGINT, before)
    children = [int(word) for word in said if word.isdigit()]
    assert (ended.cut, len(children)) == (cut, 2) and "KeyboardInterrupt" in said
    assert optimizer._status(ended) == cut and not any(alive(pid) for pid in children)


def test_a_command_that_ignores_the_interrupt_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE_S", 0.5)
    ended, said = watched(tmp_path, STUBBORN, 1.5)
    assert said == ["here"] and (ended.code, ended.cut) == (-signal.SIGKILL, "timed out")


def test_a_killed_benchmark_takes_its_case_with_it(tmp_path):
    code = f"""import sys; from pathlib import Path; from moe_rl.bench.process import watch
watch([sys.executable, "-c", {STUBBORN!r}], Path("log"), Path("."), 60, lambda: False)"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as bench:
        while not (tmp_path / "log").is_file() or "here" not in (tmp_path / "log").read_text():
            time.sleep(0.05)
        [case] = psutil.Process(bench.pid).children()
        bench.kill()
    case.wait(10)
    assert not alive(case.pid)


# ------------------------------------------------------------------------------------------------------- real cases
class Bench:
    """A started `moe-rl bench optimizer` of small steps, and what its cases start."""

    def __init__(self, out: Path, *arguments: str) -> None:
        self.out, self.drivers, self.ray = out, set[int](), set[str]()
        small = ["data.prompts_per_step=4", "rollout.n=4", "algorithm.minibatches=2"]
        command = [sys.executable, "-m", "moe_rl.cli", "bench", "optimizer", *small, "--out", str(out), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def driver(self, case: str, steps: int) -> psutil.Process:
        """The driver of a case, once its Ray session is there and a number of steps done."""
        while True:
            assert self.process.poll() is None, self.process.stdout.read()
            done = sum(len(f.read_text().splitlines()) for f in self.out.glob(f"{case}-*/run/metrics.jsonl"))
            for driver in psutil.Process(self.process.pid).children():
                with suppress(psutil.Error):
                    words = " ".join(" ".join(p.cmdline()) for p in driver.children(recursive=True))
                    ray = set(re.findall(r"/tmp/moe_rl_\w+", words))
                    self.drivers.add(driver.pid)
                    self.ray |= ray
                    if ray and done >= steps and case in " ".join(driver.cmdline()):
                        return driver
            time.sleep(0.1)

    def left(self) -> list[object]:
        """Processes of the cases, and directories that they should have removed."""
        pids = (int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit())
        processes = (p for p in pids if session_of(p) in self.drivers or f"TMPDIR={self.out}" in environment_of(p))
        directories = [*self.out.glob("*/tmp"), *self.out.glob("*/run/checkpoints"), *map(Path, self.ray)]
        return [p for p in processes if alive(p)] + [d for d in directories if d.exists()]


@pytest.mark.slow
@pytest.mark.alone
def test_a_case_that_is_killed_is_a_row_and_the_rest_goes_on(tmp_path):
    cases = ["whole-offload0-fp32", "sharded-offload0-fp32", "whole-offload0-pa", "sharded-offload1-fp32"]
    bench = Bench(tmp_path / "out", "--cases", ",".join(cases), "--max-step", "2")
    bench.driver(cases[0], 0)
    bench.driver(cases[1], 1).kill()
    bench.driver(cases[3], 0)
    text, _ = bench.process.communicate(timeout=200)
    assert bench.process.returncode == 0 and bench.left() == []
    stored = json.loads((bench.out / JSON).read_text())
    first, killed, refused, sharded = rows = [Row(**row) for row in stored["rows"]]
    assert [row.case for row in rows] == cases
    assert [row.status for row in rows] == ["ok", "killed SIGKILL", "refused", "ok"]
    assert [row.steps for row in rows] == [2, 1, None, 2] and "[optimizer.precision_aware]" in refused.error
    for row in (killed, sharded):  # neither sharding nor offload changes what is learnt
        for key in ("reward/accuracy", "reward/mean"):
            assert row.curves[key] == first.curves[key][: row.steps]
        for key in ("actor/loss", "actor/grad_norm"):
            assert row.curves[key] == pytest.approx(first.curves[key][: row.steps], rel=1e-3, abs=1e-6)
    assert all(
        row.tokens_per_s > 0 and 0.5 < row.host_gib < 20 and row.workers_host_gib > 0.5 for row in (first, sharded)
    )
    assert "killed SIGKILL" in text and (bench.out / killed.log).is_file() and (bench.out / CURVES).is_file()
    assert stored["versions"]["megatron-core"] == "0.19.2" and stored["revision"]


@pytest.mark.slow
@pytest.mark.alone
def test_a_terminated_benchmark_ends_its_case_and_writes_what_is_known(tmp_path):
    cases = ["whole-offload0-fp32", "whole-offload1-fp32"]
    bench = Bench(tmp_path / "out", "--cases", ",".join(cases))
    bench.driver(cases[0], 1)
    os.killpg(bench.process.pid, signal.SIGTERM)
    os.killpg(bench.process.pid, signal.SIGTERM)  # an impatient user
    bench.process.communicate(timeout=100)
    assert bench.process.returncode == 130 and bench.left() == []
    rows = list(csv.DictReader((bench.out / TSV).open(), delimiter="\t"))
    assert [row["status"] for row in rows] == ["interrupted", "not run"] and int(rows[0]["steps"]) >= 1


@pytest.mark.slow
@pytest.mark.alone
def test_a_case_that_takes_too_long_is_a_row_and_ctrl_c_ends_the_next(tmp_path):
    cases = ["whole-offload0-fp32", "whole-offload1-fp32"]
    bench = Bench(tmp_path / "out", "--cases", ",".join(cases), "--case-timeout", "8")
    bench.driver(cases[0], 0)
    bench.driver(cases[1], 0)
    os.killpg(bench.process.pid, signal.SIGINT)
    os.killpg(bench.process.pid, signal.SIGINT)
    text, _ = bench.process.communicate(timeout=100)
    assert bench.process.returncode == 130 and bench.left() == []
    late, cut = csv.DictReader((bench.out / TSV).open(), delimiter="\t")
    assert (late["status"], cut["status"]) == ("timed out", "interrupted")
    assert 8.0 < float(late["seconds"]) < 12.0 and "timed out" in text
