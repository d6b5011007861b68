"""metrics.jsonl, samples.jsonl and TensorBoard: written as steps finish, cut back to the checkpoint when a run resumes.

Every key is defined in docs/metrics.md.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from moe_rl.durable import write_atomic
from moe_rl.errors import RunFailed, UserError

METRICS, SAMPLES, TENSORBOARD = "metrics.jsonl", "samples.jsonl", "tensorboard"


class JsonLines(NamedTuple):
    """The objects of a JSONL file, and the numbers of lines that are none (half written when a run was killed)."""

    rows: list[dict[str, Any]]
    damaged: list[int]


def read_jsonl(path: str | Path) -> JsonLines:
    """Read what can be read of a JSONL file; a missing file is an empty one."""
    rows: list[dict[str, Any]] = []
    damaged: list[int] = []
    if Path(path).is_file():
        for number, raw in enumerate(Path(path).read_bytes().split(b"\n"), 1):
            if raw.strip():
                row = _parse(raw)
                rows.append(row) if row is not None else damaged.append(number)
    return JsonLines(rows, damaged)


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl that have a step, oldest first."""
    return [row for row in read_jsonl(Path(run_dir) / METRICS).rows if isinstance(row.get("step"), int)]


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(raw)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


class MetricsWriter:
    """Appends to a run's records; each line is on disk when the call returns.

    Args:
        run_dir: an existing directory.
        tensorboard: write event files under ``tensorboard/`` too.

    Raises:
        UserError: TensorBoard is asked for and not installed.
        RunFailed: the records cannot be written (a full disk); what was written before is whole.
    """

    def __init__(self, run_dir: str | Path, *, tensorboard: bool = True) -> None:
        self.run_dir = Path(run_dir)
        if tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise UserError(
                "observe.tensorboard",
                "observe.tensorboard is on, but TensorBoard is not installed",
                "",
                "pip install tensorboard, or set observe.tensorboard=false",
            )
        self._tensorboard = tensorboard
        self._events: Any = None
        self._files: dict[str, FileIO] = {}
        self._last_step = max((row["step"] for row in read_metrics(self.run_dir)), default=-1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one step's metrics.

        A number that is not finite is written as null, which every JSON reader takes, and its key named in `nonfinite`.

        Args:
            step: above that of the last line.
            values: key -> number, text or None; numpy scalars are numbers.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} is not after {self._last_step}, the last one in {self.run_dir / METRICS}")
        row = {"step": step} | dict(values) | {"step": step}
        nonfinite = [key for key, value in row.items() if _is_nonfinite(_plain(value))]
        self._append(METRICS, [row | ({"nonfinite": nonfinite} if nonfinite else {})])
        self._last_step = step
        if self._tensorboard:
            self._write_events(step, row)

    def write_samples(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append a step's samples, one object each; numbers that are not finite become null."""
        self._append(SAMPLES, [{"step": step} | dict(line) | {"step": step} for line in lines])

    def resume(self, step: int, line: Mapping[str, Any] | None = None) -> None:
        """Go back to a checkpoint: drop every record after `step`, and put back its `line` if a kill lost it."""
        self.truncate_after(step)
        if line and self._last_step < step:
            self.write(step, line)

    def truncate_after(self, step: int) -> None:
        """Drop the records of later steps, and lines that are half written. Each file is replaced at once, or not."""
        self._close_files()
        for path in (self.run_dir / METRICS, self.run_dir / SAMPLES):
            if path.is_file():
                _guarded(path, partial(_keep_lines, path, step))
        self._last_step = max((row["step"] for row in read_metrics(self.run_dir)), default=-1)

    def close(self) -> None:
        """Close the files."""
        self._close_files()
        if self._events is not None:
            self._events.close()
            self._events = None

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        path = self.run_dir / name
        text = "".join(json.dumps(_finite(row), allow_nan=False) + "\n" for row in rows).encode()

        def write() -> None:
            file = self._files.get(name) or self._open(name)
            size = file.seek(0, os.SEEK_END)
            try:
                written = 0
                while written < len(text):  # a nearly full disk takes a part and refuses the next
                    written += file.write(text[written:])
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)  # the first half of a line would damage the file
                raise

        _guarded(path, write)

    def _open(self, name: str) -> FileIO:
        """Open for appending, after the last whole line."""
        file = FileIO(self.run_dir / name, "a+")
        file.seek(0)
        file.truncate(file.readall().rfind(b"\n") + 1)
        self._files[name] = file
        return file

    def _write_events(self, step: int, row: Mapping[str, Any]) -> None:
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter  # seconds to import

            # events of steps that a resumed run does again are hidden
            self._events = SummaryWriter(str(self.run_dir / TENSORBOARD), purge_step=step)

        def write() -> None:
            for key, value in row.items():
                number = _plain(value)
                if isinstance(number, (int, float)) and key != "step":
                    self._events.add_scalar(key, number, step)
            self._events.flush()

        _guarded(self.run_dir / TENSORBOARD, write)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _keep_lines(path: Path, step: int) -> None:
    """Rewrite a file without the lines after `step`, at once."""
    kept = []
    for raw in path.read_bytes().split(b"\n"):
        row = _parse(raw)
        if row is not None and isinstance(row.get("step"), int) and row["step"] <= step:
            kept.append(raw + b"\n")
    write_atomic(path, b"".join(kept), path.stat().st_mode & 0o777)


def _guarded(path: Path, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as e:
        raise RunFailed(
            "observe.write",
            f"cannot write {path}: {e.strerror or e}",
            "The records of a run stand on the file system of its directory.",
            "make room or choose another --run-dir, then continue with --resume auto",
        ) from e


def _plain(value: Any) -> Any:
    """A scalar of numpy or torch as a Python number."""
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _finite(value: Any) -> Any:
    """The same with null in place of NaN and infinities, at any depth."""
    value = _plain(value)
    if isinstance(value, Mapping):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if _is_nonfinite(value) else value
