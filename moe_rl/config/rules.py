"""Preflight: what is wrong with a run that can be known before it starts. Imports no torch.

Each rule is a generator of :class:`Problem` over the configuration and the facts of the model; its ids are stable, and
docs/wrong_input.md lists them. A rule that needs the model's facts is silent without them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from moe_rl.units import size_text

from . import host
from .facts import ModelFacts
from .figures import overridden
from .kernels import kernel_problems
from .layout_rules import layout_problems
from .load import value_problems
from .optimizer_rules import optimizer_modes
from .problem import Problem, problem_of, raise_all
from .schema import Config

_FIGURE = "Name a figure of that file, and give a value of its type."


def check(
    config: Config,
    facts: ModelFacts | None = None,
    *,
    run_dir: Path | None = None,
    own_data: bool = False,
    here: bool = True,
    foreign_checkpoint: bool = False,
) -> list[Problem]:
    """Every problem of a run, in the order of the schema's sections.

    `facts` are the model's (None: the rules that need them are left out), `run_dir` the directory the run will write
    (None: its disk is not looked at), `own_data` says that the caller hands the records over instead of data.train,
    `here` that it will run on this machine, whose devices and ports are looked at, `foreign_checkpoint` that it starts from
    a checkpoint of another run.
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
    if not foreign_checkpoint:
        problems += _own_checkpoints(config)
    if facts is not None:
        for facts_rule in (_lengths, weights, _tokenizer):
            problems += facts_rule(config, facts)
        problems += [problem_of(config, *found) for found in kernel_problems(config, facts)]
        if run_dir is not None:
            problems += _disk(config, facts, run_dir)
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
    config: Config,
    facts: ModelFacts | None = None,
    *,
    run_dir: Path | None = None,
    own_data: bool = False,
    foreign_checkpoint: bool = False,
) -> None:
    """Raise one UserError that names every problem :func:`check` finds."""
    raise_all(check(config, facts, run_dir=run_dir, own_data=own_data, foreign_checkpoint=foreign_checkpoint))


def model_directory(config: Config) -> Iterator[Problem]:
    """model.path: is given, is a directory, and holds a config.json that is a JSON object and has what model.config sets."""
    path = Path(config.model.path)
    file = path / "config.json"
    why = "It holds the starting model: config.json, *.safetensors and the tokenizer."
    if not config.model.path:
        rule, what, fix = "model.path", "model.path is empty", "Set model.path to a model directory."
    elif not path.exists():
        rule, what, fix = "model.path", f"model.path {path} does not exist", "Check the path, or download the model."
    elif not path.is_dir():
        rule, what, fix = "model.path", f"model.path {path} is not a directory", "Give the directory, not a file of it."
    elif not file.is_file() and (instead := model_of_run(path)):
        rule, what, fix = "model.path", f"model.path {path} is a run's directory, not a model's", instead
        why += " A run's checkpoints hold that too, the run's directory does not."
    elif not file.is_file():
        rule, what, fix = (
            "model.config",
            f"model.path {path} has no config.json",
            "Copy config.json beside the weights.",
        )
    else:
        try:
            if isinstance(found := json.loads(file.read_text(encoding="utf-8")), dict):
                for name, what in overridden(found, config.model.config)[1]:
                    yield problem_of(config, "model.config", name, what, f"It replaces a figure of {file}.", _FIGURE)
                return
            why = "It is JSON, but not an object."
        except (ValueError, OSError, RecursionError) as error:
            why = str(error)
        rule, what, fix = "model.config", f"{file} cannot be read", "Copy it anew from the model's source."
    yield problem_of(config, rule, "model.path", what, why, fix)


def model_of_run(path: Path) -> str:
    """What to give in the place of a run's directory, or of the one its checkpoints lie in; "" for any other directory."""
    run = next((run for run in (path, path.parent) if (run / "config.resolved.yaml").is_file()), None)
    if run is None or path not in (run, run / "checkpoints"):
        return ""
    saved = sorted(found.parent for found in run.glob("checkpoints/step_*/config.json"))
    checkpoint = (
        f"Give its newest checkpoint, {saved[-1]}"
        if saved
        else "It has no checkpoint yet; give the model it started from"
    )
    return f"{checkpoint}. As a recipe, {run / 'config.resolved.yaml'} repeats the run."


def _group(config: Config) -> Iterator[Problem]:
    if config.rollout.n < 2:
        yield problem_of(
            config,
            "rollout.group",
            "rollout.n",
            f"rollout.n is {config.rollout.n}",
            "An advantage is a reward less its group's mean: in a group of one it is always zero, and nothing is learnt.",
            "Set rollout.n to 2 or more; 8 is usual.",
        )
    if config.rollout.replicas > config.data.prompts_per_step:
        yield problem_of(
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
        yield problem_of(
            config,
            "algorithm.minibatches",
            "algorithm.minibatches data.prompts_per_step",
            f"data.prompts_per_step {prompts} does not divide into algorithm.minibatches {minibatches}",
            "Each optimizer step takes an equal share of the batch, all samples of a prompt together.",
            f"Use a divisor of {prompts}.",
        )
    longest = config.data.max_prompt + config.rollout.max_response
    if config.engine.max_tokens_per_micro_batch < longest:
        yield problem_of(
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
        yield problem_of(
            config, "rollout.top_p", "rollout.top_p", what, why, "Set rollout.top_p=1; use temperature instead."
        )
    if config.rollout.top_k != 0:
        what = f"rollout.top_k is {config.rollout.top_k} in training rollouts"
        yield problem_of(
            config, "rollout.top_k", "rollout.top_k", what, why, "Set rollout.top_k=0; use temperature instead."
        )


def _optimizer(config: Config) -> Iterator[Problem]:
    optimizer = config.optimizer
    if len(optimizer.betas) != 2:
        yield problem_of(
            config,
            "optimizer.betas",
            "optimizer.betas",
            f"optimizer.betas {optimizer.betas} has {len(optimizer.betas)} values",
            "Adam keeps two moments, each with its decay rate.",
            "Give two, as in optimizer.betas=[0.9,0.95].",
        )
    if optimizer.min_lr > optimizer.lr:
        yield problem_of(
            config,
            "optimizer.min_lr",
            "optimizer.min_lr optimizer.lr",
            f"optimizer.min_lr {optimizer.min_lr:g} is above optimizer.lr {optimizer.lr:g}",
            "It is where the schedule ends, lr where it starts.",
            "Lower optimizer.min_lr.",
        )
    for found in optimizer_modes(config):
        yield problem_of(config, *found)


def _algorithm(config: Config) -> Iterator[Problem]:
    dual = config.algorithm.dual_clip
    if 0 < dual <= 1:
        yield problem_of(
            config,
            "algorithm.dual_clip",
            "algorithm.dual_clip",
            f"algorithm.dual_clip is {dual:g}",
            "It bounds the ratio where the advantage is negative; at 1 or below it would bind before the ratio moves.",
            "Give a value above 1 (3 is usual), or 0 to turn it off.",
        )
    yield from _old_logprobs(config)


def _old_logprobs(config: Config) -> Iterator[Problem]:
    a, key = config.algorithm, "algorithm.old_logprobs"
    if a.old_logprobs == "recompute":
        return
    lacking = [
        (a.kl == "k1", "algorithm.kl=k1 takes them off the rewards"),
        (a.correction != "none", f"algorithm.correction={a.correction} weighs tokens by them"),
        (config.rollout.router_replay == "R2", "rollout.router_replay=R2 replays the experts of that pass"),
        (
            a.old_logprobs == "update" and a.minibatches * a.epochs > 1,
            f"{a.minibatches * a.epochs} optimizer steps a batch need the log-probs from before the first",
        ),
    ]
    for wrong, why in lacking:
        if wrong:
            what = f"algorithm.old_logprobs is {a.old_logprobs}: the trainer has no log-probs before the update"
            yield problem_of(config, key, key, what, f"But {why}.", "Use algorithm.old_logprobs=recompute.")


def _template(config: Config) -> Iterator[Problem]:
    if "{question}" not in config.data.template:
        yield problem_of(
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
        yield problem_of(
            config,
            "data.train",
            "data.train",
            "data.train is empty",
            why,
            "Set data.train to a .jsonl or .parquet file.",
        )
    if config.trainer.validate_every and not data.validation:
        yield problem_of(
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
            yield problem_of(config, "data.path", key, what, why, "Check the path.")


def _device(config: Config) -> Iterator[Problem]:
    gpus = host.gpu_count()
    device = host.resolve_device(config.engine.device)
    if config.engine.device == "cuda" and gpus == 0:
        yield problem_of(
            config,
            "engine.device",
            "engine.device",
            "engine.device is cuda, but this machine shows no GPU",
            "No /dev/nvidia0 is there, or CUDA_VISIBLE_DEVICES hides it.",
            "Use --hw cpu, or start where a GPU is.",
        )
    elif device == "cuda" and config.cluster.gpus_per_node > gpus:
        yield problem_of(
            config,
            "cluster.gpus",
            "cluster.gpus_per_node",
            f"cluster.gpus_per_node is {config.cluster.gpus_per_node}, but this machine shows {gpus} GPU(s)",
            "Each trainer rank has a GPU of its own.",
            f"Set cluster.gpus_per_node={gpus}.",
        )
    if device == "cpu" and config.engine.dtype != "fp32":
        yield problem_of(
            config,
            "engine.dtype",
            "engine.dtype",
            f"engine.dtype is {config.engine.dtype} on a CPU",
            "Most CPUs emulate it, many times slower, and the CPU path is proven in fp32 alone.",
            "Set engine.dtype=fp32, or use --hw cpu.",
        )
    if config.engine.attention_backend == "triton" and (device == "cpu" or config.engine.dtype != "bf16"):
        yield problem_of(
            config,
            "engine.attention_backend",
            "engine.attention_backend engine.dtype",
            f"engine.attention_backend is triton with engine.dtype {config.engine.dtype} on {device}",
            "The kernels run on a GPU in bf16.",
            "Set engine.attention_backend=auto.",
        )


def _checkpoint(config: Config) -> Iterator[Problem]:
    if "model" not in config.checkpoint.contents:
        yield problem_of(
            config,
            "checkpoint.contents",
            "checkpoint.contents",
            f"checkpoint.contents {config.checkpoint.contents} has no model",
            "A checkpoint without weights cannot be resumed.",
            "Add model to it.",
        )
    wanted = config.checkpoint.load_contents
    if wanted and "model" not in wanted:
        yield problem_of(
            config,
            "checkpoint.load_contents",
            "checkpoint.load_contents",
            f"checkpoint.load_contents {wanted} has no model",
            "Moments, schedule and data position belong to the weights of the same checkpoint.",
            "Add model to it, or leave it empty to load all that a checkpoint holds.",
        )


def _own_checkpoints(config: Config) -> Iterator[Problem]:
    saved, wanted = config.checkpoint.contents, config.checkpoint.load_contents
    if lacking := ", ".join(part for part in wanted if part not in saved):
        yield problem_of(
            config,
            "checkpoint.load_contents",
            "checkpoint.load_contents checkpoint.contents",
            f"checkpoint.load_contents {wanted} asks for {lacking}, which checkpoint.contents {saved} does not save",
            "No resume from the run's own checkpoints would be possible.",
            f"Add {lacking} to checkpoint.contents, or leave checkpoint.load_contents empty to load all that a checkpoint holds.",
        )


def _port(config: Config) -> Iterator[Problem]:
    port = config.cluster.port
    if port and not host.port_is_free(port):
        yield problem_of(
            config,
            "cluster.port",
            "cluster.port",
            f"TCP port {port} is in use or not allowed on this machine",
            "The trainer ranks meet there; ports below 1024 are for privileged users.",
            "Set cluster.port=0 to take any free port, or end the process that holds it.",
        )


def _lengths(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    longest = config.data.max_prompt + config.rollout.max_response
    if longest > facts.max_positions:
        yield problem_of(
            config,
            "rollout.positions",
            "rollout.max_response data.max_prompt",
            f"data.max_prompt {config.data.max_prompt} + rollout.max_response {config.rollout.max_response} = {longest} tokens,"
            f" the model has {facts.max_positions} positions",
            "The model was not made for positions beyond its max_position_embeddings.",
            f"Shorten the response to {max(1, facts.max_positions - config.data.max_prompt)} tokens, or the prompts.",
        )


def weights(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    """The model directory holds weights; what is in them is for `Family.check_weights`."""
    if facts.weight_files == 0:
        yield problem_of(
            config,
            "model.weights",
            "model.path",
            f"model.path {facts.path} holds no weights, neither *.safetensors files nor a dist-checkpoint",
            "A run starts from weights: a config.json alone can be planned and audited, not trained or scored.",
            "Copy the weights beside config.json, or point model.path at a directory that has them.",
        )


def _tokenizer(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    if facts.tokenizer_vocab is None:
        why = "Prompts are text, the model reads token ids."
        what = f"{facts.path} has no tokenizer"
        yield problem_of(config, "model.tokenizer", "model.path", what, why, "Copy tokenizer.json beside config.json.")
    elif facts.tokenizer_vocab > facts.vocab_size:
        yield problem_of(
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


def most_checkpoints(config: Config, keep: int) -> int:
    """How many lie on disk at most: the newest is complete before the oldest goes."""
    return min(keep + 1, -(-config.trainer.steps // config.checkpoint.every))


def disk_fix(config: Config) -> str:
    """What would make room for the checkpoints: of the keys those that change something."""
    ways = ["Free space", "choose another --run-dir"]
    if most_checkpoints(config, 1) < most_checkpoints(config, config.checkpoint.keep):
        ways.append("lower checkpoint.keep")
    if "optimizer" in config.checkpoint.contents:
        ways.append("leave optimizer out of checkpoint.contents")
    return f"{', '.join(ways[:-1])} or {ways[-1]}."


def _disk(config: Config, facts: ModelFacts, run_dir: Path) -> Iterator[Problem]:
    one, kept = checkpoint_bytes(config, facts), most_checkpoints(config, config.checkpoint.keep)
    free = host.free_bytes(run_dir)
    if one * kept > free:
        yield problem_of(
            config,
            "checkpoint.disk",
            "checkpoint.keep",
            f"{kept} checkpoint(s) of {size_text(one)} do not fit: {run_dir} has {size_text(free)} free",
            "checkpoint.keep stay on disk while the next is written.",
            disk_fix(config),
        )
