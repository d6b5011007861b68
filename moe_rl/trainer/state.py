"""The run directory: what is in it, how it is written so that nothing is lost, and how a run is found again.

    config.resolved.yaml  manifest.json  metrics.jsonl  samples.jsonl  logs/
    checkpoints/step_000010/{state.json, manifest.json, weights and optimizer}    checkpoints/latest

A checkpoint is written under a temporary name, forced to disk, given a manifest with the SHA-256 of each file last, and
renamed; `latest` then names it, by an atomic rename too. A kill at any moment leaves the previous checkpoint in place.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe_rl.durable import sync, write_atomic
from moe_rl.errors import RunFailed, UserError

MANIFEST, STATE, LATEST, MEASURED = "manifest.json", "state.json", "latest", "measured.json"
SHARD_DIGESTS = "integrity.json"  # written by the engine (moe_rl/engine/checkpoint.py)
TEMPORARY, DISCARDED = ".writing_", ".discarded_"
LOCK = ".lock"


@dataclass
class RunState:
    """All of a run that is neither weights nor optimizer.

    `step` counts finished steps, `weight_version` the optimizer's updates pushed to the rollouts. `cursor` is the
    position in the data, `metrics` the line of the step just finished (it is written to metrics.jsonl after the
    checkpoint, and put back from here if a kill came between). `model` identifies the architecture, `contents` what the
    checkpoint holds.
    """

    step: int = 0
    weight_version: int = 0
    attempt: int = 1
    samples_seen: int = 0
    wall_s: float = 0.0
    cursor: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    contents: list[str] = field(default_factory=list)


def sha256(path: Path) -> str:
    """A file's SHA-256 in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class RunDirectory:
    """The paths of one run and its checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.checkpoints, self.logs = self.path / "checkpoints", self.path / "logs"

    def create(self) -> None:
        """Make the directory, and clear what an interrupted save left.

        Raises:
            UserError: it cannot be made or written.
        """
        with self._writable():
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        self.clear_unfinished()

    def clear_unfinished(self) -> None:
        """Remove what interrupted saves left."""
        for leftover in (*self.checkpoints.glob(TEMPORARY + "*"), *self.checkpoints.glob(DISCARDED + "*")):
            shutil.rmtree(leftover, ignore_errors=True)

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                "run_dir.write", f"{self.path} cannot be written: {error.strerror}", "", "Choose another --run-dir."
            ) from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes' runs out of the directory, until this process ends if it does not leave the block.

        Raises:
            UserError: another run is in it, or it cannot be written.
        """
        with self._writable():
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / LOCK).open("a+")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise UserError(
                    "run_dir.busy",
                    f"{self.path} is in use by {file.read().strip() or 'another process'}",
                    "Two runs in one directory would overwrite each other's records and checkpoints.",
                    "Wait until it has ended, or choose another --run-dir.",
                ) from error
            except OSError:  # a file system without locks
                pass
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
            yield

    def attempts(self) -> int:
        """How often the run was started before, as its manifest counts it; 0 for a new one."""
        try:
            return int(json.loads((self.path / MANIFEST).read_text())["attempt"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def has_checkpoint(self) -> bool:
        """Whether a checkpoint was ever finished here."""
        return (self.checkpoints / LATEST).is_file()

    def is_used(self) -> bool:
        """Whether a run has written steps or checkpoints here."""
        return self.has_checkpoint() or (self.path / "metrics.jsonl").exists()

    def latest(self) -> Path | None:
        """The newest whole checkpoint, None before the first.

        Raises:
            RunFailed: the pointer names a checkpoint that is not there.
        """
        pointer = self.checkpoints / LATEST
        if not self.has_checkpoint():
            return None
        found = self.checkpoints / pointer.read_text().strip()
        if not (found / MANIFEST).is_file():
            older = sorted(p.parent.name for p in self.checkpoints.glob(f"step_*/{MANIFEST}"))
            raise RunFailed(
                "checkpoint.missing",
                f"{pointer} names {found.name}, which is not there or not whole",
                "It was moved or deleted after it was saved.",
                f"Pass --resume PATH with one of: {', '.join(older)}"
                if older
                else "Start afresh in another --run-dir.",
            )
        return found

    def save(self, state: RunState, write_shards: Callable[[Path], None], keep: int) -> Path:
        """Save one checkpoint whole and drop all but the `keep` newest: `begin` and `publish`."""
        self.begin(state, write_shards)
        return self.publish(state, keep)

    def begin(self, state: RunState, write_shards: Callable[[Path], None]) -> Path:
        """Start a checkpoint; the directory that it is written in, under a temporary name.

        Args:
            write_shards: has all ranks write weights and optimizer into the directory it is given, or start to, with the
                SHA-256 of each file in `SHARD_DIGESTS` last (the ranks share that work).

        Raises:
            RunFailed: the disk is full or cannot be written; the previous checkpoint is untouched.
        """
        with self._saving(state) as work:
            work.mkdir()
            write_shards(work)
        return work

    def publish(self, state: RunState, keep: int) -> Path:
        """Make a checkpoint of what was begun, once `SHARD_DIGESTS` is there, and drop all but the `keep` newest.

        Raises:
            RunFailed: the disk is full or cannot be written; the previous checkpoint is untouched.
        """
        target = self.checkpoints / _step_name(state.step)
        with self._saving(state) as work:
            write_atomic(work / STATE, json.dumps(asdict(state), indent=1))
            listing = _listing(work)
            manifest = {"step": state.step, "files": listing, "sha256": _own_digest(listing)}
            write_atomic(work / MANIFEST, json.dumps(manifest, indent=1))
            if target.exists():  # a kill came between the next two lines
                self._discard(target)
            os.replace(work, target)
            sync(self.checkpoints)
            write_atomic(self.checkpoints / LATEST, target.name + "\n")
        self._prune(keep)
        return target

    @contextmanager
    def _saving(self, state: RunState) -> Iterator[Path]:
        """The temporary directory of a checkpoint; a fault removes it, and one of the disk is told as such."""
        work = self.checkpoints / f"{TEMPORARY}{_step_name(state.step)}"
        try:
            yield work
        except BaseException as error:
            shutil.rmtree(work, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise RunFailed(
                "checkpoint.write",
                f"saving step {state.step} to {self.checkpoints} failed: {error.strerror or error}",
                "The disk is full or cannot be written.",
                "Free space, then run the same command again: it resumes from the checkpoint before.",
            ) from error

    def cut_back(self, step: int) -> None:
        """Drop the checkpoints of later steps: a run that resumes from `step` takes another way from there."""
        later = [path for path in self._steps() if path.name > _step_name(step)]
        if later and (self.checkpoints / _step_name(step) / MANIFEST).is_file():
            write_atomic(self.checkpoints / LATEST, _step_name(step) + "\n")
        for path in later:
            self._discard(path)

    def _steps(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step_*"))

    def _prune(self, keep: int) -> None:
        for old in self._steps()[:-keep]:
            self._discard(old)

    def _discard(self, checkpoint: Path) -> None:
        """Remove a checkpoint; a kill halfway leaves no part of it under its name."""
        doomed = self.checkpoints / f"{DISCARDED}{checkpoint.name}"
        shutil.rmtree(doomed, ignore_errors=True)
        checkpoint.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _step_name(step: int) -> str:
    return f"step_{step:06d}"


def checkpoint_of(path: Path) -> Path:
    """The checkpoint that a path given by a user means: itself, what a `latest` names, or the newest of a run."""
    path = path.absolute()
    if path.name == LATEST and path.is_file():
        return path.parent / path.read_text().strip()
    return RunDirectory(path).latest() or path


def is_foreign(resume: str, run_dir: Path) -> bool:
    """Whether `--resume` names a checkpoint that the run in `run_dir` has not saved.

    Raises:
        RunFailed: it names a run whose newest checkpoint is not there.
    """
    if resume in ("auto", "never"):
        return False
    return checkpoint_of(Path(resume)).parent.resolve() != RunDirectory(run_dir).checkpoints.resolve()


def read_state(checkpoint: Path) -> RunState:
    """The state of a checkpoint directory.

    Raises:
        UserError: the directory is no checkpoint of ours.
    """
    try:
        return RunState(**json.loads((checkpoint / STATE).read_text()))
    except FileNotFoundError as error:
        raise UserError(
            "checkpoint.path",
            f"{checkpoint} is no checkpoint: it has no {STATE}",
            "",
            "Pass a directory such as RUN/checkpoints/step_000010.",
        ) from error
    except (ValueError, TypeError) as error:
        raise RunFailed(
            "checkpoint.damaged",
            f"{checkpoint / STATE} cannot be read: {error}",
            "",
            "Pass --resume PATH with another checkpoint.",
        ) from error


def _listing(directory: Path) -> dict[str, dict[str, Any]]:
    """Every file of a checkpoint, forced to disk, with its size and SHA-256."""
    digests = json.loads((directory / SHARD_DIGESTS).read_text())
    listing = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        sync(path)
        name = str(path.relative_to(directory))
        listing[name] = {"sha256": digests.get(name) or sha256(path), "bytes": path.stat().st_size}
    return listing


def _own_digest(listing: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(listing, sort_keys=True).encode()).hexdigest()


def verify(checkpoint: Path) -> None:
    """Hold a checkpoint against its manifest: every file's size, and the content of all but the shards, which the
    ranks check against `SHARD_DIGESTS` when they load them.

    Raises:
        RunFailed: files that are missing, of another size or with other content, all named.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        files = manifest["files"]
        if manifest["sha256"] != _own_digest(files):
            raise ValueError("its content differs from what was saved")
        shards = json.loads((checkpoint / SHARD_DIGESTS).read_text())
        faults = [
            f"{name} {fault}" for name in files if (fault := _fault(checkpoint / name, files[name], name in shards))
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        faults = [f"{MANIFEST} cannot be used: {error}"]
    if faults:
        raise RunFailed(
            "checkpoint.damaged",
            f"{checkpoint}: {'; '.join(faults)}",
            "The content differs from what was saved: a disk fault, or a file was touched.",
            "Pass --resume PATH with another checkpoint, or start afresh in another --run-dir.",
        )


def _fault(path: Path, expected: Mapping[str, Any], is_shard: bool) -> str:
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != expected["bytes"]:
        return f"has {path.stat().st_size} bytes where {expected['bytes']} were saved"
    return "" if is_shard or sha256(path) == expected["sha256"] else "is damaged"
