"""A fault in the user's input, and how several become one message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_rl.errors import UserError

if TYPE_CHECKING:
    from .schema import Config


@dataclass(frozen=True)
class Problem:
    """One fault. `rule` is a stable id; `key` and `origin` name the value at fault and where it was written."""

    rule: str
    what: str
    why: str = ""
    fix: str = ""
    key: str = ""
    origin: str = ""

    @property
    def headline(self) -> str:
        """What is wrong, and where the values at fault were written."""
        if not self.origin:
            return self.what
        if self.key in self.origin:  # the origin of several keys names each of them
            return f"{self.what} ({self.origin})"
        return (
            f"{self.what} (from {self.origin})"
            if self.key in self.what
            else f"{self.what} ({self.key}, from {self.origin})"
        )

    def error(self) -> UserError:
        """This problem as an exception."""
        return UserError(self.rule, self.headline, self.why, self.fix)


def problem_of(config: Config, rule: str, key: str, what: str, why: str, fix: str) -> Problem:
    """A problem of one key, or of several divided by spaces, each with its origin."""
    first, *others = key.split()
    origin = config.origin(first)
    if others:
        origin = ", ".join(f"{k} from {config.origin(k)}" for k in (first, *others))
    return Problem(rule, what, why, fix, first, origin)


class SeveralProblems(UserError):
    """Problems found together; `why` holds one message each, numbered."""

    def __str__(self) -> str:
        return f"{self.what} [{self.rule}]\n{self.why}"


def raise_all(problems: Sequence[Problem]) -> None:
    """Raise one UserError that names every problem; do nothing if there is none.

    With several problems the rule is ``config.several`` and each keeps its own id in the text.
    """
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0].error()
    listed = "\n".join(f"{i}. {p.error()}" for i, p in enumerate(problems, 1))
    raise SeveralProblems("config.several", f"{len(problems)} problems", listed)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known dotted name most like `name`, by its whole and by its last part; an empty string if none is near."""
    known = list(known)
    whole = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if whole:
        return whole[0]
    by_last: dict[str, str] = {}
    for candidate in known:
        by_last.setdefault(candidate.rsplit(".", 1)[-1], candidate)
    last = difflib.get_close_matches(name.rsplit(".", 1)[-1], list(by_last), n=1, cutoff=0.75)
    return by_last[last[0]] if last else ""
