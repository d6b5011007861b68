"""Shared fixtures: one process group of one rank for tests that build megatron-core modules in this process."""

from __future__ import annotations

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import pytest

from tests.distributed import lone_rank


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def megatron_world():
    """gloo, megatron-core's process groups and the CPU shim for a world of one rank, in this process.

    Tests of several ranks use `tests.distributed.run_ranks` and leave this process alone.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    lone_rank()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
