"""Released checkpoints on disk: check their headers, read them into a model, write one.

A directory holds `config.json`, `*.safetensors` (with `model.safetensors.index.json` where there are several) and the
tokenizer's files. Weights are as the family quantises them, or plain.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_rl.durable import sync
from moe_rl.errors import RunFailed, UserError
from moe_rl.models.headers import INDEX, Stored, broken, listed, scan_headers
from moe_rl.models.weights import DTYPES, Parts, WeightTable, torch_dtype
from moe_rl.models.wire import Wire, mismatches

if TYPE_CHECKING:
    import torch

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def check_released(path: str | Path, table: WeightTable) -> tuple[dict[str, Stored], Wire]:
    """Check a whole checkpoint against a model by its headers alone; torch-free, seconds for any size.

    Returns the place of each of its tensors, the passed over ones included, and how it stores its weights.

    Raises:
        UserError: as `headers.read_headers`; or tensors missing, extra, of another shape or dtype, all listed; or
        weights of which
            some are quantised and others are not.
    """
    stored, problems = scan_headers(path)
    wire = Wire.of(table, stored)
    found: dict[str, list[str]] = {}
    for kind, tensor in mismatches(table, stored, wire):
        found.setdefault(kind, []).append(tensor)
    problems += [line for kind in sorted(found) for line in listed(kind, found[kind])]
    if wire.quantised and not (wire.linears and wire.experts) and {"fp8", "mxfp4"} <= {r.quant for r in table.rows}:
        whole, part = ("experts", "linears") if wire.linears else ("linears", "experts")
        problems.append(f"its {part} are quantised and its {whole} are not: a mixture of two checkpoints")
    if problems:
        raise broken(Path(path), problems)
    return stored, wire


def load_released(path: str | Path, parts: Parts, table: WeightTable) -> None:
    """Copy a checkpoint's tensors into live blocks (`WeightTable.trainer_parts` and its like), rows at a time.

    Released (FP8, MXFP4) weights are decoded on the way; some 16 MiB of values are in hand at a time. Only the rows
    that the blocks ask for are read. Floating dtypes are rounded to the block's; integers are expert indices and are
    checked.

    Raises:
        UserError: as `check_released`; or a value is not finite, or no expert.
    """
    import torch

    from moe_rl.models.reader import Reader, row_steps

    stored, wire = check_released(path, table)
    by_file = sorted((e for e in table.entries if e.name in parts), key=lambda e: stored[e.name].file)
    with Reader(path, stored) as reader, torch.no_grad():
        for entry in by_file:
            blocks = parts[entry.name]
            spans = [(b.start[0], b.start[0] + b.view.shape[0]) for b in blocks]
            dtype = blocks[0].view.dtype
            for start, stop in row_steps(entry, min(a for a, _ in spans), max(z for _, z in spans)):
                value = reader.decoded(entry, wire, start, stop, dtype)
                if not value.is_floating_point():
                    check_experts(value, entry.name, stored[entry.name].file, table.experts, Path(path))
                for (first, last), block in zip(spans, blocks, strict=True):
                    low, high = max(first, start), min(last, stop)
                    if low < high:
                        rest = block.slices[1:]
                        block.view[low - first : high - first].copy_(value[(slice(low - start, high - start), *rest)])


def check_experts(table: torch.Tensor, name: str, file: str, experts: int, root: Path) -> None:
    """UserError if an expert index is outside [0, experts)."""
    low, high = int(table.min()), int(table.max())
    if low < 0 or high >= experts:
        raise broken(
            root, [f"{name} ({file}) names expert {low if low < 0 else high}; they go from 0 to {experts - 1}"]
        )


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
        if tokenizer_dir is not None:
            copy_files(TOKENIZER_FILES, tokenizer_dir, work)


def copy_files(names: Iterable[str], source: str | Path, target: Path) -> None:
    """Copy those of `names` that `source` has."""
    for name in names:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, target / name)


@contextmanager
def _renamed_when_done(target: Path) -> Iterator[Path]:
    """A directory beside `target` that takes its name once everything in it is on disk; gone if the body raises."""
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield work
        for file in (*work.iterdir(), work):
            sync(file)
        work.chmod(0o755)
        work.rename(target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


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
