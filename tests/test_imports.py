"""Who imports whom: arrows between the rooms point one way, and the light rooms stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "megatron", "transformers", "ray", "vllm", "matplotlib")
ROOMS = {
    "errors": set(),
    "durable": set(),
    "lifetime": set(),
    "units": set(),
    "config": {"errors", "units"},
    "planner": {"config", "errors"},
    "launch": {"config", "planner", "errors"},
    "preflight": {"config", "planner", "launch", "errors", "units"},
    "grpo": {"errors"},
    "models": {"config", "durable", "errors"},
    "reshard": {"models", "errors", "units"},
    "data": {"config", "errors"},
    "rewards": {"config", "data", "errors"},
    "observe": {"config", "durable", "errors"},
    "rollout": {"config", "durable", "lifetime", "models", "reshard", "errors"},
    "engine": {"config", "models", "errors"},
    "bench": {"config", "durable", "models", "observe", "trainer", "errors"},
}
FORBIDDEN = {  # third-party packages a room must not know
    "config": set(HEAVY),
    "planner": set(HEAVY),
    "launch": set(HEAVY),
    "preflight": set(HEAVY),
    "data": {"torch", "megatron", "ray", "vllm"},
    "rewards": {"torch", "megatron", "transformers", "vllm"},
    "models": {"ray", "vllm"},
    "grpo": set(HEAVY) - {"torch"},
    "reshard": {"megatron", "transformers", "ray", "vllm"},
    "engine": {"ray", "vllm", "transformers"},
    "rollout": {"megatron", "ray"},
    "bench": set(HEAVY),  # it starts runs and holds no memory of its own
}


def imported(file: Path) -> set[str]:
    """Dotted names of all modules a file imports, inside functions too; relative ones resolved."""
    package = file.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(p for p in (base, node.module or "") if p)
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def rooms_of(names: set[str]) -> set[str]:
    return {n.split(".")[1] for n in names if n.startswith("moe_rl.")} & {p.stem for p in (ROOT / "moe_rl").iterdir()}


def files_of(room: str) -> list[Path]:
    single = ROOT / "moe_rl" / f"{room}.py"
    return [single] if single.is_file() else sorted((ROOT / "moe_rl" / room).rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_one_way(room: str):
    files = files_of(room)
    assert files
    wrong = {
        str(f.relative_to(ROOT)): sorted(bad) for f in files if (bad := rooms_of(imported(f)) - ROOMS[room] - {room})
    }
    assert wrong == {}


@pytest.mark.parametrize("room", FORBIDDEN)
def test_rooms_do_not_know_what_is_not_theirs(room: str):
    wrong = {}
    for file in files_of(room):
        packages = {name.split(".")[0] for name in imported(file)}
        if packages & FORBIDDEN[room]:
            wrong[str(file.relative_to(ROOT))] = sorted(packages & FORBIDDEN[room])
    assert wrong == {}


def test_patches_know_nothing_of_moe_rl():
    for file in (ROOT / "patches").rglob("*.py"):
        names = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
        assert not any(name.split(".")[0] == "moe_rl" for name in names), file


LIGHT = "moe_rl, moe_rl.config, moe_rl.planner, moe_rl.launch.node, moe_rl.cli, moe_rl.models.family, moe_rl.models.load, moe_rl.data"


def test_light_rooms_import_without_torch():
    code = f"import sys, {LIGHT}\nprint(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_dry_run_needs_no_torch():
    code = (
        "import sys\nfrom moe_rl.cli import run\nassert run(['train', 'dsv4-tiny', '--dry-run', 'rollout.n=1']) == 2\n"
    )
    code += f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
    assert "[rollout.group]" in done.stderr
