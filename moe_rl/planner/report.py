"""A layout in words: which rank holds which layers and experts."""

from __future__ import annotations

from moe_rl.config import Config, ModelFacts
from moe_rl.config.layout import format_stages, layers_of, parse, resolve_stages


def plan_stages(config: Config, facts: ModelFacts) -> str:
    """The stages a run uses, written out (``Ettt|ttL``): layout.stages, or the balanced default. Raises UserError."""
    layout = config.layout
    sizes = (layout.pp, layout.vpp, layout.pin_hash_layers)
    return resolve_stages(layout.stages, facts.num_layers, facts.hash_layers, *sizes)


def describe_layout(config: Config, facts: ModelFacts, ranks: bool = True) -> str:
    """A grid of pipeline stages against ranks, for a layout that passed preflight; without `ranks` of the first of each stage.

    Ranks are numbered as megatron-core does: tensor parallel fastest, then data parallel, the pipeline slowest; the
    ranks of a stage are cut anew for experts, expert tensor parallel fastest, then expert parallel.
    """
    layout, stages = config.layout, plan_stages(config, facts)
    width = config.world // layout.pp
    copies = width // (layout.ep * layout.etp)
    lines = [
        f"{config.world} ranks = dp {config.dp} * pp {layout.pp} * tp {layout.tp}",
        f"experts: {facts.num_experts} a layer over ep {layout.ep} * etp {layout.etp}, in {copies} copies"
        if facts.num_experts
        else "experts: none",
        f"stages: {format_stages(parse(stages))}" + ("" if layout.stages else " (balanced)"),
    ]
    segments, layers = parse(stages), layers_of(stages)
    for stage in range(layout.pp):
        chunks = [_segment(segments[i], layers[i], facts) for i in range(stage, len(segments), layout.pp)]
        lines.append(f"  stage {stage}: {'  then  '.join(chunks)}")
        last = (stage + 1) * width
        for rank in range(stage * width, last if ranks else stage * width + 1):
            to = "" if ranks or width == 1 else f" (to {last - 1})"
            lines.append(f"    rank {rank}{to}: {rank_role(config, facts, rank - stage * width)}")
    return "\n".join(lines)


def _segment(segment: str, layers: range, facts: ModelFacts) -> str:
    parts = ["embedding"] if "E" in segment else []
    if layers:
        parts.append(f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}")
    hashed = [str(i) for i in layers if i in facts.hash_layers]
    if hashed:
        parts[-1] += f" (hash: {', '.join(hashed)})"
    return ", ".join([*parts, *(["loss"] if "L" in segment else [])])


def rank_role(config: Config, facts: ModelFacts, index: int) -> str:
    """Coordinates of the rank at position `index` of its stage."""
    layout = config.layout
    parts = [f"dp {index // layout.tp}"]
    if layout.tp > 1:
        parts.append(f"tp {index % layout.tp}")
    if facts.num_experts:
        ep = index // layout.etp % layout.ep
        held = facts.num_experts // layout.ep
        parts.append(f"experts {ep * held}-{(ep + 1) * held - 1}")
    return ", ".join(parts)
