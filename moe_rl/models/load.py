"""Released checkpoints on disk: check their headers, read them into a model, write one.

A directory holds `config.json`, `*.safetensors` (with `model.safetensors.index.json` where there are several) and the
tokenizer's files. Checking needs no torch: a safetensors file starts with the length of a JSON header (8 bytes, little
endian), the header gives dtype, shape and byte range of each tensor, and the data follow
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_rl.errors import RunFailed, UserError
from moe_rl.models.weights import BY_SAFETENSORS_NAME, DTYPES, Parts, TensorSpec, WeightTable, dtype_name, torch_dtype

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself


class Stored(NamedTuple):
    """Where a tensor lies: file name within the directory, safetensors dtype name, shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def read_headers(path: str | Path) -> dict[str, Stored]:
    """Name -> place of every tensor in a checkpoint directory, from the headers alone (no torch, no tensor data).

    Raises:
        UserError: no weight files, a file the index names is missing, a header that is not one, a truncated file, a
            tensor in two files.
    """
    root = Path(path)
    stored: dict[str, Stored] = {}
    problems: list[str] = []
    for file in _weight_files(root):
        try:
            header = _read_header(root / file)
        except ValueError as error:
            problems.append(f"{file} {error}")
            continue
        for name, entry in header.items():
            if name in stored:
                problems.append(f"{name} is both in {stored[name].file} and in {file}")
            stored[name] = entry
    if problems:
        raise _broken(root, problems)
    return stored


def _weight_files(root: Path) -> list[str]:
    """File names of the weights: those of the index where there is one, else all safetensors files."""
    if not root.is_dir():
        raise UserError("model.path", f"{root} is not a directory", "it should hold a checkpoint", "set model.path")
    index = root / INDEX
    if not index.is_file():
        files = sorted(file.name for file in root.glob("*.safetensors") if file.is_file())
        if not files:
            raise _broken(root, ["no *.safetensors file"])
        return files
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if not all(isinstance(file, str) for file in files):
            raise TypeError("weight_map names a file by what is no text")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _broken(root, [f"{INDEX} is not an index ({error})"]) from None
    missing = [f"{file} is missing, {INDEX} names it" for file in files if not (root / file).is_file()]
    if missing:
        raise _broken(root, missing)
    return files


def _read_header(file: Path) -> dict[str, Stored]:
    """One file's header; ValueError (to follow the file's name) when the file is not whole."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            raise ValueError(f"is truncated or not safetensors: {size} bytes cannot hold its header")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            places = {n: (e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for n, e in header.items()}
            end = max((stop for _, _, _, stop in places.values()), default=0)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"has a damaged header ({type(error).__name__}: {error})") from None
    if size != 8 + length + end:
        verb = "is truncated" if size < 8 + length + end else "is too long"
        raise ValueError(f"{verb}: {size} bytes, its header speaks of {8 + length + end}")
    for name, (dtype, shape, start, stop) in places.items():
        known = BY_SAFETENSORS_NAME.get(dtype)
        if known is not None and stop - start != known.size * math.prod(shape):
            raise ValueError(f"has a damaged header: {name} of shape {list(shape)} takes {stop - start} bytes")
    return {name: Stored(file.name, dtype, shape) for name, (dtype, shape, *_) in places.items()}


def check_released(path: str | Path, table: WeightTable) -> dict[str, Stored]:
    """Check a whole checkpoint against a model by its headers alone; torch-free, seconds for any size.

    Returns the place of each tensor of the table.

    Raises:
        UserError: as `read_headers`; or tensors missing, extra, of another shape or of an unknown dtype, all listed.
    """
    stored = read_headers(path)
    expected = table.expected()
    extra = [n for n in stored if n not in expected and not n.startswith(table.ignored)]
    problems = _compare(expected, stored)
    problems += _listed("not a tensor of this model", [f"{n} ({stored[n].file})" for n in sorted(extra)])
    if problems:
        raise _broken(Path(path), problems)
    return {name: stored[name] for name in expected}


def _compare(expected: Mapping[str, TensorSpec], stored: Mapping[str, Stored]) -> list[str]:
    """Problems of the expected tensors, grouped by kind."""
    missing, misshapen, unread = [], [], []
    for name, spec in expected.items():
        place = stored.get(name)
        if place is None:
            missing.append(name)
            continue
        if place.shape != spec.shape:
            misshapen.append(f"{name} is {list(place.shape)}, not {list(spec.shape)} ({place.file})")
        dtype = BY_SAFETENSORS_NAME.get(place.dtype)
        if dtype is None or dtype.integer != DTYPES[spec.dtype].integer:
            unread.append(f"{name} is {place.dtype} ({place.file})")
    return (
        _listed("missing", missing)
        + _listed("of another shape", misshapen)
        + _listed("of a dtype that is not read here (quantised?)", unread)
    )


def _listed(kind: str, names: list[str]) -> list[str]:
    """One line for all tensors of a kind of problem."""
    if not names:
        return []
    return [f"{len(names)} {kind}: {', '.join(names)}"]


def _broken(root: Path, problems: list[str]) -> UserError:
    return UserError(
        "model.weights",
        f"the checkpoint {root} cannot be used:\n    " + "\n    ".join(problems),
        "the model would start from weights other than the ones it was given",
        "download or copy the checkpoint again, or point model.path at the one this config.json belongs to",
    )


def load_released(path: str | Path, parts: Parts) -> None:
    """Copy a checkpoint's tensors into live blocks (`WeightTable.trainer_parts` and its like), one tensor at a time.

    Only the files and tensors that the blocks ask for are read. Floating dtypes are rounded to the block's; integers
    (`tid2eid`) must fit. Run `check_released` first to learn of tensors that no block asks for.

    Raises:
        UserError: a block's tensor is missing or has another shape or kind of dtype (all listed).
    """
    import torch
    from safetensors import safe_open

    stored = read_headers(path)
    specs = {name: TensorSpec(blocks[0].shape, dtype_name(blocks[0].view)) for name, blocks in parts.items()}
    problems = _compare(specs, stored)
    if problems:
        raise _broken(Path(path), problems)
    by_file: dict[str, list[str]] = {}
    for name in parts:
        by_file.setdefault(stored[name].file, []).append(name)
    for file, names in by_file.items():
        with safe_open(str(Path(path) / file), framework="pt") as reader, torch.no_grad():
            for name in names:
                value = reader.get_tensor(name)
                for part in parts[name]:
                    copy_exact_integers(part.view, value[part.index], name)


def copy_exact_integers(view: torch.Tensor, value: torch.Tensor, name: str) -> None:
    """`view.copy_(value)`; UserError if an integer does not survive the change of dtype. Floats are rounded."""
    view.copy_(value)
    if not view.is_floating_point() and not view.to(value.dtype).equal(value.to(view.device)):
        raise UserError("model.weights", f"{name} holds integers that {view.dtype} cannot", "they would wrap around")


def save_released(
    path: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    table: WeightTable,
    config: Mapping[str, Any],
    *,
    tokenizer_dir: str | Path | None = None,
    dtype: str = "bf16",
    max_file_bytes: int = 4 << 30,
) -> None:
    """Write a checkpoint directory that this program, transformers and vLLM load; whole or not at all.

    Args:
        path: the directory to make; its parent must exist.
        tensors: (released name, tensor on any device) in any order, each of the table's exactly once. They are read
            one by one, so that at most `max_file_bytes` of them wait in memory.
        table: names, shapes and dtypes.
        config: the parsed `config.json`; its dtype entry is set to what is written.
        tokenizer_dir: where to copy the tokenizer's files from.
        dtype: "bf16" writes the table's dtypes, "fp32" writes every floating tensor in fp32.
        max_file_bytes: a new file is begun before this size is passed.

    Raises:
        UserError: `path` exists.
        RunFailed: the tensors are not the table's.
    """
    target = Path(path)
    if target.exists():
        raise UserError("save.path", f"{target} exists", "nothing is overwritten", "name a new directory")
    with _renamed_when_done(target) as work:
        weight_map, total = _write_weights(work, tensors, table, dtype, max_file_bytes)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(work / INDEX, index)
        written = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
        _write_json(work / "config.json", {**config, "torch_dtype": written, "dtype": written})
        for name in TOKENIZER_FILES:
            if tokenizer_dir is not None and (Path(tokenizer_dir) / name).is_file():
                shutil.copyfile(Path(tokenizer_dir) / name, work / name)


@contextmanager
def _renamed_when_done(target: Path) -> Iterator[Path]:
    """A directory beside `target` that takes its name once everything in it is on disk; gone if the body raises."""
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield work
        for file in (*work.iterdir(), work):
            _sync(file)
        work.chmod(0o755)
        work.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _write_weights(
    work: Path, tensors: Iterable[tuple[str, torch.Tensor]], table: WeightTable, dtype: str, limit: int
) -> tuple[dict[str, str], int]:
    """Write the tensors into one file or several; returns name -> file and the bytes of all tensors."""
    from safetensors.torch import save_file

    expected = table.expected()
    waiting: dict[str, torch.Tensor] = {}
    parts: list[list[str]] = []
    waiting_bytes = total = 0

    def flush() -> None:
        save_file(waiting, str(work / f"{len(parts)}.part"), metadata={"format": "pt"})
        parts.append(list(waiting))
        waiting.clear()

    seen: set[str] = set()
    for name, tensor in tensors:
        if name not in expected or name in seen or tuple(tensor.shape) != expected[name].shape:
            why = "it came twice" if name in seen else "it is not in the table with that shape"
            raise RunFailed("save.tensors", f"cannot save {name} of shape {tuple(tensor.shape)}", why)
        seen.add(name)
        to = expected[name].dtype if dtype == "bf16" or DTYPES[expected[name].dtype].integer else dtype
        size = DTYPES[to].size * expected[name].numel
        if waiting and waiting_bytes + size > limit:
            flush()
            waiting_bytes = 0
        waiting[name] = tensor.detach().to(device="cpu", dtype=torch_dtype(to), copy=True).contiguous()
        waiting_bytes, total = waiting_bytes + size, total + size
    flush()
    absent = [name for name in expected if name not in seen]
    if absent:
        raise RunFailed("save.tensors", f"{len(absent)} tensors were not given: {', '.join(absent)}")
    weight_map = {}
    for i, names in enumerate(parts):
        file = "model.safetensors" if len(parts) == 1 else f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        (work / f"{i}.part").rename(work / file)
        weight_map.update(dict.fromkeys(names, file))
    return weight_map, total
