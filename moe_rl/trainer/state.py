"""The run directory: what is in it, how it is written so that nothing is lost, and how a run is found again.

    config.resolved.yaml  manifest.json  metrics.jsonl  samples.jsonl  logs/
    checkpoints/step_000010/{state.json, manifest.json, weights and optimizer}    checkpoints/latest

A checkpoint is written under a temporary name, forced to disk, given a manifest with the SHA-256 of each file last, and
renamed; `latest` then names it, by an atomic rename too. A kill at any moment leaves the previous checkpoint in place.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe_rl.errors import RunFailed, UserError

MANIFEST, STATE, LATEST = "manifest.json", "state.json", "latest"
SHARD_DIGESTS = "integrity.json"  # written by the engine (moe_rl/engine/checkpoint.py)
TEMPORARY = ".writing_"


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


def write_atomic(path: Path, text: str) -> None:
    """Replace a file's content at once: a temporary file beside it, fsync, rename."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(name, 0o644)
    os.replace(name, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Force a directory's entries (a rename in it) to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    """Force a file's content to disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


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
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise UserError(
                "run_dir.write", f"{self.path} cannot be written: {error.strerror}", "", "Choose another --run-dir."
            ) from error
        for leftover in self.checkpoints.glob(TEMPORARY + "*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def latest(self) -> Path | None:
        """The newest whole checkpoint, None before the first.

        Raises:
            RunFailed: the pointer names a checkpoint that is not there.
        """
        pointer = self.checkpoints / LATEST
        if not pointer.is_file():
            return None
        found = self.checkpoints / pointer.read_text().strip()
        if not (found / MANIFEST).is_file():
            older = sorted(p.parent.name for p in self.checkpoints.glob(f"step_*/{MANIFEST}"))
            raise RunFailed(
                "checkpoint.missing",
                f"{pointer} names {found.name}, which is not there or not whole",
                "It was moved or deleted after it was saved.",
                f"Pass --resume PATH with one of: {', '.join(older)}" if older else "Start afresh with --resume never.",
            )
        return found

    def save(self, state: RunState, write_shards: Callable[[Path], None], keep: int) -> Path:
        """Save one checkpoint whole and drop all but the `keep` newest.

        Args:
            write_shards: has all ranks write weights and optimizer into the directory it is given, with the SHA-256 of
                each file in `SHARD_DIGESTS` (the ranks share that work).

        Raises:
            RunFailed: the disk is full or cannot be written; the previous checkpoint is untouched.
        """
        target = self.checkpoints / f"step_{state.step:06d}"
        work = Path(tempfile.mkdtemp(dir=self.checkpoints, prefix=TEMPORARY))
        try:
            os.chmod(work, 0o755)
            write_shards(work)
            write_atomic(work / STATE, json.dumps(asdict(state), indent=1))
            listing = _listing(work)
            manifest = {"step": state.step, "files": listing, "sha256": _own_digest(listing)}
            write_atomic(work / MANIFEST, json.dumps(manifest, indent=1))
            if target.exists():  # a step repeated after a resume from an older checkpoint
                shutil.rmtree(target)
            os.replace(work, target)
            sync_directory(self.checkpoints)
            write_atomic(self.checkpoints / LATEST, target.name + "\n")
        except OSError as error:
            raise RunFailed(
                "checkpoint.write",
                f"saving step {state.step} to {self.checkpoints} failed: {error.strerror or error}",
                "The disk is full or cannot be written.",
                "Free space, then run the same command again: it resumes from the checkpoint before.",
            ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self._prune(keep)
        return target

    def _prune(self, keep: int) -> None:
        for old in sorted(self.checkpoints.glob("step_*"))[:-keep]:
            shutil.rmtree(old, ignore_errors=True)


def checkpoint_of(path: Path) -> Path:
    """The checkpoint that a path given by a user means: itself, what a `latest` names, or the newest of a run."""
    path = path.absolute()
    if path.name == LATEST and path.is_file():
        return path.parent / path.read_text().strip()
    return RunDirectory(path).latest() or path


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
        sync_file(path)
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
