"""The rollout engine for real runs: vLLM's asynchronous engine in processes of its own, on weights that only the trainer
provides.

This process keeps the weights of the last update in a file in memory, in checkpoint layout: the books of an update are
kept there (`Receiver`), and vLLM's workers load from it.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch

from moe_rl.config.host import free_port, resolve_device
from moe_rl.config.schema import Config
from moe_rl.errors import RunFailed, UserError
from moe_rl.models.family import Model, get_family, read_config, read_facts, special_ids
from moe_rl.reshard.plan import Held
from moe_rl.reshard.receive import Receiver, place, placed_parts
from moe_rl.reshard.transport import Packet
from moe_rl.rollout.engine import ENGINE_LOST, Completion, Request, check_requests, no_weights
from moe_rl.rollout.vllm_args import kernel_options, replica_nodes

_DEADLINE = 0.9  # of rollout.timeout_s: completions cut short come back before the caller gives the worker up
_EXTENSION = "moe_rl.rollout.vllm_worker.WeightExtension"
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine has a process all the same; on a CPU its worker stays inside it
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


class VllmEngine:
    """One replica of tp x dp ranks; a `RolloutEngine`.

    vLLM starts from config.json alone and gets its weights by `receive`. Requests in flight are finished before an update,
    new ones wait for its end, and the prefix cache is dropped with the old weights. A completion therefore has one version.

    Completions are drawn by vLLM's sampler, seeded by the request; another batch may change them where kernels are not
    batch-invariant (on a GPU).
    """

    def __init__(
        self,
        source: Model,
        *,
        max_tokens: int,
        tp: int = 1,
        dp: int = 1,
        ep: int = 1,
        dtype: str = "fp32",
        device: str = "cpu",
        batch_size: int = 256,
        timeout_s: float | None = None,
        hang_s: float = 300.0,
        routed_experts: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Start vLLM on the model that its config.json describes.

        Args:
            source: a model directory, or a run's `model`; its weight files are not read.
            max_tokens: longest sequence, prompt and completion.
            tp, dp, ep: ranks of the replica; `ep` is 1 or tp * dp.
            dtype: "fp32" or "bf16", of what the checkpoint does not quantise.
            device: "cpu" or "cuda".
            batch_size: most sequences decoded at a time by a data-parallel rank.
            timeout_s: seconds that one call of `generate` may take; what is unfinished then is "aborted".
            hang_s: an engine that answers nothing for so long is given up.
            routed_experts: record the experts of every token (`Completion.routed_experts`).
            options: further fields of vLLM's AsyncEngineArgs.

        Raises:
            RunFailed: vLLM does not start.
        """
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        self._facts, self._max_tokens, self._dp = read_facts(source), max_tokens, dp
        self.eos_ids, _ = special_ids(source, self._facts.vocab_size)
        self._timeout_s, self._hang_s = timeout_s, hang_s
        self._scratch = tempfile.TemporaryDirectory(prefix="moe_rl_vllm_")
        model, self._answers = Path(self._scratch.name, "model"), Path(self._scratch.name, "answers")
        model.mkdir()
        self._answers.mkdir()
        family = get_family(self._facts.family)
        config = family.export_config(read_config(source), family.read_arch(source))
        config.setdefault("architectures", [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]])
        (model / "config.json").write_text(json.dumps(config))
        self._arguments = {
            "model": str(model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
            "max_model_len": max_tokens + 1,  # scoring samples one token beyond the sequence
            "max_num_seqs": batch_size,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": _EXTENSION,
            "disable_log_stats": True,
            **({} if tp > 1 else {"distributed_executor_backend": "uni"}),
            **(_cpu_options(max_tokens, batch_size) if device == "cpu" else {}),
            **_layout_options(tp, dp, ep, self._facts.num_experts),
            **({"enable_return_routed_experts": True} if routed_experts and device == "cuda" else {}),
            **(options or {}),
        }
        self._records = routed_experts and device == "cpu"  # vLLM's own recording needs a GPU
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._in_flight, self._updating, self._count = 0, False, 0
        self._turn, self._asking = asyncio.Condition(), asyncio.Lock()
        self._llm: Any = None
        self._processes: list[psutil.Process] = []
        held = self._run(self._start())
        self._staging = _Staging(held)
        self._receiver = Receiver(self._staging.parts, self._staging.held)

    @classmethod
    def from_config(cls, config: Config) -> VllmEngine:
        """The engine that a run's configuration asks for."""
        rollout, device = config.rollout, resolve_device(config.engine.device)
        options: dict[str, Any] = {}
        if device == "cuda":
            options = dict(kernel_options(config, read_facts(config.model, config.model.family)))
            options |= {"gpu_memory_utilization": rollout.gpu_memory_utilization}
            options |= {"kv_cache_dtype": rollout.kv_cache_dtype, "enforce_eager": rollout.enforce_eager}
            if rollout.max_num_batched_tokens:
                options["max_num_batched_tokens"] = rollout.max_num_batched_tokens
        return cls(
            config.model,
            max_tokens=config.data.max_prompt + rollout.max_response,
            tp=rollout.tp,
            dp=rollout.dp,
            ep=rollout.ep,
            dtype=config.engine.dtype,
            device=device,
            batch_size=rollout.batch_size,
            timeout_s=_DEADLINE * rollout.timeout_s,
            hang_s=rollout.hang_s,
            routed_experts=rollout.router_replay == "R3",
            options=options,
        )

    # ------------------------------------------------------------------------------------------------------- weights
    @property
    def weight_version(self) -> int:
        """Version of the weights in place; -1 before the first update and after a failed one."""
        return self._receiver.version

    def holdings(self, receiver: int) -> list[Held]:
        """Every tensor that a worker of this replica holds a part of."""
        return self._receiver.holdings(receiver)

    def receive(self, packets: Iterable[Packet], version: int, names: Iterable[str]) -> None:
        """Take one whole weight update, proven twice: in what arrived, and in the live model.

        Raises:
            RunFailed: as `Receiver.finish`; or tensors of the live model were not written.
        """
        self._run(self._receive(packets, version, names))

    async def _receive(self, packets: Iterable[Packet], version: int, names: Iterable[str]) -> None:
        async with self._turn:
            await self._turn.wait_for(lambda: not self._updating)
            self._updating = True
            await self._turn.wait_for(lambda: self._in_flight == 0)
        try:
            for packet in packets:
                self._receiver.stage(packet)
            self._receiver.finish(version, names)
            await self._load(version)
        finally:
            async with self._turn:
                self._updating = False
                self._turn.notify_all()

    async def _load(self, version: int) -> None:
        """Have the workers load what is staged; what they find wrong ends the run."""
        self._receiver.version = -1
        found = await self._ask("weights_update", self._staging.path, pickle.dumps(self._staging.index))
        await self._llm.reset_prefix_cache()
        problems = sorted({problem for worker in found for problem in worker})
        if problems:
            raise RunFailed(
                "rollout.reload",
                f"after an update {'; '.join(problems)}",
                "vLLM would sample from weights that are partly old.",
                "Report it with the versions of vLLM and moe-rl.",
            )
        self._receiver.version = version

    # -------------------------------------------------------------------------------------------------------- requests
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion for each request, in their order.

        Raises:
            RunFailed: no weights are in place; or vLLM's processes died or hang (`ENGINE_LOST`).
            UserError: a prompt is empty, too long or has tokens outside the vocabulary.
        """
        check_requests(requests, self._facts.vocab_size, self._max_tokens)
        return self._run(self._generate(requests))

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-probs of given tokens; see `RolloutEngine`. Data-parallel rank i % dp scores sequence i."""
        return self._run(self._score(sequences))

    def digests(self) -> dict[str, int]:
        """Digests of the weights as the workers were given them, and of every live parameter and buffer of each rank, in
        the kernels' layout, under vLLM's names."""
        live = enumerate(self._run(self._ask("weights_digest")))
        return self._receiver.digests() | {f"rank {r}: {name}": d for r, found in live for name, d in found.items()}

    @asynccontextmanager
    async def _flight(self) -> AsyncIterator[int]:
        """Keep updates away, once the one that is on has ended; the version in place."""
        async with self._turn:
            await self._turn.wait_for(lambda: not self._updating)
            if self.weight_version < 0:
                raise no_weights()
            self._in_flight += 1
        try:
            yield self.weight_version
        finally:
            async with self._turn:
                self._in_flight -= 1
                self._turn.notify_all()

    async def _generate(self, requests: Sequence[Request]) -> list[Completion]:
        async with self._flight() as version:
            deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
            running = [_Running(request) for request in requests]
            await self._sample(running, deadline)
            if self._records:
                await self._fetch_routing(running)
            return [r.completion(version, self._facts.num_experts) for r in running]

    async def _score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)

        async def one(tokens: list[int], rank: int | None) -> np.ndarray:
            self._count += 1
            prompt, name = {"prompt_token_ids": tokens}, f"{self._count}"
            async for output in self._llm.generate(prompt, asked, name, data_parallel_rank=rank):
                rows = output.prompt_logprobs
            return np.array([row[t].logprob for t, row in zip(tokens[1:], rows[1:], strict=True)], np.float32)

        ranks = [i % self._dp if self._dp > 1 else None for i in range(len(sequences))]
        async with self._flight():
            work = asyncio.gather(*(one(s.tolist(), r) for s, r in zip(sequences, ranks, strict=True)))
            try:
                return list(await asyncio.wait_for(work, self._hang_s))
            except TimeoutError:
                raise self._lost(f"scored nothing in {self._hang_s:.0f} s") from None

    async def _sample(self, running: Sequence[_Running], deadline: float | None) -> None:
        """Sample until all are done or time is up, asking after the engine's life meanwhile."""
        tasks = [asyncio.ensure_future(self._one(r)) for r in running]
        try:
            waiting: set[asyncio.Future] = set(tasks)
            while waiting:
                left = self._hang_s if deadline is None else min(self._hang_s, deadline - time.monotonic())
                done, waiting = await asyncio.wait(waiting, timeout=max(0.0, left), return_when="FIRST_EXCEPTION")
                for task in done:
                    task.result()
                if waiting and deadline is not None and time.monotonic() >= deadline:
                    break
                if waiting:
                    await self._ask("alive")
        finally:
            for task in tasks:
                task.cancel()  # vLLM drops the request of a generator that is closed
            await asyncio.gather(*tasks, return_exceptions=True)
        for r in running:
            r.reason = r.reason or "aborted"

    async def _one(self, r: _Running) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        asked = SamplingParams(
            temperature=r.request.temperature,
            max_tokens=r.request.max_tokens,
            seed=r.request.seed >> 1,  # vLLM's seeds are signed
            stop_token_ids=list(self.eos_ids),
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._count += 1
        r.name = f"{self._count}"
        prompt = {"prompt_token_ids": list(r.request.prompt)}
        async for output in self._llm.generate(prompt, asked, r.name):
            (part,) = output.outputs
            r.routed = getattr(part, "routed_experts", None)
            r.tokens += part.token_ids
            r.logprobs += [entry[token].logprob for token, entry in zip(part.token_ids, part.logprobs, strict=True)]
            if part.finish_reason in ("stop", "length"):
                r.reason = part.finish_reason

    async def _fetch_routing(self, running: Sequence[_Running]) -> None:
        found: dict[str, np.ndarray] = {}
        for worker in await self._ask("routing_take", [r.name for r in running]):
            found.update(worker)
        for r in running:
            r.routed = found.get(r.name)

    # ------------------------------------------------------------------------------------------------------- processes
    async def _start(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Start vLLM; the union of what its workers hold."""
        os.environ.update({name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()})
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        before = set(psutil.Process().children(recursive=True))
        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments))
            started = [p for p in psutil.Process().children(recursive=True) if p not in before]
            self._processes = [p for p in started if "resource_tracker" not in " ".join(p.cmdline())]
            workers = await self._ask("weights_prepare", self._records)
        except Exception as error:
            raise RunFailed("rollout.start", f"vLLM did not start: {error}", "", "See the rollout's log.") from error
        held: dict[str, tuple[tuple[int, ...], str]] = {}
        for worker in workers:
            held.update(worker)
        return held

    def _lost(self, how: str) -> RunFailed:
        """What to raise once vLLM's processes died or answer no more; they are ended."""
        self._receiver.version = -1
        self._stop()
        return RunFailed(
            ENGINE_LOST,
            f"vLLM's engine {how}",
            "It was killed, crashed or hangs; out of memory is the common cause.",
            "See the rollout's log; rollout.max_restarts allows to start it again.",
        )

    def _stop(self) -> None:
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._processes, timeout=10)
        if self._llm is not None:
            self._llm.shutdown()
        self._processes, self._llm = [], None

    def close(self) -> None:
        """End vLLM's processes."""

        async def stop() -> None:
            self._stop()

        self._run(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._scratch.cleanup()

    async def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """What every worker answers."""
        from moe_rl.rollout.vllm_worker import read_answers

        out = () if method == "alive" else (str(self._answers),)
        async with self._asking:
            call = self._llm.collective_rpc(method, args=(*arguments, *out))
            try:
                await asyncio.wait_for(call, self._hang_s)
            except TimeoutError:
                raise self._lost(f"gave no answer to {method} in {self._hang_s:.0f} s") from None
            return read_answers(str(self._answers))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def watched() -> Any:
            from vllm.v1.engine.exceptions import EngineDeadError

            try:
                return await work
            except EngineDeadError as fault:
                raise self._lost("died") from fault

        return asyncio.run_coroutine_threadsafe(watched(), self._loop).result()


class _Running:
    """A request and what was sampled for it so far."""

    def __init__(self, request: Request) -> None:
        self.request, self.name = request, ""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.routed: np.ndarray | None = None
        self.reason: Literal["", "stop", "length", "aborted"] = ""

    def completion(self, version: int, experts: int) -> Completion:
        assert self.reason
        tokens, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
        routed = self.routed
        if routed is not None:
            fed = max(len(self.request.prompt) + len(tokens) - 1, 0)
            routed = routed[:fed].astype(np.uint8 if experts <= 256 else np.int16)
        return Completion(self.request.id, tokens, logprobs, self.reason, version, routed)


class _Staging:
    """A file in memory that holds every tensor of a replica once, in checkpoint layout; it goes with this process."""

    def __init__(self, held: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        self.held = [Held(0, name, tuple(shape), form) for name, (shape, form) in held.items()]
        self.index, size = place(self.held)
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            os.truncate(file.fileno(), max(size, 1))
            self._handle = os.dup(file.fileno())
        self.path = f"/proc/{os.getpid()}/fd/{self._handle}"  # the file has no name: nothing is left of it after a kill
        self.parts = placed_parts(self.index, torch.from_numpy(np.memmap(self.path, np.uint8, mode="r+")))


def _layout_options(tp: int, dp: int, ep: int, num_experts: int) -> dict[str, Any]:
    """vLLM's arguments of a replica on this machine alone."""
    layout: dict[str, Any] = dict(tp=tp, dp=dp, ep=ep, replicas=1, num_experts=num_experts, port=free_port())
    ((node,),) = replica_nodes(_version(), addresses=["127.0.0.1"], gpus_per_node=tp * dp, **layout)
    return dict(node.engine)


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    raise UserError(
        "rollout.vllm",
        "no vLLM is installed here",
        "rollout.engine is vllm.",
        "Run `make setup`; on GPUs the extra `gpu`.",
    )


def _cpu_options(max_tokens: int, batch_size: int) -> dict[str, Any]:
    """What vLLM's CPU build needs: no chunked prefill, which its seeded sampler does not survive, and no graphs."""
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_tokens, batch_size) * 8,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 256 << 20,
    }
