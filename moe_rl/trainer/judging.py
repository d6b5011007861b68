"""Rewards of a step's samples, by the run's verifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_rl.config import Config
from moe_rl.rewards import BatchScorer, RewardItem
from moe_rl.trainer.samples import Sample


class Judge:
    """Gives samples their reward and accuracy. A sample that cannot be judged becomes invalid, never a zero.

    Raises:
        UserError: the verifier is unknown or cannot be called.
    """

    def __init__(self, config: Config, reward: Callable[..., Any] | None = None, log: Path | None = None) -> None:
        self.config = config
        self.scorer = BatchScorer(
            reward if reward is not None else config.reward.name,
            config.reward.args,
            timeout_s=config.reward.timeout_s,
            on_error=config.reward.on_error,
            log=log,
            max_response=config.rollout.max_response,
        )

    def __call__(self, samples: Sequence[Sample]) -> int:
        """Fill in `reward` and `accuracy`; how many samples could not be judged.

        Raises:
            RunFailed: one could not, and `reward.on_error` is ``stop``; or none could.
        """
        kept = [s for s in samples if not s.aborted]
        scores = self.scorer.score([self._item(s) for s in kept])
        for sample, reward, accuracy, valid in zip(kept, scores.rewards, scores.accuracies, scores.valid, strict=True):
            sample.reward, sample.accuracy, sample.valid = float(reward), float(accuracy), bool(valid)
        by_id = {self._item_id(s): s for s in kept}
        for error in scores.errors:
            by_id[error.id].error = error.problem
        return len(scores.errors)

    @staticmethod
    def _item_id(sample: Sample) -> str:
        return f"{sample.record.id}/{sample.completion.id}"

    def _item(self, sample: Sample) -> RewardItem:
        return RewardItem(
            id=self._item_id(sample),
            completion=sample.text,
            answer=sample.record.answer,
            prompt_text=sample.record.prompt_text,
            extra=sample.record.extra,
            completion_tokens=sample.completion.tokens.tolist(),
            truncated=sample.completion.finish_reason == "length",
            max_response=self.config.rollout.max_response,
        )

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.scorer.close()
