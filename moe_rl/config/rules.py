"""Preflight: what is wrong with a run that can be known before it starts. Imports no torch.

Each rule is a generator of :class:`Problem` over the configuration and the facts of the model; its ids are stable, and
docs/wrong_input.md lists them. A rule that needs the model's facts is silent without them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from moe_rl.errors import UserError

from . import host
from .facts import ModelFacts
from .kernels import kernel_problems
from .layout import default_stages, validate_stages
from .load import value_problems
from .optimizer_rules import optimizer_modes
from .problem import Problem, raise_all
from .schema import Config


def check(
    config: Config,
    facts: ModelFacts | None = None,
    *,
    run_dir: Path | None = None,
    own_data: bool = False,
    here: bool = True,
) -> list[Problem]:
    """Every problem of a run, in the order of the schema's sections.

    `facts` are the model's (None: the rules that need them are left out), `run_dir` the directory the run will write
    (None: its disk is not looked at), `own_data` says that the caller hands the records over instead of data.train,
    `here` that it will run on this machine, whose devices and ports are looked at.
    """
    problems = value_problems(config)
    problems += model_directory(config)
    problems += layout_problems(config, facts)
    for rule in (_group, _batch, _sampling, _optimizer, _algorithm, _template, _checkpoint):
        problems += rule(config)
    for rule in (_device, _port) if here else ():
        problems += rule(config)
    if not own_data:
        problems += _data(config)
    if facts is not None:
        for facts_rule in (_lengths, _tokenizer):
            problems += facts_rule(config, facts)
        problems += [_problem(config, *found) for found in kernel_problems(config, facts)]
        if run_dir is not None:
            problems += _disk(config, facts, run_dir)
    return problems


def layout_problems(config: Config, facts: ModelFacts | None, world: int | None = None) -> list[Problem]:
    """Whether the layout fits `world` ranks (None: those of config.cluster) and, with facts, the model."""
    problems = list(_world(config, config.world if world is None else world))
    if facts is not None:
        for rule in (_layers, _experts, _tensor_parallel, _rounding, _replay):
            problems += rule(config, facts)
    return problems


def scoring_problems(config: Config, facts: ModelFacts | None) -> list[Problem]:
    """What is wrong with a scoring, which has a model, a layout and a device, but no data and no batch."""
    problems = value_problems(config)
    problems += model_directory(config)
    problems += layout_problems(config, facts)
    for rule in (_device, _port):
        problems += rule(config)
    return problems


def preflight(
    config: Config, facts: ModelFacts | None = None, *, run_dir: Path | None = None, own_data: bool = False
) -> None:
    """Raise one UserError that names every problem :func:`check` finds."""
    raise_all(check(config, facts, run_dir=run_dir, own_data=own_data))


def _problem(config: Config, rule: str, key: str, what: str, why: str, fix: str) -> Problem:
    """A problem of one key, or of several divided by spaces, each with its origin."""
    first, *others = key.split()
    origin = config.origin(first)
    if others:
        origin = ", ".join(f"{k} from {config.origin(k)}" for k in (first, *others))
    return Problem(rule, what, why, fix, first, origin)


def model_directory(config: Config) -> Iterator[Problem]:
    """model.path: is given, is a directory, and holds a config.json that is a JSON object."""
    path = Path(config.model.path)
    file = path / "config.json"
    why = "It holds the starting model: config.json, *.safetensors and the tokenizer."
    if not config.model.path:
        rule, what, fix = "model.path", "model.path is empty", "Set model.path to a model directory."
    elif not path.exists():
        rule, what, fix = "model.path", f"model.path {path} does not exist", "Check the path, or download the model."
    elif not path.is_dir():
        rule, what, fix = "model.path", f"model.path {path} is not a directory", "Give the directory, not a file of it."
    elif not file.is_file():
        rule, what, fix = (
            "model.config",
            f"model.path {path} has no config.json",
            "Copy config.json beside the weights.",
        )
    else:
        try:
            if isinstance(json.loads(file.read_text(encoding="utf-8")), dict):
                return
            why = "It is JSON, but not an object."
        except (ValueError, OSError) as error:
            why = str(error)
        rule, what, fix = "model.config", f"{file} cannot be read", "Copy it anew from the model's source."
    yield _problem(config, rule, "model.path", what, why, fix)


def _world(config: Config, world: int) -> Iterator[Problem]:
    layout = config.layout
    replica = layout.tp * layout.pp
    ranks = f"{world} rank(s)"
    if world == config.world:
        ranks = f"cluster.nodes {config.cluster.nodes} * cluster.gpus_per_node {config.cluster.gpus_per_node} = {ranks}"
    if world % replica:
        yield _problem(
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
        yield _problem(
            config,
            "layout.ep",
            "layout.ep layout.pp cluster.gpus_per_node",
            f"{ranks} are not a multiple of pp {layout.pp} * etp {layout.etp} * ep {layout.ep} = {experts}",
            "The ranks of a stage are cut anew for experts: each group of etp * ep holds all of them once.",
            f"Use a multiple of {experts} ranks, or a layout.ep that divides {max(1, world // (layout.pp * layout.etp))}.",
        )
    if layout.vpp > 1 and layout.pp == 1:
        yield _problem(
            config,
            "layout.vpp",
            "layout.vpp",
            f"layout.vpp is {layout.vpp} with layout.pp 1",
            "Virtual stages interleave the chunks of several pipeline ranks.",
            "Set layout.pp to 2 or more, or layout.vpp=1.",
        )


def _group(config: Config) -> Iterator[Problem]:
    if config.rollout.n < 2:
        yield _problem(
            config,
            "rollout.group",
            "rollout.n",
            f"rollout.n is {config.rollout.n}",
            "An advantage is a reward less its group's mean: in a group of one it is always zero, and nothing is learnt.",
            "Set rollout.n to 2 or more; 8 is usual.",
        )
    if config.rollout.replicas > config.data.prompts_per_step:
        yield _problem(
            config,
            "rollout.replicas",
            "rollout.replicas data.prompts_per_step",
            f"rollout.replicas {config.rollout.replicas} is more than data.prompts_per_step {config.data.prompts_per_step}",
            "A prompt's group is sampled by one replica, so some would never work.",
            f"Use at most {config.data.prompts_per_step} replicas.",
        )


def _batch(config: Config) -> Iterator[Problem]:
    prompts, minibatches = config.data.prompts_per_step, config.algorithm.minibatches
    if prompts % minibatches:
        yield _problem(
            config,
            "algorithm.minibatches",
            "algorithm.minibatches data.prompts_per_step",
            f"data.prompts_per_step {prompts} does not divide into algorithm.minibatches {minibatches}",
            "Each optimizer step takes an equal share of the batch, all samples of a prompt together.",
            f"Use a divisor of {prompts}.",
        )
    longest = config.data.max_prompt + config.rollout.max_response
    if config.engine.max_tokens_per_micro_batch < longest:
        yield _problem(
            config,
            "engine.token_budget",
            "engine.max_tokens_per_micro_batch data.max_prompt rollout.max_response",
            f"engine.max_tokens_per_micro_batch {config.engine.max_tokens_per_micro_batch} is less than the longest sequence:"
            f" data.max_prompt {config.data.max_prompt} + rollout.max_response {config.rollout.max_response} = {longest}",
            "A sequence is never cut over micro-batches.",
            f"Set it to {longest} or more.",
        )


def _sampling(config: Config) -> Iterator[Problem]:
    why = (
        "Cutting the distribution's tail renormalises the sampled log-probs, so that the trainer's probability ratios are"
        " wrong from the first step."
    )
    if config.rollout.top_p != 1.0:
        what = f"rollout.top_p is {config.rollout.top_p:g} in training rollouts"
        yield _problem(
            config, "rollout.top_p", "rollout.top_p", what, why, "Set rollout.top_p=1; use temperature instead."
        )
    if config.rollout.top_k != 0:
        what = f"rollout.top_k is {config.rollout.top_k} in training rollouts"
        yield _problem(
            config, "rollout.top_k", "rollout.top_k", what, why, "Set rollout.top_k=0; use temperature instead."
        )


def _optimizer(config: Config) -> Iterator[Problem]:
    optimizer = config.optimizer
    if len(optimizer.betas) != 2:
        yield _problem(
            config,
            "optimizer.betas",
            "optimizer.betas",
            f"optimizer.betas {optimizer.betas} has {len(optimizer.betas)} values",
            "Adam keeps two moments, each with its decay rate.",
            "Give two, as in optimizer.betas=[0.9,0.95].",
        )
    if optimizer.min_lr > optimizer.lr:
        yield _problem(
            config,
            "optimizer.min_lr",
            "optimizer.min_lr optimizer.lr",
            f"optimizer.min_lr {optimizer.min_lr:g} is above optimizer.lr {optimizer.lr:g}",
            "It is where the schedule ends, lr where it starts.",
            "Lower optimizer.min_lr.",
        )
    for found in optimizer_modes(config):
        yield _problem(config, *found)


def _algorithm(config: Config) -> Iterator[Problem]:
    dual = config.algorithm.dual_clip
    if 0 < dual <= 1:
        yield _problem(
            config,
            "algorithm.dual_clip",
            "algorithm.dual_clip",
            f"algorithm.dual_clip is {dual:g}",
            "It bounds the ratio where the advantage is negative; at 1 or below it would bind before the ratio moves.",
            "Give a value above 1 (3 is usual), or 0 to turn it off.",
        )


def _template(config: Config) -> Iterator[Problem]:
    if "{question}" not in config.data.template:
        yield _problem(
            config,
            "data.template",
            "data.template",
            f"data.template {config.data.template!r} has no {{question}}",
            "Every prompt would be the same text.",
            "Write {question} where the prompt goes.",
        )


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    if not data.train:
        why = "It holds the training prompts."
        yield _problem(
            config,
            "data.train",
            "data.train",
            "data.train is empty",
            why,
            "Set data.train to a .jsonl or .parquet file.",
        )
    if config.trainer.validate_every and not data.validation:
        yield _problem(
            config,
            "data.validation",
            "data.validation trainer.validate_every",
            f"data.validation is empty, but trainer.validate_every is {config.trainer.validate_every}",
            "A validation needs held-out prompts.",
            "Set data.validation, or trainer.validate_every=0.",
        )
    for key in ("data.train", "data.validation"):
        source = config.get(key)
        if not source or source.startswith("reasoning_gym:"):
            continue
        if not Path(source).is_file():
            what, why = f"{key} {source} does not exist", "It is neither a file nor a reasoning_gym: task."
            yield _problem(config, "data.path", key, what, why, "Check the path.")


def _device(config: Config) -> Iterator[Problem]:
    gpus = host.gpu_count()
    device = host.resolve_device(config.engine.device)
    if config.engine.device == "cuda" and gpus == 0:
        yield _problem(
            config,
            "engine.device",
            "engine.device",
            "engine.device is cuda, but this machine shows no GPU",
            "No /dev/nvidia0 is there, or CUDA_VISIBLE_DEVICES hides it.",
            "Use --hw cpu, or start where a GPU is.",
        )
    elif device == "cuda" and config.cluster.gpus_per_node > gpus:
        yield _problem(
            config,
            "cluster.gpus",
            "cluster.gpus_per_node",
            f"cluster.gpus_per_node is {config.cluster.gpus_per_node}, but this machine shows {gpus} GPU(s)",
            "Each trainer rank has a GPU of its own.",
            f"Set cluster.gpus_per_node={gpus}.",
        )
    if device == "cpu" and config.engine.dtype != "fp32":
        yield _problem(
            config,
            "engine.dtype",
            "engine.dtype",
            f"engine.dtype is {config.engine.dtype} on a CPU",
            "Most CPUs emulate it, many times slower, and the CPU path is proven in fp32 alone.",
            "Set engine.dtype=fp32, or use --hw cpu.",
        )
    if config.engine.attention_backend == "triton" and (device == "cpu" or config.engine.dtype != "bf16"):
        yield _problem(
            config,
            "engine.attention_backend",
            "engine.attention_backend engine.dtype",
            f"engine.attention_backend is triton with engine.dtype {config.engine.dtype} on {device}",
            "The kernels run on a GPU in bf16.",
            "Set engine.attention_backend=auto.",
        )


def _checkpoint(config: Config) -> Iterator[Problem]:
    if "model" not in config.checkpoint.contents:
        yield _problem(
            config,
            "checkpoint.contents",
            "checkpoint.contents",
            f"checkpoint.contents {config.checkpoint.contents} has no model",
            "A checkpoint without weights cannot be resumed.",
            "Add model to it.",
        )
    wanted = config.checkpoint.load_contents
    if wanted and "model" not in wanted:
        yield _problem(
            config,
            "checkpoint.load_contents",
            "checkpoint.load_contents",
            f"checkpoint.load_contents {wanted} has no model",
            "Moments, schedule and data position belong to the weights of the same checkpoint.",
            "Add model to it, or leave it empty to load all that a checkpoint holds.",
        )


def _port(config: Config) -> Iterator[Problem]:
    port = config.cluster.port
    if port and not host.port_is_free(port):
        yield _problem(
            config,
            "cluster.port",
            "cluster.port",
            f"TCP port {port} is in use or not allowed on this machine",
            "The trainer ranks meet there; ports below 1024 are for privileged users.",
            "Set cluster.port=0 to take any free port, or end the process that holds it.",
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
        yield _problem(config, p.rule, p.key, p.what, p.why, p.fix)


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
    yield _problem(config, "layout.experts", "layout.ep", what, "Every rank holds the same number of experts.", fix)


def _rounding(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    which = config.engine.fake_quant
    if which == "none" or facts.experts_format or (which == "all" and facts.linears_format):
        return
    yield _problem(
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
        yield _problem(config, "rollout.router_replay", "rollout.router_replay", what, why, "Set it to none.")


def _tensor_parallel(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    tp, etp = config.layout.tp, config.layout.etp
    for key, size in (("layout.tp", tp), ("layout.etp", etp)):
        if size > 1 and not facts.supports_tp:
            what = f"{key} is {size}, but family {facts.family} runs with {key}=1 only"
            why = facts.tp_reason or "Its layers cannot be split over tensor-parallel ranks."
            yield _problem(config, "layout.tp", key, what, why, f"Set {key}=1 and use layout.pp and layout.ep.")
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
            yield _problem(config, rule, key, what, why, "Use a divisor.")
    if (tp - 1) * -(-facts.vocab_size // tp) >= facts.vocab_size:
        what = f"layout.tp {tp} leaves a rank without one of the model's {facts.vocab_size} token ids"
        why = "Each rank holds an equal share of the vocabulary."
        yield _problem(config, "layout.vocabulary", "layout.tp", what, why, "Use a smaller layout.tp.")
    if etp > 1 and not facts.num_experts:
        what = f"layout.etp is {etp}, but the model has no experts"
        yield _problem(config, "layout.experts", "layout.etp", what, "It splits experts alone.", "Set layout.etp=1.")
    elif etp > 1 and (etp != tp or config.layout.ep > 1) and host.resolve_device(config.engine.device) == "cpu":
        yield _problem(
            config,
            "layout.etp",
            "layout.etp layout.tp layout.ep",
            f"layout.etp is {etp} with layout.tp {tp} and layout.ep {config.layout.ep} on a CPU",
            "The ranks of an expert then hold different numbers of tokens, and gloo gathers equal ones only.",
            "Set layout.etp=1, or layout.etp to layout.tp with layout.ep=1; on GPUs any will do.",
        )


def _lengths(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    longest = config.data.max_prompt + config.rollout.max_response
    if longest > facts.max_positions:
        yield _problem(
            config,
            "rollout.positions",
            "rollout.max_response data.max_prompt",
            f"data.max_prompt {config.data.max_prompt} + rollout.max_response {config.rollout.max_response} = {longest} tokens,"
            f" the model has {facts.max_positions} positions",
            "The model was not made for positions beyond its max_position_embeddings.",
            f"Shorten the response to {max(1, facts.max_positions - config.data.max_prompt)} tokens, or the prompts.",
        )


def _tokenizer(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    if facts.tokenizer_vocab is None:
        why = "Prompts are text, the model reads token ids."
        what = f"{facts.path} has no tokenizer"
        yield _problem(config, "model.tokenizer", "model.path", what, why, "Copy tokenizer.json beside config.json.")
    elif facts.tokenizer_vocab > facts.vocab_size:
        yield _problem(
            config,
            "model.vocabulary",
            "model.path",
            f"the tokenizer of {facts.path} makes ids up to {facts.tokenizer_vocab - 1}, the model's vocabulary ends at"
            f" {facts.vocab_size - 1}",
            "Such an id has no embedding.",
            "Use the tokenizer that belongs to the model.",
        )


def checkpoint_bytes(config: Config, facts: ModelFacts) -> int:
    """Bytes of one checkpoint: weights in their own type, and 12 per parameter for the fp32 copy and both moments."""
    per_parameter = 4 if config.engine.dtype == "fp32" else 2
    if "optimizer" in config.checkpoint.contents:
        per_parameter += 12
    return facts.num_parameters * per_parameter


def _disk(config: Config, facts: ModelFacts, run_dir: Path) -> Iterator[Problem]:
    one = checkpoint_bytes(config, facts)
    # the newest is complete before the oldest goes
    kept = min(config.checkpoint.keep + 1, -(-config.trainer.steps // config.checkpoint.every))
    free = host.free_bytes(run_dir)
    if one * kept > free:
        yield _problem(
            config,
            "checkpoint.disk",
            "checkpoint.keep",
            f"{kept} checkpoint(s) of {_size(one)} do not fit: {run_dir} has {_size(free)} free",
            "checkpoint.keep stay on disk while the next is written.",
            "Free space, choose another --run-dir, lower checkpoint.keep or leave optimizer out of checkpoint.contents.",
        )


def _size(count: float) -> str:
    """Bytes in the unit that keeps the number readable."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
