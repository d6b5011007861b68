"""Broken released checkpoints: each is refused with one message that names the tensor and the file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_rl.cli import run
from moe_rl.errors import UserError
from moe_rl.models.family import get_family
from moe_rl.models.load import load_released
from moe_rl.models.weights import torch_dtype, whole_parts
from tests.released_v4 import INDEX, write_released

W1 = "layers.2.ffn.experts.1.w1"
WQ = "layers.3.attn.wq_b"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_released(tmp_path_factory.mktemp("whole") / "v4")


class Broken:
    """A copy of the whole checkpoint to damage."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def index(self) -> dict[str, str]:
        return json.loads((self.path / INDEX).read_text())["weight_map"]

    @index.setter
    def index(self, weight_map: dict[str, str]) -> None:
        (self.path / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    def change(self, file: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Rewrite a file with `change(tensors)` applied, and the index with it."""
        tensors = load_file(self.path / file)
        change(tensors)
        save_file(tensors, self.path / file, metadata={"format": "pt"})
        others = {name: place for name, place in self.index.items() if place != file}
        self.index = others | dict.fromkeys(tensors, file)

    def replace(self, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> str:
        """Rewrite one tensor; the file that holds it."""
        file = self.index[name]
        self.change(file, lambda tensors: tensors.update({name: make(tensors[name]).contiguous()}))
        return file

    def drop(self, name: str) -> str:
        file = self.index[name]
        self.change(file, lambda tensors: tensors.__delitem__(name))
        return file

    def configure(self, **changes: object) -> None:
        file = self.path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def start(path: Path) -> dict[str, torch.Tensor]:
    """What a trainer does with `model.path`: check the headers, then read every value; these, by name."""
    family = get_family("deepseek_v4")
    table = family.weight_table(family.read_arch(path))
    family.check_weights(path)
    kinds = {name: torch.int64 if s.dtype == "int32" else torch_dtype(s.dtype) for name, s in table.expected().items()}
    views = {name: torch.zeros(spec.shape, dtype=kinds[name]) for name, spec in table.expected().items()}
    load_released(path, whole_parts(views), table)
    return views


def test_the_whole_one_is_taken(whole: Path):
    assert all(values.count_nonzero() for values in start(whole).values())


def missing_file(b: Broken) -> list[str]:
    file = b.index["norm.weight"]
    (b.path / file).unlink()
    return [f"{file} is missing, {INDEX} names it"]


def absent_file(b: Broken) -> list[str]:
    b.index = b.index | {"norm.weight": "model-99999.safetensors"}
    return [f"model-99999.safetensors is missing, {INDEX} names it"]


def wrong_place(b: Broken) -> list[str]:
    other = next(file for file in b.index.values() if file != b.index["norm.weight"])
    true = b.index["norm.weight"]
    b.index = b.index | {"norm.weight": other}
    return [f"norm.weight is in {true}, but {INDEX} puts it in {other}"]


def outside_the_index(b: Broken) -> list[str]:
    file = b.index["norm.weight"]
    b.index = {name: place for name, place in b.index.items() if name != "norm.weight"}
    return [f"norm.weight is in {file}, but not in {INDEX}"]


def promised_by_the_index(b: Broken) -> list[str]:
    file = b.index[f"{W1}.scale"]
    before = b.index
    b.drop(f"{W1}.scale")
    b.index = before
    return [f"{W1}.scale is not in {file}, where {INDEX} puts it"]


def empty_index(b: Broken) -> list[str]:
    b.index = {}
    return [f"{INDEX} names no file"]


def no_index(b: Broken) -> list[str]:
    (b.path / INDEX).write_text("[1]")
    return [f"{INDEX} is not an index"]


def twice_in_the_index(b: Broken) -> list[str]:
    text = json.dumps({"weight_map": b.index})
    (b.path / INDEX).write_text(f'{text[:-2]}, "norm.weight": {json.dumps(b.index["norm.weight"])}}}}}')
    return [f"{INDEX} is not an index (norm.weight is in it twice)"]


def path_in_the_index(b: Broken) -> list[str]:
    b.index = b.index | {"norm.weight": "../elsewhere.safetensors"}
    return [f"{INDEX} names ../elsewhere.safetensors, which is no file name"]


def missing_scale(b: Broken) -> list[str]:
    b.drop(f"{WQ}.scale")
    return [f"1 missing: {WQ}.scale ({WQ}.weight is in {b.index[f'{WQ}.weight']})"]


def scale_without_weight(b: Broken) -> list[str]:
    b.drop(f"{W1}.weight")
    return [f"1 missing: {W1}.weight ({W1}.scale is in {b.index[f'{W1}.scale']})"]


def expert_missing(b: Broken) -> list[str]:
    for part in ("w1", "w2", "w3"):
        b.drop(f"layers.4.ffn.experts.3.{part}.weight")
        b.drop(f"layers.4.ffn.experts.3.{part}.scale")
    return ["6 missing:", *(f"layers.4.ffn.experts.3.{p}.{k}" for p in ("w1", "w2", "w3") for k in ("weight", "scale"))]


def expert_twice(b: Broken) -> list[str]:
    first = b.index[f"{W1}.weight"]
    weight = load_file(b.path / first)[f"{W1}.weight"]
    second = next(file for file in b.index.values() if file != first)
    b.change(second, lambda tensors: tensors.update({f"{W1}.weight": weight}))
    return [f"{W1}.weight is both in {min(first, second)} and in {max(first, second)}"]


def surplus_expert(b: Broken) -> list[str]:
    file = b.index[f"{W1}.weight"]
    b.change(file, lambda t: t.update({"layers.2.ffn.experts.4.w1.weight": torch.zeros(96, 80, dtype=torch.int8)}))
    return [f"1 not a tensor of this model: layers.2.ffn.experts.4.w1.weight ({file})"]


def wrong_dtype(b: Broken) -> list[str]:
    file = b.replace(f"{WQ}.weight", lambda t: t.to(torch.bfloat16))
    return [f"1 of another dtype: {WQ}.weight is BF16, not F8_E4M3 ({file})"]


def float_scale(b: Broken) -> list[str]:
    file = b.replace(f"{W1}.scale", lambda t: t.float())
    return [f"1 of another dtype: {W1}.scale is F32, not F8_E8M0 ({file})"]


def fp8_scale_geometry(b: Broken) -> list[str]:
    file = b.replace(f"{WQ}.scale", lambda t: t.view(torch.uint8)[:1].view(torch.float8_e8m0fnu))
    return [f"1 of another shape: {WQ}.scale is [1, 1], not [2, 1] ({file})"]


def mxfp4_scale_geometry(b: Broken) -> list[str]:
    file = b.replace(f"{W1}.scale", lambda t: t.view(torch.uint8).repeat(1, 2).view(torch.float8_e8m0fnu))
    return [f"1 of another shape: {W1}.scale is [96, 10], not [96, 5] ({file})"]


def odd_packed_width(b: Broken) -> list[str]:
    file = b.replace(f"{W1}.weight", lambda t: t[:, :-1])
    return [f"1 of another shape: {W1}.weight is [96, 79], not [96, 80] ({file})"]


def unpacked(b: Broken) -> list[str]:
    file = b.replace(f"{W1}.weight", lambda t: t.repeat(1, 2))
    return [f"1 of another shape: {W1}.weight is [96, 160], not [96, 80] ({file})"]


def half_quantised(b: Broken) -> list[str]:
    for name in [n for n in b.index if "ffn.experts." in n and n.startswith("layers.")]:
        b.drop(name) if name.endswith(".scale") else b.replace(name, lambda t: t.repeat(1, 2).to(torch.bfloat16))
    return ["its linears are quantised and its experts are not: a mixture of two checkpoints"]


def vocabulary_padding(b: Broken) -> list[str]:
    file = b.replace("head.weight", lambda t: torch.cat([t, t[:10]]))
    return [f"head.weight is [160, 160], not [150, 160] ({file}): 10 rows of padding beyond vocab_size 150"]


def truncated(b: Broken) -> list[str]:
    file = b.index[f"{W1}.weight"]
    data = (b.path / file).read_bytes()
    (b.path / file).write_bytes(data[:-100])
    return [f"{file} is truncated: {len(data) - 100} bytes, its header speaks of {len(data)}"]


def header_of_other_bytes(b: Broken) -> list[str]:
    file = b.index[f"{W1}.weight"]
    data = (b.path / file).read_bytes()
    (b.path / file).write_bytes(data.replace(b'"shape":[96,80]', b'"shape":[96,81]', 1))
    return [f"{file} has a damaged header:", "of shape [96, 81] takes 7680 bytes"]


def expert_out_of_range(b: Broken) -> list[str]:
    def change(table: torch.Tensor) -> torch.Tensor:
        table[7, 1] = 4
        return table

    file = b.replace("layers.1.ffn.gate.tid2eid", change)
    return [f"layers.1.ffn.gate.tid2eid ({file}) names expert 4; they go from 0 to 3"]


def nan_scale(b: Broken) -> list[str]:
    def change(scale: torch.Tensor) -> torch.Tensor:
        scale.view(torch.uint8)[5, 2] = 255
        return scale

    file = b.replace(f"{W1}.scale", change)
    return [f"not finite in {W1}.weight", file]


def nan_block(b: Broken) -> list[str]:
    def change(weight: torch.Tensor) -> torch.Tensor:
        weight.view(torch.uint8)[100, 3] = 0x7F
        return weight

    file = b.replace(f"{WQ}.weight", change)
    return [f"not finite in {WQ}.weight", file]


def overflowing_scale(b: Broken) -> list[str]:
    file = b.replace(f"{W1}.scale", lambda t: torch.full_like(t.view(torch.uint8), 254).view(torch.float8_e8m0fnu))
    return [f"not finite in {W1}.weight", file]


def nan_norm(b: Broken) -> list[str]:
    def change(weight: torch.Tensor) -> torch.Tensor:
        weight[11] = torch.nan
        return weight

    return [f"layers.0.ffn_norm.weight ({b.replace('layers.0.ffn_norm.weight', change)}) is not finite at [11]"]


def other_config(b: Broken) -> list[str]:
    b.configure(moe_intermediate_size=64)
    file = b.index[f"{W1}.weight"]
    return [f"{W1}.weight is [96, 80], not [64, 80] ({file})"]


def fewer_layers(b: Broken) -> list[str]:
    b.configure(num_hidden_layers=4)
    return [f"layers.4.attn_norm.weight ({b.index['layers.4.attn_norm.weight']})", "not a tensor of this model"]


BREAKS = [
    missing_file,
    absent_file,
    wrong_place,
    outside_the_index,
    promised_by_the_index,
    empty_index,
    no_index,
    twice_in_the_index,
    path_in_the_index,
    missing_scale,
    scale_without_weight,
    expert_missing,
    expert_twice,
    surplus_expert,
    wrong_dtype,
    float_scale,
    fp8_scale_geometry,
    mxfp4_scale_geometry,
    odd_packed_width,
    unpacked,
    half_quantised,
    vocabulary_padding,
    truncated,
    header_of_other_bytes,
    expert_out_of_range,
    nan_scale,
    nan_block,
    overflowing_scale,
    nan_norm,
    other_config,
    fewer_layers,
]


FILE = "model-00001.safetensors"
A, B = "layers.0.hc_attn_fn", "layers.0.hc_ffn_fn"  # of one dtype and shape, and both in FILE
Header = dict[str, dict[str, object]]


def place(name: str, by: int = 0, of: str = "") -> Callable[[Header], None]:
    """Puts a tensor where another one is, moved by some bytes."""

    def change(header: Header) -> None:
        header[name]["data_offsets"] = [at + by for at in header[of or name]["data_offsets"]]

    return change


def entry(**changes: object) -> Callable[[Header], None]:
    return lambda header: header[A].update(changes)


def before_the_data(header: Header) -> None:
    start, stop = header[A]["data_offsets"]
    header[A]["data_offsets"] = [start - stop, 0]


def as_floats(header: Header) -> None:
    header[A]["data_offsets"] = [float(at) for at in header[A]["data_offsets"]]


def twice(header: Header) -> str:
    return f"{json.dumps(header)[:-1]}, {json.dumps(A)}: {json.dumps(header[B])}}}"


HEADERS = {  # change of the header, which may give its text; what the message says after the file's name
    "one place for two": (place(B, of=A), "overlaps"),
    "overlap": (place(B, 4, of=A), "overlaps"),
    "gap": (lambda header: header.pop(A), "leaves a gap after"),
    "before the data": (before_the_data, A),
    "backwards": (entry(data_offsets=[8, 0]), A),
    "places as fractions": (as_floats, A),
    "one place only": (entry(data_offsets=[0]), ""),
    "three places": (entry(data_offsets=[0, 8, 16]), A),
    "shape below zero": (entry(shape=[-1, -4]), A),
    "shape as a fraction": (entry(shape=[1.0]), A),
    "shape as truth": (entry(shape=[True]), A),
    "shape as text": (entry(shape="4"), A),
    "dtype as a list": (entry(dtype=["F32"]), A),
    "dtype as an object": (entry(dtype={}), A),
    "no dtype": (entry(dtype=None), A),
    "a tensor twice": (twice, f"{A} is in it twice"),
    "deep": (lambda header: "[" * 100_000, "RecursionError"),
    "a list": (lambda header: "[]", ""),
    "no JSON": (lambda header: "hello", ""),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_damaged_header_is_refused(
    case: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By audit, conversion and a run's checks alike; nothing is read from a place that is not the tensor's own."""
    change, says = HEADERS[case]
    root = shutil.copytree(whole, tmp_path / "v4")
    data = (root / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = change(header)
    text = (text if isinstance(text, str) else json.dumps(header)).encode()
    (root / FILE).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    for command in (["audit", str(root)], ["convert", str(root), str(tmp_path / "out")]):
        assert run(command) == 2
        said = capsys.readouterr().err
        assert f"{FILE} has a damaged header" in said
        assert says in said
    assert {path.name for path in tmp_path.iterdir()} == {"v4"}
    with pytest.raises(UserError, match=r"has a damaged header.*\[model.weights\]"):
        get_family("deepseek_v4").check_weights(root)


@pytest.mark.parametrize("dtype", ["F64", "BOOL", "U16", "F4", "bf16"])
def test_a_foreign_dtype_is_refused(
    dtype: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(whole, tmp_path / "v4")
    data = (root / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[A]["dtype"] = dtype
    text = json.dumps(header).encode()
    (root / FILE).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    for command in (
        ["audit", str(root)],
        ["audit", str(root), "--digests"],
        ["convert", str(root), str(tmp_path / "out")],
    ):
        assert run(command) == 2
        assert f"{A} is {dtype}, not F32 ({FILE})" in capsys.readouterr().err


@pytest.mark.parametrize("file", [INDEX, "config.json"])
def test_deeply_nested_json_is_refused(
    file: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(whole, tmp_path / "v4")
    (root / file).write_text("[" * 100_000)
    for command in (["audit", str(root)], ["convert", str(root), str(tmp_path / "out")]):
        assert run(command) == 2
        assert file in capsys.readouterr().err


def raw(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A change of a tensor's bytes as one of the tensor: few operations take elements of one byte."""
    return lambda t: change(t.view(torch.uint8)).view(t.dtype)


NORM, PROJ, EXPERT = "mtp.0.enorm.weight", "mtp.0.e_proj", "mtp.0.ffn.experts.1.w1"
PASSED_OVER: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor] | None, str]] = {  # None: without the tensor
    "unknown floats": (NORM, lambda t: t.double(), f"1 of an unknown dtype: {NORM} is F64"),
    "unknown integers": (NORM, lambda t: t.short(), f"1 of an unknown dtype: {NORM} is I16"),
    "truth": (NORM, lambda t: t > 0, f"1 of an unknown dtype: {NORM} is BOOL"),
    "codes of what has no scale": (NORM, lambda t: t.to(torch.float8_e4m3fn), "1 missing: mtp.0.enorm.scale"),
    "empty": (NORM, lambda t: t[:0], f"{NORM} is [0]: no values"),
    "FP8 without scale": (f"{PROJ}.scale", None, f"1 missing: {PROJ}.scale ({PROJ}.weight is in "),
    "MXFP4 without scale": (f"{EXPERT}.scale", None, f"1 missing: {EXPERT}.scale ({EXPERT}.weight is in "),
    "scale without weight": (f"{PROJ}.weight", None, f"1 missing: {PROJ}.weight ({PROJ}.scale is in "),
    "scale of what is plain": (f"{PROJ}.weight", lambda t: t.float(), f"as {PROJ}.weight is not quantised"),
    "fewer FP8 scales": (f"{PROJ}.scale", raw(lambda t: t[:1]), f"is [160, 160] and {PROJ}.scale [1, 2]"),
    "more FP8 scales": (f"{PROJ}.scale", raw(lambda t: t.repeat(3, 1)), f"is [160, 160] and {PROJ}.scale [6, 2]"),
    "fewer MXFP4 scales": (f"{EXPERT}.scale", raw(lambda t: t[:, :2]), f"is [96, 80] and {EXPERT}.scale [96, 2]"),
    "one axis": (f"{PROJ}.weight", raw(lambda t: t[0]), f"{PROJ}.weight is [160] and"),
    "bf16 FP8 scales": (f"{PROJ}.scale", lambda t: t.bfloat16(), f"{PROJ}.scale is BF16, not F8_E8M0 or F32"),
    "float MXFP4 scales": (f"{EXPERT}.scale", lambda t: t.float(), f"{EXPERT}.scale is F32, not F8_E8M0"),
}


@pytest.mark.parametrize("case", PASSED_OVER)
def test_prediction_layers_that_are_no_values_are_refused(
    case: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are passed over, but kept: as numbers (bf16) or as they are (dist); no table gives their shapes."""
    name, change, says = PASSED_OVER[case]
    root = shutil.copytree(whole, tmp_path / "v4")
    b = Broken(root)
    file = b.drop(name) if change is None else b.replace(name, change)
    convert = ["convert", str(root), str(tmp_path / "out"), "--to"]
    for command in (["audit", str(root)], ["audit", str(root), "--digests"], [*convert, "dist"], [*convert, "bf16"]):
        assert run(command) == 2
        said = capsys.readouterr().err
        assert says in said and file in said
    assert {path.name for path in tmp_path.iterdir()} == {"v4"}


def test_files_that_may_not_be_read_are_named(whole: Path, tmp_path: Path) -> None:
    """By an owner without the rights of root, who may read everything."""
    privileges = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if privileges and subprocess.run([*privileges, "true"], capture_output=True, check=False).returncode:
        pytest.skip("setpriv cannot drop the rights of root here")
    commands, says = [], []
    for file in (FILE, INDEX, "config.json", "tokenizer.json"):
        root = shutil.copytree(whole, tmp_path / file)
        (root / "tokenizer.json").write_text("{}")
        (root / file).chmod(0)
        commands += [["audit", str(root)], ["convert", str(root), str(tmp_path / "out")]]
        says += [file] * 2
    code = f"from moe_rl.cli import run; import sys\nfor c in {commands!r}: print('---', run(c), file=sys.stderr)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*privileges, sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    *parts, last = done.stderr.split("---")
    assert len(parts) == len(says) and last == " 2\n", done.stderr
    for said, file in zip(parts, says, strict=True):
        assert file in said and "Permission denied" in said and "[internal]" not in said, said


@pytest.mark.parametrize("name", ["x" * 256, "\u00fc" * 128, "", ".", "a/b"])
def test_an_index_of_what_is_no_file_name_is_refused(name: str, whole: Path, tmp_path: Path) -> None:
    root = shutil.copytree(whole, tmp_path / "v4")
    b = Broken(root)
    b.index = b.index | {"norm.weight": name}
    with pytest.raises(UserError, match="which is no file name"):
        start(root)


@pytest.mark.parametrize("damage", BREAKS, ids=lambda f: f.__name__)
def test_it_is_refused_by_name(whole: Path, tmp_path: Path, damage: Callable[[Broken], list[str]]):
    shutil.copytree(whole, tmp_path / "v4")
    says = damage(Broken(tmp_path / "v4"))
    with pytest.raises(UserError) as error:
        start(tmp_path / "v4")
    assert error.value.rule == "model.weights"
    for text in says:
        assert text in str(error.value)
