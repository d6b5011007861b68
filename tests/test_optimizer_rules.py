"""Ways to hold the optimizer: what is ignored below is refused above; the patches' switch; the doctor."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest

import moe_patches
from moe_rl.cli import run
from moe_rl.config import Config, host, load_config
from moe_rl.config.optimizer_rules import optimizer_modes
from moe_rl.errors import UserError


@pytest.fixture
def gpu(monkeypatch) -> None:
    """A machine with a GPU and Transformer Engine, as the rules see it."""
    monkeypatch.setattr(host, "resolve_device", lambda device: "cuda" if device == "auto" else device)
    monkeypatch.setattr(host, "has_package", lambda name: name == "transformer_engine")


def rules(dtype: str = "bf16", **optimizer: object) -> list[str]:
    config = Config()
    config.engine.dtype = dtype
    for name, value in optimizer.items():
        setattr(config.optimizer, name, value)
    return [found[0] for found in optimizer_modes(config)]


AWARE, GRADS, MOMENTS = "optimizer.precision_aware", "optimizer.grad_dtype", "optimizer.moment_dtype"


@pytest.mark.parametrize("offload", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("grads", ["fp32", "bf16"])
def test_modes_that_exist_on_a_gpu(gpu, offload, aware, grads):
    assert rules(offload_fraction=offload, precision_aware=aware, grad_dtype=grads) == []
    if not aware:
        refused = [GRADS] if grads == "bf16" else []
        assert rules("fp32", offload_fraction=offload, grad_dtype=grads) == refused
    moments = [] if aware and offload == 0 else [MOMENTS]
    assert rules(offload_fraction=offload, precision_aware=aware, moment_dtype="bf16") == moments


def test_options_that_would_be_ignored_are_refused(gpu):
    assert rules("fp32", precision_aware=True, offload_fraction=1.0) == [AWARE]
    assert rules("fp32", precision_aware=True, grad_dtype="bf16", moment_dtype="bf16", offload_fraction=0.5) == [
        GRADS,
        AWARE,
        MOMENTS,
    ]


def test_the_precision_aware_optimizer_needs_its_kernel(monkeypatch):
    monkeypatch.setattr(host, "has_package", lambda name: True)
    monkeypatch.setattr(host, "resolve_device", lambda device: "cpu")
    assert rules(precision_aware=True) == [AWARE] and rules(precision_aware=True, offload_fraction=0.1) == []
    monkeypatch.setattr(host, "resolve_device", lambda device: "cuda")
    assert rules(precision_aware=True) == []
    monkeypatch.setattr(host, "has_package", lambda name: False)
    (found,) = optimizer_modes(load_config(None, ["optimizer.precision_aware=true", "engine.dtype=bf16"]))
    assert "Transformer Engine" in found[3] and "not installed" in found[3]


def test_presence_of_a_package():
    assert host.has_package("torch") and not host.has_package("no_such_package")


# ------------------------------------------------------------------------------------------------- patches.disable
def test_the_environment_joins_the_configuration(monkeypatch, tmp_path):
    monkeypatch.setenv(moe_patches.SWITCH, "hybrid_reload, hybrid_masters,")
    config = load_config(None, ["patches.disable=[hybrid_masters,no_grad_main_params]"])
    assert config.patches.disable == ["hybrid_masters", "no_grad_main_params", "hybrid_reload"]
    assert config.origin("patches.disable") == f"command line and environment {moe_patches.SWITCH}"
    assert load_config(None).origin("patches.disable") == f"environment {moe_patches.SWITCH}"
    path = tmp_path / "config.resolved.yaml"
    path.write_text(config.to_yaml())
    monkeypatch.delenv(moe_patches.SWITCH)
    again = Config.from_resolved(path)
    assert again == config and again.origin("patches.disable") == config.origin("patches.disable")
    assert load_config(None).patches.disable == []


def test_a_wrong_name_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv(moe_patches.SWITCH, "hybrid_mastres")
    with pytest.raises(UserError, match=f"nearest: hybrid_masters .*environment {moe_patches.SWITCH}") as wrong:
        load_config(None)
    assert wrong.value.rule == "config.choice"


# ---------------------------------------------------------------------------------------------------------- doctor
def _doctor(rank: int, world: int, port: int, arguments: list[str]) -> tuple[int, str]:
    from contextlib import redirect_stdout
    from io import StringIO

    out = StringIO()
    with redirect_stdout(out):
        code = run(["doctor", *arguments])
    return code, out.getvalue()


def test_the_doctor_shows_versions_devices_and_the_ledger():
    from tests.distributed import run_ranks

    code, text = run_ranks(_doctor, 1, ["--json", "patches.disable=[hybrid_reload]"])[0]
    found = json.loads(text)
    assert code == 0
    assert found["versions"]["megatron-core"] == {"installed": "0.19.2", "wanted": "==0.19.2", "agrees": True}
    assert found["versions"]["torch"]["installed"] == version("torch")
    assert found["devices"]["cpu"]["cores"] >= 1 and found["devices"]["cpu"]["memory_gib"] > 0
    expected = {name: "disabled" if name == "hybrid_reload" else "applied" for name in moe_patches.names()}
    assert {patch["name"]: patch["state"] for patch in found["patches"]} == expected
    code, text = run_ranks(_doctor, 1, [])[0]
    assert code == 0 and "does not agree" not in text
    for patch in moe_patches.patches():
        assert patch.name in text and patch.target in text and patch.upstream in text


def test_what_is_not_as_it_should_be_is_marked():
    from moe_rl.doctor import describe, kernels_of

    gpu = {"name": "H200", "memory_gib": 139.8, "arch": "sm90", "kernels": kernels_of("sm90")}
    cpu = {"arch": "aarch64", "cores": 1, "memory_gib": 1.0, "amx": False}
    packages = {n: {"installed": "2.11.0", "tested": "2.11.0", "same": n == "torch"} for n in ("torch", "vllm")}
    found = {
        "python": "3.12",
        "versions": {"torch": {"installed": "1.0", "wanted": ">=2.11", "agrees": False}},
        "tested": {"profile": "h200", "seen": "there", "packages": packages},
        "devices": {"cpu": cpu, "gpus": [gpu]},
        "patches": [],
    }
    text = describe(found)
    assert "<- does not agree" in text and text.count("<- another one") == 1 and "no gpu" not in text
    assert "gpu 0: H200 (sm90), 139.8 GiB" in text and "aarch64" in text
    experts = next(line for line in text.splitlines() if "mxfp4 experts" in line)
    assert "marlin" in experts and "deep_gemm" not in experts  # DeepGEMM's MXFP4 needs sm100


def test_an_installation_is_held_against_the_tested_matrix():
    from moe_rl.config.load import shipped
    from moe_rl.doctor import tested

    assert tested("cpu")["packages"]["torch"] == {"installed": version("torch"), "tested": "2.13.0", "same": True}
    assert tested("cpu")["packages"]["python"]["same"]  # 3.12 stands for each of its releases
    assert not tested("h200")["packages"]["torch"]["same"]
    assert all(tested(profile)["packages"] for profile in shipped("profile"))


# ------------------------------------------------------------------------------------------------------------ a run
@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_offloaded_run_records_its_patches_resumes_and_trains_like_a_plain_one(monkeypatch, tmp_path):
    from tests.short_runs import short_run

    layout = ["layout.pp=2", "layout.ep=1", "cluster.gpus_per_node=2"]
    plain = short_run(tmp_path / "plain", "trainer.steps=3", layout=layout)
    monkeypatch.setenv(moe_patches.SWITCH, "hybrid_gradients")
    offloaded = ["optimizer.offload_fraction=0.5", "checkpoint.optimizer_format=same_layout"]
    short_run(tmp_path / "run", *offloaded, layout=layout)
    workers = json.loads((tmp_path / "run" / "manifest.json").read_text())["workers"]
    expected = {n: "disabled" if n == "hybrid_gradients" else "applied" for n in moe_patches.names()}
    assert [workers[f"trainer_{rank}"]["patches"] for rank in range(2)] == [expected] * 2
    resumed = short_run(tmp_path / "run", "trainer.steps=3", *offloaded, layout=layout)
    assert [m["attempt"] for m in resumed.metrics] == [1, 1, 2]
    for name in ("actor/loss", "actor/grad_norm", "reward/mean"):
        got, wanted = ([m[name] for m in run.metrics] for run in (resumed, plain))
        assert got == pytest.approx(wanted, rel=1e-4, abs=1e-5), name
