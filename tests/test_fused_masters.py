"""Masters that are stored as a bf16 weight and the 16 bits it lacks: joined, split, and what cannot be split."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_patches.fused_masters import join_master, split_master
from tests.distributed import run_ranks


def masters(count: int = 200_000) -> torch.Tensor:
    """fp32 values of every exponent and sign, ties and the borders of rounding among them; all round to finite bf16."""
    bits = np.random.default_rng(3).integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32)
    bits[:4000] = bits[:4000] & 0xFFFF0000 | np.tile(np.array([0x8000, 0x7FFF, 0x8001, 0x0000], dtype=np.uint32), 1000)
    values = bits.view(np.float32)
    return torch.from_numpy(values[np.isfinite(values) & (np.abs(values) < 3e38)].copy())


def rounded_half_away(master: torch.Tensor) -> torch.Tensor:
    """bf16 as FusedAdam writes it: the upper half of the bits, one more if the lower half's first bit is set."""
    bits = master.numpy().view(np.uint32).astype(np.uint64)
    upper = ((bits + 0x8000) >> 16).astype(np.uint16)
    return torch.from_numpy(upper.view(np.int16).copy()).view(torch.bfloat16)


def test_a_master_survives_with_the_weight_of_fused_adam():
    master = masters()
    param = rounded_half_away(master)
    remainder = split_master(param, master)
    assert remainder.dtype == torch.int16
    assert torch.equal(join_master(param, remainder).view(torch.int32), master.view(torch.int32))


def test_a_master_survives_with_the_weight_of_torch_but_for_ties_rounded_down():
    master = masters()
    param = master.bfloat16()
    joined = join_master(param, split_master(param, master)).view(torch.int32)
    lower, upper = master.view(torch.int32) & 0xFFFF, master.view(torch.int32) >> 16
    tie_down = (lower == 0x8000) & (upper % 2 == 0)
    assert 0 < tie_down.sum() < 2000
    assert torch.equal(joined, master.view(torch.int32) - tie_down.int())
    assert torch.equal(join_master(param, split_master(param, master)).bfloat16(), param)


def test_a_master_of_other_weights_is_refused():
    param = torch.tensor([1.0, 2.0]).bfloat16()
    for master in ([1.0, 2.04], [1.0, -2.0], [1.0, float("nan")]):
        with pytest.raises(RuntimeError, match="of the same checkpoint"):
            split_master(param, torch.tensor(master))


def _whole(rank: int, world: int, port: int) -> dict[str, list[float]]:
    """A native-fp32 parameter and a bf16 one without remainders: reloaded, read and written."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    import moe_patches

    moe_patches.apply([])
    params = [torch.tensor([1.0, 2.0]), torch.tensor([3.0]).bfloat16()]
    fused = SimpleNamespace(
        param_groups=[{"params": params}], state={p: {"master_param": torch.zeros(p.shape)} for p in params}
    )
    fused.get_unscaled_state = lambda p, name: fused.state[p][name]
    fused.set_scaled_state = lambda p, name, value: fused.state[p][name].copy_(value)
    stub = SimpleNamespace(
        optimizer=fused,
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True),
        ddp_config=SimpleNamespace(use_megatron_fsdp=False),
        model_param_group_index_map={params[0]: (0, 0), params[1]: (0, 1)},
    )
    DistributedOptimizer._copy_model_params_to_main_params(stub)
    out = {"reloaded": [v for p in params for v in fused.state[p]["master_param"].tolist()]}
    params[0].add_(1)  # as FusedAdam does, which leaves the master behind
    out["read"] = DistributedOptimizer._get_main_param_and_optimizer_states(stub, params[0])["param"].tolist()
    DistributedOptimizer._set_main_param_and_optimizer_states(stub, params[0], {"param": torch.tensor([7.0, 8.0])})
    return out | {"written": params[0].tolist()}


def test_whole_masters_follow_loaded_weights_and_native_fp32_is_its_own_master():
    assert run_ranks(_whole, 1)[0] == {"reloaded": [1.0, 2.0, 3.0], "read": [2.0, 3.0], "written": [7.0, 8.0]}
