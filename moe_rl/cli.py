"""The ``moe-rl`` command. Torch and the trainer are imported by the commands that need them, after preflight."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_rl import __version__
from moe_rl.config import Config, load_config
from moe_rl.config.explain import explain as explain_keys
from moe_rl.config.layout_rules import layout_problems
from moe_rl.config.load import shipped, split_words
from moe_rl.config.rules import model_directory
from moe_rl.durable import FULL
from moe_rl.errors import EXIT_DONE, MoeRLError, RunFailed, UserError

if TYPE_CHECKING:
    from moe_rl.trainer.inputs import Inputs

EXIT_INTERRUPTED = 130
RESOLVED = "config.resolved.yaml"
STATE = "state.json"  # of a run's checkpoint

app = typer.Typer(
    help="GRPO for large mixture-of-experts models, native to Megatron-Core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench_app = typer.Typer(help="Measurements, of real runs.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench_app, name="bench")

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values that win over all others.")
]
Hardware = Annotated[str | None, typer.Option("--hw", help="Profile of the machine; default: the recipe's own.")]
Files = Annotated[list[Path] | None, typer.Option("--file", help="YAML file read after the profile; may be repeated.")]


def _version(asked: bool) -> None:
    if asked:
        print(f"moe-rl {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help=f"Shipped: {', '.join(shipped('recipe'))}; or a YAML file.")],
    overrides: Overrides = None,
    hw: Hardware = None,
    file: Files = None,
    run_dir: Annotated[Path | None, typer.Option(help="Directory of the run; default: runs/RECIPE-TIME.")] = None,
    resume: Annotated[str, typer.Option(metavar="auto|never|PATH", help="Continue from a checkpoint.")] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the plan, start nothing.")
    ] = False,
) -> None:
    """Train a model with GRPO."""
    config = load_config(recipe, overrides or (), hw=hw, files=file or (), environment=os.environ)
    directory = run_dir or Path("runs") / f"{Path(recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    if dry_run:
        from moe_rl.trainer.inputs import read_inputs
        from moe_rl.trainer.judging import Judge

        inputs = read_inputs(config, directory, resume=resume)
        with Judge(config):  # a verifier of the user's is imported only when it is started
            print(describe(config, inputs))
        return
    from moe_rl.trainer.api import train as run_training

    try:
        code = run_training(config, run_dir=directory, resume=resume)
        from moe_rl.planning import keep_comparison

        if text := keep_comparison(directory, config):
            print(text)
    except MoeRLError:
        raise
    except Exception as error:
        raise _unexpected(error, directory) from error
    raise typer.Exit(code)


@app.command()
def plan(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE|CONFIG.JSON", help="As for train; or a model's config.json.")
    ],
    overrides: Overrides = None,
    hw: Hardware = None,
    file: Files = None,
    search: Annotated[bool, typer.Option("--search", help="Rank layouts that fit by the time of a step.")] = False,
    measured: Annotated[Path | None, typer.Option(help="Directory of a run whose measured rates count.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What a run needs before it starts: layout, memory by phase, time of a step, checkpoints. Exit code 2: a rule is broken."""
    from moe_rl.planning import run as run_planner

    run_planner(
        recipe, overrides or (), hw=hw, files=file or (), search=search, measured=measured, as_json=as_json
    ).give()


@app.command()
def launch(
    recipe: Annotated[str, typer.Argument(help="As for train.")],
    overrides: Overrides = None,
    hw: Hardware = None,
    file: Files = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="Of sbatch, as in --sbatch=--time=8:00:00; repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job, the plan and every rank's role.")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="Hand the job to sbatch instead of printing it.")] = False,
    settings: Annotated[bool, typer.Option("--settings", help="Print the job's sizes alone, for a shell.")] = False,
) -> None:
    """The batch job of a run under Slurm, which goes on by itself until the last step."""
    from moe_rl.config import check
    from moe_rl.config.problem import raise_all
    from moe_rl.launch import render
    from moe_rl.models.family import read_facts
    from moe_rl.planner.plan import Plan
    from moe_rl.planner.text import describe as describe_plan

    environment = dict(os.environ)
    if "MODEL_PATH" in environment and not Path(environment.get("DIST_CKPT_PATH", "")).exists():
        environment.pop("DIST_CKPT_PATH", None)  # the job makes it
    config = load_config(recipe, overrides or (), hw=hw, files=file or (), environment=environment)
    raise_all([*model_directory(config)])
    facts = read_facts(config.model, config.model.family)
    problems = check(config, facts, here=False)
    if not dry_run or layout_problems(config, facts):
        raise_all(problems)
    arguments = [recipe, *(["--hw", hw] if hw else []), *(part for f in file or () for part in ("--file", str(f)))]
    arguments += overrides or []
    job = render.render(config, arguments, sbatch or (), {} if settings else dict(os.environ))
    if settings:
        print(render.settings(config, arguments), end="")
    elif dry_run:
        print("\n\n".join([job.rstrip(), describe_plan(Plan.of(config, facts)), render.roles(config, facts)]))
        raise_all(problems)
    else:
        print(render.submit(job) if submit else job, end="")


@app.command(hidden=True)
def node(
    cpus: Annotated[int, typer.Option(help="Processes that this node takes.")],
    gpus: Annotated[int, typer.Option(help="Of them, on GPUs.")] = 0,
    object_store_gib: Annotated[float, typer.Option(help="Shared memory of Ray's objects.")] = 1.0,
) -> None:
    """One node of a batch job's Ray cluster; the job starts it."""
    from moe_rl.launch.node import serve

    serve(cpus, gpus, object_store_gib)


@app.command()
def score(
    source: Annotated[str, typer.Argument(help="A model directory, a checkpoint, or a run (its newest one).")],
    tokens: Annotated[Path, typer.Option(help='JSONL, one {"tokens": [...]} a line.')],
    out: Annotated[Path, typer.Option(help='JSONL to write, one {"logprobs": [...]} a line.')],
    overrides: Overrides = None,
    hw: Hardware = None,
    file: Files = None,
) -> None:
    """Log-probs of given tokens, in any layout: natural log, the first token of a line omitted."""
    resolved = _resolved_config(Path(source))
    overrides = overrides or []
    if resolved is None:
        overrides = [f"model.path={source}", *overrides]
    config = load_config(resolved, overrides, hw=hw, files=file or ())
    if not tokens.is_file():
        raise UserError(
            "score.tokens", f"--tokens {tokens} does not exist", fix='Give a file with {"tokens": [...]} a line.'
        )
    from moe_rl.trainer.scoring import score as run_scoring

    print(f"{out}: log-probs of {run_scoring(config, source, tokens, out)} sequences")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A released or bf16 checkpoint, or a dist-checkpoint of a run.")],
    target: Annotated[Path, typer.Argument(help="The directory to make.")],
    to: Annotated[
        str | None, typer.Option(help="released, bf16 or dist; default: dist, of a dist-checkpoint released.")
    ] = None,
    layout: Annotated[str, typer.Option(help="Ranks that a dist-checkpoint is written for, as in pp=2,ep=2.")] = "",
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    mtp: Annotated[str, typer.Option(help="keep or drop the layers that predict further tokens.")] = "keep",
    like: Annotated[
        Path | None, typer.Option(help="Released checkpoint: unchanged blocks keep its scales, files are cut as there.")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Drop what an unfinished call left.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """A checkpoint in another form: FP8 and MXFP4 as released, bf16, or a dist-checkpoint. A second call goes on."""
    from moe_rl.config.layout import parse_sizes
    from moe_rl.models.headers import recognise

    to = to or ("released" if recognise(source) == "dist" else "dist")
    for name, value, possible in (("--to", to, ("released", "bf16", "dist")), ("--mtp", mtp, ("keep", "drop"))):
        if value not in possible:
            raise UserError(
                "convert.option", f"{name} {value}", f"Possible are {', '.join(possible)}.", "Use one of them."
            )
    if layout and to != "dist":
        why = "Only a dist-checkpoint is written by rank."
        raise UserError("convert.option", f"--layout {layout} with --to {to}", why, "Drop it, or use --to dist.")
    from moe_rl.convert.job import convert as run_conversion
    from moe_rl.convert.job import show_progress
    from moe_rl.convert.plan import Request

    sizes = parse_sizes(layout, ("pp", "ep"))
    request = Request(source, target, to, mtp=mtp, like=like, **sizes)
    done = run_conversion(request, workers=workers, restart=restart, tell=show_progress)
    print(json.dumps(dataclasses.asdict(done), indent=1) if as_json else "\n".join(done.lines()))


@app.command()
def audit(
    source: Annotated[str, typer.Argument(metavar="RECIPE|DIR", help="A recipe, or a checkpoint of any form.")],
    overrides: Overrides = None,
    hw: Hardware = None,
    file: Files = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="Layout to build and prove, as in pp=32,ep=8; may be repeated.")
    ] = None,
    digests: Annotated[bool, typer.Option("--digests", help="Read every value: SHA-256 of each tensor.")] = False,
    every: Annotated[bool, typer.Option("--list", help="List every tensor on disk.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Account for every tensor of a checkpoint, and for every rank of a layout, without building one."""
    from moe_rl.audit import audit as run_audit
    from moe_rl.config.layout import parse_sizes
    from moe_rl.planning import read_source

    config = read_source(source, overrides or (), hw, file or ())
    own = {name: getattr(config.layout, name) for name in ("pp", "ep", "tp", "etp", "vpp", "stages", "pin_hash_layers")}
    layouts = [parse_sizes(text) for text in layout or ()] or [own]
    found = run_audit(config.model, config.model.family, layouts, digests=digests)
    print(
        json.dumps(found.as_dict(with_tensors=every), indent=1)
        if as_json
        else "\n".join(found.lines(with_tensors=every))
    )
    if found.problems:
        raise UserError(
            "audit.problems",
            f"{found.source} is not accounted for:\n    " + "\n    ".join(found.problems),
            "Each tensor of the source belongs to one place of the model, and each place is held once.",
            "Fetch what is named here again, or use the config.json that belongs to it.",
        )


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="Directory of a run.")]) -> None:
    """Write report.html and its curves into a run directory."""
    if not (run_dir / "metrics.jsonl").is_file():
        raise UserError(
            "report.run_dir",
            f"{run_dir} holds no metrics.jsonl",
            "A report is drawn from the metrics of a run that finished a step.",
            "Give the directory that `moe-rl train` wrote.",
        )
    from moe_rl.observe.report import build

    print(build(run_dir))


@app.command()
def doctor(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]...", help="A recipe, whose profile counts, and values; any order."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    refit: Annotated[
        bool,
        typer.Option("--refit", help="Update the recipe's rollouts twice without training: nothing may change."),
    ] = False,
    hw: Hardware = None,
    file: Files = None,
) -> None:
    """Versions, devices and runtime patches of this installation."""
    recipe, overrides = split_words(words or ())
    config = load_config(recipe, overrides, hw=hw, files=file or ())
    if refit:
        if recipe is None:
            raise UserError(
                "doctor.recipe",
                "--refit is given without a recipe",
                "It starts the trainer and the rollouts of one.",
                f"Name one: {', '.join(shipped('recipe'))}; or a YAML file.",
            )
        from moe_rl.trainer.refit import refit as run_refit

        done = run_refit(config)
        print(json.dumps(done.as_dict(), indent=1) if as_json else "\n".join(done.lines()))
        return
    from moe_rl.doctor import describe as describe_installation
    from moe_rl.doctor import examine

    found = examine(config)
    print(json.dumps(found, indent=1) if as_json else describe_installation(found))


@bench_app.command("optimizer")
def bench_optimizer(
    recipe: Annotated[
        str, typer.Argument(help="As for train; a KEY=VALUE here belongs to the overrides.")
    ] = "dsv4-tiny",
    overrides: Overrides = None,
    task: Annotated[str, typer.Option(help="What is trained: grpo.")] = "grpo",
    cases: Annotated[
        str | None, typer.Option(metavar="NAME,...|all", help="Cases of the matrix; default: a choice of them.")
    ] = None,
    max_step: Annotated[int | None, typer.Option(help="Steps of a case at most; default: the recipe's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the results; default: a new one in runs/.")] = None,
    case_timeout: Annotated[float, typer.Option(metavar="SECONDS", help="A case that takes longer is ended.")] = 3600,
    hw: Hardware = None,
    file: Files = None,
) -> None:
    """GRPO under each way to hold the optimizer: sharding x offload x precision, each case a run of its own."""
    from moe_rl.bench.optimizer import benchmark

    if "=" in recipe and not Path(recipe).is_file():
        recipe, overrides = "dsv4-tiny", [recipe, *(overrides or [])]
    options: dict[str, Any] = dict(hw=hw, files=file or (), task=task, cases=cases, max_step=max_step, out=out)
    _, interrupted = benchmark(recipe, overrides or (), **options, case_timeout_s=case_timeout)
    raise typer.Exit(EXIT_INTERRUPTED if interrupted else EXIT_DONE)


@bench_app.command("train")
def bench_train(
    recipe: Annotated[str, typer.Argument(help="A recipe, or a path to one.")],
    overrides: Overrides = None,
    layers: Annotated[int | None, typer.Option(help="Keep the model's first layers only.")] = None,
    experts: Annotated[int | None, typer.Option(help="Keep so many routed experts.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    sequences: Annotated[int, typer.Option(help="Sequences of a step.")] = 16,
    steps: Annotated[int, typer.Option(help="Steps that are measured, after one that is not.")] = 3,
    by_length: Annotated[list[int], typer.Option(help="Time the update with sequences of this length, too.")] = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="File of the results.")] = Path("bench-train.json"),
    profile: Annotated[bool, typer.Option("--profile", help="Keep a trace for Perfetto beside it.")] = False,
    hw: Hardware = None,
    file: Files = None,
) -> None:
    """Tokens/s and MFU of log-probs and update with random weights, on one process, against a bare loop."""
    from moe_rl.bench.train import benchmark

    sizes = dict(layers=layers, experts=experts, length=length, sequences=sequences, steps=steps, by_length=by_length)
    found = benchmark(recipe, overrides or (), hw=hw, files=file or (), **sizes, out=out, profile=profile)  # type: ignore[arg-type]
    print(json.dumps(found["result"], indent=1))
    print(f"results: {out}")


@bench_app.command("sync")
def bench_sync(
    recipe: Annotated[str, typer.Argument(help="A DeepSeek-V4 recipe, or a path to one.")],
    overrides: Overrides = None,
    layers: Annotated[int | None, typer.Option(help="Keep the model's first layers only.")] = None,
    experts: Annotated[int | None, typer.Option(help="Keep so many routed experts.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Keep so many tokens of the vocabulary.")] = None,
    out: Annotated[Path, typer.Option(help="File of the results.")] = Path("bench-sync.json"),
    hw: Hardware = None,
    file: Files = None,
) -> None:
    """A weight update of quantised weights on one device, by part, against the whole checkpoint to each receiver."""
    from moe_rl.bench.sync import benchmark, show

    show(
        benchmark(
            recipe, overrides or (), hw=hw, files=file or (), layers=layers, experts=experts, vocab=vocab, out=out
        )
    )
    print(f"results: {out}")


@app.command()
def explain(
    key: Annotated[str, typer.Argument(help="A key (layout.pp), a section (layout), or `all`.")],
    overrides: Overrides = None,
    recipe: Annotated[str | None, typer.Option(help="Show the values of this recipe.")] = None,
    hw: Hardware = None,
    file: Files = None,
) -> None:
    """What a key means, its value and where that came from, its default and the allowed values."""
    key = key.strip().rstrip(".")
    if recipe is None and hw is None and not file and not overrides:
        config = Config()
    else:
        config = load_config(recipe, overrides or (), hw=hw, files=file or ())
    print(explain_keys(key, config))


def describe(config: Config, inputs: Inputs) -> str:
    """The plan that --dry-run prints: model, layout, batch, data, and every value that is not a default."""
    from moe_rl.planner import describe_layout

    data, n, facts, held_out = config.data, config.rollout.n, inputs.facts, len(inputs.validation)
    samples = data.prompts_per_step * n
    lines = [
        f"model: {facts.family}, {facts.num_layers} layers, {facts.path}",
        describe_layout(config, facts),
        f"step: {data.prompts_per_step} prompts * {n} samples = {samples} completions of up to"
        f" {config.rollout.max_response} tokens, {config.algorithm.epochs * config.algorithm.minibatches} optimizer step(s)",
        f"data: {len(inputs.records)} prompts of {data.train}",
        f"validation: {held_out} prompts of {data.validation}" if held_out else "validation: none",
        f"reward: {config.reward.name}",
        "values that are not defaults:",
    ]
    lines += [f"  {name}: {config.get(name)}  # {origin}" for name, origin in config.origins.items()]
    return "\n".join(lines)


def _resolved_config(source: Path) -> Path | None:
    """The configuration of the run that a checkpoint (or the run directory) belongs to; None for a model directory.

    A checkpoint that was taken out of its run is a model directory: it has the model's config.json.
    """
    has_config = (source / "config.json").is_file()
    if not has_config or (source / STATE).is_file():
        for directory in (source, *list(source.absolute().parents)[:2]):
            if (directory / RESOLVED).is_file():
                return directory / RESOLVED
    if has_config:
        return None
    raise UserError(
        "score.source",
        f"{source} is neither a model directory nor a checkpoint of a run",
        f"It has no config.json, and no {RESOLVED} is beside its checkpoints directory.",
        "Give a directory with config.json and safetensors, RUN/checkpoints/step_NNNNNN, or RUN.",
    )


def _unexpected(error: Exception, run_dir: Path | None = None) -> MoeRLError:
    """An exception nobody foresaw as a message; its traceback goes into the run directory, or a temporary file."""
    if isinstance(error, OSError) and error.filename and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        kind = RunFailed if run_dir else UserError
        why = "This user may not read or write it."
        return kind(
            "file.access", f"{error.filename}: {error.strerror}", why, "Give access to it, or name another place."
        )
    if isinstance(error, OSError) and error.errno in FULL:
        where = error.filename or run_dir or "a file system"
        fix = "Free space and start again with --resume auto."
        return RunFailed("disk.full", f"no space left for {where}", "A file could not be written whole.", fix)
    name = f"error-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    directory = run_dir if run_dir and run_dir.is_dir() else Path(tempfile.mkdtemp(prefix="moe-rl-"))
    text = "".join(traceback.format_exception(error))
    try:
        (directory / name).write_text(text)
    except OSError as second:
        text, name = text[-2000:], f"not written: {second}"
        return RunFailed("internal", f"{type(error).__name__}: {error}", f"A fault of moe-rl; {name}.", log_tail=text)
    why = f"A fault of moe-rl; the traceback is in {directory / name}."
    return RunFailed("internal", f"{type(error).__name__}: {error}", why, "Please report it with that file.")


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code; every error becomes one message on stderr."""
    try:
        app(args=list(arguments), prog_name="moe-rl")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_DONE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        known = error if isinstance(error, MoeRLError) else _unexpected(error)
        print(f"error: {known}", file=sys.stderr)
        return known.exit_code
    return EXIT_DONE


def main() -> None:
    """Entry point of the ``moe-rl`` script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names that the terminal's encoding lacks
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
