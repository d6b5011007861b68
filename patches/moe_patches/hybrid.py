"""What the patches of the CPU-offloading optimizer share. It updates, for each parameter given to it, an inner one: the
parameter itself, an fp32 copy of it, or a copy on the CPU."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from .ledger import mark, marks

HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer.HybridDeviceOptimizer"
DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"


def hybrid_class() -> Any:
    """megatron-core's HybridDeviceOptimizer, as its optimizer modules see it."""
    return distributed_module().HybridDeviceOptimizer


def distributed_class() -> Any:
    """megatron-core's DistributedOptimizer."""
    return distributed_module().DistributedOptimizer


def distributed_module() -> Any:
    from megatron.core.optimizer import distrib_optimizer

    return distrib_optimizer


def bare_hybrid(**attributes: Any) -> Any:
    """A hybrid optimizer without parameters or streams, which answers with `attributes`: for probes."""

    class Bare(hybrid_class()):  # type: ignore[misc]
        def __init__(self) -> None:
            self.__dict__.update(attributes)

    return Bare()


class MethodPatch(ABC):
    """A ledger entry that wraps one method: subclasses give the class, the method and what stands in its place."""

    name: str
    method: str
    package = "megatron-core"

    @abstractmethod
    def owner(self) -> Any:
        """The class that has the method."""

    @abstractmethod
    def replace(self, original: Callable) -> Callable:
        """The method that takes the place of `original`."""

    def applied(self) -> bool:
        return self.name in marks(getattr(self.owner(), self.method))

    def apply(self) -> None:
        original = getattr(self.owner(), self.method)
        setattr(self.owner(), self.method, mark(functools.wraps(original)(self.replace(original)), self.name))


def values(*numbers: float) -> torch.Tensor:
    """A small fp32 tensor for a probe."""
    return torch.tensor(numbers, dtype=torch.float32)
