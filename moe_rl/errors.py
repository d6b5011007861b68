"""The two ways a command of ours ends badly, each with one message: what happened, why, how to fix it."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_USER = 2
EXIT_FAILED = 3
EXIT_SEGMENT = 75


class MoeRLError(Exception):
    """Base of both; `rule` is a stable id such as ``layout.world`` that docs and tests refer to."""

    exit_code = EXIT_FAILED

    def __init__(self, rule: str, what: str, why: str = "", fix: str = "") -> None:
        self.rule, self.what, self.why, self.fix = rule, what, why, fix
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [f"{self.what} [{self.rule}]"]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)

    def __reduce__(self):  # Exception pickles its args only; ours cross process borders whole
        return (type(self), (self.rule, self.what, self.why, self.fix))


class UserError(MoeRLError):
    """The user's input is wrong (exit code 2): found before training wherever it can be."""

    exit_code = EXIT_USER


class RunFailed(MoeRLError):
    """A run ended by a fault that is not in its input (exit code 3); the last checkpoint is kept.

    `log_tail` holds the last lines of the failed process, where a process failed.
    """

    exit_code = EXIT_FAILED

    def __init__(self, rule: str, what: str, why: str = "", fix: str = "", log_tail: str = "") -> None:
        self.log_tail = log_tail
        super().__init__(rule, what, why, fix)

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n  its last lines:\n{self.log_tail}" if self.log_tail else text

    def __reduce__(self):
        return (type(self), (self.rule, self.what, self.why, self.fix, self.log_tail))
