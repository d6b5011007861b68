"""`moe-rl convert`: what goes round comes back byte by byte; kills, other arguments and bad sources."""

from __future__ import annotations

import filecmp
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from moe_rl.cli import run
from moe_rl.convert.job import convert
from moe_rl.convert.plan import Request
from moe_rl.errors import RunFailed, UserError
from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from moe_rl.models.deepseek_v4.weights import weight_table
from moe_rl.models.load import check_released, load_released
from moe_rl.models.weights import torch_dtype, whole_parts
from moe_rl.models.wire import Wire
from tests.distributed import run_ranks
from tests.released_v4 import INDEX, dequantised, raw_tensors, released_config, write_released
from tests.small_v4 import run_config, write_model
from tests.test_preflight import small_disk

ARCH = DeepseekV4Arch.from_dict(released_config())
TABLE = weight_table(ARCH)
PARTS = 300_000  # bytes a file, so that there are several


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_released(tmp_path_factory.mktemp("released") / "v4")


@pytest.fixture(scope="module")
def dist(released: Path) -> Path:
    """The released checkpoint as a dist-checkpoint of PP2 x EP2, by two processes."""
    target = released.parent / "dist"
    convert(Request(released, target, "dist", pp=2, ep=2, file_bytes=PARTS), workers=2)
    return target


def equal_bytes(first: Path, second: Path, *, but: tuple[str, ...] = ()) -> None:
    """Same names, dtypes, shapes and bytes of every tensor; those that start with `but` only in the first."""
    a, b = raw_tensors(first), raw_tensors(second)
    assert {n for n in a if not n.startswith(but or ("none",))} == b.keys()
    for name, tensor in b.items():
        assert (tensor.dtype, tensor.shape) == (a[name].dtype, a[name].shape), name
        assert tensor.contiguous().view(torch.uint8).equal(a[name].contiguous().view(torch.uint8)), name


def test_released_to_dist_and_back_is_byte_exact(released: Path, dist: Path, tmp_path: Path):
    files = {p.name for p in dist.iterdir()}
    assert {f"__{rank}_0.distcp" for rank in range(4)} < files and "__4_0.distcp" not in files
    report = convert(Request(dist, tmp_path / "back", "released"))
    assert report.blocks == report.blocks_kept > 25_000
    equal_bytes(released, tmp_path / "back")
    for file in released.glob("*.safetensors"):  # the very files, header and all
        assert filecmp.cmp(file, tmp_path / "back" / file.name, shallow=False), file.name
    theirs, ours = (json.loads((p / "config.json").read_text()) for p in (released, tmp_path / "back"))
    assert ours == theirs | {"dtype": "bfloat16"}
    assert json.loads((tmp_path / "back" / INDEX).read_text()) == json.loads((released / INDEX).read_text())
    assert not [p for p in tmp_path.iterdir() if p.name != "back"]


def test_float32_scales_come_back_too(tmp_path: Path):
    source = write_released(tmp_path / "base", expert_dtype="fp8")
    convert(Request(source, tmp_path / "dist", "dist"))
    report = convert(Request(tmp_path / "dist", tmp_path / "back", "released"))
    assert report.blocks == report.blocks_kept
    equal_bytes(source, tmp_path / "back")


def test_without_the_released_scales_the_values_come_back(released: Path, dist: Path, tmp_path: Path):
    """Two encodings of the same numbers: other bytes, in files of our own cut, equal values."""
    shutil.copytree(dist, tmp_path / "dist")
    shutil.rmtree(tmp_path / "dist" / "carried")
    digests = json.loads((tmp_path / "dist" / "integrity.json").read_text())
    (tmp_path / "dist" / "integrity.json").write_text(json.dumps({n: d for n, d in digests.items() if "/" not in n}))
    report = convert(Request(tmp_path / "dist", tmp_path / "back", "released", file_bytes=PARTS))
    assert report.blocks_kept == 0 and report.mtp_kept == ()
    assert check_released(tmp_path / "back", TABLE)[1] == Wire("fp8", "mxfp4")
    ours, theirs = dequantised(tmp_path / "back"), dequantised(released)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 3
    different = 0
    for name, value in ours.items():
        assert np.array_equal(value, theirs[name]), name
    raw, before = raw_tensors(tmp_path / "back"), raw_tensors(released)
    different = sum(not raw[n].view(torch.uint8).equal(before[n].view(torch.uint8)) for n in raw if n.endswith("scale"))
    assert different > 50
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    # and --like brings the bytes back
    convert(Request(tmp_path / "dist", tmp_path / "like", "released", like=released))
    equal_bytes(released, tmp_path / "like")


def test_only_changed_blocks_get_another_scale(released: Path, tmp_path: Path):
    """A trained weight: blocks that nobody touched keep their bytes, the others are encoded anew, as well as can be."""
    convert(Request(released, tmp_path / "bf16", "bf16"))
    name = "layers.2.ffn.experts.1.w1.weight"
    file = tmp_path / "bf16" / "model.safetensors"
    tensors = raw_tensors(tmp_path / "bf16")
    before = tensors[name].clone()
    tensors[name][10:20, 32:64] *= 1.25
    from safetensors.torch import save_file

    save_file(tensors, file)
    report = convert(Request(tmp_path / "bf16", tmp_path / "back", "released", like=released))
    assert 0 < report.blocks - report.blocks_kept <= 10  # a changed block may need the very scale that it had
    ours, theirs = raw_tensors(tmp_path / "back"), raw_tensors(released)
    for key in ours:
        if not key.startswith(name.removesuffix("weight")):
            assert ours[key].view(torch.uint8).equal(theirs[key].view(torch.uint8)), key
    value, step = dequantised(tmp_path / "back")[name], tensors[name].float().numpy()
    assert np.array_equal(value[:10], before[:10].float().numpy())
    assert 0 < np.abs(value - step).max() <= np.abs(step[10:20, 32:64]).max() / 4


def test_prediction_layers_are_dropped_by_choice_and_listed(released: Path, dist: Path, tmp_path: Path, capsys):
    assert run(["convert", str(dist), str(tmp_path / "back"), "--mtp", "drop"]) == 0
    out = capsys.readouterr().out
    passed = [n for n in raw_tensors(released) if n.startswith("mtp.")]
    assert f"prediction layers dropped: {len(passed)} tensors" in out
    assert "mtp.0.ffn.experts.*.w2.scale (4)" in out and "  mtp.0.e_proj.weight\n" in out
    equal_bytes(released, tmp_path / "back", but=("mtp.",))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_bf16_is_what_transformers_loads(released: Path, dist: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    from moe_rl.models.deepseek_v4.weights import transformers_views

    one, other = tmp_path / "one", tmp_path / "other"
    convert(Request(released, one, "bf16", mtp="drop"))
    convert(Request(dist, other, "bf16", mtp="drop", file_bytes=PARTS))
    equal_bytes(one, other)
    config = json.loads((one / "config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"
    # transformers takes the ratio 8 of these tiny layers from compress_rates alone, which released configs lack
    (one / "config.json").write_text(
        json.dumps(
            config
            | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}
            | {"layer_types": list(ARCH.attention_kinds)}
        )
    )
    model, info = AutoModelForCausalLM.from_pretrained(one, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    values = dequantised(released)
    for name, view in transformers_views(model, ARCH).items():
        assert np.array_equal(view.double().numpy(), values[name].astype(np.float64)), name


def test_the_released_spelling_of_a_config():
    from moe_rl.models.deepseek_v4.arch import released_spelling

    spelled = released_config(compress_ratios=[0, 4, 128, 4, 0], mlp_layer_types=["hash_moe"] * 2 + ["moe"] * 3)
    spelled["layer_types"] = list(DeepseekV4Arch.from_dict(spelled).attention_kinds)
    out = released_spelling(spelled, DeepseekV4Arch.from_dict(spelled))
    assert "layer_types" not in out and "mlp_layer_types" not in out
    assert out["compress_ratios"] == [0, 4, 128, 4, 0] and out["num_hash_layers"] == 2
    assert DeepseekV4Arch.from_dict(out) == DeepseekV4Arch.from_dict(spelled)


# ---------------------------------------------------------------------------------------------------------- the engine
def _weights_of(rank: int, world: int, port: int, path: str, keys: dict) -> dict[str, np.ndarray]:
    from moe_rl.engine.engine import Engine

    engine = Engine.create(run_config(path, world, **keys), rank, world, f"127.0.0.1:{port}", train=False)
    return {
        name: {part.start: part.view.double().numpy().copy() for part in parts}
        for name, parts in engine.weights().items()
    }


@pytest.mark.parametrize("keys", [{}, {"layout__pp": 2, "layout__ep": 1}, {"layout__ep": 2}])
def test_the_engine_starts_from_it_in_any_layout(released: Path, dist: Path, keys: dict):
    """`model.path=` the converted checkpoint, written for PP2 x EP2: fp32 engines of other layouts hold its values."""
    world = keys.get("layout__pp", 1) * keys.get("layout__ep", 1)
    values, seen = dequantised(released), set()
    for weights in run_ranks(_weights_of, world, str(dist), keys):
        for name, blocks in weights.items():
            ((start, value),) = blocks.items()
            assert not any(start) and np.array_equal(value, values[name].astype(np.float64)), name
            seen.add(name)
    assert seen == TABLE.expected().keys()


def _save(rank: int, world: int, port: int, path: str, target: str, keys: dict) -> None:
    from moe_rl.engine.engine import Engine

    engine = Engine.create(
        run_config(path, world, **keys), rank, world, f"127.0.0.1:{port}", train=True, random_init=True
    )
    engine.save(target)


@pytest.mark.parametrize("family", ["deepseek_v4", "qwen"])
def test_what_an_engine_saved_becomes_files(family: str, tmp_path: Path):
    """Of a training checkpoint, optimizer and all, the weights: each tensor where another engine's loading puts it."""
    from moe_rl.models.family import get_family

    if family == "qwen":
        from tests.small_qwen import write_model as write_qwen

        model = write_qwen(tmp_path / "model", "qwen3_moe")
    else:
        model = write_model(tmp_path / "model")
    keys = {"layout__ep": 2} if family == "deepseek_v4" else {"layout__tp": 2}
    run_ranks(_save, 2, str(model), str(tmp_path / "dist"), keys)
    shutil.copy(model / "config.json", tmp_path / "dist")
    convert(Request(tmp_path / "dist", tmp_path / "plain", "bf16"))
    kind = get_family(family)
    table = kind.weight_table(kind.read_arch(model))
    views = {
        n: torch.zeros(s.shape, dtype=torch.int64 if s.dtype == "int32" else torch.float32)
        for n, s in table.expected().items()
    }
    load_released(tmp_path / "plain", whole_parts(views), table)
    (weights,) = run_ranks(_weights_of, 1, str(tmp_path / "dist"), {})
    for name, blocks in weights.items():
        for start, value in blocks.items():
            part = views[name][tuple(slice(a, a + n) for a, n in zip(start, value.shape, strict=True))]
            rounded = torch.from_numpy(value).to(torch_dtype(table.expected()[name].dtype)).double()
            assert torch.equal(part.double(), rounded), name


# ------------------------------------------------------------------------------------------------- kills and bad input
def test_a_killed_call_is_continued(released: Path, tmp_path: Path):
    """Killed at a random moment after the first file; the second call takes what is whole and ends with the same bytes."""
    target = tmp_path / "dist"
    code = (
        "import sys; from pathlib import Path; from moe_rl.convert.job import convert; from moe_rl.convert.plan import Request\n"
        "from moe_rl.convert import work; import time; run = work.Worker.run\n"
        "def slow(self, unit):\n    time.sleep(0.3)\n    return run(self, unit)\n"
        "work.Worker.run = slow\n"
        f"convert(Request(Path({str(released)!r}), Path({str(target)!r}), 'dist', pp=2, ep=2, file_bytes={PARTS}))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    done = tmp_path / ".dist.converting" / "done"
    deadline = time.time() + 120
    while time.time() < deadline and len(list(done.glob("0*")) if done.is_dir() else []) < 3:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not target.exists() and len(list(done.glob("0*"))) >= 3
    first = next(p for p in sorted((tmp_path / ".dist.converting" / "out").glob("*.distcp")))
    request = Request(released, target, "dist", pp=2, ep=2, file_bytes=PARTS)
    with pytest.raises(UserError, match=r"unfinished conversion of something else: ep: 2 before, 1 now"):
        convert(Request(released, target, "dist", pp=2, ep=1, file_bytes=PARTS))
    first.write_bytes(first.read_bytes()[:-1] + b"?")  # a damaged file is written again
    report = convert(request)
    assert 2 <= report.reused < report.files
    convert(Request(target, tmp_path / "back", "released"))
    equal_bytes(released, tmp_path / "back")
    assert not done.exists()


def run_slowly(number: int):
    from moe_rl.convert.work import run_in_process

    time.sleep(0.3)
    return run_in_process(number)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_call_leaves_no_process_and_is_continued(sent: signal.Signals, released: Path, tmp_path: Path):
    """With two workers, stopped after the second file: all end at once, and a second call ends with the same bytes."""
    target = tmp_path / "dist"
    code = (
        "import sys; from pathlib import Path; from moe_rl import cli; from moe_rl.convert import job, plan\n"
        "from tests.test_convert import run_slowly\n"
        f"job.run_in_process = run_slowly\n"
        f"plan.Request.__init__.__defaults__ = (*plan.Request.__init__.__defaults__[:-1], {PARTS})\n"
        "if __name__ == '__main__':\n"
        "    import signal; signal.signal(signal.SIGINT, signal.default_int_handler)  # not so under `nohup ... &`\n"
        "    cli.main()\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, str(script), "convert", str(released), str(target), "--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
    records = tmp_path / ".dist.converting" / "done"
    deadline = time.time() + 120
    while time.time() < deadline and len(list(records.glob("0*")) if records.is_dir() else []) < 2:
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(sent)
    _, said = process.communicate(timeout=30)
    assert process.returncode == (130 if sent == signal.SIGINT else -sent)
    assert "Traceback" not in said
    assert len(children) >= 2
    assert not psutil.wait_procs(children, timeout=10)[1]
    assert not target.exists()
    request = Request(released, target, "dist", file_bytes=PARTS)
    assert 2 <= convert(request, workers=2).reused
    convert(Request(target, tmp_path / "back", "released"))
    equal_bytes(released, tmp_path / "back")


def test_a_changed_source_is_not_continued_with(released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from moe_rl.convert import job

    source = shutil.copytree(released, tmp_path / "source")
    request = Request(source, tmp_path / "dist", "dist")
    monkeypatch.setattr(job, "_finish", lambda *_: 1 / 0)  # everything is written, and then it breaks off
    with pytest.raises(ZeroDivisionError):
        convert(request)
    monkeypatch.undo()
    file = next(source.glob("*.safetensors"))
    os.utime(file, (1, 1))
    with pytest.raises(UserError, match=f"unfinished conversion of something else: .*{file.name}: ") as error:
        convert(request)
    assert "--restart" in error.value.fix and not request.target.exists()
    assert convert(request, restart=True).reused == 0
    assert not list(tmp_path.glob(".*"))


def test_a_worker_that_dies_is_told(released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from moe_rl.convert import job

    monkeypatch.setattr(job, "run_in_process", os._exit)  # picklable, and ends the process without a word
    with pytest.raises(RunFailed, match="a process of the conversion died"):
        convert(Request(released, tmp_path / "dist", "dist"), workers=2)
    monkeypatch.undo()
    assert convert(Request(released, tmp_path / "dist", "dist")).files > 0


def test_a_disk_that_is_too_small_is_told_in_a_unit_that_fits(released: Path, tmp_path: Path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(UserError, match=r"convert\.disk") as error:
            convert(Request(released, disk / "out", "dist"))
        assert re.search(r"^[1-9][\d.]* MiB are to be written, [1-9][\d.]* KiB are free in ", error.value.what)
        assert not (disk / "out").exists()


def test_wrong_requests_are_refused(released: Path, dist: Path, tmp_path: Path, capsys):
    def message(*arguments: str) -> str:
        assert run(["convert", *arguments]) == 2
        return capsys.readouterr().err

    out = str(tmp_path / "out")
    assert "[convert.target]" in message(str(released), str(tmp_path))
    assert "[convert.target]" in message(str(released), str(tmp_path / "no" / "out"))
    assert "is no directory [convert.target]" in message(str(released), str(released / "config.json" / "out"))
    assert "lies in the source [convert.target]" in message(str(released), str(released / "out"))
    assert "exists [convert.target]" in message(str(released), str(_link(tmp_path / "dangling")))
    assert "[convert.target]" in message(str(released), str(tmp_path / ("x" * 250)))
    (tmp_path / ".taken.converting").touch()
    assert "[convert.target]" in message(str(released), str(tmp_path / "taken"))
    assert "[convert.option]" in message(str(released), out, "--to", "bf16", "--layout", "pp=2")
    assert "pp is given twice [layout.option]" in message(str(released), out, "--layout", "pp=2,pp=2")
    assert "[convert.option]" in message(str(released), out, "--to", "fp8")
    assert "[convert.option]" in message(str(released), out, "--mtp", "maybe")
    assert "[layout.option]" in message(str(released), out, "--layout", "tp=2")
    assert "[convert.layout]" in message(str(released), out, "--layout", "ep=3")
    assert "[convert.layout]" in message(str(released), out, "--layout", "pp=2,stages=Ett|tL")
    assert "[layout.too_many_stages]" in message(str(released), out, "--layout", "pp=9")
    assert "[model.path]" in message(str(tmp_path / "absent"), out)
    (tmp_path / "nothing").mkdir()
    assert "[model.weights]" in message(str(tmp_path / "nothing"), out)
    plain = tmp_path / "plain"
    convert(Request(released, plain, "bf16"))
    assert "[convert.mtp]" in message(str(plain), out, "--to", "released")
    assert "[model.weights]" in message(str(dist), out, "--like", str(plain))
    broken = shutil.copytree(dist, tmp_path / "broken")
    (broken / "__2_0.distcp").unlink()
    assert "__2_0.distcp" in message(str(broken), out)
    short = shutil.copytree(dist, tmp_path / "short")
    data = (short / "__3_0.distcp").read_bytes()
    (short / "__3_0.distcp").write_bytes(data[: len(data) // 2])
    assert f"__3_0.distcp is truncated: {len(data) // 2} bytes" in message(str(short), out)
    assert not Path(out).exists()


def _link(path: Path) -> Path:
    path.symlink_to("nowhere")
    return path


def test_a_plain_model_goes_to_dist_in_its_own_precision(tmp_path: Path):
    """dsv4-tiny is in fp32: no bit is lost on the way to a dist-checkpoint, and to another layout's."""
    from moe_rl.config.load import ASSETS

    source = ASSETS / "models" / "dsv4-tiny"
    convert(Request(source, tmp_path / "first", "dist"))
    convert(Request(tmp_path / "first", tmp_path / "dist", "dist", ep=2))
    (weights,) = run_ranks(_weights_of, 1, str(tmp_path / "dist"), {})
    raw = raw_tensors(source)
    assert weights.keys() == raw.keys() and (tmp_path / "dist" / "tokenizer.json").is_file()
    for name, blocks in weights.items():
        (value,) = blocks.values()
        assert np.array_equal(value, raw[name].double().numpy()), name


def test_a_limit_on_files_is_told_as_a_full_disk(released: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What a quota says, too; the second call goes on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    sizes = sorted(file.stat().st_size for file in released.glob("*.safetensors"))
    command = ["convert", str(released), str(tmp_path / "out"), "--to", "released"]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[-1] - 1, hard))
        assert run(command) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert "no space left for" in said and "File too large" in said and "[convert.disk]" in said
    assert run(command) == 0
    assert "of them from the call before" in capsys.readouterr().out
    equal_bytes(released, tmp_path / "out")


def start_late(plan_file: Path, root: Path, counter) -> None:
    """The first process that comes starts at once, the other when the first has long done everything."""
    from moe_rl.convert.work import start_process

    try:
        (root.parent / "first").touch(exist_ok=False)
    except FileExistsError:
        time.sleep(5)
    start_process(plan_file, root, counter)


def test_a_process_that_starts_late_is_waited_for(released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What it was started with must not be gone by then."""
    from moe_rl.convert import job

    monkeypatch.setattr(job, "start_process", start_late)
    convert(Request(released, tmp_path / "dist", "dist"), workers=2)
    assert not multiprocessing.active_children()


def test_a_terminal_without_the_letters_of_a_name(released: Path, tmp_path: Path):
    command = [sys.executable, "-m", "moe_rl.cli", "convert", str(released), str(tmp_path / "\u00fc"), "--to", "bf16"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert done.returncode == 0 and "\\xfc: bf16, " in done.stdout, done.stderr


def test_a_tied_output_layer_is_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some tied models' files hold it once more; a trained model's would be the old one."""
    from safetensors.torch import save_file

    from moe_rl.config.load import ASSETS

    source = shutil.copytree(ASSETS / "models" / "qwen2-tiny", tmp_path / "source")
    (source / INDEX).unlink()
    tensors = raw_tensors(source)
    copy = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | copy, source / "model.safetensors", metadata={"format": "pt"})
    for first, then in (("source", "dist"), ("dist", "back")):
        assert run(["convert", str(tmp_path / first), str(tmp_path / then)]) == 0
        out = capsys.readouterr().out
        assert ("left out, as config.json ties them to others: lm_head.weight" in out) == (first == "source")
        assert "prediction layers" not in out
    convert(Request(ASSETS / "models" / "qwen2-tiny", tmp_path / "without", "bf16"))
    equal_bytes(tmp_path / "without", tmp_path / "back")


@pytest.mark.parametrize("way", ["plain", "dist"])
def test_a_value_that_bf16_cannot_hold_is_refused(way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is finite in an fp32 source, and would be infinite in the target."""
    from safetensors.torch import save_file

    from moe_rl.config.load import ASSETS

    source = shutil.copytree(ASSETS / "models" / "dsv4-tiny", tmp_path / "source")
    tensors = raw_tensors(source)
    tensors["layers.0.attn_norm.weight"][3] = -3.4e38
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    says = "is -3.4e+38 at [3], too large for bfloat16"
    if way == "dist":
        assert run(["convert", str(source), str(tmp_path / "dist")]) == 0
        source = tmp_path / "dist"
    assert run(["convert", str(source), str(tmp_path / "bf16"), "--to", "bf16"]) == 2
    said = capsys.readouterr().err
    assert "layers.0.attn_norm.weight" in said and says in said
    assert not (tmp_path / "bf16").exists()


def test_transformer_engine_beside_it_is_left_alone(released: Path, tmp_path: Path):
    """megatron-core takes Transformer Engine up where it finds it, which no process without a GPU survives."""
    package = tmp_path / "site" / "transformer_engine" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text("raise RuntimeError('Transformer Engine was imported')\n")
    commands = [["convert", str(released), str(tmp_path / "dist"), "--to", "dist"], ["audit", str(tmp_path / "dist")]]
    code = f"import sys; from moe_rl.cli import run; sys.exit(any([run(c) for c in {commands!r}]))"
    paths = os.pathsep.join([str(package.parent.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
