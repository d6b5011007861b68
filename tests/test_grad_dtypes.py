"""Gradient norms and clipping of lists that mix dtypes, against float64 and with kernels as strict as the real ones."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_patches
from moe_patches.grad_dtypes import make_dtype_safe_grad_fns
from tests.distributed import run_ranks
from tests.test_patches import shim_and_group


def random(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LISTS: dict[str, list[torch.Tensor]] = {
    "mixed": [random(1000, F32, 1), random(3000, BF16, 2), random(77, F32, 3), random(5, BF16, 4)],
    "three dtypes": [random(10, F32, 1), random(10, BF16, 2), random(10, F16, 3) * 100],
    "empty list": [],
    "one tensor": [random(10, BF16, 5)],
    "one element each": [torch.tensor([3.0]), torch.tensor([-4.0], dtype=BF16)],
    "zeros": [torch.zeros(5), torch.zeros(7, dtype=BF16)],
    "empty tensors": [torch.zeros(0), torch.zeros(0, dtype=BF16), torch.tensor([2.0])],
    "large and small": [
        torch.tensor([1e15]),
        torch.full((1000,), 1e-15, dtype=BF16),
        torch.full((9,), 1e15, dtype=BF16),
    ],
    "a NaN first": [torch.tensor([math.nan, 1.0]), torch.ones(3, dtype=BF16)],
    "a NaN last": [torch.ones(3), torch.tensor([1.0, math.nan], dtype=BF16)],
    "an infinity": [torch.ones(3), torch.tensor([math.inf], dtype=BF16)],
}


def strict(kernel: Any) -> Any:
    """A kernel that refuses what the real ones misread: tensors of several dtypes in one launch."""

    def launch(chunk: int, flag: Any, lists: list[list[torch.Tensor]], *args: Any) -> Any:
        dtypes = {str(t.dtype) for tensors in lists for t in tensors}
        if len(dtypes) > 1:
            raise RuntimeError(f"one launch, several dtypes: {sorted(dtypes)}")
        return kernel(chunk, flag, lists, *args)

    return launch


def exact_l2(chunk: int, flag: Any, lists: list[list[torch.Tensor]], per_tensor: bool) -> tuple[torch.Tensor, None]:
    return torch.cat([t.double().flatten() for t in lists[0]]).norm().float().reshape(1), None


def _norms(rank: int, world: int, port: int, strict_kernels: bool, patched: bool) -> dict:
    from megatron.core.optimizer import clip_grads, optimizer

    out: dict[str, Any] = {}
    with shim_and_group(rank, world, port):
        if strict_kernels:
            clip_grads.l2_norm_impl = strict(exact_l2)
            clip_grads.multi_tensor_scale_impl = strict(clip_grads.multi_tensor_scale_impl)
        if patched:
            moe_patches.apply(())
        for name, grads in LISTS.items():
            for norm_type in (2, 2.0, math.inf, 3):
                try:
                    out[name, norm_type] = float(optimizer.get_grad_norm_fp32(list(grads), norm_type))
                except RuntimeError as error:
                    out[name, norm_type] = str(error)
    return out


def float64_norm(grads: list[torch.Tensor], norm_type: float) -> float:
    values = [abs(x) for g in grads for x in g.double().tolist()]
    if any(math.isnan(x) for x in values):
        return math.nan
    if norm_type == math.inf:
        return max(values, default=0.0)
    return sum(x**norm_type for x in values) ** (1 / norm_type)


@pytest.mark.parametrize("strict_kernels", [False, True])
def test_mixed_norms_equal_float64(strict_kernels):
    for (name, norm_type), got in run_ranks(_norms, 1, strict_kernels, True)[0].items():
        if name in ("one tensor", "empty list") and not strict_kernels:
            continue  # the original's own, next test
        if norm_type == 3 and name in ("one tensor", "large and small"):
            continue  # the original rounds bf16 norms of other orders, and cubes in fp32
        wanted = float64_norm(LISTS[name], norm_type)
        assert got == pytest.approx(wanted, rel=1e-6, abs=0.0, nan_ok=True), (name, norm_type)


def test_strict_kernels_refuse_mixed_lists_without_the_patch():
    out = run_ranks(_norms, 1, True, False)[0]
    refused = {name for (name, norm_type), got in out.items() if norm_type == 2 and "several dtypes" in str(got)}
    assert refused == {n for n, grads in LISTS.items() if len({g.dtype for g in grads}) > 1}
    assert out["empty list", 2] == 0.0


def test_lists_of_one_dtype_reach_the_original_untouched():
    seen: list[Any] = []

    def norm(grads, norm_type=2, grad_stats_parallel_group=None):
        seen.append((grads, norm_type, grad_stats_parallel_group))
        return 7.0

    def clip(parameters, max_norm, total_norm, use_decoupled_grad=False):
        seen.append((parameters, max_norm, total_norm, use_decoupled_grad))

    def l2(grads):
        raise AssertionError("not for lists of one dtype")

    safe_norm, safe_clip = make_dtype_safe_grad_fns(norm, clip, l2)
    group = object()
    for grads in ([], [torch.ones(2)], [torch.ones(2, dtype=BF16), torch.ones(3, dtype=BF16)], torch.ones(4)):
        assert safe_norm(grads, math.inf, grad_stats_parallel_group=group) == 7.0
        assert seen[-1][0] is grads and seen[-1][1:] == (math.inf, group)
    for params in ([], [SimpleNamespace(grad=torch.ones(2)), SimpleNamespace(grad=None)], torch.ones(4)):
        safe_clip(params, 1.0, 2.0)
        assert seen[-1][0] is params and seen[-1][1:] == (1.0, 2.0, False)
    aware = [SimpleNamespace(grad=torch.ones(1), decoupled_grad=torch.ones(1, dtype=BF16)), SimpleNamespace(grad=None)]
    safe_clip(aware, 1.0, 2.0, use_decoupled_grad=True)
    assert seen[-1][0] is aware and seen[-1][3] is True
    count = len(seen)
    safe_clip(iter(aware), 1.0, 2.0, use_decoupled_grad=True)  # a generator is read once
    assert seen[-1][0] == aware and len(seen) == count + 1


def _clipped(rank: int, world: int, port: int, patched: bool) -> Any:
    from megatron.core.optimizer import clip_grads, optimizer

    params = [SimpleNamespace(decoupled_grad=g.clone()) for g in LISTS["mixed"]] + [
        SimpleNamespace(decoupled_grad=None)
    ]
    with shim_and_group(rank, world, port):
        clip_grads.multi_tensor_scale_impl = strict(clip_grads.multi_tensor_scale_impl)
        if patched:
            moe_patches.apply(())
        try:
            optimizer.clip_grad_by_total_norm_fp32(params, 2.0, 8.0, use_decoupled_grad=True)
        except RuntimeError as error:
            return str(error)
    return [p.decoupled_grad.float().tolist() for p in params[:-1]]


def test_mixed_gradients_are_clipped_by_one_factor():
    assert "several dtypes" in run_ranks(_clipped, 1, False)[0]
    clipped = run_ranks(_clipped, 1, True)[0]
    for got, grad in zip(clipped, LISTS["mixed"], strict=True):  # 2 / (8 + 1e-6): a quarter is exact in bf16
        assert got == pytest.approx((grad / 4).float().tolist(), rel=1e-6 if grad.dtype == F32 else 2**-8)


def _norm_of_ranks(rank: int, world: int, port: int) -> list[float]:
    from megatron.core.optimizer import optimizer

    with shim_and_group(rank, world, port):
        moe_patches.apply(())
        grads = [LISTS["mixed"], [], [LISTS["mixed"][0]]][rank]
        return [float(optimizer.get_grad_norm_fp32(list(grads), p)) for p in (2.0, math.inf)]


def test_ranks_with_mixed_and_with_plain_lists_stay_in_step():
    everything = [*LISTS["mixed"], LISTS["mixed"][0]]
    for got in run_ranks(_norm_of_ranks, 3, timeout=60.0):
        assert got == pytest.approx([float64_norm(everything, p) for p in (2, math.inf)], rel=1e-6)
