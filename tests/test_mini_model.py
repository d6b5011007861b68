"""scripts/make_mini_model.py: a directory that a run starts from, made whole or not at all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_rl import load_config
from moe_rl.cli import run
from moe_rl.models.family import read_facts

ROOT = Path(__file__).resolve().parent.parent


def make(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/make_mini_model.py", *map(str, arguments)]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_model_is_a_release_that_the_audit_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = make(tmp_path / "model", "--tiny", "--train-s", "1")
    assert done.returncode == 0, done.stderr
    assert run(["audit", str(tmp_path / "model"), "--digests"]) == 0, capsys.readouterr().err
    facts = read_facts(tmp_path / "model")
    names = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    assert facts.family == "deepseek_v4"
    assert {"layers.1.ffn.experts.0.w1.scale", "layers.0.attn.wq_b.scale"} <= names.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # nothing of its scratch is left


def test_what_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    for arguments, says in (((tmp_path, "--tiny"), "exists"), ((tmp_path / "new",), "no GPU")):
        done = make(*arguments)
        assert done.returncode == 2
        assert says in done.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_the_recipe_is_of_real_layout() -> None:
    """Widths that Marlin, FlashMLA and DeepGEMM take, and every kind of layer."""
    config = load_config("dsv4-mini")
    arch = json.loads((Path(config.model.path) / "config.json").read_text())
    assert (arch["head_dim"], arch["num_attention_heads"], arch["expert_dtype"]) == (512, 64, "fp4")
    assert set(arch["compress_ratios"]) == {0, 4, 128}
    assert 0 < arch["num_hash_layers"] < arch["num_hidden_layers"]
    assert (config.rollout.engine, config.rollout.moe_backend, config.rollout.router_replay) == ("vllm", "marlin", "R3")
