"""Runtime patches: each is needed on the pinned megatron-core, mends it, is applied once, and keeps out of the way."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_patches
from moe_patches.__main__ import table
from moe_patches.no_grad import wrap_no_grad
from moe_rl.config.schema import PATCHES
from tests.distributed import run_ranks

ROOT = Path(__file__).parent.parent
NAMES = moe_patches.names()


@contextlib.contextmanager
def shim_and_group(rank: int, world: int, port: int) -> Iterator[None]:
    """The CPU shim and a gloo group, which is gone afterwards."""
    from moe_patches import cpu

    cpu.install()
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def targets() -> dict[str, Any]:
    """What the ledger replaces, as megatron-core holds it now."""
    from megatron.core.optimizer import clip_grads, distrib_optimizer, layer_wise_optimizer, optimizer

    distributed, hybrid = distrib_optimizer.DistributedOptimizer, distrib_optimizer.HybridDeviceOptimizer
    return {
        "build": distributed.__dict__["_build_model_and_main_param_groups"],
        "get": distributed._get_main_param_and_optimizer_states,
        "set": distributed._set_main_param_and_optimizer_states,
        "load": distributed.load_parameter_state_from_dp_reshardable,
        "reload": distributed._copy_model_params_to_main_params,
        "masters": hybrid._update_fp32_params_by_new_state,
        "gradients": hybrid._set_sub_optimizer_grads,
        "step": hybrid._sync_sub_optimizers_state_to_hdo,
        "norm": clip_grads.get_grad_norm_fp32,
        "clip": clip_grads.clip_grad_by_total_norm_fp32,
        "norm by value": optimizer.get_grad_norm_fp32,
        "clip by value": optimizer.clip_grad_by_total_norm_fp32,
        "norm by value, again": layer_wise_optimizer.get_grad_norm_fp32,
    }


def states(disable: Any = ()) -> dict[str, str]:
    return {s.name: s.state for s in moe_patches.apply(disable)}


# ---------------------------------------------------------------------------------------------------- the ledger
def _needed(rank: int, world: int, port: int) -> dict:
    before = {p.name: p.probe() for p in moe_patches.patches()}
    original = targets()
    first, patched = states(), targets()
    after = {p.name: p.probe() for p in moe_patches.patches()}
    second, again = states(), targets()
    return {
        "before": before,
        "after": after,
        "states": [first, second],
        "replaced": [n for n in original if original[n] is not patched[n]],
        "kept": [n for n in patched if patched[n] is again[n]],
        "same": patched["norm"] is patched["norm by value"] is patched["norm by value, again"],
    }


def test_each_patch_is_needed_and_mends_and_is_applied_once():
    out = run_ranks(_needed, 1)[0]
    assert out["before"] == dict.fromkeys(NAMES, True)
    assert out["after"] == dict.fromkeys(NAMES, False)
    assert out["states"] == [dict.fromkeys(NAMES, "applied")] * 2
    assert out["replaced"] == out["kept"] == list(targets()) and out["same"]


def _after_the_shim(rank: int, world: int, port: int) -> list[dict]:
    from moe_patches import cpu

    early = states()
    cpu.install()
    return [early, states(), {p.name: p.probe() for p in moe_patches.patches()}]


def _before_the_shim(rank: int, world: int, port: int) -> list[dict]:
    from moe_patches import cpu

    cpu.install()
    return [states(), states(), {p.name: p.probe() for p in moe_patches.patches()}]


@pytest.mark.parametrize("order", [_after_the_shim, _before_the_shim])
def test_the_shim_and_the_ledger_meet_in_any_order(order):
    assert run_ranks(order, 1)[0] == [dict.fromkeys(NAMES, "applied")] * 2 + [dict.fromkeys(NAMES, False)]


def test_patched_before_anything_of_megatron_is_imported():
    code = """
import sys, json, moe_patches
assert not any(m.startswith("megatron") for m in sys.modules)
first = [s.state for s in moe_patches.apply()]
from megatron.core.optimizer.optimizer import get_grad_norm_fp32
import megatron.core.models.mimo.optimizer as late
from moe_patches.ledger import marks
assert marks(get_grad_norm_fp32) == marks(late.clip_grad_by_total_norm_fp32) == {"dtype_safe_gradients"}
print(json.dumps([first, [s.state for s in moe_patches.apply()]]))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "patches"), moe_patches.SWITCH: ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [["applied"] * len(NAMES)] * 2


def _reloaded(rank: int, world: int, port: int) -> dict:
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    states()
    out: dict[str, Any] = {}
    for module in (clip_grads, optimizer, distrib_optimizer):
        importlib.reload(module)
        needed = {p.name for p in moe_patches.patches() if p.probe()}
        now = states()
        out[module.__name__.rsplit(".")[-1]] = (
            needed,
            set(now.values()),
            any(p.probe() for p in moe_patches.patches()),
        )
    before = targets()
    for name in [n for n in sys.modules if n.startswith("moe_patches.") and not n.endswith("cpu")]:
        importlib.reload(sys.modules[name])
    importlib.reload(moe_patches)
    out["itself"] = (states(), [n for n, target in targets().items() if target is not before[n]])
    return out


def test_a_reload_is_patched_anew():
    out = run_ranks(_reloaded, 1)[0]
    distributed = {"no_grad_main_params", "optimizer_states", "hybrid_reload", "fused_masters"}
    assert out["clip_grads"] == ({"dtype_safe_gradients"}, {"applied"}, False)
    assert out["optimizer"] == (set(), {"applied"}, False)
    assert out["distrib_optimizer"] == (distributed, {"applied"}, False)
    assert out["itself"] == (dict.fromkeys(NAMES, "applied"), [])


def _switched_off(rank: int, world: int, port: int, by_environment: bool) -> dict:
    original, off = targets(), ["hybrid_masters", "dtype_safe_gradients"]
    os.environ[moe_patches.SWITCH] = "hybrid_masters, dtype_safe_gradients"
    found = states(None if by_environment else off)
    return {"states": found, "kept": [n for n, target in targets().items() if target is original[n]]}


@pytest.mark.parametrize("by_environment", [False, True])
def test_a_switch_leaves_its_patch_out(by_environment):
    out = run_ranks(_switched_off, 1, by_environment)[0]
    off = ("hybrid_masters", "dtype_safe_gradients")
    assert out["states"] == {n: "disabled" if n in off else "applied" for n in NAMES}
    assert out["kept"] == ["masters", "norm", "clip", "norm by value", "clip by value", "norm by value, again"]


def _all_off(rank: int, world: int, port: int) -> tuple[dict, bool, dict, dict]:
    original = targets()
    off = states(["all"])
    same = targets() == original
    return off, same, states(()), states(["all"])


def test_all_switches_everything_off_and_nothing_back():
    off, same, on, late = run_ranks(_all_off, 1)[0]
    assert off == dict.fromkeys(NAMES, "disabled") and same
    assert on == late == dict.fromkeys(NAMES, "applied")


def test_a_name_that_is_no_patch_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="no patch is called hybrid_mastres; there are no_grad_main_params, "):
        moe_patches.disabled(["hybrid_mastres"])
    monkeypatch.setenv(moe_patches.SWITCH, "all,x")
    with pytest.raises(ValueError, match="called x"):
        moe_patches.disabled()
    monkeypatch.setenv(moe_patches.SWITCH, " all ,")
    assert moe_patches.disabled() == tuple(NAMES) and moe_patches.disabled(()) == ()


def _upstream_fixed(rank: int, world: int, port: int) -> dict:
    """megatron-core as it would be with each fault mended at its root; written without the patches."""
    from megatron.core.optimizer import clip_grads, distrib_optimizer, layer_wise_optimizer, optimizer

    distributed, hybrid = distrib_optimizer.DistributedOptimizer, distrib_optimizer.HybridDeviceOptimizer

    def build(cls, ranges, places, groups, config):
        for group in groups:
            shards = []
            for param in group["params"]:
                buffer, dtype, bucket = places[param]
                span = ranges[buffer][dtype][bucket]["param_map"][param]["param"]
                shards.append(param.detach().view(-1)[span.start : span.end])
            group["orig_group"]["params"] = shards

    def lists(grads):
        return [[g for g in grads if g.dtype == d] for d in {g.dtype for g in grads}]

    def norm(grads, norm_type=2.0, grad_stats_parallel_group=None):
        launch = clip_grads.multi_tensor_applier
        return sum(launch(clip_grads.l2_norm_impl, None, [same], False)[0] ** 2 for same in lists(grads)) ** 0.5

    def clip(parameters, max_norm, total_norm, use_decoupled_grad=False):
        for same in lists([p.decoupled_grad for p in parameters]):
            clip_grads.multi_tensor_applier(
                clip_grads.multi_tensor_scale_impl, None, [same, same], max_norm / total_norm
            )

    def masters(self):
        for param, state in self.state.items():
            self.param_to_inner_param[param].data.copy_(state["master_param"])

    def gradients(self):
        for param, inner in self.param_to_inner_param.items():
            inner.grad = param.decoupled_grad
        if hasattr(self, "gpu_optimizer"):
            self.gpu_optimizer.register_step_pre_hook(lambda *_: self._d2h_stream.record_event().wait())

    def step(self):
        for group in self.param_groups:
            group["step"] = self.gpu_optimizer.param_groups[0]["step"]

    def read(self, param):
        main = self.optimizer.param_groups[0]["params"][0]
        state = self.optimizer.state[main]
        if "exp_avg" not in state and param is not main:  # FusedAdam, native fp32
            return {"param": param}
        if "exp_avg" not in state:  # FusedAdam with remainders
            return {"param": (main.float().view(torch.int32) + state["master_param"]).view(torch.float32)}
        return {"param": main, "exp_avg": state["exp_avg"]}

    def write(self, param, tensors):
        main = self.optimizer.param_groups[0]["params"][0]
        if "exp_avg" not in tensors:
            remainder = tensors["param"].view(torch.int32) - main.float().view(torch.int32)
            self.optimizer.state[main]["master_param"].copy_(remainder)
            return
        for target, key in ((main, "param"), (self.optimizer.state[main]["master_param"], "param")):
            target.copy_(tensors[key])
        self.optimizer.state[main]["exp_avg"].copy_(tensors["exp_avg"])

    def reload(self, state_dict=None):
        if not hasattr(self, "model_float16_groups"):
            for state in self.optimizer.state.values():
                state["master_param"].zero_()
            return
        for model, main in zip(self.model_float16_groups[0], self.shard_fp32_from_float16_groups[0], strict=True):
            main.copy_(model)
            self.optimizer.param_to_inner_param[main].copy_(main)

    distributed._build_model_and_main_param_groups = classmethod(build)
    distributed._get_main_param_and_optimizer_states = read
    distributed._set_main_param_and_optimizer_states = write
    distributed._copy_model_params_to_main_params = reload
    distributed.load_parameter_state_from_dp_reshardable = lambda self, state: (
        self.optimizer._sync_hdo_state_to_sub_optimizers()
    )
    hybrid._update_fp32_params_by_new_state = masters
    hybrid._set_sub_optimizer_grads = gradients
    hybrid._sync_sub_optimizers_state_to_hdo = step
    for function, name in ((norm, "get_grad_norm_fp32"), (clip, "clip_grad_by_total_norm_fp32")):
        function.__module__ = clip_grads.__name__
        for module in (clip_grads, optimizer, layer_wise_optimizer):
            setattr(module, name, function)
    fixed = targets()
    return {"states": states(), "kept": [n for n, target in targets().items() if target is fixed[n]]}


def test_a_fixed_upstream_is_left_alone():
    out = run_ranks(_upstream_fixed, 1)[0]
    assert out["states"] == dict.fromkeys(NAMES, "not needed") and out["kept"] == list(targets())


def _missing(rank: int, world: int, port: int) -> list[dict]:
    from megatron.core.optimizer import distrib_optimizer

    del distrib_optimizer.DistributedOptimizer._build_model_and_main_param_groups
    first = states()
    sys.modules["megatron.core.optimizer"] = None  # type: ignore[assignment]
    return [first, {s.name: f"{s.state}; {s.note}" for s in moe_patches.apply(())}]


def test_a_target_that_is_not_there_is_named():
    one, all_of_them = run_ranks(_missing, 1)[0]
    assert one == {n: "target missing" if n == "no_grad_main_params" else "applied" for n in NAMES}
    assert set(all_of_them) == set(NAMES)
    for said in all_of_them.values():
        assert said.startswith("target missing; megatron-core 0.19.2; ") and "megatron.core.optimizer" in said


def test_the_readme_holds_the_ledger():
    assert table() in (ROOT / "patches" / "README.md").read_text()


def test_the_configuration_knows_the_patches():
    assert list(PATCHES) == NAMES


# -------------------------------------------------------------------------------------------- no-grad main parameters
def test_wrap_no_grad_cuts_leaves_that_stay_leaves():
    class Owner:
        @classmethod
        def cut(cls, param: torch.Tensor, scale: float) -> torch.Tensor:
            return param.view(-1)[1:3] if scale == 1 else (param * scale).view(-1)[1:3]

    param = torch.nn.Parameter(torch.arange(4.0))
    assert not Owner.cut(param, 1).is_leaf and not Owner.cut(param, 2).is_leaf
    Owner.cut = wrap_no_grad(Owner.__dict__["cut"])
    shard, copy = Owner.cut(param, 1), Owner.cut(param, scale=2)
    with torch.no_grad():
        param.add_(1)
    assert shard.is_leaf and copy.is_leaf and not shard.requires_grad
    assert shard.tolist() == [2, 3] and copy.tolist() == [2, 4]  # one memory with the parameter; a copy
    torch.optim.SGD([shard])
    assert wrap_no_grad(lambda: torch.is_grad_enabled())() is False and torch.is_grad_enabled()


# ---------------------------------------------------------------------------------- the CPU shim's two devices
def _divided(rank: int, world: int, port: int, fraction: float, dtype: str) -> list[str]:
    """What the hybrid optimizer updates for each of four parameters of 4 values each, by its own maps."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from moe_patches import cpu

    cpu.install()
    params = [
        torch.nn.Parameter(torch.ones(4, dtype=torch.float32 if dtype == "fp32" or i == 3 else torch.bfloat16))
        for i in range(4)
    ]
    hybrid = HybridDeviceOptimizer(
        params,
        offload_fraction=fraction,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        lr=1.0,
    )
    assert not torch.ones(1).is_cuda
    found = []
    for param in params:
        inner = hybrid.param_to_inner_param[param]
        place = "cpu" if param in hybrid.gpu_params_map_cpu_copy else "gpu"
        on_cpu = any(inner is p for o in hybrid.cpu_optimizers for g in o.param_groups for p in g["params"])
        assert on_cpu == (place == "cpu") and inner.dtype == torch.float32
        found.append(f"{place} {'itself' if inner is param else 'copy'}")
    return found


@pytest.mark.parametrize(
    "fraction, dtype, expected",
    [
        (0.0, "fp32", ["gpu itself"] * 4),
        (0.5, "fp32", ["cpu copy"] * 2 + ["gpu itself"] * 2),
        (0.5, "bf16", ["cpu copy"] * 2 + ["gpu copy", "gpu itself"]),
        (1.0, "bf16", ["cpu copy"] * 4),
    ],
)
def test_the_shim_divides_parameters_between_two_devices(fraction, dtype, expected):
    assert run_ranks(_divided, 1, fraction, dtype) == [expected]
