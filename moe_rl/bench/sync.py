"""`moe-rl bench sync`: the weight update of a cut of a model, ours against the whole quantised checkpoint to each receiver."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moe_rl.bench.table import machine, make_directory_of
from moe_rl.config import load_config
from moe_rl.durable import write_atomic
from moe_rl.errors import UserError
from moe_rl.models.family import read_config, read_facts

COLUMNS = {
    "share": "experts held: 1 of so many parts",
    "way": "",
    "bytes": "sent to one receiver",
    "encode_s": "",
    "transfer_s": "",
    "repack_s": "copies into place and digests of what lies there",
    "seconds": "their sum",
    "transfer_over_path": "of the rate of a plain copy on the same path",
    "peak_extra_bytes": "most memory of the device beside weights, receiver and the buffer that packets arrive in",
}


def benchmark(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    hw: str | None = None,
    files: Sequence[Path] = (),
    layers: int | None = None,
    experts: int | None = None,
    vocab: int | None = None,
    out: Path = Path("bench-sync.json"),
) -> dict[str, Any]:
    """Measure (see `trainer.sync_speed`); `out` is replaced after every row. `layers`, `experts` and `vocab` cut the model.

    Raises:
        UserError: the input is wrong; nothing was measured.
    """
    small = [
        f"--{n} {v}" for n, v in (("layers", layers), ("experts", experts), ("vocab", vocab)) if v is not None and v < 1
    ]
    if small:
        raise UserError("bench.size", ", ".join(small), "There is nothing to measure.", "Use at least 1.")
    config = load_config(recipe, overrides, hw=hw, files=files)
    facts = read_facts(config.model, config.model.family)
    if facts.family != "deepseek_v4":
        what = f"the recipe's model is of family {facts.family}"
        raise UserError("bench.family", what, "Its releases are not quantised.", "Use a DeepSeek-V4 recipe.")
    make_directory_of(out)
    changes = {"num_hidden_layers": layers, "n_routed_experts": experts, "vocab_size": vocab}
    result: dict[str, Any] = {**machine(), "recipe": recipe, "overrides": list(overrides), **changes}
    result |= {"columns": COLUMNS, "rows": []}
    with tempfile.TemporaryDirectory(prefix="bench-sync-") as directory:
        cut = read_config(config.model) | {k: v for k, v in changes.items() if v is not None}
        (Path(directory) / "config.json").write_text(json.dumps(cut))
        from moe_rl.trainer.sync_speed import measure

        for row in measure(directory, config.engine.device):
            result["rows"].append(row)
            write_atomic(out, json.dumps(result, indent=1) + "\n")
    return result


def show(result: dict[str, Any]) -> None:
    """Print the rows as a table, and what columns mean."""
    table = Table(*COLUMNS, box=None, header_style="")
    for row in result["rows"]:
        cells = (row[name] for name in COLUMNS)
        table.add_row(
            *(f"{c:.4g}" if isinstance(c, float) else f"{c:,}" if isinstance(c, int) else c or "-" for c in cells)
        )
    console = Console()
    console.width = max(console.width, 150)
    console.print(table)
    for name, meaning in COLUMNS.items():
        if meaning:
            console.print(f"  {name}: {meaning}", highlight=False)
