"""The shipped verifiers: how right a completion is, given the reference answer.

A verifier is called as ``verifier(completion, answer, **context)`` and gives the reward, or a dict with `reward` and
`accuracy`. Each factory here takes the arguments of `reward.args` and returns a verifier. Those of `TRUSTED` run in
the calling process: they use time linear in the text and no library that may hang.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from moe_rl.errors import UserError

Verifier = Callable[..., Any]

_NUMBER = re.compile(r"[-+\u2212]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_ANSWER_LINE = re.compile(r"answer[ \t]*:[ \t]*([^\n]+)", re.IGNORECASE)


def find_last_number(text: str) -> Decimal | None:
    """The last decimal number in a text, or None.

    Thousands may be set off with commas; a sign counts unless it follows a digit, letter or bracket, where it is an
    operator. Exponents, fractions and words are not read: ``1/2`` ends in 2.
    """
    last = deque(_NUMBER.finditer(text), maxlen=1)
    if not last:
        return None
    match = last[0]
    digits = match.group().rstrip(",").replace("\u2212", "-")
    sign, digits = ("-", digits[1:]) if digits[0] == "-" else ("", digits.lstrip("+"))
    before = text[match.start() - 1] if match.start() else ""
    if before.isalnum() or before in tuple(")]}"):
        sign = ""
    if "," in digits and not _THOUSANDS.fullmatch(digits):
        sign, digits = "", digits.rpartition(",")[2]  # a list such as 1,2,3
    return Decimal(sign + digits.replace(",", ""))


def last_number() -> Verifier:
    """1 where the last number of the completion equals the last number of the answer, else 0."""

    def verify(completion: str, answer: str) -> float:
        expected = find_last_number(answer)
        if expected is None:
            raise ValueError(f"the reference answer {answer[:80]!r} holds no number")
        return float(find_last_number(completion) == expected)

    return verify


def exact() -> Verifier:
    """1 where completion and answer are the same text, white space at the ends aside, else 0."""

    def verify(completion: str, answer: str) -> float:
        return float(completion.strip() == answer.strip())

    return verify


def answer_line() -> Verifier:
    """1 where the last ``Answer: ...`` of the completion is the answer, else 0.

    Dollar signs, a surrounding \\boxed{}, spaces and a final full stop do not count; numbers compare by value.
    """

    def verify(completion: str, answer: str) -> float:
        found = _ANSWER_LINE.findall(completion)
        if not found:
            return 0.0
        given, expected = _plain(found[-1]), _plain(answer)
        if given == expected:
            return 1.0
        numbers = [_whole_number(given), _whole_number(expected)]
        return float(None not in numbers and numbers[0] == numbers[1])

    return verify


def _plain(text: str) -> str:
    text = text.replace("$", "").strip().rstrip(".").strip()
    if text.startswith("\\boxed{") and text.endswith("}"):
        text = text.removeprefix("\\boxed{")[:-1]
    return "".join(text.split())


def _whole_number(text: str) -> Decimal | None:
    match = _NUMBER.fullmatch(text)
    return find_last_number(text) if match else None


def math() -> Verifier:
    """1 where math-verify finds the completion's final expression equal to the answer, else 0.

    The library's own time limits rest on SIGALRM, which only works in a main thread and cannot break into long integer
    arithmetic; they are off, and the worker process has the deadline. A completion it cannot parse is wrong; an answer
    it cannot parse is an error.
    """
    from math_verify import parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # both warn that the time limit is off

    def verify_math(completion: str, answer: str) -> float:
        wrapped = answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
        expected = parse(wrapped, parsing_timeout=None)
        if not expected:
            raise ValueError(f"math-verify cannot parse the reference answer {answer[:80]!r}")
        return float(verify(expected, parse(completion, parsing_timeout=None), timeout_seconds=None))

    return verify_math


DAPO_BASES: dict[str, Callable[[], Verifier]] = {
    "answer_line": answer_line,
    "last_number": last_number,
    "exact": exact,
    "math": math,
}


def dapo(*, base: str = "answer_line", overlong_buffer: int = 0, penalty_factor: float = 1.0) -> Verifier:
    """+1 or -1 by a base verifier, less a penalty for length (Yu et al. 2025, DAPO, eq. 13); accuracy apart.

    With L = max_response, B = overlong_buffer and n the completion's tokens, the penalty is

        0                                   n <= L - B
        penalty_factor * (n - (L - B)) / B  L - B < n <= L

    so that a right answer that fills the whole response gets 1 - penalty_factor. B = 0 is no penalty.

    Args:
        base: who says what is right: answer_line, last_number, exact or math.
        overlong_buffer: tokens before the longest response in which the penalty grows.
        penalty_factor: the penalty at the longest response.

    Raises:
        UserError: an argument is out of range.
    """
    check_dapo(base, overlong_buffer, penalty_factor)
    verify = DAPO_BASES[base]()

    def shaped(
        completion: str, answer: str, *, completion_tokens: Sequence[int], max_response: int
    ) -> dict[str, float]:
        accuracy = verify(completion, answer)
        over = max(0, len(completion_tokens) - (max_response - overlong_buffer))
        penalty = penalty_factor * over / overlong_buffer if overlong_buffer else 0.0
        return {"reward": (1.0 if accuracy else -1.0) - penalty, "accuracy": accuracy}

    return shaped


def check_dapo(
    base: str = "answer_line",
    overlong_buffer: int = 0,
    penalty_factor: float = 1.0,
    max_response: int | None = None,
) -> None:
    """Raise UserError where the arguments of :func:`dapo` make no sense, or the buffer exceeds `max_response`."""
    whole = type(overlong_buffer) is int and 0 <= overlong_buffer <= (max_response or overlong_buffer)
    number = type(penalty_factor) in (int, float) and penalty_factor >= 0
    if base in DAPO_BASES and whole and number:
        return
    longest = f" and at most rollout.max_response={max_response}" if max_response else ""
    raise UserError(
        "reward.args",
        f"dapo cannot take base={base!r}, overlong_buffer={overlong_buffer!r}, penalty_factor={penalty_factor!r}",
        f"base is one of {', '.join(DAPO_BASES)}; overlong_buffer a whole number of tokens{longest}; "
        "penalty_factor at least 0.",
        "for example reward.args.overlong_buffer=1024 reward.args.penalty_factor=1.0",
    )


def reasoning_gym(*, task: str = "") -> Verifier:
    """reasoning-gym's own score of the completion for the record's task, 0 to 1; accuracy is 1 at a full score.

    Needs the field `entry` (question, answer, metadata) that ``reasoning_gym:`` sources give, or `metadata` beside
    question and answer. `task` overrides the task the record names. The whole completion, ends stripped, is the answer.
    """
    from moe_rl.data.generated import library

    gym = library()

    def verify(completion: str, answer: str, *, prompt_text: str, extra: Mapping[str, Any]) -> float:
        default = {"question": prompt_text, "answer": answer, "metadata": extra.get("metadata", {})}
        entry = extra.get("entry", default)
        name = task or extra.get("task") or entry["metadata"].get("source_dataset", "")
        if not name:
            raise ValueError("the record names no reasoning-gym task; set reward.args.task")
        return float(gym.get_score_answer_fn(name)(completion.strip(), entry))

    return verify


FACTORIES: dict[str, Callable[..., Verifier]] = {
    "last_number": last_number,
    "exact": exact,
    "answer_line": answer_line,
    "math": math,
    "dapo": dapo,
    "reasoning_gym": reasoning_gym,
}
TRUSTED = ("last_number", "exact", "answer_line")


def is_trusted(name: str, args: Mapping[str, Any]) -> bool:
    """True where a verifier may run in the calling process, without a deadline."""
    return name in TRUSTED or (name == "dapo" and args.get("base", "answer_line") in TRUSTED)
