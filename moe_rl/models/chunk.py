"""What the pipeline chunks of all families share: layers under global numbers, the hand-over between stages, recompute."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import nn


def build_device(config: TransformerConfig) -> torch.device:
    """Where parameters are created; without a GPU on torch's default device, which an audit sets to meta."""
    return (
        torch.get_default_device()
        if config.use_cpu_initialization
        else torch.device("cuda", torch.cuda.current_device())
    )


class GlobalLayers(nn.ModuleDict):
    """Layers keyed by their global index, so that checkpoint keys are equal in every pipeline layout.

    megatron-core treats what lies below a plain container as replicated over the ranks, experts too: recurse here.
    """

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        state = {}
        for index, layer in self.items():
            state.update(sharded_state_dict_default(layer, f"{prefix}{index}.", sharded_offsets, metadata))
        return state


class ModelChunk(LanguageModule):
    """One pipeline chunk: the embedding with `pre_process`, some layers, the output layer with `post_process`.

    A family's class fills `layers` with those of `layer_range`, ends its constructor with `finish`, and runs each layer
    through `recomputed`.
    """

    layers: GlobalLayers

    def __init__(
        self, config: TransformerConfig, pre_process: bool, post_process: bool, vp_stage: int | None, tied: bool = False
    ) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.share_embeddings_and_output_weights = tied
        self.input_tensor: torch.Tensor | None = None

    @property
    def layer_range(self) -> range:
        """Global indices of this chunk's layers."""
        rank = self.pp_group.rank()
        first = get_transformer_layer_offset(self.config, self.vp_stage, rank)
        return range(first, first + get_num_layers_to_build(self.config, self.vp_stage, rank))

    def finish(self) -> None:
        """Mark the parameters, once all are built."""
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()
        for name, weight in self.named_parameters():
            if ".local_experts." in name:
                # megatron-core marks experts only when EP > 1, and the optimizer's checkpoint would depend on EP.
                weight.allreduce = False

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor]) -> None:
        """Called by the pipeline schedule with the previous stage's output."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def recomputed(
        self, layer: Callable[..., torch.Tensor], hidden: torch.Tensor, *others: torch.Tensor
    ) -> torch.Tensor:
        """`layer(hidden, *others)`, run again in backward where the configuration asks for full recompute."""
        if self.config.recompute_granularity != "full" or not torch.is_grad_enabled():
            return layer(hidden, *others)
        if not hidden.requires_grad:
            # A frozen embedding would make the re-entrant checkpoint drop the layer's gradients without a word.
            hidden = hidden.detach().requires_grad_()
        # checkpoint() takes tensors only; what else the layer needs rides in its closure.
        return tensor_parallel.checkpoint(layer, False, hidden, *others)
