"""Rules on the layout: whether it fits the ranks, and the model. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from moe_rl.errors import UserError

from . import host
from .facts import ModelFacts
from .layout import default_stages, validate_stages
from .problem import Problem, problem_of
from .schema import Config, EngineConfig, LayoutConfig


def layout_problems(config: Config, facts: ModelFacts | None, world: int | None = None) -> list[Problem]:
    """Whether the layout fits `world` ranks (None: those of config.cluster) and, with facts, the model."""
    problems = list(_world(config, config.world if world is None else world))
    if facts is not None:
        for rule in (_layers, _experts, _tensor_parallel, _rounding, _replay):
            problems += rule(config, facts)
    return problems


def fit_problems(facts: ModelFacts, sizes: Mapping[str, Any]) -> list[Problem]:
    """Whether the model can be cut so at all, on GPUs however many; `sizes` are fields of `LayoutConfig`."""
    config = Config(layout=LayoutConfig(**sizes), engine=EngineConfig(device="cuda"))
    found = [*_virtual(config), *(p for rule in (_layers, _experts, _tensor_parallel) for p in rule(config, facts))]
    return [replace(problem, key="", origin="") for problem in found]


def _world(config: Config, world: int) -> Iterator[Problem]:
    layout = config.layout
    replica = layout.tp * layout.pp
    ranks = f"{world} rank(s)"
    if world == config.world:
        ranks = f"cluster.nodes {config.cluster.nodes} * cluster.gpus_per_node {config.cluster.gpus_per_node} = {ranks}"
    if world % replica:
        yield problem_of(
            config,
            "layout.world",
            "layout.pp layout.tp cluster.gpus_per_node",
            f"{ranks} are not a multiple of layout.tp {layout.tp} * layout.pp {layout.pp} = {replica}",
            "One copy of the model takes tp * pp ranks; the copies (dp) are what is left.",
            f"Use a multiple of {replica} ranks, or a smaller layout.pp or layout.tp.",
        )
        return
    experts = layout.pp * layout.etp * layout.ep
    if world % experts:
        yield problem_of(
            config,
            "layout.ep",
            "layout.ep layout.pp cluster.gpus_per_node",
            f"{ranks} are not a multiple of pp {layout.pp} * etp {layout.etp} * ep {layout.ep} = {experts}",
            "The ranks of a stage are cut anew for experts: each group of etp * ep holds all of them once.",
            f"Use a multiple of {experts} ranks, or a layout.ep that divides {max(1, world // (layout.pp * layout.etp))}.",
        )
    yield from _virtual(config)


def _virtual(config: Config) -> Iterator[Problem]:
    layout = config.layout
    if layout.vpp > 1 and layout.pp == 1:
        yield problem_of(
            config,
            "layout.vpp",
            "layout.vpp",
            f"layout.vpp is {layout.vpp} with layout.pp 1",
            "Virtual stages interleave the chunks of several pipeline ranks.",
            "Set layout.pp to 2 or more, or layout.vpp=1.",
        )


def _layers(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    layout = config.layout
    sizes = (layout.pp, layout.vpp, layout.pin_hash_layers)
    if layout.stages:
        found = validate_stages(layout.stages, facts.num_layers, facts.hash_layers, *sizes)
    else:
        found = []
        try:
            default_stages(facts.num_layers, facts.hash_layers, *sizes)
        except UserError as error:
            found = [Problem(error.rule, error.what, error.why, error.fix, "layout.pp")]
    for p in found:
        yield problem_of(config, p.rule, p.key, p.what, p.why, p.fix)


def _experts(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    ep = config.layout.ep
    if ep > 1 and facts.num_experts == 0:
        what, fix = f"layout.ep is {ep}, but the model has no experts", "Set layout.ep=1."
    elif facts.num_experts % ep:
        divisors = [d for d in range(1, facts.num_experts + 1) if facts.num_experts % d == 0]
        what = f"layout.ep {ep} does not divide the model's {facts.num_experts} experts"
        fix = f"Use one of {', '.join(map(str, divisors))}."
    else:
        return
    yield problem_of(config, "layout.experts", "layout.ep", what, "Every rank holds the same number of experts.", fix)


def _rounding(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    which = config.engine.fake_quant
    if which == "none" or facts.experts_format or (which == "all" and facts.linears_format):
        return
    yield problem_of(
        config,
        "engine.fake_quant",
        "engine.fake_quant",
        f"engine.fake_quant is {which}, but releases of family {facts.family} quantise no weight of that kind",
        "It rounds weights as the rollouts hold them, and these hold them unrounded.",
        "Set engine.fake_quant=none.",
    )


def _replay(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    if config.rollout.router_replay != "none" and not facts.num_experts:
        what = f"rollout.router_replay is {config.rollout.router_replay}, but the model has no experts"
        why = "There is no router whose choices could be replayed."
        yield problem_of(config, "rollout.router_replay", "rollout.router_replay", what, why, "Set it to none.")


def _tensor_parallel(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    tp, etp = config.layout.tp, config.layout.etp
    for key, size in (("layout.tp", tp), ("layout.etp", etp)):
        if size > 1 and not facts.supports_tp:
            what = f"{key} is {size}, but family {facts.family} runs with {key}=1 only"
            why = facts.tp_reason or "Its layers cannot be split over tensor-parallel ranks."
            yield problem_of(config, "layout.tp", key, what, why, f"Set {key}=1 and use layout.pp and layout.ep.")
    if not facts.supports_tp:
        return
    for key, size, count, thing in (
        ("layout.tp", tp, facts.num_heads, "attention heads"),
        ("layout.tp", tp, facts.num_kv_heads, "key-value heads"),
        ("layout.tp", tp, facts.ffn_size, "columns of a feed-forward layer"),
        ("layout.etp", etp, facts.expert_size, "columns of an expert"),
    ):
        if count % size:
            rule = "layout.heads" if "heads" in thing else "layout.columns"
            what, why = f"{key} {size} does not divide the model's {count} {thing}", "Each rank holds the same number."
            yield problem_of(config, rule, key, what, why, "Use a divisor.")
    if (tp - 1) * -(-facts.vocab_size // tp) >= facts.vocab_size:
        what = f"layout.tp {tp} leaves a rank without one of the model's {facts.vocab_size} token ids"
        why = "Each rank holds an equal share of the vocabulary."
        yield problem_of(config, "layout.vocabulary", "layout.tp", what, why, "Use a smaller layout.tp.")
    if etp > 1 and not facts.num_experts:
        what = f"layout.etp is {etp}, but the model has no experts"
        yield problem_of(config, "layout.experts", "layout.etp", what, "It splits experts alone.", "Set layout.etp=1.")
    elif etp > 1 and (etp != tp or config.layout.ep > 1) and host.resolve_device(config.engine.device) == "cpu":
        yield problem_of(
            config,
            "layout.etp",
            "layout.etp layout.tp layout.ep",
            f"layout.etp is {etp} with layout.tp {tp} and layout.ep {config.layout.ep} on a CPU",
            "The ranks of an expert then hold different numbers of tokens, and gloo gathers equal ones only.",
            "Set layout.etp=1, or layout.etp to layout.tp with layout.ep=1; on GPUs any will do.",
        )
