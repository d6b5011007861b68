"""What a rollout engine is, whatever runs inside: requests in, completions with log-probs out. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from moe_rl.errors import RunFailed, UserError
from moe_rl.reshard.plan import Held

if TYPE_CHECKING:
    from moe_rl.reshard.transport import Packet

ENGINE_LOST = "rollout.engine_lost"  # the rule of a RunFailed after which a new process may do what was asked


@dataclass(frozen=True)
class Request:
    """One completion to sample.

    `prompt` holds token ids; `seed` (64 bits) fixes the random numbers, token by token; at `temperature` 0 the most
    likely token is taken. `id` is the caller's, unique within a call.
    """

    id: int
    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float = 1.0


@dataclass(frozen=True)
class Completion:
    """One sampled completion of R tokens, the end-of-sequence token included where it was sampled.

    `tokens` is int32 [R]; `logprobs` is float32 [R], natural logarithms under softmax(logits / temperature) of the
    whole vocabulary (under the temperature-1 softmax where the request was greedy). `finish_reason` is "stop" after an
    end-of-sequence token, "length" at max_tokens, "aborted" when time ran out. `weight_version` produced every token.
    `routed_experts`, where they were asked for, are the experts that the rollout's router chose for every token fed to
    the model: [prompt + R - 1, num_hidden_layers, experts per token], uint8 for at most 256 experts, else int16 (row t
    is token t; the last sampled token is never fed). A layer without a router holds any values.
    """

    id: int
    tokens: np.ndarray
    logprobs: np.ndarray
    finish_reason: Literal["stop", "length", "aborted"]
    weight_version: int
    routed_experts: np.ndarray | None = None


class RolloutEngine(Protocol):
    """One rollout worker. Weights reach it by `receive` alone, and it generates only on weights proven whole."""

    @property
    def weight_version(self) -> int:
        """Version of the weights in place; -1 before the first update and after a failed one."""

    def holdings(self, receiver: int) -> list[Held]:
        """The tensors to send here, in the dtypes kept here, for a plan that numbers this worker `receiver`."""

    def receive(self, packets: Iterable[Packet], version: int, names: Iterable[str]) -> None:
        """One whole weight update; RunFailed (naming tensors) unless each of `names` arrived once and intact."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of the requests; RunFailed without proven weights."""

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """float32 [L-1] for each sequence of L >= 2 token ids: natural log-probs at temperature 1 of its tokens, the first
        omitted, by the forward pass that generation uses, the data-parallel ranks in turn; RunFailed without proven
        weights."""

    def digests(self) -> dict[str, int]:
        """Name -> share of the digest of what is held of that tensor, computed from the live weights."""


def sample_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """The 64-bit seed of one sample, from what identifies it in a run and nothing else.

    `prompt_index` is the prompt's position in the data set and `sample_index` counts its completions, so neither the
    number of replicas, nor the batch a request lands in, nor a resume changes what is sampled.
    """
    text = f"{run_seed},{step},{prompt_index},{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def check_requests(requests: Sequence[Request], vocab_size: int, max_positions: int) -> None:
    """Raises UserError for a prompt that is empty, too long or has tokens outside the vocabulary."""
    for request in requests:
        length = len(request.prompt) + request.max_tokens
        problem = None
        if not request.prompt or request.max_tokens < 1:
            problem = "needs a prompt and at least one token to sample"
        elif length > max_positions:
            problem = f"would reach {length} tokens, the model has {max_positions} positions"
        elif not 0 <= min(request.prompt) <= max(request.prompt) < vocab_size:
            problem = f"has token {max(request.prompt)}, the model has {vocab_size}"
        elif not request.temperature >= 0:
            problem = f"has temperature {request.temperature}"
        if problem:
            raise UserError("rollout.request", f"request {request.id} {problem}")


def no_weights() -> RunFailed:
    """The error of an engine that is asked to sample before an update was proven whole."""
    return RunFailed(
        "rollout.weights",
        "this rollout has no weights that it may sample from",
        "none were received yet, or the last update failed",
    )
