"""A process of its own that scores tokens with vLLM: the CPU shim of megatron-core must not be where vLLM is.

python -m tests.vllm_process MODEL TOKENS OUT      (files as `moe-rl score` reads and writes them)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": f"{ROOT}:{ROOT / 'patches'}",
}


def vllm_logprobs(model: Path, tokens: list[list[int]], scratch: Path) -> list[list[float]]:
    """vLLM's float32 log-probs of each sequence after its first token."""
    source, out = scratch / "vllm_tokens.jsonl", scratch / "vllm_logprobs.jsonl"
    source.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in tokens))
    command = [sys.executable, "-m", "tests.vllm_process", str(model), str(source), str(out)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line)["logprobs"] for line in out.read_text().splitlines()]


def main(model: str, source: str, out: str) -> None:
    from vllm import LLM, SamplingParams

    rows = [json.loads(line)["tokens"] for line in Path(source).read_text().splitlines()]
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
    )
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = llm.generate([{"prompt_token_ids": row} for row in rows], asked, use_tqdm=False)
    with Path(out).open("w") as file:
        for row, result in zip(rows, found, strict=True):
            pairs = zip(row[1:], result.prompt_logprobs[1:], strict=True)
            file.write(json.dumps({"logprobs": [entry[token].logprob for token, entry in pairs]}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
