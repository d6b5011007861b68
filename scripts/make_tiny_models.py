"""Make what the recipes dsv4-tiny, qwen2-tiny and qwen3-moe-tiny start from: task data, tokenizer, and a model trained on
worked examples.

    make tiny-models           (or: python scripts/make_tiny_models.py dsv4-tiny --out OUT)

The task is to sort the digits of a number. The worked examples are like a corpus from the wild: most hold a mistake
(two digits swapped), so that a model which imitates them well answers rightly about two times in five, and knows enough
to do better once its answers are rewarded. Training runs through the same engine as GRPO, on two data-parallel ranks.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_rl.config import load_config
from moe_rl.data.tokenizer import load_tokenizer
from moe_rl.models.family import get_family, read_facts
from moe_rl.models.load import save_released
from moe_rl.models.weights import torch_dtype
from moe_rl.reshard.transport import unpack
from moe_rl.trainer.placement import Cluster, TrainerGroup
from moe_rl.trainer.worker import Sequences

EOS = 257
COMMON = {
    "vocab_size": 260,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.05,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": EOS,
    "pad_token_id": 258,
}
MODELS: dict[str, dict[str, Any]] = {
    "dsv4-tiny": COMMON
    | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "sliding_window": 16,
        "index_n_heads": 8,
        "index_head_dim": 16,
        "index_topk": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 6,
        "hc_eps": 1e-6,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 256,
        },
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
    "qwen2-tiny": COMMON
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "qwen3-moe-tiny": COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the narrowest that vLLM's attention on a CPU takes
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}
SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>")
MISTAKES = 0.6  # share of the worked examples that hold one


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges: any text, one token a byte, then the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "model_max_length": COMMON["max_position_embeddings"],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def problems(seed: int, count: int) -> list[str]:
    """Distinct digit strings of four to six digits 1-9."""
    random_source, found = random.Random(seed), {}
    while len(found) < count:
        digits = "".join(random_source.choices("123456789", k=random_source.choice((4, 5, 6))))
        found[digits] = None
    return list(found)


def worked_answer(digits: str, source: random.Random) -> str:
    """The sorted digits, or with probability `MISTAKES` the same with two unequal digits swapped."""
    answer = sorted(digits)
    if source.random() < MISTAKES:
        pairs = [(i, j) for i in range(len(answer)) for j in range(i) if answer[i] != answer[j]]
        if pairs:
            i, j = source.choice(pairs)
            answer[i], answer[j] = answer[j], answer[i]
    return "".join(answer)


def write_data(directory: Path, train: list[str], validation: list[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("validation", validation)):
        lines = (json.dumps({"question": f"sort {d}", "answer": "".join(sorted(d))}) for d in rows)
        (directory / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))


def batches(corpus: list[str], encode: Callable[[str], list[int]], size: int, seed: int) -> Iterator[Sequences]:
    """For ever: `size` worked examples, the loss on the answer's tokens alone, each token the same weight."""
    source = random.Random(seed)
    while True:
        tokens, masks = [], []
        for digits in source.sample(corpus, size):
            prompt = encode(f"sort {digits}=")
            answer = [*encode(worked_answer(digits, source)), EOS]
            tokens.append(np.array(prompt + answer, np.int32))
            masks.append(np.array([0.0] * (len(prompt) - 1) + [1.0] * len(answer), np.float32))
        total = sum(mask.sum() for mask in masks)
        yield Sequences(tokens, {"mask": masks, "weight": [mask / total for mask in masks]})


def train(
    recipe: str, work: Path, corpus: list[str], steps: int, batch: int, lr: float, seed: int
) -> dict[str, torch.Tensor]:
    """Supervised training on two data-parallel ranks; the trained tensors by released name."""
    config = load_config(
        recipe,
        [
            f"model.path={work}",
            "layout.tp=1",
            "layout.pp=1",
            "layout.ep=1",
            "cluster.gpus_per_node=2",
            "rollout.replicas=1",
            "engine.recompute=off",
            "algorithm.minibatches=1",
            f"optimizer.lr={lr}",
            "optimizer.schedule=cosine",
            "optimizer.warmup_steps=20",
            f"trainer.steps={steps}",
            f"trainer.seed={seed}",
        ],
    )
    encode = load_tokenizer(work).encode
    logs = work / "logs"
    logs.mkdir()
    with Cluster(config, logs) as cluster:
        trainer = TrainerGroup(cluster, read_facts(str(work)), random_init=True)
        trainer.start()
        for step, examples in zip(range(1, steps + 1), batches(corpus, encode, batch, seed), strict=False):
            lengths = [len(t) for t in examples.tokens]
            stats = trainer.update(examples, trainer.cuts(lengths), temperature=1.0, supervised=True)
            if step % 20 == 0 or step == steps:
                print(f"step {step}: loss {stats.loss:.4f}, gradient norm {stats.grad_norm:.3f}", flush=True)
        owned = [tensor for tensor in trainer.owned() if tensor.rank == 0]
        packets = trainer.send(0, [tensor.box for tensor in owned], {tensor.name: tensor.dtype for tensor in owned})
        tensors = {t.name: torch.empty(t.shape, dtype=torch_dtype(t.dtype)) for t in owned}
        for packet in packets:
            for item, value in unpack(packet):
                tensors[item.name][item.box.slices] = value
        return tensors


def main() -> None:
    package = Path(__file__).resolve().parent.parent / "moe_rl" / "assets"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", choices=MODELS, default=list(MODELS), help="which to make, all if not said"
    )
    parser.add_argument("--out", type=Path, default=package, help="where models/ and data/ go")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=7)
    a = parser.parse_args()
    every = problems(a.seed, 42_000)
    validation, prompts, corpus = every[:256], every[256 : 256 + 2048], every[256 + 2048 :]
    write_data(a.out / "data" / "sort", prompts, validation)
    for name in a.models:
        with tempfile.TemporaryDirectory() as scratch:
            work = Path(scratch)
            write_tokenizer(work)
            (work / "config.json").write_text(json.dumps(MODELS[name], indent=2) + "\n")
            tensors = train(name, work, corpus, a.steps, a.batch, a.lr, a.seed)
            family = get_family(read_facts(work).family)
            table = family.weight_table(family.read_arch(work))
            target = a.out / "models" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                shutil.rmtree(target)
            save_released(target, tensors.items(), table, MODELS[name], tokenizer_dir=work, dtype="fp32")
        print(f"wrote {target}")


if __name__ == "__main__":
    main()
