"""The second table of docs/wrong_input.md, "During a run": each row is checked against a real message by a test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

DOC = Path(__file__).parent.parent / "docs" / "wrong_input.md"
HEADING = "## During a run"


class Ended(Protocol):
    """A run, or a command, that ended with a message."""

    run_dir: Path

    def stderr(self) -> str: ...


def check_documented(wrong: str, ended: Ended) -> None:
    """The table has a row for this case, and it says what the message says."""
    process = getattr(ended, "process", None)
    row = table_row(wrong, ended.stderr(), ended.run_dir, ended.code if process is None else process.returncode)
    assert row in DOC.read_text().split(HEADING)[1].splitlines(), f"docs/wrong_input.md lacks this row:\n{row}"


def table_row(wrong: str, message: str, run_dir: Path, code: int) -> str:
    """A row of the table, with names in place of what differs from run to run."""
    first = message.removeprefix("error: ").splitlines()[0]
    what, _, rule = first.rstrip("]").rpartition(" [")
    for pattern, name in (
        (re.escape(str(run_dir)), "RUN"),
        (re.escape(str(run_dir.parent)), "DIR"),
        (r"^(trainer|rollout)_\d died while .*", "trainer_1 died while updating"),
        (r"process \d+ on \S+", "process PID on HOST"),
        (r"__\d+_\d+\.distcp", "__1_0.distcp"),
        (r"\d+ bytes where \d+ were", "N bytes where M were"),
        (r"step_\d+", "step_000010"),
        (r"\S*moe_rl/assets", "moe_rl/assets"),
    ):
        what = re.sub(pattern, name, what)
    return f"| {wrong} | {what} | `{rule}` | {code} |"
