"""`moe-rl bench train`: its FLOPs by hand, and its figures from a real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from tests.tiny_v4 import tiny_config


def test_flops_by_hand():
    """One sliding layer of one sequence of three tokens with a window of two: five pairs."""
    from moe_rl.trainer.speed import step_flops

    arch = DeepseekV4Arch.from_dict(
        tiny_config(num_hidden_layers=1, layer_types=None, compress_rates=None, compress_ratios=[0], sliding_window=2)
    )
    h, moe, d, heads, vocab, hc = 32, 16, 16, 4, 61, 4
    attention = h * 24 + 24 * heads * d + h * d + 24 * heads * d // 2 + h * 24  # q_a, q_b, kv, o_a (two groups), o_b
    feed_forward = 3 * h * moe * (1 + 2) + 8 * h  # shared and two of eight experts, router
    mixes = 2 * (2 + hc) * hc * hc * h + hc * hc * h
    weights = attention + feed_forward + mixes + vocab * h
    assert step_flops(arch, [3]) == pytest.approx(6 * 3 * weights + 12 * 5 * heads * d)
    assert step_flops(replace(arch, sliding_window=3), [3, 3]) == pytest.approx(
        2 * (6 * 3 * weights + 12 * 6 * heads * d)
    )


def test_figures_of_the_tiny_recipe(tmp_path: Path):
    out = tmp_path / "found.json"
    command = (
        "-m moe_rl.cli bench train dsv4-tiny --hw cpu --layers 4 --length 24 --sequences 3 --steps 1 --profile --out"
    )
    env = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run([sys.executable, *command.split(), str(out)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())["result"]
    assert found["tokens"] == 72 and 0 < found["update"]["mfu"] < 1
    assert all(found[part]["seconds"] > 0 for part in ("update", "log_probs", "bare loop"))
    assert {"Attention", "MixtureOfExperts", "rest"} < set(found["forward by part, s"])
    assert "traceEvents" in json.loads(out.with_suffix(".trace.json").read_text())
