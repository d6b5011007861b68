"""GRPO for large mixture-of-experts models, native to Megatron-Core.

``load_config``, ``train`` and ``GRPOTrainer`` are imported on first use, so that ``import moe_rl`` costs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_rl.config import load_config as load_config
    from moe_rl.trainer.api import GRPOTrainer as GRPOTrainer
    from moe_rl.trainer.api import train as train

__version__ = "0.1.0"
__all__ = ["GRPOTrainer", "__version__", "load_config", "train"]

_HOME = {"load_config": "moe_rl.config", "train": "moe_rl.trainer.api", "GRPOTrainer": "moe_rl.trainer.api"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'moe_rl' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
