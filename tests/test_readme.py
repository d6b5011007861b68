"""What the README tells a new user to type works as it stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moe_rl.cli import run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def block(after: str) -> str:
    """The first indented block below a line of the README, indentation removed."""
    lines = README.split(after, 1)[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("    "))
    end = next(i for i in range(start, len(lines)) if lines[i] and not lines[i].startswith("    "))
    return "\n".join(line[4:] for line in lines[start:end]).strip() + "\n"


def test_ones_own_task_passes_the_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = block("## Your own task")
    data, judge, command = (part.strip() for part in re.split(r"^# .*\n|^(?=\.venv)", text, flags=re.M)[1:])
    assert len((judge + command).splitlines()) < 10
    Path("capitals.jsonl").write_text(data + "\n")
    Path("held_out.jsonl").write_text(data.replace("France", "Peru").replace("Paris", "Lima") + "\n")
    Path("judge.py").write_text(judge + "\n")
    words = shlex.split(command.replace("\\\n", " "))
    assert words[0] == ".venv/bin/moe-rl"
    code = run([*words[1:], "--dry-run"])
    output = capsys.readouterr()
    assert code == 0, output.err
    assert f"data: 1 prompts of {tmp_path}/capitals.jsonl" in output.out and "reward: judge:reward" in output.out


def test_every_option_and_file_it_names_exists(capsys: pytest.CaptureFixture[str]):
    for command in ("train", "score", "report", "explain"):
        assert run([command, "--help"]) == 0
    helps = capsys.readouterr().out
    listed = block("## The command")
    for option in set(re.findall(r"--[a-z-]+", listed)):
        assert option in helps, option
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target
    for target in re.findall(r"^make [a-z-]+", block("## Start"), flags=re.M):
        assert f"\n{target.split()[1]}:" in (ROOT / "Makefile").read_text()


@pytest.mark.slow
def test_the_python_example_trains(tmp_path: Path):
    code = block("From Python:").replace("trainer.steps=20", "trainer.steps=2")
    assert "trainer.steps=2" in code
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    [metrics] = tmp_path.glob("runs/*/metrics.jsonl")
    assert len(metrics.read_text().splitlines()) == 2
