"""The engine on GPUs against the same engine on the CPU: fp32 to rounding, bf16 to its own precision, and over NCCL."""

from __future__ import annotations

import math

import pytest

from tests.distributed import run_ranks
from tests.small_v4 import write_model
from tests.test_engine_layouts import EP2, FULL, PP2, TRAINING, VPP2, _train

pytestmark = pytest.mark.gpu
CUDA = {"engine__device": "cuda"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


def _train_on_cpu(rank: int, world: int, port: int, *args) -> dict:
    from moe_patches import cpu

    cpu.install()  # before megatron-core is imported, which would take up Transformer Engine here
    return _train(rank, world, port, *args)


@pytest.fixture(scope="module")
def on_cpu(model) -> dict:
    return run_ranks(_train_on_cpu, 1, model, TRAINING, 4, True)[0]


def check(result: dict, expected: dict, loss: float, logprob: float) -> None:
    for step, wanted in zip(result["steps"], expected["steps"], strict=True):
        assert math.isclose(step.loss, wanted.loss, rel_tol=loss)
        assert math.isclose(step.grad_norm, wanted.grad_norm, rel_tol=20 * loss)
    found, first = result["scores"][0], expected["scores"][0]
    assert max(abs(found[i][0] - first[i][0]).max() for i in found if len(first[i][0])) < logprob
    assert result["bias_kept"] and result["training"]


@pytest.mark.parametrize("recompute", [{}, FULL], ids=["off", "full"])
def test_fp32_equals_the_cpu(model, on_cpu, recompute) -> None:
    result = run_ranks(_train, 1, model, TRAINING | CUDA | recompute, 4, True)[0]
    check(result, on_cpu, loss=1e-4, logprob=1e-4)


def test_bf16_is_as_close_as_its_rounding(model, on_cpu) -> None:
    result = run_ranks(_train, 1, model, TRAINING | CUDA | {"engine__dtype": "bf16"}, 4, True)[0]
    check(result, on_cpu, loss=2e-2, logprob=0.3)


@pytest.mark.parametrize("layout", [{}, PP2 | FULL, EP2, VPP2], ids=["dp2", "pp2", "ep2", "vpp2"])
def test_two_gpus_over_nccl_equal_the_cpu(model, on_cpu, layout) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    ranks = run_ranks(_train, 2, model, TRAINING | CUDA | layout, 4, True)
    assert {(s.loss, s.grad_norm) for s in ranks[0]["steps"]} == {(s.loss, s.grad_norm) for s in ranks[1]["steps"]}
    scores: dict = {}
    for rank in ranks:
        if rank["scores"]:
            scores |= rank["scores"][0]
    check({**ranks[-1], "scores": [scores]}, on_cpu, loss=1e-4, logprob=1e-4)
