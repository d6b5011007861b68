"""scripts/setup_env.sh: does nothing when nothing changed, and tells what is missing in one message."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = ("bash", "dirname", "cat", "sha256sum", "cut", "df", "awk", "flock", "env", "tail", "rm")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout's set-up files, and a directory `tools` that holds a shell's tools but no Python and no uv."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup_env.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tools").mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found, name
        (tmp_path / "tools" / name).symlink_to(found)
    return tmp_path


def setup(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script where neither a home directory, nor a Python on the path, nor a package index can be found."""
    clean = {"PATH": str(checkout / "tools"), "HOME": str(checkout), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    command = ["bash", "scripts/setup_env.sh"]
    return subprocess.run(command, cwd=checkout, env=clean | environment, capture_output=True, text=True, timeout=120)


def stamp(checkout: Path) -> None:
    """What a finished set-up leaves: a Python 3.12 in .venv and the digest of what it was made of."""
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    made_of = f"{checkout}\n" + (checkout / "pyproject.toml").read_text() + (checkout / "constraints.txt").read_text()
    digest = subprocess.run(["sha256sum"], input=made_of, capture_output=True, text=True, check=True).stdout.split()[0]
    (checkout / ".venv" / ".installed").write_text(digest + "\n")


def test_a_second_call_does_nothing(checkout: Path):
    stamp(checkout)
    done = setup(checkout)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_python_it_says_how_to_get_one(checkout: Path):
    if any(Path(p).exists() for p in ("/usr/local/bin/python3.12", "/opt/python")):
        pytest.skip("this machine has a Python 3.12 outside the path")
    done = setup(checkout)
    assert done.returncode == 1
    assert "no Python 3.12 found" in done.stderr and "pyenv install 3.12" in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_python_that_is_not_3_12_is_refused(checkout: Path):
    done = setup(checkout, MOE_RL_PYTHON="/bin/false")
    assert done.returncode == 1 and "MOE_RL_PYTHON=/bin/false is no Python 3.12" in done.stderr


def test_without_an_index_it_fails_with_the_log(checkout: Path):
    done = setup(checkout, MOE_RL_PYTHON=getattr(sys, "_base_executable", sys.executable))
    assert done.returncode == 1
    assert "fetching the installer failed" in done.stderr and "package index" in done.stderr
    assert not (checkout / ".venv" / ".installed").exists()


def test_a_changed_pin_installs_anew(checkout: Path):
    stamp(checkout)
    with (checkout / "constraints.txt").open("a") as file:
        file.write("# another pin\n")
    done = setup(checkout)
    assert done.returncode == 1 and "fetching the installer" in done.stdout  # there is no index here
    assert not (checkout / ".venv" / ".installed").exists()
