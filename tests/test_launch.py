"""Batch jobs: what is rendered for each profile, and that the template is sound bash. tests/test_slurm.py runs them.

`python -m tests.test_launch` writes tests/golden anew.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moe_rl.cli import run
from moe_rl.config import load_config
from moe_rl.config.environment import VARIABLES
from moe_rl.config.keys import keys
from moe_rl.errors import UserError
from moe_rl.launch import render
from moe_rl.launch.node import meet, versions
from moe_rl.models.family import read_facts

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
CASES = {  # the two runs of verl PR #8383
    "h100": ["rollout.max_response=4096"],
    "gb200": ["layout.pp=16", "layout.ep=16", "rollout.max_response=8192", "data.template=Q: {question}"],
}
ENVIRONMENT = {"SAVE_FREQ": "5", "SAVE_CONTENTS": "model,extra", "RUN_DIR": "/shared/my run", "HOME": "/root"}


def job(profile: str) -> str:
    config = load_config("dsv4-pro", CASES[profile], hw=profile, environment=ENVIRONMENT)
    arguments = ["dsv4-pro", "--hw", profile, *CASES[profile]]
    return render.render(config, arguments, ["--time=08:00:00"], ENVIRONMENT)


def head(text: str) -> str:
    """What differs from job to job: sbatch's options and the settings."""
    options = re.findall(r"^#SBATCH .*\n", text, re.M)
    return "".join(options) + text.partition(render.BEGIN)[2].partition(render.END)[0]


@pytest.mark.parametrize("profile", CASES)
def test_the_rendered_job_is_the_golden_one(profile: str):
    text = job(profile)
    assert head(text) == (GOLDEN / f"{profile}.txt").read_text()
    assert text.partition(render.END)[2] == render.TEMPLATE.read_text().partition(render.END)[2]  # one source of truth
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_the_repository_and_the_package_have_one_template():
    assert (ROOT / "launchers" / "slurm" / "train.sbatch").resolve() == render.TEMPLATE.resolve()


def test_shell_scripts_pass_shellcheck():
    if not shutil.which("shellcheck"):
        pytest.skip("needs shellcheck (apt-get install shellcheck)")
    subprocess.run(["shellcheck", render.TEMPLATE, ROOT / "tests" / "slurm" / "cluster.sh"], check=True)


def test_an_argument_reaches_the_run_as_it_was_typed():
    odd = ['data.template={question} it\'s $HOME `x` "q"', "trainer.steps=3"]
    text = render.settings(load_config("dsv4-tiny", odd), ["dsv4-tiny", *odd])
    script = f"{text}printf '%s\\n' \"${{arguments[@]}}\""
    shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == ["dsv4-tiny", *odd]


def test_roles_name_the_stages_of_every_node():
    config = load_config("dsv4-pro", hw="h100")
    lines = render.roles(config, read_facts(config.model.path)).splitlines()
    assert len(lines) == 1 + 64 + 512
    nodes = [line for line in lines if line.startswith("  node ")]
    assert nodes[0].startswith("  node 0: ranks 0-7, stage 0 (E") and nodes[0].endswith(", head and driver")
    assert nodes[1].startswith("  node 1: ranks 8-15, stage 0 (E") and "ranks 504-511, stage 31 (t" in nodes[63]
    assert lines[-1] == "    rank 511: stage 31, dp 15, experts 336-383"


def test_a_dry_run_shows_job_plan_and_roles(capsys: pytest.CaptureFixture[str]):
    nodes = ["cluster.nodes=2", "cluster.gpus_per_node=2", "rollout.replicas=3"]
    assert run(["launch", "dsv4-tiny", "--hw", "cpu", *nodes, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n" in shown and "nodes=2\ncpus=4\ngpus=\n" in shown
    assert "host memory by phase" in shown
    assert "  node 1: ranks 2-3, stage 1 (" in shown and "rollout_1\n    rank 2: stage 1, dp 0, experts 0-" in shown


def test_roles_name_every_part_of_a_replica_over_several_nodes():
    shape = ["rollout.engine=vllm", "rollout.tp=8", "rollout.dp=8", "rollout.ep=64", "rollout.replicas=8"]
    config = load_config("dsv4-pro", shape, hw="h100")
    lines = render.roles(config, read_facts(config.model.path)).splitlines()
    ends = [line.rpartition(", rollout_")[2] for line in lines if line.startswith("  node ")]
    assert ends[:3] == ["0, head and driver", "0_1", "0_2"] and ends[8] == "1" and ends[63] == "7_7"
    assert "cpus=9\n" in render.settings(config, [])


def test_a_job_that_could_not_run_is_not_rendered(capsys: pytest.CaptureFixture[str]):
    assert run(["launch", "dsv4-tiny", "layout.pp=3"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "[layout.world]" in shown.err


BREAKS = [*map(chr, range(32)), "\x7f", "\x85", "\u2028", "\u2029"]


@pytest.mark.parametrize("option", ["", "-", "--", " --time=1", "time=1", "id", *(f"--comment=a{c}id" for c in BREAKS)])
def test_an_option_that_would_leave_its_line_is_refused(option: str, capsys: pytest.CaptureFixture[str]):
    assert run(["launch", "dsv4-tiny", f"--sbatch={option}"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "[launch.sbatch]" in shown.err and repr(option) in shown.err


def test_nothing_in_an_option_is_run(tmp_path: Path):
    mark = tmp_path / "ran"
    odd = [f"--comment={c}" for c in (f"a;touch {mark}", f"$(touch {mark})", f"`touch {mark}`", f"a\\' \" &>{mark}")]
    text = render.render(load_config("dsv4-tiny"), ["dsv4-tiny"], odd)
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH --comment")]
    assert lines == [f"#SBATCH {o}" for o in odd]
    subprocess.run(["bash", "-c", text.partition(render.BEGIN)[0].partition("set -")[0]], check=True)
    assert not mark.exists()


def test_without_slurm_a_job_is_not_submitted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    assert run(["launch", "dsv4-tiny", "--submit"]) == 2
    assert "[launch.slurm]" in capsys.readouterr().err


def test_a_node_with_other_versions_says_so_and_the_driver_hears_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    head = {"address": "127.0.0.1:1", "name": "n1", "versions": versions() | {"torch": "1.0"}}
    (tmp_path / "head.json").write_text(json.dumps(head))
    monkeypatch.setenv("MOE_RL_EXCHANGE", str(tmp_path))
    monkeypatch.setenv("MOE_RL_HEAD", "n1")
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest keeps its own handlers
    assert run(["node", "--cpus", "1"]) == 2
    with pytest.raises(UserError) as caught:
        meet(tmp_path)
    assert (
        caught.value.rule == "node.versions" and "nodes n2 and n1" in caught.value.what and "1.0" in caught.value.what
    )


# ---------------------------------------------------------------------------------------------- environment variables
def test_every_variable_sets_a_key():
    assert set(VARIABLES.values()) <= set(keys())


def test_variables_stand_between_files_and_command_line(tmp_path: Path):
    file = tmp_path / "more.yaml"
    file.write_text("checkpoint: {every: 2, contents: [model]}\ntrainer: {steps: 7}\n")
    config = load_config(
        "dsv4-tiny", ["trainer.steps=9"], files=[file], environment=ENVIRONMENT | {"TOTAL_STEPS": "8", "GRAD_DTYPE": ""}
    )
    assert (config.checkpoint.every, config.checkpoint.contents) == (5, ["model", "extra"])
    assert config.origin("checkpoint.every") == "environment SAVE_FREQ"
    assert (config.trainer.steps, config.origin("trainer.steps")) == (9, "command line")
    assert config.origin("optimizer.grad_dtype") == "default"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in CASES:
        (GOLDEN / f"{name}.txt").write_text(head(job(name)))
