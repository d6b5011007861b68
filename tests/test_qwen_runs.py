"""Whole runs of the shipped Qwen recipes: trainer processes in tensor and expert parallelism, a rollout process, GRPO."""

from __future__ import annotations

import json
import re
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_rl import GRPOTrainer, load_config
from moe_rl.cli import run
from moe_rl.config.load import ASSETS
from moe_rl.data.tokenizer import load_tokenizer
from tests.short_runs import read
from tests.small_qwen import token_logprobs

SMALL = ["data.prompts_per_step=4", "rollout.n=4", "trainer.steps=2", "trainer.validate_every=0", "checkpoint.every=1"]


def test_a_run_in_tensor_parallelism_scores_alike_and_resumes_in_another_layout(tmp_path):
    """Two steps at TP2 x EP2; the checkpoint scored in one process; one more step from it at PP2."""
    config = load_config("qwen3-moe-tiny", [*SMALL, "observe.tensorboard=false"])
    assert GRPOTrainer(config, run_dir=tmp_path / "run").fit() == 0
    metrics = read(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2]
    assert all(line["mismatch/pearson_prob"] > 0.999999 for line in metrics)
    tokens = [[115, 111, 114, 116, 32, 53, 52, 61, 52, 53, 257], [7, 7], [9]]
    (tmp_path / "tokens.jsonl").write_text("".join(json.dumps({"tokens": t}) + "\n" for t in tokens))
    scored = []
    for name, keys in (("tp2", []), ("one", ["layout.tp=1", "layout.ep=1", "cluster.gpus_per_node=1"])):
        out = tmp_path / f"{name}.jsonl"
        assert (
            run(["score", str(tmp_path / "run"), "--tokens", str(tmp_path / "tokens.jsonl"), "--out", str(out), *keys])
            == 0
        )
        scored.append([line["logprobs"] for line in read(out)])
    for a, b in zip(*scored, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    other = [*SMALL, "trainer.steps=3", "layout.tp=1", "layout.ep=1", "layout.pp=2", "observe.tensorboard=false"]
    assert GRPOTrainer(load_config("qwen3-moe-tiny", other), run_dir=tmp_path / "run").fit() == 0
    assert [line["step"] for line in read(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("name", ["qwen2-tiny", "qwen3-moe-tiny"])
def test_transformers_loads_the_shipped_model_and_it_answers(name):
    """The starting model knows enough to be rewarded, and too little to be done."""
    torch.set_num_threads(1)
    model, info = AutoModelForCausalLM.from_pretrained(
        ASSETS / "models" / name, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    encode = load_tokenizer(ASSETS / "models" / name).encode
    right, wrong = (torch.tensor([*encode(f"sort 5241={answer}"), 257]) for answer in (1245, 5555))
    with torch.no_grad():
        good, bad = (token_logprobs(model.eval(), t)[-5:].sum() for t in (right, wrong))
    assert bad < good - 3 and -3 < good < -0.05


@pytest.mark.slow
@pytest.mark.parametrize("name, engine", [("qwen2-tiny", "transformers"), ("qwen3-moe-tiny", "vllm")])
def test_grpo_improves_the_reward(name, engine, tmp_path):
    """With vLLM also: the trainer replays its experts, and its death in the middle of a rollout loses nothing."""
    vllm = engine == "vllm"
    keys = ["rollout.engine=vllm", "rollout.router_replay=R3"] if vllm else []
    config = load_config(name, ["trainer.steps=20", "observe.tensorboard=false", *keys])
    if vllm:
        threading.Thread(target=_kill_vllm, args=(tmp_path / "run",), daemon=True).start()
    assert GRPOTrainer(config, run_dir=tmp_path / "run").fit() == 0
    metrics = read(tmp_path / "run" / "metrics.jsonl")
    accuracy = [line["eval/accuracy"] for line in metrics if "eval/accuracy" in line]
    print(name, accuracy)
    assert accuracy[-1] > accuracy[0] + 0.25
    assert all(line["mismatch/pearson_prob"] > 0.999999 for line in metrics)
    assert [line.get("replay/coverage") for line in metrics] == [1.0 if vllm else None] * 20
    assert metrics[-1].get("rollout/restarts") == (1 if vllm else None)
    assert all(line["response/aborted_ratio"] == 0.0 for line in metrics)


def _kill_vllm(run_dir):
    """SIGKILL for vLLM's own processes, below the rollout's, in the third step."""
    while not (run_dir / "metrics.jsonl").exists() or len(read(run_dir / "metrics.jsonl")) < 2:
        time.sleep(0.01)
    worker = int(re.findall(r"process (\d+) on", (run_dir / "logs" / "rollout_0.log").read_text())[0])
    time.sleep(0.1)
    for process in psutil.Process(worker).children(recursive=True):
        if "resource_tracker" not in " ".join(process.cmdline()):
            process.kill()
