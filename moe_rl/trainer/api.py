"""The doors to a run: from a configuration, and from Python objects."""

from __future__ import annotations

import dataclasses
import json
import platform
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from moe_rl.config import Config
from moe_rl.data import Cursor
from moe_rl.durable import write_atomic
from moe_rl.errors import EXIT_DONE, EXIT_SEGMENT, MoeRLError, UserError
from moe_rl.models.family import read_config
from moe_rl.models.load import TOKENIZER_FILES, copy_files
from moe_rl.observe.metrics import MetricsWriter
from moe_rl.observe.progress import Progress
from moe_rl.trainer.canary import Canary
from moe_rl.trainer.inputs import Rows, read_inputs
from moe_rl.trainer.judging import Judge
from moe_rl.trainer.loop import Loop, sample_lines
from moe_rl.trainer.nodes import check_nodes
from moe_rl.trainer.placement import Cluster, RolloutGroup, TrainerGroup, WeightSync
from moe_rl.trainer.saving import Checkpoints, summary
from moe_rl.trainer.state import MANIFEST, MEASURED, RunDirectory, RunState, checkpoint_of, read_state, verify

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # batch systems can hand on the second one and not the first
# what a resumed run starts afresh without a part of the checkpoint
WITHOUT = {
    "optimizer": "the moments of the optimizer start from zero",
    "extra": "the learning-rate schedule and the random states start over",
}


def train(config: Config, run_dir: str | Path | None = None, resume: str = "auto") -> int:
    """Run the training a configuration describes; the exit code (0 done, 75 asked to stop and saved).

    Raises:
        UserError: the input is wrong; nothing has started.
        RunFailed: the run ended by a fault; its last checkpoint is kept.
    """
    return GRPOTrainer(config, run_dir=run_dir, resume=resume).fit()


class GRPOTrainer:
    """A GRPO run.

    Args:
        config: from :func:`moe_rl.load_config`.
        reward: a callable in place of `reward.name`; see :mod:`moe_rl.rewards` for its arguments.
        dataset: rows (dicts) in place of `data.train`; a finite iterable.
        validation: rows in place of `data.validation`. With a `dataset` of one's own and without this, the validation set
            of a shipped recipe is left out too: it belongs to the recipe's task.
        run_dir: where the run writes; by default runs/RECIPE-TIME.
        resume: ``auto`` continues from the run directory's latest checkpoint if it has one, ``never`` refuses a
            directory that holds a run, a path continues from that checkpoint.

    Raises:
        UserError: the configuration, the model, the data or the run directory is wrong.
    """

    def __init__(
        self,
        config: Config,
        *,
        reward: Callable[..., Any] | None = None,
        dataset: Rows | None = None,
        validation: Rows | None = None,
        run_dir: str | Path | None = None,
        resume: str = "auto",
    ) -> None:
        self.config = config
        stem = Path(config.recipe or "run").stem
        self.run = RunDirectory(Path(run_dir or Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"))
        given: dict[str, Any] = {"reward": reward, "dataset": dataset, "validation": validation}
        self.inputs = read_inputs(config, self.run.path, **given, resume=resume)
        self.arch = json.loads(
            json.dumps(dataclasses.asdict(self.inputs.arch))
        )  # as a checkpoint's state.json holds it
        self.cursor = Cursor(self.inputs.records, seed=config.trainer.seed, shuffle=config.data.shuffle)
        self.checkpoint = self._find_checkpoint(resume)
        self.state = self._restore()
        self.judge = Judge(config, reward)
        self.stop_asked = False

    # ------------------------------------------------------------------------------------------------------- resuming
    def _find_checkpoint(self, resume: str) -> Path | None:
        if resume == "auto":
            return self.run.latest()
        if resume == "never":
            if self.run.is_used():
                raise self._taken("--resume never starts afresh and would overwrite it.")
            return None
        return checkpoint_of(Path(resume))

    def _taken(self, why: str) -> UserError:
        fix = "Choose another --run-dir, or continue with --resume auto."
        return UserError("run_dir.taken", f"{self.run.path} already holds a run", why, fix)

    def _restore(self) -> RunState:
        """The state to start from, checked against this run's model and data."""
        if self.checkpoint is None:
            contents = list(self.config.checkpoint.contents)
            return RunState(model=self.arch, contents=contents, attempt=1 + self.run.attempts())
        state = read_state(self.checkpoint)
        if self.run.has_checkpoint() and not self.checkpoint.parent.samefile(self.run.checkpoints):
            raise self._taken(f"{self.checkpoint} belongs to another run, and its steps would be mixed with those.")
        verify(self.checkpoint)
        if state.model != self.arch:
            names = sorted(k for k in self.arch if state.model.get(k) != self.arch[k])
            raise UserError(
                "checkpoint.model",
                f"{self.checkpoint} belongs to another model than {self.config.model.path}",
                "They differ in " + "; ".join(f"{k}: {state.model.get(k)} and {self.arch[k]}" for k in names[:5]) + ".",
                "Set model.path to the model the run was started with, or start afresh in another --run-dir.",
            )
        self._check_load_contents(state)
        self.cursor.load_state_dict(state.cursor)
        state.attempt = 1 + max(state.attempt, self.run.attempts())
        return state

    def _check_load_contents(self, state: RunState) -> None:
        wanted = self.config.checkpoint.load_contents
        lacking = [part for part in wanted if part not in state.contents]
        if lacking:
            origin = self.config.origin("checkpoint.load_contents")
            raise UserError(
                "checkpoint.load_contents",
                f"{self.checkpoint} holds {', '.join(state.contents)}, not {', '.join(lacking)}"
                f" (checkpoint.load_contents, from {origin})",
                "It was saved with fewer checkpoint.contents.",
                f"Leave {', '.join(lacking)} out of it, leave it empty, or resume from another checkpoint.",
            )

    # ------------------------------------------------------------------------------------------------------------ fit
    def fit(self) -> int:
        """Run to `trainer.steps`; the exit code. See :func:`train` for what it raises."""
        config = self.config
        with self.run.held(), _when_asked_to_stop(self._ask_stop), self.judge:
            self.run.create()
            metrics = MetricsWriter(self.run.path, tensorboard=config.observe.tensorboard)
            if self.state.step >= config.trainer.steps:
                metrics.resume(self.state.step, self.state.metrics)
                print(f"{self.run.path}: all {config.trainer.steps} steps are done")
                return EXIT_DONE
            write_atomic(self.run.path / "config.resolved.yaml", config.to_yaml(origins=True))
            if self.checkpoint is not None:
                print(self._resume_note(self.checkpoint))
            progress = Progress(config.trainer.steps, self.state.step)
            try:
                with metrics, progress, Cluster(config, self.run.logs) as cluster:
                    check_nodes(cluster, self.inputs.facts, self.run.path)
                    return self._run(cluster, metrics, progress)
            finally:
                self.run.clear_unfinished()

    def _resume_note(self, checkpoint: Path) -> str:
        lines = [f"resuming from {checkpoint}: step {self.state.step}, attempt {self.state.attempt}"]
        wanted = self.config.checkpoint.load_contents or self.state.contents
        for part, then in WITHOUT.items():
            if part not in self.state.contents:
                lines.append(f"it holds no {part}: {then}")
            elif part not in wanted:
                lines.append(f"checkpoint.load_contents leaves {part} out: {then}")
        return "\n".join(lines)

    def _ask_stop(self, signum: int, frame: FrameType | None) -> None:
        self.stop_asked = True

    def _run(self, cluster: Cluster, metrics: MetricsWriter, progress: Progress) -> int:
        config, state = self.config, self.state
        progress.phase("start")
        trainer = TrainerGroup(cluster, self.inputs.facts, reference=config.algorithm.kl != "none")
        rollout = RolloutGroup(cluster)
        trainer.start()
        rollout.start()
        loaded: dict[str, Any] = {}
        if self.checkpoint is not None:
            progress.phase("load")
            contents = config.checkpoint.load_contents or state.contents
            loaded = {"checkpoint": str(self.checkpoint), "contents": contents}
            loaded |= trainer.load(self.checkpoint, contents)
        # not before: a checkpoint that cannot be loaded costs no records
        metrics.resume(state.step, state.metrics)
        self.run.cut_back(state.step)
        sync = WeightSync(trainer, rollout)
        sync.push(state.weight_version)  # before anything else: no rollout ever samples from other weights
        canary = Canary(config, self.inputs.records, trainer, rollout)
        canary.check()
        self._write_manifest(trainer, rollout, sync, loaded)
        loop = Loop(
            config,
            state,
            trainer,
            rollout,
            sync,
            canary,
            self.cursor,
            self.inputs.validation,
            self.judge,
            self.inputs.tokenizer,
            progress,
        )
        saves = Checkpoints(self.run, trainer.finish_save, config.checkpoint.keep, config.checkpoint.async_save)
        try:
            self._steps(loop, saves, metrics)
        except MoeRLError as error:
            if not error.rule.startswith(("worker.", "checkpoint.")):  # the ranks still write what they have copied
                saves.settle(config.engine.distributed_timeout_s)
            raise
        finally:
            saves.abandon()
        if loop.measured:  # a run that was done already keeps what it had
            write_atomic(self.run.path / MEASURED, json.dumps({"phases": loop.measured, "step": state.step}, indent=1))
        return EXIT_DONE if state.step == config.trainer.steps else EXIT_SEGMENT

    def _steps(self, loop: Loop, saves: Checkpoints, metrics: MetricsWriter) -> None:
        """Run until all steps are done or a stop was asked for; either way the last step's checkpoint is durable."""
        config, state = self.config, self.state
        stop = self.stop_asked
        while state.step < config.trainer.steps and not stop:
            line, samples = loop.step()
            metrics.write_samples(
                state.step, sample_lines(state.step, samples, config.observe.samples_per_step, config.rollout.n)
            )
            last, stop = state.step == config.trainer.steps, self.stop_asked
            if last or stop or state.step % config.checkpoint.every == 0:
                started = time.perf_counter()
                with loop.phase("checkpoint"):
                    self._save(saves, loop.trainer, line)
                    if last or stop:
                        saves.wait()
                loop.note_phase("checkpoint")
                line["time/checkpoint"] = time.perf_counter() - started
            durable = saves.durable()
            if durable:
                loop.progress.note(summary(durable))
            metrics.write(state.step, line | durable)
            loop.progress.step(line)

    def _save(self, saves: Checkpoints, trainer: TrainerGroup, line: dict[str, Any]) -> None:
        self.state.metrics = line
        self.state.contents = list(self.config.checkpoint.contents)

        def write(directory: Path) -> None:
            trainer.save(directory, self.state.contents)
            # with these a checkpoint is a model directory: model.path of another run, or the source of a conversion
            copy_files(TOKENIZER_FILES, self.config.model.path, directory)
            (directory / "config.json").write_text(json.dumps(read_config(self.config.model), indent=2) + "\n")

        saves.save(self.state, write)

    def _write_manifest(
        self, trainer: TrainerGroup, rollout: RolloutGroup, sync: WeightSync, loaded: dict[str, Any]
    ) -> None:
        names = ("layout", "host", "pid", "python", "versions", "patches")
        workers = {
            n: {"node": trainer.cluster.places[n]} | {k: v for k, v in w.items() if k in names}
            for n, w in (trainer.ranks | rollout.ranks).items()
        }
        manifest = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "attempt": self.state.attempt,
            "step": self.state.step,
            **({"loaded": loaded} if loaded else {}),
            "host": platform.node(),
            "versions": {name: version(name) for name in ("torch", "megatron-core", "transformers", "ray")},
            "git": _git_revision(),
            "layout": {
                k: v for k, v in trainer.layout.items() if k in ("world", "tp", "pp", "vpp", "ep", "dp", "stages")
            },
            "reshard": sync.plan.summary().splitlines(),
            "workers": workers,
        }
        write_atomic(self.run.path / MANIFEST, json.dumps(manifest, indent=1))


@contextmanager
def _when_asked_to_stop(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have each of STOP_SIGNALS call `handler`, where this is the main thread: no other may say what signals do."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, former in previous.items():
            signal.signal(number, former)


def _git_revision() -> str | None:
    """The revision of the checkout this package runs from, None for an installed one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
