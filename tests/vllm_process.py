"""Processes of their own for vLLM: the CPU shim of megatron-core must not be where vLLM is. This one scores tokens:

python -m tests.vllm_process MODEL TOKENS OUT      (files as `moe-rl score` reads and writes them)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from moe_rl.errors import MoeRLError
from moe_rl.rollout import vllm_worker

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


class Faulty(vllm_worker.WeightExtension):
    """The worker extension with covers that can be taken off."""

    def take_off(self, cover: str) -> None:
        """`layout`: experts stay in checkpoint layout; `layer`: a layer is not loaded; empty: all covers back."""
        from moe_patches import vllm_cpu

        if not hasattr(self, "whole"):
            self.whole = vllm_cpu.forget_layout, vllm_worker._by_layer
        vllm_cpu.forget_layout, vllm_worker._by_layer = self.whole
        if cover == "layout":
            vllm_cpu.forget_layout = lambda model: 0
        elif cover == "layer":
            vllm_worker._by_layer = lambda *arguments: list(self.whole[1](*arguments))[1:]


class EngineProcess:
    """A `VllmEngine`, or with `part` above 0 a `VllmFollower`, in a process; `call(function, ...)` runs function(engine, ...)
    there. `options` are those of `Replica`."""

    def __init__(self, path: Path, **options: Any) -> None:
        context = get_context("spawn")
        self._end, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, str(path), options))
        self._process.start()
        self.call(None)

    def call(self, function: Callable | None, *arguments: Any) -> Any:
        self._end.send((function, arguments))
        while not self._end.poll(1):
            assert self._process.is_alive(), "the engine's process died"
        good, value = self._end.recv()
        if good:
            return value
        raise value

    def ended(self, timeout_s: float) -> bool:
        """Whether the process has come to its end."""
        self._process.join(timeout_s)
        return not self._process.is_alive()

    def close(self) -> None:
        if self._process.is_alive():
            self.call(_close)
            self._process.join(60)


def _serve(end: Any, path: str, options: dict) -> None:
    from moe_rl.rollout.vllm_engine import VllmEngine
    from moe_rl.rollout.vllm_node import Replica, VllmFollower

    engine: Any = None
    part = options.pop("part", 0)
    replica = Replica(path, **options)
    while True:
        function, arguments = end.recv()
        try:
            engine = engine or (VllmFollower(replica, part, os._exit) if part else VllmEngine(replica))
            end.send((True, function(engine, *arguments) if function else None))
        except MoeRLError as error:
            end.send((False, error))
        except Exception:
            end.send((False, RuntimeError(traceback.format_exc())))
        if function is _close:
            return


def _close(engine: Any) -> None:
    engine.close()


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
