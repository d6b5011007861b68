"""`moe-rl bench train`: its FLOPs by hand, and its figures from a real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from moe_rl.config.facts import LayerWidths
from moe_rl.config.flops import Flops, summed
from moe_rl.models.family import read_facts
from tests.tiny_v4 import tiny_config


def test_flops_by_hand(tmp_path: Path):
    """One sliding layer of one sequence of three tokens with a window of two: five pairs."""
    sizes = {"num_hidden_layers": 1, "layer_types": None, "compress_rates": None, "compress_ratios": [0]}

    def flops(window: int) -> Flops:
        (tmp_path / "config.json").write_text(json.dumps(tiny_config(**sizes, sliding_window=window)))
        return Flops.of(read_facts(tmp_path))

    h, moe, d, heads, vocab, hc = 32, 16, 16, 4, 61, 4
    attention = h * 24 + 24 * heads * d + h * d + 24 * heads * d // 2 + h * 24  # q_a, q_b, kv, o_a (two groups), o_b
    feed_forward = 3 * h * moe * (1 + 2) + 8 * h  # shared and two of eight experts, router
    mixes = 2 * (2 + hc) * hc * hc * h + hc * hc * h
    vectors = 3 * h + 24 + d + heads + 2 * ((2 + hc) * hc + 3) + hc + 1  # norms, sinks, bases and scales of the mixes
    weights = attention + feed_forward + mixes + vectors + vocab * h
    assert flops(2).token == 6 * weights
    assert flops(2).sequence(3) == 3 * flops(2).token + 12 * 5 * heads * d
    assert flops(3).sequence(3) == 3 * flops(3).token + 12 * 6 * heads * d


@given(st.integers(0, 300), st.integers(1, 20), st.integers(0, 40))
def test_pairs_are_those_of_a_loop(length, ratio, most):
    assert summed(length, ratio, most) == sum(min(p // ratio, most) for p in range(1, length + 1))


def test_pairs_of_compressed_layers():
    """Window of 2, entries of 2 tokens, one of them chosen: tokens 0..4 see 1, 2, 2, 2, 2 near and 0, 1, 1, 1, 1 far; the
    indexer scores 0 + 1 + 1 + 2 + 2."""
    layer = LayerWidths(window=1, ratio=2, chunked=True, pair_work=7, index_work=4, chosen=1)
    assert Flops(0.0, (layer,)).sequence(5) == 6 * 3 * (9 + 4) + 2 * 4 * 6
    assert Flops(0.0, (replace(layer, chosen=0, index_work=0),)).sequence(5) == 6 * 7 * (9 + 6)
    assert Flops(0.0, (replace(layer, chosen=2),)).sequence(5) == 6 * 3 * (9 + 6), "nothing to choose from"


def test_figures_of_the_tiny_recipe(tmp_path: Path):
    out = tmp_path / "found.json"
    command = "-m moe_rl.cli bench train dsv4-tiny --hw cpu --layers 4 --length 24 --sequences 3 --steps 1 --profile --by-length 36 --out"
    env = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run([sys.executable, *command.split(), str(out)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())["result"]
    assert found["tokens"] == 72 and 0 < found["update"]["mfu"] < 1
    assert 0 < found["update by length"]["36"]["mfu"] < 1
    assert all(found[part]["seconds"] > 0 for part in ("update", "log_probs", "bare loop"))
    assert {"Attention", "MixtureOfExperts", "rest"} < set(found["forward by part, s"])
    assert "traceEvents" in json.loads(out.with_suffix(".trace.json").read_text())
