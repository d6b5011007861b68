"""Damaged dist-checkpoints: conversion, audit and a run's checks refuse each with one message that names the file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_rl.cli import run
from moe_rl.convert.job import convert
from moe_rl.convert.plan import Request
from moe_rl.errors import UserError
from moe_rl.models.family import get_family
from moe_rl.models.headers import DIST_DIGESTS
from tests.released_v4 import write_released

DATA = "__1_0.distcp"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    convert(Request(write_released(root / "v4"), root / "dist", "dist", pp=2, ep=2))
    return root / "dist"


def gone(file: str) -> Callable[[Path], None]:
    return lambda root: (root / file).unlink()


def pipe(file: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        (root / file).unlink()
        os.mkfifo(root / file)

    return change


def holds(file: str, data: bytes) -> Callable[[Path], None]:
    return lambda root: void((root / file).write_bytes(data))


def cut(part: float) -> Callable[[Path], None]:
    return lambda root: os.truncate(root / DATA, int((root / DATA).stat().st_size * part))


def config(**changes: object) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        file = root / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def unrecorded(file: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        recorded = json.loads((root / DIST_DIGESTS).read_text())
        del recorded[file]
        (root / DIST_DIGESTS).write_text(json.dumps(recorded))

    return change


def flip(root: Path) -> None:
    data = bytearray((root / DATA).read_bytes())
    data[len(data) // 2] ^= 1
    (root / DATA).write_bytes(data)


def void(_: object) -> None: ...


BEFORE_READING = {  # damage, what the message says; told before a run starts, too
    "no data": (gone(DATA), f"missing file(s): {DATA}"),
    "no index": (gone(".metadata"), "missing file(s) of a dist-checkpoint: .metadata"),
    "no form": (gone("metadata.json"), "missing file(s) of a dist-checkpoint: metadata.json"),
    "garbage index": (holds(".metadata", b"hello"), ".metadata is not the file that was saved"),
    "empty index": (holds(".metadata", b""), ".metadata is not the file that was saved"),
    "garbage form": (holds("metadata.json", b"{"), "metadata.json is not the file that was saved"),
    "no digests": (gone(DIST_DIGESTS), f"{DIST_DIGESTS} cannot be read"),
    "garbage digests": (holds(DIST_DIGESTS, b"["), f"{DIST_DIGESTS} cannot be read"),
    "deep digests": (holds(DIST_DIGESTS, b"[" * 100_000), f"{DIST_DIGESTS} cannot be read"),
    "a pipe for digests": (pipe(DIST_DIGESTS), f"{DIST_DIGESTS} cannot be read"),
    "a pipe for data": (pipe(DATA), f"missing file(s): {DATA}"),
    "digests without names": (holds(DIST_DIGESTS, b"[1]"), f"{DIST_DIGESTS} is no record of digests"),
    "digests of nothing": (holds(DIST_DIGESTS, b"{}"), f"{DIST_DIGESTS} is no record of digests"),
    "index not recorded": (unrecorded(".metadata"), f"{DIST_DIGESTS} is no record of digests"),
    "no carried scales": (gone("carried/model.safetensors"), "missing file(s): carried/model.safetensors"),
    "no carried places": (gone("carried/layout.json"), "missing file(s): carried/layout.json"),
    "garbage carried places": (holds("carried/layout.json", b"{"), "carried/layout.json is not the file"),
}
BY_THE_INDEX = {
    "truncated": (cut(0.5), f"{DATA} is truncated"),
    "empty": (cut(0), f"{DATA} is truncated: 0 bytes"),
    "fewer layers": (config(num_hidden_layers=4, compress_ratios=[0, 4, 8, 4]), "layers.4."),
    "another model": (config(hidden_size=192), ""),
}


@pytest.mark.parametrize("case", [*BEFORE_READING, *BY_THE_INDEX, "flipped bit"])
def test_it_is_refused_by_name(case: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, says = (BEFORE_READING | BY_THE_INDEX).get(case, (flip, f"{DATA} is not the file that was saved"))
    damage(shutil.copytree(whole, tmp_path / "broken"))
    assert run(["convert", str(tmp_path / "broken"), str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err
    left = {path.name for path in tmp_path.iterdir()} - {"broken"}
    assert left == ({".out.converting"} if case == "flipped bit" else set())  # files before the damaged one are kept
    assert run(["audit", str(tmp_path / "broken"), *(["--digests"] if case == "flipped bit" else [])]) == 2
    assert says in capsys.readouterr().err
    if case in BEFORE_READING:
        with pytest.raises(UserError, match=r"\[model.weights\]") as error:
            get_family("deepseek_v4").check_weights(tmp_path / "broken")
        assert says in str(error.value)


def test_a_link_to_nowhere_beside_the_data_is_passed_over(whole: Path, tmp_path: Path) -> None:
    root = shutil.copytree(whole, tmp_path / "linked")
    (root / "old.distcp").symlink_to("nowhere")
    assert run(["convert", str(root), str(tmp_path / "out")]) == 0


def test_the_whole_one_is_taken(whole: Path) -> None:
    assert run(["audit", str(whole), "--digests"]) == 0
