"""One completion judged: a verifier's answer turned into two finite numbers, or into what is wrong with it."""

from __future__ import annotations

import math
import numbers
import traceback
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from .registry import RewardItem, Scorer

LONGEST = 300  # characters of an exception's text that are kept


class Verdict(NamedTuple):
    """`reward` and `accuracy` (0 to 1), or NaN in both and the `problem`."""

    reward: float
    accuracy: float
    problem: str = ""


def failed(problem: str) -> Verdict:
    return Verdict(math.nan, math.nan, problem)


def judge(score: Scorer, item: RewardItem, catch: type[BaseException] = Exception) -> Verdict:
    """Run a verifier on one item. What it raises (of the kind `catch`) and what is no number becomes the problem."""
    try:
        return as_verdict(score(item))
    except catch as e:
        return failed(f"raised {describe_exception(e)}")


def as_verdict(value: Any) -> Verdict:
    """Read what a verifier returned.

    A number is the reward, and its accuracy is 1 where it is at least 1, else 0. A dict has `reward` and may have
    `accuracy`. A bool counts as 0 or 1; numpy and torch scalars are numbers. None, NaN, infinities and text are not.
    """
    if not isinstance(value, dict):
        reward = as_number(value)
        if reward is None:
            return failed(f"returned {_short(value)}, which is no finite number")
        return Verdict(reward, float(reward >= 1))
    if "reward" not in value or set(value) - {"reward", "accuracy"}:
        return failed(f"returned a dict with the keys {_short(list(value))}; reward and accuracy are expected")
    reward = as_number(value["reward"])
    if reward is None:
        return failed(f"returned the reward {_short(value['reward'])}, which is no finite number")
    accuracy = as_number(value.get("accuracy", reward >= 1))
    if accuracy is None or not 0 <= accuracy <= 1:
        return failed(f"returned the accuracy {_short(value['accuracy'])}, which is no number from 0 to 1")
    return Verdict(reward, accuracy)


def as_number(value: Any) -> float | None:
    """The finite float a value is, or None. Text never is one, nor is an array of more than one element."""
    if not isinstance(value, (numbers.Real, Decimal)):
        if getattr(value, "shape", None) != () or not hasattr(value, "item"):
            return None
        value = value.item()  # a scalar of numpy or torch
        if not isinstance(value, numbers.Real):
            return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if math.isfinite(number) else None


def describe_exception(e: BaseException) -> str:
    """Type, text and the innermost place in one line."""
    try:
        text = str(e)
    except Exception:
        text = "(its text cannot be read)"
    text = text if len(text) <= LONGEST else text[:LONGEST] + "..."
    frames = traceback.extract_tb(e.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(e).__name__}: {text}{place}"


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
