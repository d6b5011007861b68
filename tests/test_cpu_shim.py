"""The CPU device shim: requests for CUDA are answered by the CPU, once, and never beside vLLM."""

from __future__ import annotations

import sys
import types

import pytest

from tests.distributed import run_ranks


def _installed_in(rank: int, world: int, port: int) -> dict:
    import torch

    from moe_patches import cpu

    cpu.install()
    first = torch.zeros
    cpu.install()
    out = {"twice": torch.zeros is first, "cuda_available": torch.cuda.is_available()}
    out["factories"] = {
        torch.zeros(2, device="cuda").device.type,
        torch.arange(3, device=torch.device("cuda", 0)).device.type,
        torch.empty(2, pin_memory=True).device.type,
        torch.ones(2).to("cuda").device.type,
        torch.ones(2).to(device="cuda:0", dtype=torch.float64).device.type,
        torch.ones(2).cuda().device.type,
        torch.nn.Linear(2, 2).cuda().weight.device.type,
        str(torch.cuda.current_device()),
    }
    out["type"] = torch.ones(1).type()
    namespace = {"__name__": "megatron.core.optimizer.any"}
    exec("def type_of(t): return t.type()", namespace)
    out["type_for_megatron"] = namespace["type_of"](torch.ones(1, dtype=torch.bfloat16))
    with torch.device("meta"):
        out["meta"] = (torch.empty(2).device.type, torch.zeros(2, device="cpu").device.type)
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
    return out


def test_cuda_requests_are_answered_by_the_cpu():
    out = run_ranks(_installed_in, 1)[0]
    assert out["twice"] and out["factories"] == {"cpu"}
    assert not out["cuda_available"]
    assert out["type"] == "torch.FloatTensor"
    assert out["type_for_megatron"] == "torch.cuda.BFloat16Tensor"
    assert out["meta"] == ("meta", "cpu")


def _beside_vllm(rank: int, world: int, port: int) -> str:
    from moe_patches import cpu

    sys.modules["vllm"] = types.ModuleType("vllm")
    with pytest.raises(RuntimeError, match="vLLM") as refused:
        cpu.install()
    assert not cpu.is_installed()
    return str(refused.value)


def test_refused_beside_vllm():
    assert "processes of their own" in run_ranks(_beside_vllm, 1)[0]


def _tracker(rank: int, world: int, port: int) -> bool:
    import torch
    from megatron.core import parallel_state, tensor_parallel

    from moe_patches import cpu

    cpu.install()
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    before = torch.get_rng_state()
    with tensor_parallel.get_cuda_rng_tracker().fork():
        torch.rand(3)
    same = torch.equal(before, torch.get_rng_state())
    torch.distributed.destroy_process_group()
    return same


def test_rng_tracker_restores_the_generator():
    assert run_ranks(_tracker, 1) == [True]
