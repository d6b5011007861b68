"""The optimizer's bytes, item by item, against sums worked by hand."""

from __future__ import annotations

import pytest

from moe_rl.planner.optimizer_memory import OptimizerMode, Shard, optimizer_memory, power_of_two, split_offloaded

# 100 bf16 values of which the rank owns 50, and 10 fp32 ones of which it owns 10
SHARDS = [Shard(10, 10, fp32=True), Shard(60, 30), Shard(40, 20)]


@pytest.mark.parametrize(
    "mode, gpu, step, host",
    [
        (OptimizerMode(), {"weights": 240, "gradients": 440, "masters": 200, "moments": 480}, 0, 0),
        (OptimizerMode(grad_bytes=2), {"weights": 240, "gradients": 240, "masters": 200, "moments": 480}, 200, 0),
        (OptimizerMode(True), {"weights": 240, "gradients": 440, "masters": 140, "moments": 480}, 0, 0),
        (
            OptimizerMode(True, grad_bytes=2, moment_bytes=2),
            {"weights": 240, "gradients": 240, "masters": 140, "moments": 240},
            0,
            0,
        ),
        # everything offloaded: the plain masters stay on the GPU too
        (
            OptimizerMode(False, 1.0, pinned_rounding=False),
            {"weights": 240, "gradients": 440, "masters": 200, "moments": 0},
            0,
            720 + 240,
        ),
        (
            OptimizerMode(True, 1.0, 2, pinned_rounding=False),
            {"weights": 240, "gradients": 240, "masters": 0, "moments": 0},
            0,
            720
            + 240
            + 60,  # what bf16 copies of 60 and 40 bytes left pinned; the fp32 parameter's master takes the latter
        ),
        # half: the fp32 parameter and the first bf16 one, 40 of 60 owned values
        (
            OptimizerMode(True, 0.5, 2, pinned_rounding=False),
            {"weights": 240, "gradients": 240, "masters": 80, "moments": 160},
            80,
            480 + 240 + 60,
        ),
        (
            OptimizerMode(False, 0.5, 2, pinned_rounding=False),
            {"weights": 240, "gradients": 240, "masters": 200, "moments": 160},
            200,
            480 + 240,
        ),
    ],
)
def test_items(mode, gpu, step, host):
    memory = optimizer_memory(SHARDS, mode)
    assert memory.gpu == gpu
    assert sum(memory.gpu_step.values()) == step
    assert sum(memory.host.values()) == host


def test_pinned_blocks_are_rounded_up():
    rounding = [optimizer_memory(SHARDS, OptimizerMode(aware, 1.0)).host["pinned rounding"] for aware in (False, True)]
    gaps = [64 - 40, 128 - 120, 128 - 80]  # of 4 bytes a value
    assert rounding == [sum(gaps), gaps[0]]  # precision-aware, only masters of fp32 parameters are pinned
    assert optimizer_memory(SHARDS, OptimizerMode(True, 1.0)).host["gradient staging"] == 2 * 128
    assert [power_of_two(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


@pytest.mark.parametrize("fraction, count", [(0.0, 0), (0.01, 1), (0.17, 2), (0.5, 2), (0.67, 3), (1.0, 3)])
def test_parameters_go_whole_and_in_order(fraction, count):
    offloaded, kept = split_offloaded(SHARDS, fraction)
    assert offloaded == SHARDS[:count] and kept == SHARDS[count:]
