"""The kernels of log-probs against float64 and plain PyTorch: interpreted on the CPU, and at full size on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_interpreted_kernels_equal_plain_pytorch():
    """In a process of its own: Triton asks whether to interpret when it is imported."""
    command = [sys.executable, "-m", "tests.logprob_cases"]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("weight") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [100, 1024])
@pytest.mark.parametrize("vocabulary", [129280, 5003])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_errors_are_those_of_plain_bf16(chunk, vocabulary, temperature):
    import torch

    from tests.logprob_cases import errors

    for name, (slow, fast) in errors(300, vocabulary, 512, chunk, temperature, torch.bfloat16, "cuda").items():
        assert fast <= 2 * slow, f"{name}: fused is off by {fast:.2e}, plain by {slow:.2e}"
