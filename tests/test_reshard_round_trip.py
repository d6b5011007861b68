"""A run that is resharded and back goes on as if it had never been: to the last bit, in bf16 too.

Between two layouts bf16 rounds other sums: which tokens stand in one matrix product, and the order in which micro-batches
and ranks are added. So a bf16 run continued in another layout leaves the run it came from by that rounding, from the
second step on. Whether the checkpoint is to blame is decided by a run of the target layout itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import run_ranks
from tests.small_v4 import write_model
from tests.test_engine_layouts import EP2, PP2
from tests.test_optimizer_modes import LAYOUTS, PAIRWISE, RESHARD, Mode, _load, _save, describe, mode


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp("v4")))


def _check(model: str, directory: Path, modes: list[Mode], name: str) -> None:
    """Save in a layout, load in pp2 ep2 and save there, load that in the first again: the steps of the run that went on."""
    (world, layout), away = LAYOUTS[name], directory / "away"
    away.mkdir(parents=True)
    here = [m | layout for m in modes]
    saved = run_ranks(_save, world, model, str(directory), here)
    there = run_ranks(_load, 4, model, str(directory), [m | PP2 | EP2 for m in modes], "there", str(away))
    back = run_ranks(_load, world, model, str(away), here, "back")
    for before, after in zip(saved, back, strict=True):
        for keys, b, a in zip(modes, before, after, strict=True):
            assert [a[k] for k in ("digest", "next", "end")] == [b[k] for k in ("digest", "next", "end")], describe(
                keys
            )
    for i, keys in enumerate(modes):  # the same weights and first loss, and then another rounding
        assert there[0][i]["next"][0][0] == pytest.approx(saved[0][i]["next"][0][0], abs=1e-5), describe(keys)


def test_a_bf16_run_that_was_resharded_and_back_goes_on_to_the_bit(model, tmp_path):
    _check(model, tmp_path / "run", [mode("mixed", "bf16", 0.5, True)], "pp2")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_mode_does(model, tmp_path, name):
    _check(model, tmp_path / "run", RESHARD if name == "ep2" else PAIRWISE, name)
