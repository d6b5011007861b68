"""Make the weights that the recipe dsv4-mini starts from: DeepSeek-V4 of real layout, small enough for one GPU.

    python scripts/make_mini_model.py OUT                          one GPU, two minutes
    python scripts/make_mini_model.py OUT --tiny --train-s 20      a CPU: the same layer kinds, narrow

The engine learns from a fixed seed, on the worked examples of scripts/make_tiny_models.py (sorting digits, most with a
mistake), until the time is up; then the weights are encoded as a release: FP8 linears, MXFP4 experts, and OUT holds
them with config.json and tokenizer. How many steps fit depends on the GPU, so two makings differ; both start GRPO.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "patches")]
from moe_rl.config.host import free_port  # noqa: E402
from moe_rl.config.load import ASSETS, load_config  # noqa: E402
from scripts.make_tiny_models import batches, problems  # noqa: E402

SHIPPED = ASSETS / "models" / "dsv4-mini"
SEED, HELD_BACK = 7, 2304  # problems(SEED) below HELD_BACK are the shipped task's prompts (scripts/make_tiny_models.py)
PER_MICRO_BATCH = 16
NARROW = {
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 40,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 48,
    "o_groups": 2,
    "o_lora_rank": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "compress_ratios": [0, 4, 8, 4],
    "sliding_window": 8,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 2,
    "max_position_embeddings": 1024,
}


def make(target: Path, seconds: float, tiny: bool = False) -> dict[str, Any]:
    """Train from random weights for `seconds` and write the encoded model to the new directory `target`.

    Returns steps, first and last loss (nats per token).
    """
    from moe_rl.convert.job import convert
    from moe_rl.convert.plan import Request
    from moe_rl.data.tokenizer import load_tokenizer
    from moe_rl.models.load import save_released

    config = json.loads((SHIPPED / "config.json").read_text()) | (NARROW if tiny else {})
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        drawn, trained = Path(scratch) / "drawn", Path(scratch) / "trained"
        drawn.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(SHIPPED / name, drawn / name)
        (drawn / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        engine = _engine(drawn)
        examples = batches(problems(SEED, 42_000)[HELD_BACK:], load_tokenizer(drawn).encode, 32 if tiny else 128, SEED)
        losses = _learn(engine, examples, seconds)
        tensors = [(name, part.view) for name, (part,) in engine.weights().items()]
        table = engine.family.weight_table(engine.arch)
        save_released(trained, tensors, table, config, tokenizer_dir=drawn, dtype="bf16")
        engine.close()
        convert(Request(trained, target, "released"), workers=1)
    return {"steps": len(losses), "loss_first": losses[0], "loss_last": losses[-1]}


def _engine(model: Path) -> Any:
    """The trainer's engine in this process, random weights: bf16 on a GPU, else fp32."""
    gpu = torch.cuda.is_available()
    if not gpu:
        from moe_patches import cpu

        cpu.install()
    from moe_rl.engine.engine import Engine

    keys = [f"model.path={model}", "cluster.gpus_per_node=1", "engine.recompute=off", f"trainer.seed={SEED}"]
    config = load_config(None, [*keys, *(("engine.device=cuda", "engine.dtype=bf16") if gpu else ())])
    return Engine.create(config, 0, 1, f"127.0.0.1:{free_port()}", train=True, random_init=True)


def _learn(engine: Any, examples: Any, seconds: float) -> list[float]:
    """Losses of the steps done; the learning rate falls with the time that is left."""
    from moe_rl.engine.batch import MicroBatch

    began, losses = time.perf_counter(), []
    while not losses or (spent := time.perf_counter() - began) < seconds:
        left = 1.0 if not losses else 1 - spent / seconds
        lr = 1e-3 * min(1.0, (len(losses) + 1) / 20) * max(0.05, left)
        batch = next(examples)
        micro_batches = []
        for start in range(0, len(batch.tokens), PER_MICRO_BATCH):
            rows = range(start, min(start + PER_MICRO_BATCH, len(batch.tokens)))
            fields = [{name: values[i] for name, values in batch.fields.items()} for i in rows]
            micro_batches.append(MicroBatch.pack([batch.tokens[i] for i in rows], fields, list(rows)))
        losses.append(engine.update(micro_batches, _imitate, temperature=1.0, lr=lr).loss)
        if len(losses) % 20 == 1:
            print(f"step {len(losses)}: loss {losses[-1]:.3f}, {time.perf_counter() - began:.0f} s", flush=True)
    return losses


def _imitate(logprobs: torch.Tensor, _: Any, fields: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict]:
    return -(logprobs * fields["weight"]).sum(), {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory to make")
    parser.add_argument("--train-s", type=float, default=120, help="seconds of training (default %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="narrow layers, for a CPU")
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} exists: choose another directory or remove it")
    if not torch.cuda.is_available() and not options.tiny:
        parser.error("there is no GPU: the real widths take hours on a CPU; --tiny makes a narrow model")
    found = make(options.out, options.train_s, options.tiny)
    print(f"wrote {options.out}: {found['steps']} steps, loss {found['loss_first']:.3f} -> {found['loss_last']:.3f}")


if __name__ == "__main__":
    main()
