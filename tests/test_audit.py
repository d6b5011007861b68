"""`moe-rl audit`: full-size models in the layouts of their recipes, checkpoints of every form, and what it finds wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_rl.audit import audit
from moe_rl.cli import run
from moe_rl.config import load_config
from moe_rl.config.load import ASSETS
from moe_rl.convert.job import convert
from moe_rl.convert.plan import Request
from moe_rl.models.family import get_family, read_facts
from tests.released_v4 import INDEX, raw_tensors, released_config, shapes, write_released
from tests.small_qwen import save_model

LAYOUTS = [{}, {"pp": 2, "ep": 2}, {"pp": 4, "ep": 4}, {"pp": 2, "vpp": 2}, {"ep": 4}]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_released(tmp_path_factory.mktemp("released") / "v4")


@pytest.mark.parametrize(
    ("recipe", "layouts", "total", "active"),
    [("dsv4-pro", ["pp=32,ep=8", "pp=16,ep=16"], 1.6e12, 49e9), ("dsv4-flash", ["pp=8,ep=8"], 284.3e9, 13.8e9)],
)
@pytest.mark.slow
def test_full_size_models_are_accounted_for(recipe: str, layouts: list[str], total: float, active: float):
    """All coordinates of the model itself, on a CPU: in minutes, and in 8 GiB."""
    code = (
        "import sys, resource; from moe_rl.cli import run\n"
        f"code = run(['audit', {recipe!r}, '--json', *{[x for name in layouts for x in ('--layout', name)]!r}])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == [] and len(found["layouts"]) == len(layouts)
    assert [a["coordinates"] for a in found["layouts"]] == [256] * 2 if recipe == "dsv4-pro" else [64]
    assert found["totals"]["parameters"] == pytest.approx(total, rel=0.02)
    assert found["totals"]["active"] == pytest.approx(active, rel=0.02)
    assert int(done.stderr.split()[-1]) < 8 << 20  # KiB


def test_pro_is_as_large_as_its_release():
    """865 GB were published; what is not built, the prediction layer, is the rest: 3 projections of 7168 and one layer."""
    path = Path(load_config("dsv4-pro").model.path)
    family = get_family("deepseek_v4")
    from moe_rl.audit import totals

    found = totals(family.weight_table(family.read_arch(path)), 6, {"expert_dtype": "fp4"})
    assert found.released_bytes == pytest.approx(865e9, rel=0.02)
    assert found.parameters == pytest.approx(1.6e12, rel=0.02)


@pytest.mark.parametrize("recipe", ["dsv4-flash", "dsv4-pro"])
def test_the_recipes_say_what_is_not_verified(recipe: str, capsys):
    assert run(["explain", "layout.pp", "--recipe", recipe]) == 0
    config = load_config(recipe)
    assert config.world == {"dsv4-flash": 64, "dsv4-pro": 512}[recipe] and config.layout.pin_hash_layers
    text = json.loads((Path(config.model.path) / "config.json").read_text())
    assert set(text["_unverified"]) < set(text) and text["_sources"]
    facts = read_facts(config.model)
    assert facts.hash_layers == (0, 1, 2) and facts.weight_files == 0
    # what is left to say of it without GPUs, data and the release itself
    assert run(["train", recipe, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "[data.train]" in said and "[model.tokenizer]" in said and "[layout" not in said


def test_figures_are_overridden_by_keys(released: Path, capsys):
    """What is not verified can be set, wherever a model is planned, accounted for or built."""
    keys = ["model.config.o_groups=32", "model.config.rope_scaling.factor=32", "model.config.swiglu_limit=7"]
    config = load_config("dsv4-pro", keys)
    arch = get_family("deepseek_v4").read_arch(config.model)
    assert (arch.o_groups, arch.compress_rope.factor, arch.swiglu_limit) == (32, 32, 7)
    totals = []
    for figures in ([], keys):
        assert run(["plan", "dsv4-pro", *figures, "--json"]) == 0
        totals.append(json.loads(capsys.readouterr().out)["model"]["params_total"])
    # 16 more groups: so many more columns of wo_b in each layer; wo_a has as many values as before
    assert totals[1] - totals[0] == 61 * 7168 * 16 * 1024
    found = audit(load_config("dsv4-flash", ["model.config.num_hidden_layers=40"]).model)
    assert "compress_ratios" in found.unverified and "num_hidden_layers" not in found.unverified
    assert not found.problems and found.totals.parameters == pytest.approx(284.3e9 * 40 / 43, rel=0.01)
    assert run(["audit", str(released), "model.config.q_lora_rank=8"]) == 2
    assert "wq_a.weight is" in capsys.readouterr().err
    config = load_config("dsv4-pro", ["model.config.index_topk=3", "model.config.index_topk=4"])
    assert config.origin("model.config.index_topk") == "command line" and config.model.config == {"index_topk": 4}


@pytest.mark.parametrize("form", ["released", "bf16", "dist"])
def test_whole_checkpoints_are_accounted_for(released: Path, tmp_path: Path, form: str):
    path = released
    if form != "released":
        path = tmp_path / form
        convert(Request(released, path, form, pp=2, ep=2) if form == "dist" else Request(released, path, form))
    found = audit(path, layouts=LAYOUTS, digests=True)
    assert found.problems == [] and [a.coordinates for a in found.layouts] == [1, 4, 16, 2, 4]
    parameters = sum(torch.Size(s).numel() for n, k, s in shapes(released_config()) if not n.startswith("mtp"))
    assert found.totals.parameters + found.totals.tables == parameters
    if form == "dist":
        assert {x.belongs_to for x in found.tensors if "_extra" not in x.name} == {x.name for x in found.tensors}
        return
    raw = raw_tensors(path)
    assert {x.name: (x.shape, len(x.sha256)) for x in found.tensors} == {
        n: (tuple(t.shape), 64) for n, t in raw.items()
    }
    assert found.passed_over == sum(n.startswith("mtp.") for n in raw)
    assert len({x.belongs_to for x in found.tensors} - {""}) == sum(
        not n.startswith("mtp.") and not n.endswith(".scale") for n in raw
    )


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_moe"])
def test_tensor_parallel_ranks_together_are_the_model(kind: str, tmp_path: Path):
    layouts = [{"tp": 2}, {"tp": 2, "pp": 2}]
    layouts += [{"tp": 2, "etp": 2}, {"ep": 2, "etp": 2}, {"tp": 2, "ep": 2}] if kind == "qwen3_moe" else []
    found = audit(save_model(tmp_path / "model", kind), layouts=layouts)
    assert found.problems == [] and len(found.layouts) == len(layouts)


@pytest.mark.parametrize(
    ("recipe", "layout", "says"),
    [
        ("dsv4-tiny", "ep=3", "layout.ep 3 does not divide the model's 8 experts [layout.experts]"),
        ("dsv4-tiny", "tp=2", "layout.tp is 2, but family deepseek_v4 runs with layout.tp=1 only [layout.tp]"),
        ("dsv4-tiny", "vpp=2", "layout.vpp is 2 with layout.pp 1 [layout.vpp]"),
        ("dsv4-tiny", "pp=2,stages=EttttL", "has 1 segment(s), but pp * vpp is 2 * 1 = 2 [layout.segments]"),
        ("qwen3-moe-tiny", "tp=3", "layout.tp 3 does not divide the model's 4 attention heads"),
        ("qwen3-moe-tiny", "tp=4", "layout.tp 4 does not divide the model's 2 key-value heads [layout.heads]"),
        (
            "qwen3-moe-tiny",
            "etp=3",
            "layout.etp 3 does not divide the model's 64 columns of an expert [layout.columns]",
        ),
        ("qwen2-tiny", "ep=2", "layout.ep is 2, but the model has no experts [layout.experts]"),
        ("qwen2-tiny", "etp=2", "layout.etp is 2, but the model has no experts [layout.experts]"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused(recipe: str, layout: str, says: str, capsys):
    assert run(["audit", recipe, "--layout", layout]) == 2
    assert says in capsys.readouterr().err


def test_a_rank_that_holds_a_part_twice_is_found(released: Path):
    """Two chunks of one rank, which a layout without pipeline ranks would give it."""
    from moe_rl.audit import Audit, _audit_layout, totals

    facts, kind = read_facts(released), get_family("deepseek_v4")
    arch = kind.read_arch(released)
    table = kind.weight_table(arch)
    found = Audit("", "", totals(table, 2, released_config()))
    _audit_layout(found, kind, arch, table, facts, {"vpp": 2})
    assert "vpp=2: layers.4.attn_norm.weight is on the pipeline stages 0.0, 0.1" in found.problems


def test_a_tied_copy_with_other_values_is_found(tmp_path: Path, capsys):
    path = shutil.copytree(ASSETS / "models" / "qwen2-tiny", tmp_path / "model")
    (path / INDEX).unlink()
    tensors = load_file(path / "model.safetensors")
    copy = tensors["model.embed_tokens.weight"].clone()
    for change, code, says in (
        (lambda: copy, 0, ""),
        (lambda: copy + 1, 2, "lm_head.weight (model.safetensors) has other values than model.embed_tokens.weight"),
        (lambda: copy[:-1].clone(), 2, "1 of another shape: lm_head.weight is"),
    ):
        save_file(tensors | {"lm_head.weight": change()}, path / "model.safetensors", metadata={"format": "pt"})
        assert run(["audit", str(path), "--digests"]) == code
        assert says in capsys.readouterr().err


def test_a_directory_is_no_recipe_and_a_recipe_no_directory(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    def said(source: str, code: int = 2) -> tuple[str, str]:
        assert run(["audit", source]) == code
        return capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    shutil.copytree(released, "qwen2-tiny")  # another model's, in a directory that is named like a recipe
    out, err = said("qwen2-tiny", 0)
    assert "qwen2-tiny: plain" in out and err == "qwen2-tiny is taken as the recipe; ./qwen2-tiny means the directory\n"
    out, err = said("./qwen2-tiny", 0)
    assert "released (FP8 linears, MXFP4 experts)" in out and err == ""
    shutil.copytree(released, "mine.yaml")
    assert "released (FP8" in said("mine.yaml", 0)[0]
    Path("mine.yaml/config.json").unlink()
    for source in ("mine.yaml", str(tmp_path / "mine.yaml")):
        assert f"model.path {tmp_path}/mine.yaml has no config.json" in said(source)[1]
    assert f"model.path {tmp_path}/nowhere/v4 does not exist" in said("nowhere/v4")[1]
    assert f"model.path {tmp_path}/nowhere does not exist" in said("nowhere/config.json")[1]
    assert "there is no recipe 'dsv4-tinny'; nearest: dsv4-tiny" in said("dsv4-tinny")[1]


def test_everything_wrong_is_in_one_report(released: Path, tmp_path: Path, capsys):
    path = shutil.copytree(released, tmp_path / "v4")
    index = json.loads((path / INDEX).read_text())
    (path / INDEX).unlink()
    file = path / index["weight_map"]["layers.2.attn.wo_b.weight"]
    tensors = load_file(file)
    del tensors["layers.2.attn.wo_b.weight"]
    tensors["layers.9.surplus"] = torch.zeros(2)
    norm = next(name for name in tensors if name.endswith("_norm.weight"))
    tensors[norm][3] = torch.nan
    save_file(tensors, file)
    other = path / index["weight_map"]["layers.4.ffn.experts.0.w2.weight"]
    tensors = load_file(other)
    tensors["layers.4.ffn.experts.0.w2.weight"] = tensors["layers.4.ffn.experts.0.w2.weight"][:-1].contiguous()
    save_file(tensors, other)
    assert run(["audit", str(path), "--digests", "--json", "--list"]) == 2
    out, said = capsys.readouterr()
    for text in (
        f"1 missing: layers.2.attn.wo_b.weight (layers.2.attn.wo_b.scale is in {file.name})",
        f"1 not a tensor of this model: layers.9.surplus ({file.name})",
        f"layers.4.ffn.experts.0.w2.weight is [159, 48], not [160, 48] ({other.name})",
        f"{norm} ({file.name}) is not finite at [3]",
    ):
        assert text in said and any(text in problem for problem in json.loads(out)["problems"]), text
    listed = {x["name"]: x for x in json.loads(out)["tensors"]}
    assert listed["layers.9.surplus"]["belongs_to"] == "" and listed["norm.weight"]["belongs_to"] == "norm.weight"


def test_a_changed_or_foreign_dist_checkpoint(released: Path, tmp_path: Path):
    path = tmp_path / "dist"
    convert(Request(released, path, "dist"))
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "__0_0.distcp").write_bytes(data)
    assert audit(path, digests=True).problems == ["__0_0.distcp is not the file that was saved"]
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 8, "o_groups": 4}))
    problems = audit(path).problems
    assert any(
        "layers.0.self_attn.q_b_proj.weight (layers.0.attn.wq_b.weight) is [160, 48], not [320, 48]" in p
        for p in problems
    )


def test_a_table_that_lacks_a_row_is_found(released: Path, monkeypatch: pytest.MonkeyPatch):
    """A parameter, and a buffer, that no row speaks of."""
    from moe_rl.models.deepseek_v4 import weights

    rows = weights.ROWS
    for gone, says in (
        ("attn.q_norm.weight", "elements of layers.0.self_attn.q_a_norm.weight"),
        ("gate.bias", "expert_bias"),
    ):
        monkeypatch.setattr(weights, "ROWS", tuple(r for r in rows if not r.released.endswith(gone)))
        problems = audit(released, layouts=[{"pp": 2}]).problems
        assert any(says in problem for problem in problems), gone
    monkeypatch.setattr(weights, "ROWS", (*rows, rows[0]._replace(released="again.weight")))
    assert any(
        "64000 of the 24000 elements" in p or "48000 of the 24000" in p for p in audit(released, layouts=[{}]).problems
    )
