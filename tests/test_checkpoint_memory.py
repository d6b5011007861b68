"""What saving and loading add to a rank's host memory, by the kernel's own mark, against the formula of docs/architecture.md.

T is the largest stored tensor, S what a rank writes. A save at once: T. A save beside the training: S + T. A load: 2 T, as
torch reads one; for states that reshard `optimizer_state.LOAD_BYTES` more; and an offloading optimizer's second copy of its
masters.
"""

from __future__ import annotations

import ctypes
import gc
import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.small_v4 import write_model
from tests.test_optimizer_modes import SAME_LAYOUT, Mode, _engine, _steps, mode

MIB = 1 << 20
LOAD_SLACK = 36 * MIB  # and what the C library's heap loses between blocks of a few MiB
SLACK = 20 * MIB  # allocator, metadata of tensors, torch's own first-use buffers
SIZES = {
    "hidden_size": 384,
    "moe_intermediate_size": 512,
    "head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "n_routed_experts": 4,
    "vocab_size": 4096,
}


class Mark:
    """The kernel's high-water mark of this process's resident memory, set back at the start of a block."""

    def __enter__(self) -> Mark:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process still holds would be used without a trace
        Path("/proc/self/clear_refs").write_text("5")
        self.before = self._read("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = self._read("VmHWM") - self.before
        self.left = self._read("VmRSS") - self.before

    @staticmethod
    def _read(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(rank: int, world: int, port: int, path: str, directory: str, keys: Mode, at_once: int) -> dict[str, Any]:
    """Bytes that each way to save, and a load, add at most; `written` by this rank, `largest` tensor and parameters."""
    from moe_rl.engine import optimizer_state

    optimizer_state.LOAD_BYTES = at_once
    engine = _engine(rank, world, f"file://{directory}/meeting", path, keys)
    _steps(engine, 1)
    engine.save(f"{directory}/warm", contents=["extra", "model"], background=True)  # what only the first one takes
    engine.finish_save()
    engine.load(f"{directory}/warm")
    out: dict[str, Any] = {}
    params = [p for chunk in engine.chunks for p in chunk.parameters()]
    out["largest"], out["params"] = 4 * max(p.numel() for p in params), sum(p.numel() for p in params)
    for name, background in (("save", False), ("async", True)):
        with Mark() as mark:
            engine.save(f"{directory}/{name}", background=background)
            engine.finish_save()
        out[name], out[f"{name} left"] = mark.peak, mark.left
    out["written"] = Path(directory, "save", f"__{rank}_0.distcp").stat().st_size
    out["reports"] = {n: json.loads(Path(directory, n, "save.json").read_text()) for n in ("save", "async")}
    _steps(engine, 1)
    with Mark() as mark:
        out["loaded"] = engine.load(f"{directory}/save")
    out["load"] = mark.peak
    engine.save(f"{directory}/again")  # what was read in parts is what was written
    digests = [json.loads(Path(directory, name, "integrity.json").read_text()) for name in ("save", "again")]
    out["same"] = digests[0][f"__{rank}_0.distcp"] == digests[1][f"__{rank}_0.distcp"]
    engine.close()
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp("v4"), **SIZES))


CASES: dict[str, tuple[int, Mode]] = {
    "one rank": (1, mode("mixed")),
    "two data-parallel ranks": (2, mode("mixed", "bf16", 1.0, True)),
    "as it lies": (2, mode("mixed") | SAME_LAYOUT),
}


@pytest.mark.parametrize("name", CASES)
def test_a_save_and_a_load_take_no_more_than_the_formula(model, tmp_path, name):
    world, keys = CASES[name]
    group = 16 * MIB  # a thirteenth of one rank's states
    ranks = run_ranks(measure, world, model, str(tmp_path), keys, group)
    total = sum(r["written"] for r in ranks)
    assert 90e6 < total < 330e6
    for r in ranks:
        assert r["same"] is True
        largest, masters = r["largest"], 4 * r["params"] / world if keys["optimizer__offload_fraction"] else 0
        print(name, {k: round(v / MIB, 1) for k, v in r.items() if isinstance(v, int)})
        assert r["save"] < largest + SLACK
        assert 0.9 * r["written"] < r["async"] < r["written"] + largest + SLACK
        assert r["load"] < max(group, 3 * largest) + 2 * largest + masters + LOAD_SLACK
        assert max(r["save left"], r["async left"]) < SLACK
        assert r["written"] < 1.2 * total / world
        assert r["load"] - masters < 0.5 * r["written"]  # no second whole copy
    reports = ranks[0]["reports"]
    assert (
        reports["async"]["staged_gib"] * 2**30 == pytest.approx(total, rel=0.02) and reports["save"]["staged_gib"] == 0
    )
    for way, report in reports.items():
        assert report["host_peak_gib"] * 2**30 == pytest.approx(max(r[way] for r in ranks), abs=SLACK)
    assert ranks[0]["loaded"]["host_peak_gib"] * 2**30 == pytest.approx(ranks[0]["load"], abs=SLACK)
