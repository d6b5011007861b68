"""After each weight update: fixed token sequences scored by both sides. Digests prove that weights arrived; this proves
that the rollouts compute with them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from moe_rl.config import Config
from moe_rl.data import Record
from moe_rl.errors import RunFailed
from moe_rl.grpo.mismatch import mismatch
from moe_rl.trainer.worker import Sequences

LENGTH = 64  # tokens of a sequence at most: past the windows of tiny models, and cheap beside a step
GATES = {  # metric -> its gate, and whether the metric must stay above it
    "pearson_prob": ("canary_pearson_min", True),
    "k3_kl": ("canary_k3_max", False),
    "logprob_abs_max": ("canary_logprob_max", False),
}


def canary_sequences(records: Sequence[Record], count: int, length: int) -> list[np.ndarray]:
    """`count` sequences of `length` tokens, int32: the data set's prompts in its own order, end to end, over and over.

    They are the same in every step and every resume, and of the kind of text that the model is used on.
    """
    tokens = itertools.chain.from_iterable(itertools.cycle([r.prompt_tokens for r in records]))
    return [np.fromiter(itertools.islice(tokens, length), np.int32, length) for _ in range(count)]


class Canary:
    """Compares the trainer's and each replica's log-probs of `sequences`."""

    def __init__(self, config: Config, records: Sequence[Record], trainer: Any, rollout: Any) -> None:
        """`trainer` and `rollout` are the groups of :mod:`moe_rl.trainer.placement`."""
        self.config, self.trainer, self.rollout = config, trainer, rollout
        # vLLM samples one token behind what it scores
        longest = config.data.max_prompt + config.rollout.max_response - 1
        length = max(2, min(LENGTH, longest, config.engine.max_tokens_per_micro_batch))
        count = config.trainer.canary_sequences
        if count:  # each data-parallel rank of a replica scores one at least
            count = max(count, config.rollout.dp)
        self.sequences = canary_sequences(records, count, length)

    def log_probs(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """float32 [tokens] of the trainer, and of each replica by name: natural log at temperature 1, first tokens omitted."""
        cuts = self.trainer.cuts([len(s) for s in self.sequences])
        rows = self.trainer.log_probs(Sequences(self.sequences, {}), cuts, temperature=1.0)
        mine = np.concatenate([rows[i][0] for i in range(len(self.sequences))])
        theirs = self.rollout.score(self.sequences)
        return torch.from_numpy(mine), {name: torch.from_numpy(np.concatenate(r)) for name, r in theirs.items()}

    def check(self) -> dict[str, float]:
        """The metrics ``sync/canary_*``, of each the worst rollout's: of every data-parallel rank of every replica, which
        score in turn; {} where trainer.canary_sequences is 0.

        Raises:
            RunFailed: one of them passes its gate; the replica is named.
        """
        if not self.sequences:
            return {}
        mine, theirs = self.log_probs()
        dp, count = self.config.rollout.dp, len(self.sequences)
        found = {}
        for name, scores in theirs.items():
            for rank in range(dp):
                rows = (side.view(count, -1)[rank::dp].flatten() for side in (mine, scores))
                found[f"{name}, data-parallel rank {rank}," if dp > 1 else name] = mismatch(*rows)
        metrics = {}
        for key, (gate, above) in GATES.items():
            values = {name: values[f"mismatch/{key}"] for name, values in found.items()}
            # a value that is no number is the worst there is
            name = max(
                values, key=lambda n: float("inf") if values[n] != values[n] else -values[n] if above else values[n]
            )
            worst, bound = values[name], getattr(self.config.trainer.gates, gate)
            metrics[f"sync/canary_{key}"] = worst
            if bound > 0 and not (worst >= bound if above else worst <= bound):
                raise RunFailed(
                    "gate.canary",
                    f"after the weight update sync/canary_{key} of {name} is {worst:.6g},"
                    f" {'below' if above else 'above'} trainer.gates.{gate} {bound:g}",
                    "Every tensor arrived with the trainer's bits, but the rollout computes another model with them.",
                    f"Run `moe-rl doctor --refit RECIPE`; if the two only round differently, set trainer.gates.{gate}.",
                )
        return metrics
