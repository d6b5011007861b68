"""The rollout engine for real runs: vLLM's asynchronous engine in processes of its own, on weights that only the trainer
provides. `vllm_node` has what each node of a replica is started with and keeps; this is what leads them."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import numpy as np
import psutil

from moe_rl.config.schema import Config
from moe_rl.errors import RunFailed
from moe_rl.lifetime import end_children_with_this
from moe_rl.models.family import special_ids
from moe_rl.reshard.plan import Held
from moe_rl.reshard.receive import Receiver
from moe_rl.reshard.transport import Packet
from moe_rl.rollout.engine import ENGINE_LOST, Completion, Request, check_requests, no_weights
from moe_rl.rollout.vllm_node import ENVIRONMENT, NodeWeights, Replica, Weights

_DEADLINE = 0.9  # of rollout.timeout_s: completions cut short come back before the caller gives the worker up


class VllmEngine:
    """One replica of tp x dp ranks; a `RolloutEngine`.

    vLLM starts from config.json alone and gets its weights by `receive`. Requests in flight are finished before an update,
    new ones wait for its end, and the prefix cache is dropped with the old weights. A completion therefore has one version.

    Completions are drawn by vLLM's sampler, seeded by the request; another batch may change them where kernels are not
    batch-invariant (on a GPU).
    """

    def __init__(self, replica: Replica, *, timeout_s: float | None = None, hang_s: float = 300.0) -> None:
        """Start vLLM on this node, and wait for those of its ranks that other nodes start (`VllmFollower`).

        Args:
            replica: what to start.
            timeout_s: seconds that one call of `generate` may take; what is unfinished then is "aborted".
            hang_s: an engine that answers nothing for so long is given up.

        Raises:
            RunFailed: vLLM does not start.
        """
        self._replica, self._weights = replica, NodeWeights(replica)
        self._facts = self._weights.facts
        self.eos_ids, _ = special_ids(replica.source, self._facts.vocab_size)
        self._timeout_s, self._hang_s = timeout_s, hang_s
        self._records = replica.routed_experts and replica.device == "cpu"  # vLLM's own recording needs a GPU
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._in_flight, self._updating, self._count = 0, False, 0
        self._turn, self._asking = asyncio.Condition(), asyncio.Lock()
        self._llm: Any = None
        self._processes: list[psutil.Process] = []
        end_children_with_this(self._weights.model.parent)
        arguments = {"model": str(self._weights.model), **replica.node(0, self._facts).engine}
        self.held = self._run(self._start(arguments))
        self._weights.hold(self.held[0])

    @classmethod
    def from_config(cls, config: Config, replica: Replica | None = None) -> VllmEngine:
        """The engine that a run's configuration asks for; on one node if no `replica` is given."""
        rollout = config.rollout
        return cls(
            replica or Replica.from_config(config), timeout_s=_DEADLINE * rollout.timeout_s, hang_s=rollout.hang_s
        )

    # ------------------------------------------------------------------------------------------------------- weights
    @property
    def _receiver(self) -> Receiver:
        return self._weights.receiver

    @property
    def weight_version(self) -> int:
        """Version of the weights in place; -1 before the first update and after a failed one."""
        return self._receiver.version

    def holdings(self, receiver: int) -> list[Held]:
        """Every tensor that a worker on this node holds a part of."""
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
            self._weights.stage(packets, version, names)
            await self._load(version)
        finally:
            async with self._turn:
                self._updating = False
                self._turn.notify_all()

    async def _load(self, version: int) -> None:
        """Have the workers load what is staged; what they find wrong ends the run."""
        self._receiver.version = -1
        found = await self._ask("weights_update", version, self._hang_s / 2)
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
        check_requests(requests, self._facts.vocab_size, self._replica.max_tokens)
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

        dp = self._replica.dp
        ranks = [i % dp if dp > 1 else None for i in range(len(sequences))]
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
    async def _start(self, arguments: dict[str, Any]) -> list[Weights]:
        """Start vLLM; for each node the union of what its workers hold."""
        os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        before = set(psutil.Process().children(recursive=True))
        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
            started = [p for p in psutil.Process().children(recursive=True) if p not in before]
            self._processes = [p for p in started if "resource_tracker" not in " ".join(p.cmdline())]
            workers = await self._ask("weights_prepare", self._records)
        except Exception as error:
            raise RunFailed("rollout.start", f"vLLM did not start: {error}", "", "See the rollout's log.") from error
        count = self._replica.ranks_per_node
        return [
            {name: weight for held in workers[first : first + count] for name, weight in held.items()}
            for first in range(0, len(workers), count)
        ]

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
        self._weights.close()

    async def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """What every worker answers, on whatever node, in the order of their ranks."""
        core = self._llm.engine_core
        asked = (method, None, arguments, None)
        async with self._asking:
            # AsyncLLM.collective_rpc asks all data-parallel ranks too, and hands on the first one's answer alone
            calls = [core._call_utility_async("collective_rpc", *asked, engine=engine) for engine in core.core_engines]
            try:
                answers = await asyncio.wait_for(asyncio.gather(*calls), self._hang_s)
            except TimeoutError:
                raise self._lost(f"gave no answer to {method} in {self._hang_s:.0f} s") from None
        found = [pickle.loads(answer) for rank in answers for answer in rank]
        if len(found) != self._replica.ranks:
            raise self._lost(f"has {len(found)} workers where {self._replica.ranks} were asked for")
        return found

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
