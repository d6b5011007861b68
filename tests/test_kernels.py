"""Which kernel runs where: the table against the schema, the profiles, and what preflight says."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_rl.config import host, kernels, load_config, schema
from moe_rl.config.kernels import EXPERTS, LINEARS, kernel_problems
from moe_rl.models.family import read_facts

PRO = read_facts(Path(load_config("dsv4-pro").model.path))


def problems(monkeypatch, profile: str, facts=PRO, amx: bool = False, **rollout: str) -> list[tuple[str, ...]]:
    monkeypatch.setattr(host, "has_cpu_flag", lambda flag: amx and flag == "amx_tile")
    config = load_config("dsv4-pro", hw=profile)
    config.rollout.engine = "vllm"
    for name, value in rollout.items():
        setattr(config.rollout, name, value)
    return list(kernel_problems(config, facts))


def test_the_keys_offer_what_the_table_knows():
    assert set(schema.MOE_BACKENDS) == set().union(*EXPERTS.values())
    assert set(schema.LINEAR_BACKENDS) == set().union(*LINEARS.values())
    assert set(schema.keys()["cluster.gpu_arch"].choices) == {"", *kernels.GPUS}


@pytest.mark.parametrize("profile", ["h100", "h200", "gb200"])
def test_profiles_name_kernels_that_run_there(monkeypatch, profile):
    config = load_config("dsv4-pro", hw=profile)
    assert config.rollout.moe_backend != "auto" != config.rollout.linear_backend and config.cluster.gpu_arch
    assert problems(monkeypatch, profile) == []


def test_deep_gemm_has_no_mxfp4_kernel_for_hopper(monkeypatch):
    ((rule, keys, what, why, fix),) = problems(monkeypatch, "h100", moe_backend="deep_gemm")
    assert rule == "rollout.kernels" and keys == "rollout.moe_backend cluster.gpu_arch"
    assert what == "rollout.moe_backend deep_gemm runs MXFP4 experts on sm100, sm103, sm120, not on sm90 (H100, H200)"
    assert "every GPU" in why and fix.startswith("Set rollout.moe_backend to one of marlin, ")
    assert problems(monkeypatch, "gb200", moe_backend="deep_gemm") == []
    fp8 = PRO.__class__(**{**vars(PRO), "experts_format": "fp8"})
    assert problems(monkeypatch, "h100", facts=fp8, moe_backend="deep_gemm") == []
    plain = PRO.__class__(**{**vars(PRO), "experts_format": "", "linears_format": ""})
    assert problems(monkeypatch, "h100", facts=plain, moe_backend="deep_gemm") == []


def test_other_kernels_that_cannot_run(monkeypatch):
    fp8 = PRO.__class__(**{**vars(PRO), "experts_format": "fp8"})
    ((_, keys, what, _, fix),) = problems(monkeypatch, "h100", facts=fp8, moe_backend="emulation")
    assert keys == "rollout.moe_backend" and "no kernel for FP8 experts" in what and "marlin" in fix
    ((_, keys, what, _, _),) = problems(monkeypatch, "gb200", linear_backend="marlin")
    assert keys.startswith("rollout.linear_backend") and "not on sm100" in what
    ((_, keys, what, _, fix),) = problems(monkeypatch, "cpu")
    assert "no CPU without AMX" in what and "transformers" in fix
    assert problems(monkeypatch, "cpu", amx=True) == []
