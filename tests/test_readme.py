"""What the README tells a new user to type works as it stands there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moe_rl.cli import run
from moe_rl.config.keys import keys, sections

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def block(after: str) -> str:
    """The first indented block below a line of the README, indentation removed."""
    lines = README.split(after, 1)[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("    "))
    end = next(i for i in range(start, len(lines)) if lines[i] and not lines[i].startswith("    "))
    return "\n".join(line[4:] for line in lines[start:end]).strip() + "\n"


CAPITALS = """France Paris,Spain Madrid,Italy Rome,Japan Tokyo,China Beijing,India Delhi,Egypt Cairo,Cuba Havana,Chile Santiago,
Kenya Nairobi,Norway Oslo,Poland Warsaw,Greece Athens,Iran Tehran,Iraq Baghdad,Sweden Stockholm,Peru Lima"""


def own_task() -> list[str]:
    """Write the files of "Your own task" into the working directory, with more lines; the words of its command."""
    text = block("## Your own task")
    data, judge, command = (part.strip() for part in re.split(r"^# .*\n|^(?=\.venv)", text, flags=re.M)[1:])
    assert len((judge + command).splitlines()) < 10
    lines = [
        data.replace("France", country).replace("Paris", capital)
        for country, capital in (pair.split() for pair in CAPITALS.split(","))
    ]
    Path("capitals.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    Path("held_out.jsonl").write_text(lines[-1] + "\n")
    Path("judge.py").write_text(judge + "\n")
    words = shlex.split(command.replace("\\\n", " "))
    assert words[0] == ".venv/bin/moe-rl"
    return words[1:]


def test_ones_own_task_passes_the_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = run([*own_task(), "--dry-run"])
    output = capsys.readouterr()
    assert code == 0, output.err
    assert f"data: 16 prompts of {tmp_path}/capitals.jsonl" in output.out and "reward: judge:reward" in output.out


def test_every_option_and_file_it_names_exists(capsys: pytest.CaptureFixture[str]):
    for command in ("train", "score", "report", "explain", "doctor", "convert", "audit", "launch", "bench optimizer"):
        assert run([*command.split(), "--help"]) == 0
    helps = capsys.readouterr().out
    listed = block("## The command")
    for option in set(re.findall(r"--[a-z-]+", listed)):
        assert option in helps, option
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target
    for target in re.findall(r"^make [a-z-]+", block("## Start"), flags=re.M):
        assert f"\n{target.split()[1]}:" in (ROOT / "Makefile").read_text()


def test_every_key_and_metric_that_the_guides_name_exists():
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    for guide in ("from_verl.md", "scale.md"):
        text = (ROOT / "docs" / guide).read_text()
        rows = [line.split(" | ", 1)[1] if line.startswith("| ") else line for line in text.splitlines()]
        ours = "\n".join(rows) if guide == "from_verl.md" else text
        for name in re.findall(r"`((?:{})\.[a-z_.]+)(?:=[^`]*)?`".format("|".join(sections())), ours):
            assert name in keys() or name.startswith("reward.args"), f"{guide}: {name}"
        for name in re.findall(r"`((?:reward|response|actor|mismatch|kl|eval|time|memory|correction)/[a-z_]+)`", ours):
            assert f"`{name}`" in metrics, f"{guide}: {name}"
        for target in re.findall(r"\]\(([^)#]+)", text):
            assert (ROOT / "docs" / target).exists(), f"{guide}: {target}"


@pytest.mark.slow
def test_ones_own_task_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "moe_rl.cli", *own_task(), "trainer.steps=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    [run_dir] = tmp_path.glob("runs/dsv4-tiny-*")
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [m["eval/samples"] for m in metrics] == [1.0, 1.0]
    for line in map(json.loads, (run_dir / "samples.jsonl").read_text().splitlines()):
        assert line["prompt"].startswith("capital of ") and line["prompt"].endswith("? ")
        assert line["reward"] == float(line["response"].strip().lower() == line["answer"].lower())


@pytest.mark.slow
def test_the_python_example_trains(tmp_path: Path):
    code = block("From Python:").replace("trainer.steps=20", "trainer.steps=2")
    assert "trainer.steps=2" in code
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    [metrics] = tmp_path.glob("runs/*/metrics.jsonl")
    assert len(metrics.read_text().splitlines()) == 2
