"""Imported once by the fork server of tests/distributed.py."""

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import megatron.core  # noqa: E402, F401
import megatron.core.dist_checkpointing  # noqa: E402, F401
import megatron.core.optimizer  # noqa: E402, F401
import megatron.core.transformer.moe.moe_layer  # noqa: E402, F401
import torch  # noqa: E402, F401
