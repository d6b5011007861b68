"""Which worker ended the run, told by real processes of a local Ray that die, raise and hang; and what a session leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from moe_rl.errors import RunFailed, UserError
from moe_rl.trainer.faults import collect, missing, tail
from moe_rl.trainer.session import Session
from tests.run_process import alive, seeded

pytestmark = [pytest.mark.slow, pytest.mark.alone]


class Worker:
    """Does one thing at a time, as the run's workers do."""

    def process(self) -> int:
        return os.getpid()

    def give(self, value: Any) -> Any:
        return value

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self) -> None:
        time.sleep(600)

    def refuse(self) -> None:
        raise UserError("layout.world", "the layout does not fit", "", "Change it.")

    def stumble(self) -> None:
        raise ZeroDivisionError("in the third layer")

    def lose_peer(self, process: int) -> None:
        """Fail as a rank does whose peer is gone: at once, over the closed connection."""
        while alive(process):
            time.sleep(0.001)
        raise RuntimeError("Connection closed by peer")


class NeverBorn(Worker):
    def __init__(self) -> None:
        raise ImportError("no module named tensor_engine")


class Workers:
    """Named workers of this test session's Ray, started when first asked for, each with a log."""

    def __init__(self, logs: Path) -> None:
        self.directory, self.actors, self.logs = logs, {}, {}

    def __call__(self, name: str, kind: type = Worker) -> Any:
        if name not in self.actors:
            self.actors[name] = ray.remote(kind).options(name=name, num_cpus=1, max_restarts=0).remote()
            self.logs[name] = self.directory / f"{name}.log"
            self.logs[name].write_text(f"{name} says hello\n")
        return self.actors[name]

    def forget(self, name: str) -> None:
        ray.kill(self.actors.pop(name))
        del self.logs[name]
        while not missing([name]):
            time.sleep(0.01)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    session = Session()
    session.start(num_cpus=8, log_to_driver=False, logging_level="ERROR", object_store_memory=100 * 2**20)
    found = Workers(tmp_path_factory.mktemp("logs"))
    ray.get([found("trainer_0").process.remote(), found("trainer_1").process.remote()])
    yield found
    session.end()
    assert not session.path.exists()


def failure(calls: dict[str, Any], workers: Workers, **options: Any) -> tuple[RunFailed, float]:
    """What `collect` raises, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(RunFailed) as caught:
        collect(calls, workers.logs, **{"timeout_s": 60.0, "doing": "updating", **options})
    return caught.value, time.monotonic() - began


def test_results_come_by_name(workers: Workers) -> None:
    calls = {name: workers(name).give.remote(name.upper()) for name in ("trainer_0", "trainer_1")}
    results = collect(calls, workers.logs, timeout_s=60.0, doing="updating")
    assert results == {"trainer_0": "TRAINER_0", "trainer_1": "TRAINER_1"}


def test_a_death_is_named_with_its_log(workers: Workers) -> None:
    calls = {"trainer_0": workers("trainer_0").give.remote(0), "victim": workers("victim").die.remote()}
    fault, seconds = failure(calls, workers)
    workers.forget("victim")
    assert fault.rule == "worker.died" and fault.what == "victim died while updating"
    assert "victim says hello" in fault.log_tail and "victim.log" in fault.fix
    assert seconds < 30


def test_the_dead_is_named_and_not_the_peers_that_failed_with_it(workers: Workers) -> None:
    process = ray.get(workers("victim").process.remote())
    calls = {
        "trainer_0": workers("trainer_0").lose_peer.remote(process),
        "trainer_1": workers("trainer_1").lose_peer.remote(process),
        "victim": workers("victim").hang.remote(),
    }
    time.sleep(0.5)
    os.kill(process, signal.SIGKILL)
    fault, seconds = failure(calls, workers)
    workers.forget("victim")
    assert fault.what == "victim died while updating"
    assert seconds < 30


def test_a_death_among_those_that_nobody_waits_for_is_noticed(workers: Workers) -> None:
    process = ray.get(workers("victim").process.remote())
    calls = {"sleeper": workers("sleeper").hang.remote()}
    os.kill(process, signal.SIGKILL)
    fault, seconds = failure(calls, workers, doing="generating")
    workers.forget("victim"), workers.forget("sleeper")
    assert fault.what == "victim died while generating"
    assert seconds < 30


def test_a_death_in_an_argument_is_not_blamed_on_the_receiver(workers: Workers) -> None:
    calls = {"trainer_0": workers("trainer_0").give.remote(workers("victim").die.remote())}
    fault, _ = failure(calls, workers, doing="taking new weights")
    workers.forget("victim")
    assert fault.what == "victim died while taking new weights"


def test_a_worker_that_cannot_be_built_says_why(workers: Workers) -> None:
    calls = {"stillborn": workers("stillborn", NeverBorn).process.remote()}
    fault, _ = failure(calls, workers, doing="starting")
    workers.forget("stillborn")
    assert fault.what == "stillborn died while starting"
    assert fault.why == "ImportError: no module named tensor_engine"


def test_an_exception_is_named_and_its_traceback_goes_to_the_log(workers: Workers) -> None:
    calls = {"trainer_0": workers("trainer_0").give.remote(0), "trainer_1": workers("trainer_1").stumble.remote()}
    fault, seconds = failure(calls, workers)
    assert fault.rule == "worker.raised"
    assert fault.what == "trainer_1 failed while updating: ZeroDivisionError: in the third layer"
    assert "in stumble" in fault.log_tail and "\x1b" not in fault.log_tail
    assert "in stumble" in workers.logs["trainer_1"].read_text()
    assert seconds < 30


def test_a_users_error_crosses_whole_and_before_others(workers: Workers) -> None:
    calls = {"trainer_0": workers("trainer_0").stumble.remote(), "trainer_1": workers("trainer_1").refuse.remote()}
    with pytest.raises(UserError) as caught:
        collect(calls, workers.logs, timeout_s=60.0, doing="starting")
    assert (caught.value.rule, caught.value.fix) == ("layout.world", "Change it.")


def test_silence_is_named_after_the_limit(workers: Workers) -> None:
    calls = {"trainer_0": workers("trainer_0").give.remote(0), "sleeper": workers("sleeper").hang.remote()}
    fault, seconds = failure(calls, workers, timeout_s=3.0)
    workers.forget("sleeper")
    assert fault.rule == "worker.silent" and "no answer from sleeper in 3 s while updating" in fault.what
    assert "sleeper says hello" in fault.log_tail
    assert 3.0 <= seconds < 30.0


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"".join(b"line %d\n" % i for i in range(100)) + b"\xff\n")
    assert tail(log, 3).splitlines() == ["    line 98", "    line 99", "    \ufffd"]
    assert "No such file" in tail(tmp_path / "none")


# -------------------------------------------------------------------------------------------------------- the session
DRIVER = """
import signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
import ray
from moe_rl.trainer.session import Session
class Worker:
    def process(self):
        import os
        return os.getpid()
session = Session()
try:
    session.start(num_cpus=3, log_to_driver=False, logging_level="ERROR", object_store_memory=100 * 2**20)
    worker = ray.remote(Worker).options(name="trainer_0").remote()
    print(session.path, int(ray.cluster_resources()["CPU"]), ray.get(worker.process.remote()), flush=True)
    while not asked:
        time.sleep(0.01)
    time.sleep(4)  # what the signal ended would be gone by now
    print("asked", ray.get(worker.process.remote()), flush=True)
finally:
    session.end()
"""


class Driver:
    """Another process with a session of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_until_ready(self) -> Driver:
        path, cpus, worker = self.read().split()
        self.path, self.cpus, self.worker = Path(path), int(cpus), int(worker)
        return self

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def others(self) -> list[int]:
        """Living processes of its session of the operating system, it aside."""
        pids = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]
        return [p for p in pids if p != self.process.pid and alive(p) and _session(p) == self.process.pid]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


@pytest.fixture
def driver(workers: Workers) -> Iterator[Driver]:
    """A second session, while that of `workers` runs."""
    found = Driver().wait_until_ready()
    yield found
    found.process.kill()
    found.process.wait()


def test_a_second_session_is_apart_and_goes_whole(workers: Workers, driver: Driver) -> None:
    assert driver.cpus == 3 and ray.cluster_resources()["CPU"] == 8
    assert missing(["trainer_0"]) == []  # its worker of the same name is not this session's
    driver.process.send_signal(signal.SIGTERM)  # to the handler that was set before Ray was started
    assert driver.read().split() == ["asked", str(driver.worker)]
    assert driver.process.wait(30) == 0
    assert driver.others() == [] and not driver.path.exists()


def test_its_processes_outlive_a_signal_to_the_whole_group(driver: Driver) -> None:
    os.killpg(driver.process.pid, signal.SIGTERM)
    assert driver.read().split() == ["asked", str(driver.worker)]
    assert driver.process.wait(30) == 0
    assert driver.others() == [] and not driver.path.exists()


def test_nothing_outlives_a_killed_driver_by_more_than_seconds(driver: Driver) -> None:
    assert len(driver.others()) >= 5
    driver.process.kill()
    driver.process.wait()
    deadline = time.monotonic() + 10
    while (driver.others() or driver.path.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert driver.others() == [] and not driver.path.exists()


def test_an_interrupt_while_ray_starts_ends_it_cleanly() -> None:
    driver = Driver()
    while len(driver.others()) < 5:  # Ray's servers: next this process connects to them
        time.sleep(0.005)
    time.sleep(seeded("interrupt").uniform(0.0, 1.0))
    os.killpg(driver.process.pid, signal.SIGINT)
    _, text = driver.process.communicate(timeout=60)
    assert driver.process.returncode == -signal.SIGINT and "KeyboardInterrupt" in text, text
    assert driver.others() == []


def test_a_long_temporary_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's sockets would have paths that the kernel refuses."""
    long = tmp_path / ("long" * 10)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    session = Session()
    session.end()
    assert session.path.parent == Path("/tmp") and not session.path.exists()
