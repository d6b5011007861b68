"""Rewards: shipped verifiers, the user's own, and scoring that no verifier can hang or crash. Imports no torch."""

from __future__ import annotations

from .registry import NAMES, RewardItem, VerifierSpec, describe
from .scoring import BatchScorer, RewardError, Scores, score_all

__all__ = ["NAMES", "BatchScorer", "RewardError", "RewardItem", "Scores", "VerifierSpec", "describe", "score_all"]
