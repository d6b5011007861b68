"""Short real runs of the shipped tiny model through the Python API, and what they leave."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl import GRPOTrainer, load_config
from moe_rl.config.load import ASSETS

MODEL = ASSETS / "models" / "dsv4-tiny"
PROMPTS, N = 4, 4
SMALL = [
    f"data.prompts_per_step={PROMPTS}",
    f"rollout.n={N}",
    "trainer.steps=2",
    "trainer.validate_every=0",
    "optimizer.warmup_steps=0",
    "observe.tensorboard=false",
    f"observe.samples_per_step={PROMPTS * N}",
]
ONE = ["layout.pp=1", "layout.ep=1", "cluster.gpus_per_node=1"]


@dataclass(frozen=True)
class Result:
    """`metrics[k]` and `samples[k]` are those of step k + 1; the samples of a prompt stand side by side."""

    code: int
    run_dir: Path
    metrics: list[dict[str, Any]]
    samples: list[list[dict[str, Any]]]


def short_run(run_dir: Path, *overrides: str, layout: Sequence[str] = ONE, **objects: Any) -> Result:
    """`objects` go to GRPOTrainer: reward, dataset, validation."""
    config = load_config("dsv4-tiny", [*SMALL, *layout, *overrides])
    code = GRPOTrainer(config, run_dir=run_dir, **objects).fit()
    metrics = read(run_dir / "metrics.jsonl")
    lines = read(run_dir / "samples.jsonl")
    samples = [grouped([line for line in lines if line["step"] == m["step"]]) for m in metrics]
    return Result(code, run_dir, metrics, samples)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def grouped(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A step's lines, one of each group first in the file, ordered by group."""
    prompts = list(dict.fromkeys(line["prompt_id"] for line in lines))
    return sorted((dict(line) for line in lines), key=lambda line: prompts.index(line["prompt_id"]))


def initial_logprobs(samples: Sequence[Mapping[str, Any]], temperature: float = 1.0) -> list[np.ndarray]:
    """transformers' log-probs, float64 [R] each, of the responses under the shipped weights, each sequence alone."""
    import torch
    from transformers import AutoModelForCausalLM

    from moe_rl.data.tokenizer import load_tokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer, rows = load_tokenizer(MODEL), []
    for sample in samples:
        prompt = list(tokenizer.encode(sample["prompt"]))
        ids = torch.tensor([prompt + sample["tokens"]])
        with torch.no_grad():
            logprobs = (model(ids).logits.float() / temperature).log_softmax(-1)[0, :-1]
        rows.append(logprobs.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :, 0].double().numpy())
    return rows
