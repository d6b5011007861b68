"""The patches on real GPU kernels and a real quantised parameter: what the originals do there, and the patched ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed import run_ranks

pytestmark = pytest.mark.gpu


def _originals() -> tuple[Any, Any, Any]:
    """Patch this process; what the patched building of shards, norm and clipping replaced."""
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    import moe_patches

    moe_patches.apply([])
    build = DistributedOptimizer._build_model_and_main_param_groups.__func__.__wrapped__
    return build, clip_grads.get_grad_norm_fp32.__wrapped__, clip_grads.clip_grad_by_total_norm_fp32.__wrapped__


def _quantised(rank: int, world: int, port: int) -> dict[str, Any]:
    import torch
    import transformer_engine.pytorch as te
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range
    from transformer_engine.common.recipe import Float8CurrentScaling

    build, *_ = _originals()
    with te.fp8_model_init(enabled=True, recipe=Float8CurrentScaling()):
        param = te.Linear(128, 128, bias=False, params_dtype=torch.bfloat16, device="cuda").weight
    out: dict[str, Any] = {"class": type(param).__name__, "type": param.type()}
    config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False, fp8_recipe="tensorwise")
    for name, function in (
        ("original", build),
        ("patched", DistributedOptimizer._build_model_and_main_param_groups.__func__),
    ):
        group: dict[str, Any] = {"params": [param], "orig_group": {}}
        ranges = [{"buffer": [{"param_map": {param: {"param": Range(100, 300)}}}]}]
        with torch.enable_grad():
            function(DistributedOptimizer, ranges, {param: (0, "buffer", 0)}, [group], config)
        shard = group["orig_group"]["params"][0]
        expected = param.dequantize(dtype=torch.float32).detach().reshape(-1)[100:300]
        try:
            torch.optim.AdamW([shard])
            error = ""
        except ValueError as refused:
            error = str(refused)
        out[name] = (shard.is_leaf, bool(torch.equal(shard.detach(), expected)), error)
    return out


def test_shards_of_a_quantised_parameter_are_leaves() -> None:
    pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)
    out = run_ranks(_quantised, 1)[0]
    print(out)
    assert out["original"][0] is False and "non-leaf" in out["original"][2]
    assert out["patched"] == (True, True, "")


def _mixed(rank: int, world: int, port: int) -> dict[str, Any]:
    import torch
    from megatron.core.optimizer import clip_grads

    _, norm, clip = _originals()
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    generator = torch.Generator("cuda").manual_seed(1)
    grads = [torch.randn(n, generator=generator, device="cuda") for n in (1000, 77, 4096, 5)]
    grads = [g.bfloat16() if i % 2 else g for i, g in enumerate(grads)]
    exact = sum(float(g.double().square().sum()) for g in grads) ** 0.5
    out: dict[str, Any] = {"exact": exact, "kernel": str(getattr(clip_grads.l2_norm_impl, "__name__", ""))}

    def attempt(function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    for name, function in (("original", norm), ("patched", clip_grads.get_grad_norm_fp32)):
        found = attempt(function, [g.clone() for g in grads], 2.0, torch.distributed.group.WORLD)
        out[f"{name} norm"] = found if isinstance(found, str) else float(found)
    for name, function in (("original", clip), ("patched", clip_grads.clip_grad_by_total_norm_fp32)):
        params = [SimpleNamespace(decoupled_grad=g.clone()) for g in grads]
        error = attempt(function, params, 1.0, exact, use_decoupled_grad=True)
        right = [
            torch.allclose(p.decoupled_grad.float(), g.float() / exact, rtol=1e-2)
            for p, g in zip(params, grads, strict=True)
        ]
        out[f"{name} clip"] = error if isinstance(error, str) else right
    torch.distributed.destroy_process_group()
    return out


def test_real_kernels_get_lists_of_one_dtype() -> None:
    pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)
    out = run_ranks(_mixed, 1)[0]
    print(out)
    assert out["patched norm"] == pytest.approx(out["exact"], rel=1e-6) and out["patched clip"] == [True] * 4
    assert isinstance(out["original norm"], str) or abs(out["original norm"] / out["exact"] - 1) > 1e-4
    assert out["original clip"] != [True] * 4


def _race(rank: int, world: int, port: int, disabled: list[str]) -> float:
    """What a step of SGD leaves of 3 where the gradient is 1, its cast to fp32 comes late, and its memory held 5."""
    import torch

    import moe_patches

    moe_patches.apply(disabled)
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    torch.cuda.set_device(0)
    weights = [torch.nn.Parameter(torch.full((1 << 20,), 3.0, device="cuda", dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = HybridDeviceOptimizer(
        [{"params": weights, "lr": 1.0}],
        offload_fraction=0.5,
        cpu_optimizer_cls=torch.optim.SGD,
        gpu_optimizer_cls=torch.optim.SGD,
        param_update_in_fp32=True,
        lr=1.0,
    )
    kept = [w for w in weights if w not in optimizer.gpu_params_map_cpu_copy]
    assert len(kept) == 1
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with torch.cuda.stream(optimizer._d2h_stream):
        torch.full((1 << 20,), 5.0, device="cuda")  # the block that the cast is given next
        torch.cuda._sleep(10**9)  # about half a second
    torch.cuda.synchronize()
    with torch.cuda.stream(optimizer._d2h_stream):
        torch.cuda._sleep(10**9)
    optimizer.step()
    torch.cuda.synchronize()
    master = optimizer.param_to_fp32_param[kept[0]]
    assert torch.equal(master, master[0].expand_as(master))
    return float(master[0])


def test_what_stays_on_the_gpu_waits_for_its_gradients() -> None:
    assert run_ranks(_race, 1, [])[0] == 2.0
    assert run_ranks(_race, 1, ["hybrid_streams"])[0] == -2.0
