"""The embedded rollout engine: transformers' own `generate`, on weights that only the trainer provides."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from moe_rl.config.host import resolve_device
from moe_rl.config.schema import Config
from moe_rl.errors import RunFailed
from moe_rl.models.family import Model, get_family, read_facts, special_ids
from moe_rl.models.weights import torch_dtype, whole_parts
from moe_rl.reshard.plan import Held
from moe_rl.reshard.receive import Receiver
from moe_rl.reshard.transport import Packet
from moe_rl.rollout.engine import Completion, Request, check_requests, no_weights
from moe_rl.rollout.sampling import sample

_DEADLINE = 0.9  # of rollout.timeout_s: completions cut short come back before the caller gives the worker up


class TransformersEngine:
    """Generates with transformers' implementation of the model; a `RolloutEngine`.

    Before the first update every parameter is NaN and every index table -1, so nothing can be sampled from weights
    that did not come from the trainer. A batch holds prompts of one length, for DeepSeek-V4 in transformers is wrong
    under left padding.
    """

    def __init__(
        self,
        model: Model,
        *,
        batch_size: int = 256,
        dtype: str = "fp32",
        device: str = "cpu",
        threads: int = 1,
        timeout_s: float | None = None,
        routes: bool = False,
    ) -> None:
        """Build the model that its config.json describes.

        Args:
            model: a model directory, or a run's `model`; its weight files are not read.
            batch_size: most completions decoded at a time.
            dtype: "fp32" or "bf16".
            device: torch device.
            threads: torch's threads in this process.
            timeout_s: seconds that one call of `generate` may take; what is unfinished then is "aborted".
            routes: completions carry the experts that their tokens took.
        """
        torch.set_num_threads(threads)
        facts = read_facts(model)
        family = get_family(facts.family)
        self._model = family.transformers_model(model, torch_dtype(dtype), device)
        views = family.weight_table(family.read_arch(model)).transformers_views(self._model)
        for view in views.values():
            view.fill_(torch.nan if view.is_floating_point() else -1)
        self._receiver = Receiver(whole_parts(views))
        self._device, self._batch_size, self._timeout_s = device, batch_size, timeout_s
        self._vocab_size, self._max_positions = facts.vocab_size, facts.max_positions
        self.eos_ids, self._pad_id = special_ids(model, facts.vocab_size)
        # `generate` fills what its configuration leaves open from the model's own, made from config.json
        self._model.generation_config.eos_token_id = list(self.eos_ids) or None
        self._routes = _Routes(self._model, facts.num_layers, facts.num_experts) if routes else None

    @classmethod
    def from_config(cls, config: Config) -> TransformersEngine:
        """The engine that a run's configuration asks for."""
        return cls(
            config.model,
            batch_size=config.rollout.batch_size,
            dtype=config.engine.dtype,
            device=resolve_device(config.engine.device),
            timeout_s=_DEADLINE * config.rollout.timeout_s,
            routes=config.rollout.router_replay == "R3",
        )

    @property
    def weight_version(self) -> int:
        """Version of the weights in place; -1 before the first update and after a failed one."""
        return self._receiver.version

    def holdings(self, receiver: int) -> list[Held]:
        """Every parameter and routing buffer of the live model."""
        return self._receiver.holdings(receiver)

    def receive(self, packets: Iterable[Packet], version: int, names: Iterable[str]) -> None:
        """Take one whole weight update; see `Receiver`."""
        for packet in packets:
            self._receiver.stage(packet)
        self._receiver.finish(version, names)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion for each request, in their order. What a request samples does not depend on the others.

        Raises:
            RunFailed: no weights are in place, or the model gives logits that are not numbers.
            UserError: a prompt is empty, too long or has tokens outside the vocabulary.
        """
        if self.weight_version < 0:
            raise no_weights()
        check_requests(requests, self._vocab_size, self._max_positions)
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        done: dict[int, Completion] = {}
        for batch in self._batches(requests):
            done.update(zip(batch, self._generate_batch([requests[i] for i in batch], deadline), strict=True))
        return [done[i] for i in range(len(requests))]

    @torch.no_grad()
    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-probs of given tokens; see `RolloutEngine`. Neighbours of one length go through the model together."""
        self.generate([])  # raises without proven weights
        rows: list[np.ndarray] = []
        for _, same in itertools.groupby(sequences, key=len):
            tokens = torch.from_numpy(np.stack(list(same)).astype(np.int64)).to(self._device)
            logprobs = self._model(tokens, use_cache=False).logits[:, :-1].float().log_softmax(-1)
            rows.extend(logprobs.gather(2, tokens[:, 1:, None])[:, :, 0].cpu().numpy())
        return rows

    def digests(self) -> dict[str, int]:
        """Digests of the live model; see `Receiver`."""
        return self._receiver.digests()

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Indices of requests with prompts of one length, at most `batch_size` at a time, the long answers together."""
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt), requests[i].max_tokens, i))
        batch: list[int] = []
        for i in order:
            other = batch and len(requests[batch[0]].prompt) != len(requests[i].prompt)
            if other or len(batch) == self._batch_size:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _generate_batch(self, requests: list[Request], deadline: float | None) -> list[Completion]:
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        sampler, stop = _Sampler(requests), _Stop(requests, deadline)
        if self._routes is not None:
            self._routes.clear()  # of passes that generated nothing
        if not stop.late():
            prompts = torch.tensor([r.prompt for r in requests], device=self._device)
            self._model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                generation_config=GenerationConfig(
                    max_new_tokens=max(r.max_tokens for r in requests),
                    do_sample=False,
                    use_cache=True,
                    eos_token_id=list(self.eos_ids) or None,
                    pad_token_id=self._pad_id,
                ),
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([stop]),
            )
        tokens, logprobs = sampler.result()
        completions = [
            _cut(request, tokens[i], logprobs[i], self.eos_ids, self.weight_version)
            for i, request in enumerate(requests)
        ]
        if self._routes is None or not len(tokens[0]):
            return completions
        chosen = self._routes.take(len(requests))
        fed = [len(r.prompt) + len(c.tokens) - 1 for r, c in zip(requests, completions, strict=True)]
        return [replace(c, routed_experts=chosen[i, : fed[i]].copy()) for i, c in enumerate(completions)]


def _cut(
    request: Request, tokens: np.ndarray, logprobs: np.ndarray, eos_ids: Sequence[int], version: int
) -> Completion:
    """A row of the batch, up to where its request ends."""
    tokens, logprobs = tokens[: request.max_tokens], logprobs[: request.max_tokens]
    ends = np.flatnonzero(np.isin(tokens, eos_ids))
    if len(ends):
        tokens, logprobs = tokens[: ends[0] + 1], logprobs[: ends[0] + 1]
    whole = len(tokens) == request.max_tokens
    reason: Literal["stop", "length", "aborted"] = "stop" if len(ends) else "length" if whole else "aborted"
    return Completion(request.id, tokens.copy(), logprobs.copy(), reason, version)


class _Routes:
    """Keeps what the routers of a transformers model choose, pass by pass."""

    def __init__(self, model: torch.nn.Module, layers: int, experts: int) -> None:
        self._dtype = np.uint8 if experts <= 256 else np.int16
        self._layers = layers
        self.clear()
        for name, module in model.named_modules():
            if found := re.search(r"layers\.(\d+)\.mlp\.gate$", name):
                module.register_forward_hook(partial(self._keep, int(found[1])))

    def clear(self) -> None:
        """Forget all passes."""
        self._steps: list[list[torch.Tensor]] = [[] for _ in range(self._layers)]

    def _keep(self, layer: int, module: torch.nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> None:
        self._steps[layer].append(output[2])  # logits, weights, experts int64 [rows * tokens, k]

    def take(self, rows: int) -> np.ndarray:
        """uint8 or int16 [rows, tokens fed, layers, k] since `clear`; zeros for a layer without a router."""
        layers = [
            torch.cat([s.view(rows, -1, s.shape[-1]) for s in steps], 1) if steps else None for steps in self._steps
        ]
        self.clear()
        some = next(chosen for chosen in layers if chosen is not None)
        whole = torch.stack([torch.zeros_like(some) if chosen is None else chosen for chosen in layers], 2)
        return whole.cpu().numpy().astype(self._dtype)


class _Sampler:
    """A logits processor that draws the token itself, keeps its log-prob, and leaves `generate` no other choice."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._ids = [r.id for r in requests]
        self._seeds = [r.seed for r in requests]
        self._temperatures = [r.temperature for r in requests]
        self._tokens: list[torch.Tensor] = []
        self._logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not scores.isfinite().all():
            rows = (~scores.isfinite().all(-1)).nonzero()[:, 0].tolist()
            what = f"the model's logits are not numbers for requests {[self._ids[row] for row in rows]}"
            raise RunFailed("rollout.logits", what, "the weights diverged, or the dtype is too narrow for them")
        tokens, logprobs = sample(scores, self._seeds, len(self._tokens), self._temperatures)
        self._tokens.append(tokens)
        self._logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """int32 and float32 [rows, steps]."""
        if not self._tokens:
            return np.zeros((len(self._ids), 0), np.int32), np.zeros((len(self._ids), 0), np.float32)
        tokens, logprobs = torch.stack(self._tokens, 1), torch.stack(self._logprobs, 1)
        return tokens.cpu().numpy().astype(np.int32), logprobs.cpu().numpy()


class _Stop:
    """A stopping criterion: each row at its own length, and all of them at the deadline."""

    def __init__(self, requests: Sequence[Request], deadline: float | None) -> None:
        self._lengths = torch.tensor([len(r.prompt) + r.max_tokens for r in requests])
        self._deadline = deadline

    def late(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        if self.late():
            return torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return input_ids.shape[1] >= self._lengths.to(input_ids.device)
