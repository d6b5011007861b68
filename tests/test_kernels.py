"""The Triton kernels of training, interpreted on the CPU, against float64 and plain PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_rl.errors import UserError
from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from tests.tiny_v4 import tiny_config


def test_interpreted_kernels_equal_plain_pytorch():
    """In a process of its own: Triton asks whether to interpret when it is imported."""
    names = ("attention", "logprob", "hyper", "experts", "model")
    run = f"import importlib; [importlib.import_module(f'tests.{{n}}_cases').main() for n in {names}]"
    command = [sys.executable, "-W", "ignore", "-c", run]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 4 + 1 + 2 + 3 + 1 + 2, "some case compared nothing"


def test_without_a_gpu_attention_is_plain_and_says_so(megatron_world):
    from moe_rl.models.deepseek_v4.build import make_transformer_config

    arch = DeepseekV4Arch.from_dict(tiny_config())
    config = make_transformer_config(arch, attention_backend="auto")
    assert config.attention_backend == "plain" and "a GPU and bf16" in config.attention_note
    with pytest.raises(UserError, match="engine.attention_backend"):
        make_transformer_config(arch, attention_backend="triton")
