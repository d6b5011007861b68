"""The training engine of one rank: the model in megatron's layout, its log-probs, its updates and its checkpoints."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from moe_rl.config import Config
from moe_rl.engine import checkpoint, fake_quant, memory
from moe_rl.engine.batch import MicroBatch
from moe_rl.engine.parallel import Parallel, destroy, init_distributed
from moe_rl.engine.saver import Saver
from moe_rl.engine.schedule import scheduled_rate
from moe_rl.errors import RunFailed, UserError
from moe_rl.models.family import get_family, read_config, read_facts
from moe_rl.models.weights import Part
from moe_rl.models.wire import Wire

_GIB = 2**30


class Engine:
    """One rank's share of the model. All ranks call the same methods in the same order; each holds its own results.

    Attributes:
        parallel: where this rank stands.
        arch: the model's sizes.
        patches: runtime patch -> what became of it; equal on all ranks.
        steps: optimizer steps done so far; the learning rate is a function of it.
        routes: sequence id -> int16 [L-1, layers, k], the experts that the last `log_probs` with `record` saw tokens take
            in this rank's layers, -1 in the others.
    """

    def __init__(self, config: Config, parallel: Parallel, family: Any, *, train: bool, reference: bool) -> None:
        from moe_rl.engine import build
        from moe_rl.engine.patching import apply_patches

        self.config, self.parallel, self.family = config, parallel, family
        self.patches = apply_patches(config.patches.disable)
        self.arch = family.read_arch(config.model)
        self.steps = 0
        self.saver = Saver()
        self.transformer_config = build.make_transformer_config(family, self.arch, config, parallel)
        print(f"attention: {getattr(self.transformer_config, 'attention_note', 'PyTorch')}", flush=True)
        self.chunks: list[nn.Module] = build.build_chunks(family, self.arch, self.transformer_config, parallel)
        self.reference: list[nn.Module] = []
        if reference:
            self.reference = build.build_chunks(family, self.arch, self.transformer_config, parallel)
            for chunk in self.reference:
                chunk.eval().requires_grad_(False)
        self.rounding: dict[str, str] = {}
        if config.engine.fake_quant != "none":
            self._round()
        self.routes: dict[int, Any] = {}
        self.optimizer: Any = None
        self._wrapped: list[nn.Module] = list(self.chunks)
        if train:
            self._wrapped = list(build.wrap_ddp(config, self.chunks, self.transformer_config))
            self.optimizer = build.build_optimizer(config, self._wrapped)  # type: ignore[arg-type]

    @classmethod
    def create(
        cls,
        config: Config,
        rank: int,
        world: int,
        address: str,
        *,
        train: bool = True,
        reference: bool = False,
        random_init: bool = False,
    ) -> Engine:
        """Join the other ranks at `address` (``host:port``) and build this rank's share of the model.

        Weights come from the checkpoint in `model.path`; a model without any is refused unless `random_init` is set,
        which then draws them by name, equal in every layout, from `trainer.seed`. With `train=False` there are no
        gradients and no optimizer. With `reference` a frozen copy of the starting weights is held beside the policy.

        Raises:
            UserError: the model directory, the layout or the device is wrong.
        """
        facts = read_facts(config.model, config.model.family)
        if facts.weight_files == 0 and not random_init:
            raise UserError(
                "model.weights",
                f"{config.model.path} holds no weights",
                "Training starts from weights.",
                "Point model.path at a directory with weights.",
            )
        parallel = init_distributed(config, facts, rank, world, address)
        engine = cls(config, parallel, get_family(facts.family), train=train, reference=reference)
        if facts.weight_files:
            engine.load_released(config.model.path)
        else:
            for chunk in (*engine.chunks, *engine.reference):
                engine.family.init_weights(chunk, config.trainer.seed)
            engine.reload_master()
        return engine

    # ----------------------------------------------------------------------------------------------------- computing
    def log_probs(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        temperature: float,
        entropy: bool = False,
        reference: bool = False,
        record: bool = False,
    ) -> list[tuple[tuple[int, ...], list[Any], list[Any] | None]]:
        """Score this data-parallel rank's micro-batches; every rank passes the same number of them.

        Experts that come with the micro-batches are replayed (RunFailed unless all of them are); `record` leaves those
        that routers choose in `routes`.

        Returns:
            On the last pipeline stage, for each micro-batch its sequence ids, the log-probs of each sequence (float32
            [L-1], natural log, under softmax(logits / temperature)) and, with `entropy`, the entropies of those
            distributions (float32 [L-1]), else None. On the other stages [].
        """
        from moe_rl.engine import step

        self.saver.check()
        if reference and not self.reference:
            raise UserError("engine.reference", "this engine was built without the reference model")
        chunks, replay = self.reference if reference else self._wrapped, self._replay(micro_batches, record)
        options: dict[str, Any] = {"temperature": temperature, "entropy": entropy, "replay": replay}
        scores = step.score(chunks, micro_batches, self.parallel, **options)
        if replay is not None and record:
            self.routes = replay.recorded(self.parallel)
        elif replay is not None:
            replay.coverage(self.parallel)
        return scores

    def _replay(self, micro_batches: Sequence[MicroBatch], record: bool = False) -> Any:
        from moe_rl.engine.replay import Replay

        if record or any(m.routes is not None for m in micro_batches):
            return Replay(self.arch, record)
        return None

    def update(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_fn: Any,
        *,
        temperature: float,
        lr: float | None = None,
        scored: bool = False,
    ) -> Any:
        """One optimizer step on the loss summed over micro-batches and data-parallel ranks; an `UpdateStats`.

        `loss_fn(logprobs [T], entropy [T], fields)` gives a micro-batch's share of the loss, which nothing scales
        afterwards, and named sums to report (names that start with ``max_`` are reduced by maximum). The gradient norm
        is clipped to `optimizer.clip_grad` (0: not). `lr` overrides the schedule. With `scored` the stats hold the log-probs and
        entropies that the loss was made of, as `log_probs` gives them.

        Raises:
            RunFailed: the loss or the gradient is not finite; the weights in memory are then unusable. Or experts that
            came with the micro-batches were not all replayed.
        """
        from moe_rl.engine import build, step

        if self.optimizer is None:
            raise UserError("engine.train", "this engine was built for scoring only (train=False)")
        self.saver.check()
        lr = scheduled_rate(self.config, self.steps) if lr is None else lr
        replay = self._replay(micro_batches)
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        options: dict[str, Any] = {"temperature": temperature, "replay": replay, "scored": scored}
        loss, sums, scores = step.accumulate_gradients(self._wrapped, micro_batches, loss_fn, self.parallel, **options)
        coverage = None if replay is None else replay.coverage(self.parallel)
        build.set_hyperparameters(self.optimizer, self.config, lr)
        _, grad_norm, _ = self.optimizer.step()
        build.drop_gradients(self.optimizer)
        self.steps += 1
        if not math.isfinite(loss) or not math.isfinite(float(grad_norm)):
            raise RunFailed(
                "engine.not_finite",
                f"optimizer step {self.steps}: loss {loss}, gradient norm {float(grad_norm)}",
                "A weight, a log-prob or a reward overflowed.",
                "Lower optimizer.lr, or look at the step's samples.",
            )
        return step.UpdateStats(loss, float(grad_norm), lr, sums, coverage, scores)

    # ------------------------------------------------------------------------------------------------------- weights
    def _round(self) -> None:
        """Let forward passes, the reference's too, run on weights rounded as `engine.fake_quant` says."""
        wire = Wire.released(read_config(self.config.model))
        self.rounding = fake_quant.kinds(self.family.weight_table(self.arch), wire, self.config.engine.fake_quant)
        self._scale = wire.scale
        for chunks, reference in ((self.chunks, False), (self.reference, True)):
            if chunks:
                parts = self.weights(reference=reference)
                for layer in (layer for chunk in chunks for layer in chunk.layers.values()):
                    fake_quant.install(layer, parts, self.rounding, self._scale)

    def sent(self, names: Iterable[str], encoded: Collection[str] = ()) -> dict[str, list[Part]]:
        """The parts of these tensors as a rollout must have them: the live ones, or copies where `engine.fake_quant` rounds
        and they are not among the `encoded`, which the codec rounds anyway."""
        parts = self.weights()
        found = {name: parts[name] for name in names if name in parts}
        plain = found.keys() - set(encoded)
        return found | fake_quant.rounded_parts(parts, plain, self.rounding, self._scale) if self.rounding else found

    def weights(self, *, reference: bool = False) -> dict[str, list[Part]]:
        """Released name -> the live blocks of every tensor that this rank has a share of, buffers included."""
        table = self.family.weight_table(self.arch)
        parts: dict[str, list[Part]] = {}
        for chunk in self.reference if reference else self.chunks:
            parts.update(table.trainer_parts(chunk, self.parallel.shard))
        return parts

    def digest(self) -> dict[str, int]:
        """Released name -> 64-bit digest of every tensor that this rank has a share of; layouts do not change it. All
        ranks call."""
        from moe_rl.models.digest import block_sums, whole_digest

        parts = self.weights()
        flat = [(name, part) for name, blocks in parts.items() for part in blocks]
        shares = {(name, p.start): s for (name, p), s in zip(flat, block_sums([p for _, p in flat]), strict=True)}
        if self.parallel.tp > 1 or self.parallel.etp > 1:  # the other blocks of a tensor are on other ranks
            ranks: list[dict] = [{}] * self.parallel.world
            dist.all_gather_object(ranks, shares)
            shares = {key: share for rank in ranks for key, share in rank.items()}
        sums: dict[str, list[int]] = {}
        for (name, _), share in shares.items():
            sums.setdefault(name, []).append(share)
        return {
            name: whole_digest(str(blocks[0].view.dtype).removeprefix("torch."), blocks[0].shape, sums[name])
            for name, blocks in parts.items()
        }

    def load_released(self, path: str | Path) -> None:
        """Read weights into the policy and the reference, from safetensors (released, or plain) or a dist-checkpoint.

        All ranks call. Raises UserError as models.load, or as engine.checkpoint.load."""
        from moe_rl.models.headers import recognise
        from moe_rl.models.load import load_released

        if recognise(path) == "dist":
            for chunks in filter(None, (self.chunks, self.reference)):
                checkpoint.load(path, ["model"], chunks, None, self.parallel, self.arch)
            return self.reload_master()
        table = self.family.weight_table(self.arch)
        load_released(path, self.weights(), table)
        if self.reference:
            load_released(path, self.weights(reference=True), table)
        self.reload_master()

    def reload_master(self) -> None:
        """Set the optimizer's fp32 masters to the weights; needed after weights changed by another hand than its own."""
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    # --------------------------------------------------------------------------------------------------- checkpoints
    def save(
        self, directory: str | Path, *, contents: Sequence[str] | None = None, background: bool | None = None
    ) -> None:
        """Write this engine's state (`checkpoint.contents` by default); all ranks call. See engine.checkpoint.save.

        With `background` (`checkpoint.async_save` by default) the files are written beside the training: the directory is
        a checkpoint once `finish_save` has returned. A save that is still in flight is waited for first.
        """
        options = self.config.checkpoint
        contents = options.contents if contents is None else contents
        if "optimizer" in contents and self.optimizer is None:
            raise UserError("checkpoint.contents", "an engine built with train=False has no optimizer to save")
        self.finish_save()
        checkpoint.save(
            directory,
            contents,
            self.chunks,
            self.optimizer,
            self.parallel,
            self.arch,
            {"steps": self.steps},
            self.saver,
            optimizer_format=options.optimizer_format,
            background=options.async_save if background is None else background,
        )

    def finish_save(self) -> None:
        """Wait for the save in flight, if there is one.

        Raises:
            RunFailed: it failed; all ranks raise the same. `update` and `log_probs` raise it too.
        """
        self.saver.wait()

    def load(self, directory: str | Path, *, contents: Sequence[str] | None = None) -> dict[str, float]:
        """Read a checkpoint that any layout wrote, by default all that it holds; all ranks call.

        Without `optimizer` in `contents` the moments stay as they are and the masters follow the weights. See
        engine.checkpoint.load.

        Returns:
            `seconds`, and the peaks `host_peak_gib` and `gpu_peak_gib` above what was in use before.
        """
        if self.optimizer is None and contents is not None:
            contents = [part for part in contents if part != "optimizer"]
        start, peak = time.perf_counter(), memory.Peak()
        try:
            extra = checkpoint.load(directory, contents, self.chunks, self.optimizer, self.parallel, self.arch)
        finally:
            peak.stop()
        memory.give_back()
        self.steps = extra.get("steps", self.steps)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "host_peak_gib": peak.host / _GIB, "gpu_peak_gib": peak.gpu / _GIB}

    # --------------------------------------------------------------------------------------------------------- other
    def memory(self) -> dict[str, float]:
        """Memory of this process in GiB: `host` now, `host_peak` and `gpu_peak` (0 without one) since its start."""
        import psutil

        return {
            "host": psutil.Process().memory_info().rss / _GIB,
            "host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB,
            "gpu_peak": memory.gpu_peak_bytes()[0] / _GIB,
        }

    def close(self) -> None:
        """Leave the process groups, once the save in flight is written."""
        try:
            self.finish_save()
        finally:
            destroy()
