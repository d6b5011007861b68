"""What each rank of a layout holds: its layers, its parameters, its part of the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from moe_rl.config import Config, ModelFacts
from moe_rl.config.facts import TensorSize
from moe_rl.config.layout import layers_of, parse, resolve_stages

from .optimizer_memory import Shard


@dataclass(frozen=True)
class Stage:
    """One pipeline rank's share: its `layers`, and whether it has the embedding and the loss."""

    index: int
    layers: tuple[int, ...]
    embedding: bool
    loss: bool


Kind = tuple[Any, ...]
"""What makes two stages alike: their layers' widths and routing, and the ends."""


@dataclass(frozen=True)
class Inventory:
    """A model laid out. `width` ranks make a stage; `copies` of a stage's experts lie among them."""

    config: Config
    facts: ModelFacts
    stages: tuple[Stage, ...]
    _shards: dict[Kind, list[Shard]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, config: Config, facts: ModelFacts) -> Inventory:
        """The layout that `config` asks for. Raises UserError where there is none."""
        layout = config.layout
        text = resolve_stages(
            layout.stages, facts.num_layers, facts.hash_layers, layout.pp, layout.vpp, layout.pin_hash_layers
        )
        segments, layers = parse(text), layers_of(text)
        stages = []
        for rank in range(layout.pp):
            held = range(rank, len(segments), layout.pp)
            stages.append(
                Stage(
                    rank,
                    tuple(layer for i in held for layer in layers[i]),
                    any("E" in segments[i] for i in held),
                    any("L" in segments[i] for i in held),
                )
            )
        return cls(config, facts, tuple(stages))

    @property
    def width(self) -> int:
        return self.config.world // self.config.layout.pp

    @property
    def copies(self) -> int:
        layout = self.config.layout
        return max(1, self.width // (layout.ep * layout.etp))

    @cached_property
    def _by_layer(self) -> dict[int | None, list[TensorSize]]:
        found: dict[int | None, list[TensorSize]] = {}
        for t in self.facts.tensors:
            found.setdefault(t.layer, []).append(t)
        return found

    def kind(self, stage: Stage) -> Kind:
        """Stages of one kind hold the same tensors."""
        hashed = self.facts.hash_layers
        layers = tuple((self.facts.layers[i], i in hashed) for i in stage.layers)
        return layers, stage.embedding, stage.loss

    def tensors(self, stage: Stage) -> Iterator[TensorSize]:
        """The tensors of a stage. A tied output layer is a copy of its own only where the embedding is elsewhere."""
        tied = stage.embedding and stage.loss
        names = {"embedding": stage.embedding, "head": stage.loss}
        for t in self._by_layer.get(None, ()):
            if names[t.place] and not (tied and t.place == "head" and is_tied_copy(self.facts, t)):
                yield t
        for layer in stage.layers:
            yield from self._by_layer[layer]

    def local(self, t: TensorSize) -> tuple[int, int]:
        """How many such tensors a rank of the stage holds, and the values of each."""
        layout = self.config.layout
        parts = (layout.etp if t.expert else layout.tp) if t.split else 1
        return (self.facts.num_experts // layout.ep if t.expert else 1), -(-t.numel // parts)

    def shards(self, stage: Stage) -> list[Shard]:
        """The trained parameters of a rank, those kept in fp32 first, each with what the rank's optimizer owns of it.

        The distributed optimizer cuts a buffer of all parameters into equal runs, one a data-parallel rank: a rank owns
        whole parameters but for the two that its run cuts. Here it is the first rank's run; the others' are as long.
        """
        kind = self.kind(stage)
        if kind not in self._shards:
            self._shards[kind] = self._cut(stage)
        return self._shards[kind]

    def _cut(self, stage: Stage) -> list[Shard]:
        runs: dict[tuple[bool, bool], list[int]] = {}
        for t in self.tensors(stage):
            if t.trained:
                count, numel = self.local(t)
                runs.setdefault((t.fp32, t.expert), []).extend([numel] * count)
        shards = []
        dense = self.width // self.config.layout.tp
        for (fp32, expert), sizes in sorted(runs.items(), key=lambda run: not run[0][0]):
            end, start = sum(sizes) / (self.copies if expert else dense), 0
            for numel in sizes:
                shards.append(Shard(numel, round(min(numel, max(0.0, end - start))), fp32))
                start += numel
        return shards

    def untrained_bytes(self, stage: Stage) -> int:
        """Buffers and frozen parameters of a rank."""
        b = 4 if self.config.engine.dtype == "fp32" else 2
        total = 0
        for t in self.tensors(stage):
            count, numel = self.local(t)
            total += 0 if t.trained else count * numel * (b if t.bytes == 2 else t.bytes)
        return total

    def largest(self, stage: Stage) -> int:
        """Values of the largest parameter that a rank holds."""
        return max((self.local(t)[1] for t in self.tensors(stage) if t.trained), default=0)


def is_tied_copy(facts: ModelFacts, t: TensorSize) -> bool:
    """Whether a tensor of the model's end is the embedding once more."""
    return facts.tied and t.numel == facts.vocab_size * facts.hidden_size


def parameters(facts: ModelFacts) -> tuple[int, int]:
    """The model's parameters, and those that one token meets (`top_k` experts of each layer)."""
    total = active = 0
    for t in facts.tensors:
        if t.bytes <= 4:  # not a table of ids
            total += t.numel * (facts.num_experts if t.expert else 1)
            active += t.numel * (facts.top_k if t.expert else 1)
    return total, active


def released_bytes(facts: ModelFacts) -> tuple[int, int]:
    """Bytes of a released checkpoint: outside the experts, and of all experts."""
    dense = sum(t.released for t in facts.tensors if not t.expert)
    return dense, sum(t.released * facts.num_experts for t in facts.tensors if t.expert)
