"""How fast one process trains a model with random weights: the engine's log-probs and update, a bare loop, each backend.

FLOPs of a step are those of `config.flops`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_rl.config import Config
from moe_rl.config.flops import Flops
from moe_rl.engine.batch import MicroBatch
from moe_rl.engine.engine import Engine
from moe_rl.engine.parallel import init_distributed
from moe_rl.models.family import get_family, read_facts


def measure(
    config: Config,
    lengths: Sequence[int],
    steps: int,
    *,
    by_length: Sequence[int] = (),
    trace: Path | None = None,
    save: Callable[[dict[str, Any]], object] = lambda found: None,
) -> dict[str, Any]:
    """Seconds, tokens/s and share of the measured matrix rate of a step over sequences of these lengths, on one process.

    Each figure is the median of `steps` after one that does not count. The update is timed again with as many tokens in sequences of each
    length of `by_length`. `trace` gets one update's profile (Chrome format, which Perfetto opens); `save` gets what is found so
    far. Weights are drawn on the device: their values do not matter here.
    """
    facts = read_facts(config.model, config.model.family)
    with tempfile.TemporaryDirectory() as directory:
        parallel = init_distributed(config, facts, 0, 1, f"file://{directory}/store")
    engine = Engine(config, parallel, get_family(facts.family), train=True, reference=False)
    clock, (chunk,) = Clock(engine.parallel.device), engine.chunks
    with torch.no_grad():
        for p in chunk.parameters():
            p.fill_(1.0) if p.ndim == 1 else p.normal_(0, 0.02)
        for name, b in chunk.named_buffers():
            if name.endswith("tid2eid"):
                b.copy_(torch.rand(len(b), engine.arch.num_experts, device=b.device).argsort(1)[:, : b.shape[1]])
    engine.reload_master()
    budget, vocabulary = config.engine.max_tokens_per_micro_batch, engine.arch.vocab_size
    batches = micro_batches(lengths, budget, vocabulary)

    def log_probs() -> None:
        engine.log_probs(batches, temperature=1.0, entropy=True)

    def update(batches: Sequence[MicroBatch] = batches) -> None:
        engine.update(batches, policy_loss, temperature=1.0)

    flops_of = Flops.of(facts).sequence
    rate, tokens, flops = clock.matrix_rate(), sum(lengths), sum(map(flops_of, lengths))
    found: dict[str, Any] = {
        "tokens": tokens,
        "micro_batches": len(batches),
        "tflop": flops / 1e12,
        "matrix_tflops": rate / 1e12,
        "attention": getattr(engine.transformer_config, "attention_note", ""),
    }

    def figures(call: Callable[[], None]) -> dict[str, float]:
        seconds, peak = clock.seconds(call, steps)
        save(found)
        return {"seconds": seconds, "tokens_per_s": tokens / seconds, "peak_gib": peak}

    def lengthwise() -> dict[str, dict[str, float]]:
        rows = {}
        for length in by_length:
            again = [length] * max(1, tokens // length)
            cut = micro_batches(again, max(budget, length), vocabulary)
            rows[str(length)] = row = figures(lambda cut=cut: update(cut))  # type: ignore[misc]
            row["tokens_per_s"] = sum(again) / row["seconds"]
            row["mfu"] = sum(map(flops_of, again)) / row["seconds"] / rate
        return rows

    found["update"] = figures(update)
    found["update"]["mfu"] = flops / found["update"]["seconds"] / rate
    found["log_probs"] = figures(log_probs)
    found["bare loop"] = figures(lambda: bare_step(engine, batches))
    found["update over bare loop"] = found["bare loop"]["seconds"] / found["update"]["seconds"]
    found["log-probs of update"] = found["log_probs"]["seconds"] / found["update"]["seconds"]
    found["forward by part, s"] = clock.parts(chunk, log_probs)
    if trace is not None:
        clock.profile(update, trace)
    found["update by length"] = lengthwise()
    if engine.transformer_config.attention_backend == "triton":
        set_backend(chunk, "plain")
        found["update, plain backend"] = figures(update)
        found["over plain"] = found["update, plain backend"]["seconds"] / found["update"]["seconds"]
        found["update by length, plain backend"] = lengthwise()
    engine.close()
    return found


def micro_batches(lengths: Sequence[int], budget: int, vocabulary: int) -> list[MicroBatch]:
    """Random sequences in order, as many to a micro-batch as its budget of tokens takes, with fields of a policy loss."""
    generator, rows, room = np.random.default_rng(0), [[]], budget  # type: ignore[var-annotated]
    for length in lengths:
        if rows[-1] and length > room:
            rows.append([])
            room = budget
        rows[-1].append(generator.integers(0, vocabulary, length))
        room -= length
    total = sum(lengths) - len(lengths)

    def fields(sequence: np.ndarray) -> dict[str, np.ndarray]:
        n = len(sequence) - 1
        return {"weight": np.full(n, 1 / total), "advantage": generator.normal(size=n)}

    return [MicroBatch.pack(row, [fields(s) for s in row]) for row in rows]


def policy_loss(logprobs: torch.Tensor, entropy: torch.Tensor, fields: dict[str, torch.Tensor]):
    """The policy gradient's loss."""
    return -(logprobs * fields["advantage"] * fields["weight"]).sum(), {}


def bare_step(engine: Engine, batches: Sequence[MicroBatch]) -> None:
    """Forward, backward and optimizer on the same module and data, without the engine around them."""
    assert engine.optimizer is not None
    (model,) = engine._wrapped
    model.zero_grad_buffer()
    for m in (b.to(engine.parallel.device) for b in batches):
        out = model(m.tokens[None], m.packed_sequences(), labels=m.labels[None], temperature=1.0, entropy=True)
        policy_loss(out[0], out[1], m.fields)[0].backward()
    model.finish_grad_sync()
    engine.optimizer.step()


def set_backend(chunk: torch.nn.Module, backend: str) -> None:
    """Let the layers of a chunk or layer run "triton" kernels or the "plain" way, however they were built."""
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    from moe_rl.models.deepseek_v4.attention import Attention
    from moe_rl.models.deepseek_v4.fused_experts import FusedExperts, FusedSharedExpert
    from moe_rl.models.deepseek_v4.hyper import HyperConnection
    from moe_rl.models.deepseek_v4.layers import RMSNorm

    fused = backend == "triton"
    for module in chunk.modules():
        if isinstance(module, (Attention, HyperConnection, RMSNorm)):
            module.backend = backend
        elif isinstance(module, SequentialMLP):
            module.__class__ = FusedExperts if fused else SequentialMLP
        elif isinstance(module, SharedExpertMLP):
            module.__class__ = FusedSharedExpert if fused else SharedExpertMLP


class Clock:
    """Times on one device, everything queued before a reading being done."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.gpu = device, device.type == "cuda"

    def now(self) -> float:
        if self.gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def seconds(self, call: Callable[[], None], steps: int) -> tuple[float, float]:
        """Median seconds of a call, and the GiB allocated at its peak (0 on a CPU)."""
        call()
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(steps):
            start = self.now()
            call()
            times.append(self.now() - start)
        return float(np.median(times)), torch.cuda.max_memory_allocated() / 2**30 if self.gpu else 0.0

    def matrix_rate(self) -> float:
        """FLOPs a second of a large product, bf16 on a GPU and fp32 on a CPU."""
        n, dtype = (8192, torch.bfloat16) if self.gpu else (512, torch.float32)
        a, b = (torch.randn(n, n, device=self.device).to(dtype) for _ in range(2))
        return 2 * n**3 / self.seconds(lambda: (a @ b, None)[1], 10)[0]

    def parts(self, chunk: torch.nn.Module, call: Callable[[], None]) -> dict[str, float]:
        """Seconds in the forward of each kind of module; what is in none of them, log-probs above all, is the rest."""
        found: dict[str, float] = {}
        begun: list[float] = []
        handles = []
        for parent in chunk.layers.values():
            for module in parent.children():

                def end(module, inputs, out) -> None:
                    kind = type(module).__name__
                    found[kind] = found.get(kind, 0.0) + self.now() - begun.pop()

                handles += [
                    module.register_forward_pre_hook(lambda module, inputs: begun.append(self.now())),
                    module.register_forward_hook(end),
                ]
        start = self.now()
        call()
        found["rest"] = self.now() - start - sum(found.values())
        for handle in handles:
            handle.remove()
        return found

    def profile(self, call: Callable[[], None], trace: Path) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.gpu else [])]
        with profile(activities=activities) as found:
            call()
            self.now()
        found.export_chrome_trace(str(trace))
