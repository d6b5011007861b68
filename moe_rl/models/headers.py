"""What a checkpoint directory holds, by its file headers alone. Torch-free, seconds for any size.

A safetensors file starts with the length of a JSON header (8 bytes, little endian); the header gives dtype, shape and
byte range of each tensor, and the data follow (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from moe_rl.errors import UserError
from moe_rl.models.wire import SIZES

INDEX = "model.safetensors.index.json"
DIST_MARKS = (".metadata", "metadata.json")  # of torch's distributed checkpoints, and megatron-core's beside it
DIST_DIGESTS = "integrity.json"  # file name -> SHA-256, of the dist-checkpoints written here
_LONGEST_NAME = 255  # bytes of a file's name; a longer one is an error of the file system, not a missing file
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself


class Stored(NamedTuple):
    """Where a tensor lies: file name within the directory, safetensors dtype name, shape, first byte in the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0


def recognise(path: str | Path) -> str:
    """What weights `path` holds, by content: "safetensors", "dist" (a megatron dist-checkpoint) or "" (none).

    Raises:
        UserError: it is no directory, holds both kinds, or a dist-checkpoint without its index.
    """
    root = Path(path)
    if not root.is_dir():
        raise UserError("model.path", f"{root} is not a directory", "it should hold a checkpoint", "set model.path")
    tensors = (root / INDEX).is_file() or any(root.glob("*.safetensors"))
    marks = [mark for mark in DIST_MARKS if (root / mark).is_file()]
    dist = len(marks) == len(DIST_MARKS)
    if tensors and dist:
        raise broken(
            root, [f"it holds *.safetensors files and a dist-checkpoint ({DIST_MARKS[0]}): which is the model?"]
        )
    if not tensors and not dist and any(root.glob("*.distcp")):
        raise broken(root, listed("missing file(s) of a dist-checkpoint", [m for m in DIST_MARKS if m not in marks]))
    return "safetensors" if tensors else "dist" if dist else ""


def check_dist_files(path: str | Path) -> None:
    """UserError if a dist-checkpoint lacks a file that its record of digests names, has no such record, or another index.

    The index is unpickled by whoever reads it, so its bytes are held against their digest before that.
    """
    root = Path(path)
    try:
        if not (root / DIST_DIGESTS).is_file():  # a pipe would be waited for
            raise FileNotFoundError("there is no such file")
        recorded = json.loads((root / DIST_DIGESTS).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise broken(root, [f"{DIST_DIGESTS} cannot be read: {error}"]) from None
    if not isinstance(recorded, dict) or not recorded.keys() >= set(DIST_MARKS):
        raise broken(root, [f"{DIST_DIGESTS} is no record of digests: it does not name {' and '.join(DIST_MARKS)}"])
    missing = [name for name in recorded if not (root / name).is_file()]
    if missing:
        raise broken(root, listed("missing file(s)", missing))
    index = [name for name in recorded if name in DIST_MARKS or name.endswith("/layout.json")]
    changed = [n for n in index if hashlib.sha256((root / n).read_bytes()).hexdigest() != recorded[n]]
    if changed:
        raise broken(root, [f"{name} is not the file that was saved" for name in changed])


def read_headers(path: str | Path) -> dict[str, Stored]:
    """Name -> place of every tensor in a checkpoint directory, from the headers alone (no torch, no tensor data).

    Raises:
        UserError: as `scan_headers`; or a tensor in two files, or an index that says otherwise than the files.
    """
    stored, problems = scan_headers(path)
    if problems:
        raise broken(Path(path), problems)
    return stored


def scan_headers(path: str | Path) -> tuple[dict[str, Stored], list[str]]:
    """As `read_headers`, with what is wrong about single tensors handed back, for a report that names more.

    Raises:
        UserError: no weight files, a file the index names is missing, a header that is not one, a truncated file.
    """
    root = Path(path)
    stored: dict[str, Stored] = {}
    damaged: list[str] = []
    problems: list[str] = []
    files, index = _weight_files(root)
    for file in files:
        try:
            header = _read_header(root / file)
        except ValueError as error:
            damaged.append(f"{file} {error}")
            continue
        for name, entry in header.items():
            if name in stored:
                problems.append(f"{name} is both in {stored[name].file} and in {file}")
            stored[name] = entry
    if damaged:
        raise broken(root, damaged)
    for name, file in sorted(index.items()):
        if name not in stored:
            problems.append(f"{name} is not in {file}, where {INDEX} puts it")
        elif stored[name].file != file:
            problems.append(f"{name} is in {stored[name].file}, but {INDEX} puts it in {file}")
    if index:
        problems += [f"{n} is in {s.file}, but not in {INDEX}" for n, s in stored.items() if n not in index]
    return stored, problems


def _weight_files(root: Path) -> tuple[list[str], dict[str, str]]:
    """File names of the weights, and the index (name -> file) where there is one; else all safetensors files."""
    if not root.is_dir():
        raise UserError("model.path", f"{root} is not a directory", "it should hold a checkpoint", "set model.path")
    index = root / INDEX
    if not index.is_file():
        files = sorted(file.name for file in root.glob("*.safetensors") if file.is_file())
        if not files:
            raise broken(root, ["no *.safetensors file"])
        return files, {}
    try:
        whole = json.loads(index.read_text(), object_pairs_hook=_each_once)
        weight_map: dict[str, str] = whole["weight_map"]
        files = sorted(set(weight_map.values()))
        if not all(isinstance(file, str) for file in files):
            raise TypeError("weight_map names a file by what is no text")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise broken(root, [f"{INDEX} is not an index ({error})"]) from None
    if not files:
        raise broken(root, [f"{INDEX} names no file"])
    outside = [
        f"{INDEX} names {file or 'a file without a name'}, which is no file name"
        for file in files
        if not file or Path(file).name != file or len(file.encode(errors="replace")) > _LONGEST_NAME
    ]
    if outside:
        raise broken(root, outside)
    missing = [f"{file} is missing, {INDEX} names it" for file in files if not (root / file).is_file()]
    if missing:
        raise broken(root, missing)
    return files, weight_map


def _read_header(file: Path) -> dict[str, Stored]:
    """One file's header; ValueError (to follow the file's name) when the file is not whole."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            raise ValueError(f"is truncated or not safetensors: {size} bytes cannot hold its header")
        try:
            header: dict[str, Any] = json.loads(stream.read(length), object_pairs_hook=_each_once)
            header.pop("__metadata__", None)
            places = {n: (e["dtype"], e["shape"], *e["data_offsets"]) for n, e in header.items()}
            for name, place in places.items():
                _check_place(name, *place)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ValueError(f"has a damaged header: {kind}{error}") from None
    end = max((stop for _, _, _, stop in places.values()), default=0)
    if size != 8 + length + end:
        verb = "is truncated" if size < 8 + length + end else "is too long"
        raise ValueError(f"{verb}: {size} bytes, its header speaks of {8 + length + end}")
    at, before = 0, "the header"
    for name, (_, _, start, stop) in sorted(places.items(), key=lambda item: item[1][2:]):
        if start != at:  # the format allows neither: bytes of another tensor would be read as this one's
            what = "overlaps" if start < at else "leaves a gap after"
            raise ValueError(f"has a damaged header: {name} {what} {before}: it starts at byte {start}, not {at}")
        at, before = stop, name
    return {n: Stored(file.name, d, tuple(shape), 8 + length + start) for n, (d, shape, start, _) in places.items()}


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError if it has a key twice, of which json would keep the last without a word."""
    made = dict(pairs)
    if len(made) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name} is in it twice")
    return made


def _check_place(name: str, dtype: object, shape: object, *offsets: Any) -> None:
    """ValueError if a header's entry is none: dtype a text, shape and the two offsets counts, as many bytes as it takes."""
    counts = [*shape, *offsets] if isinstance(shape, list) else []
    if (
        not isinstance(dtype, str)
        or not counts
        or len(offsets) != 2
        or not all(type(n) is int and n >= 0 for n in counts)
    ):
        raise ValueError(f"{name} of dtype {dtype!r}, shape {shape!r}, bytes {list(offsets)!r}")
    *sizes, start, stop = counts
    if stop < start or (dtype in SIZES and stop - start != SIZES[dtype] * math.prod(sizes)):
        raise ValueError(f"{name} of shape {sizes} takes {stop - start} bytes")


def listed(kind: str, names: list[str]) -> list[str]:
    """One line for all tensors of a kind of problem."""
    return [f"{len(names)} {kind}: {', '.join(names)}"] if names else []


def broken(root: Path, problems: list[str]) -> UserError:
    """One error for everything that is wrong with a checkpoint."""
    return UserError(
        "model.weights",
        f"the checkpoint {root} cannot be used:\n    " + "\n    ".join(problems),
        "the model would start from weights other than the ones it was given",
        "download or copy the checkpoint again, or point model.path at the one this config.json belongs to",
    )
