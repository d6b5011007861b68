"""Qwen on GPUs against transformers on the CPU: one GPU, and two over NCCL. `pytest -m gpu tests/test_qwen_gpu.py`"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.distributed import run_ranks
from tests.test_qwen_layouts import EP2, ETP2, FULL, LENGTHS, PP2, TP2, VPP2, _check, _train, models

__all__ = ["models"]
pytestmark = pytest.mark.gpu
CUDA = {"engine__device": "cuda"}
TWO: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2 tp2": ("qwen2", TP2 | FULL),
    "qwen2 pp2": ("qwen2", PP2),
    "qwen3 vpp2": ("qwen3", VPP2),
    "moe tp2": ("qwen3_moe", TP2),
    "moe tp2 ep2": ("qwen3_moe", TP2 | EP2),
    "moe ep2": ("qwen3_moe", EP2),
    "moe etp2": ("qwen3_moe", ETP2),  # ranks with different numbers of tokens, which gloo cannot gather
}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("recompute", [{}, FULL], ids=["off", "full"])
def test_fp32_trains_as_transformers_does(models, kind, recompute):
    _check(models, kind, 1, CUDA | recompute, 4)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_moe"])
def test_bf16_is_as_close_as_its_rounding(models, kind):
    path, expected = models(kind)
    (rank,) = run_ranks(_train, 1, path, CUDA | {"engine__dtype": "bf16"}, 4)
    for found, (loss, norm) in zip(rank["steps"], expected["steps"], strict=True):
        assert found.loss == pytest.approx(loss, rel=2e-2)
        assert found.grad_norm == pytest.approx(norm, rel=0.1)
    gaps = np.concatenate([rank["scores"][0][i][0] - expected["scores"][0][i] for i in range(len(LENGTHS))])
    assert abs(gaps).mean() < 0.05


@pytest.mark.parametrize("name", TWO)
def test_two_gpus_train_as_transformers_does(models, name):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    kind, keys = TWO[name]
    _check(models, kind, 2, CUDA | keys, 4)
