"""What the README tells a new user to type works as it stands there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from moe_rl.cli import app, run
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


def parser() -> dict[str, set[str]]:
    """Every command that is shown, with its long options; of two names of one, both."""
    root = get_command(app)

    def walk(command: Any, name: str) -> Iterator[tuple[str, set[str]]]:
        if hasattr(command, "commands"):
            for word, below in command.commands.items():
                if not below.hidden:
                    yield from walk(below, f"{name} {word}".strip())
        else:
            yield name, {o for p in command.params for o in p.opts if o.startswith("--")}

    return dict(walk(root, ""))


def test_its_list_of_commands_is_the_parsers():
    """Each command with each of its options, and no other; --hw and --file stand in one sentence for all."""
    text = block("## The command").replace("\n               ", "")
    listed = {}
    for line in text.splitlines():
        words = line.removeprefix("moe-rl ").split(" ")
        name = " ".join(words[:2] if words[0] == "bench" else words[:1])
        listed[name] = set(re.findall(r"--[a-z-]+", line))
    known, shared = parser(), {"--hw", "--file"}
    assert {n: o - shared for n, o in listed.items()} == {n: o - shared for n, o in known.items()}
    without = [name for name, options in known.items() if not shared <= options]
    assert f"All but {' and '.join(f'`{n}`' for n in without)} take `key=value ...`, `--hw` and `--file`" in README


def test_every_option_and_file_it_names_exists():
    options = set().union(*parser().values())
    for option in set(re.findall(r"`(--[a-z-]+)", README)):
        assert option in options, option
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
