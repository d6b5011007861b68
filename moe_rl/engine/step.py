"""One pass of micro-batches through the pipeline: forward only for log-probs, forward and backward for an update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn

from moe_rl.engine.batch import MicroBatch
from moe_rl.engine.parallel import Parallel
from moe_rl.engine.replay import Replay
from moe_rl.errors import UserError

LossFn = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(log-probs [T], entropy [T] without gradient, fields) -> (loss to be summed, named sums to report)."""

Scores = list[tuple[tuple[int, ...], list[np.ndarray], "list[np.ndarray] | None"]]
"""For each micro-batch: sequence ids, log-probs float32 [L-1] of each sequence, entropies of the same shape."""


@dataclass(frozen=True)
class UpdateStats:
    """What an optimizer step reports, equal on all ranks. `grad_norm` is taken before clipping; `loss` and `sums` are
    summed over micro-batches and data-parallel ranks (``max_*``: their maximum); `coverage` is the share of the given
    experts that routers took (None: nothing was replayed). `scores` is what `score` would have found before the step, if
    that was asked for."""

    loss: float
    grad_norm: float
    lr: float
    sums: dict[str, float] = field(default_factory=dict)
    coverage: float | None = None
    scores: Scores = field(default_factory=list)


def check_counts(micro_batches: Sequence[MicroBatch], parallel: Parallel) -> None:
    """Refuse counts that would leave a pipeline stage or an expert-parallel peer waiting for ever.

    Raises:
        UserError: no micro-batch, counts that differ between ranks, or with virtual stages no multiple of pp.
    """
    count = torch.tensor([len(micro_batches), -len(micro_batches)], device=parallel.device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    most, least = int(count[0]), -int(count[1])
    multiple = parallel.pp if parallel.vpp > 1 else 1
    if least != most or most == 0 or most % multiple:
        raise UserError(
            "engine.micro_batches",
            f"between {least} and {most} micro-batches per rank",
            "Every rank needs the same number, at least one"
            + (f", and with layout.vpp > 1 a multiple of pp = {multiple}." if multiple > 1 else "."),
            "Fill up with micro-batches of weight 0.",
        )


def _run(
    chunks: Sequence[nn.Module],
    micro_batches: Sequence[MicroBatch],
    parallel: Parallel,
    reduce: Callable,
    *,
    temperature: float,
    entropy: bool,
    forward_only: bool,
    replay: Replay | None = None,
) -> list[Any]:
    """Drive megatron's schedule over the micro-batches; what `reduce` stored for each, on the last stage, else []."""

    def batches() -> Iterator[MicroBatch]:
        return (m.to(parallel.device) for m in micro_batches)

    def forward_step(data: Iterator[MicroBatch], model: nn.Module) -> tuple[torch.Tensor, Callable]:
        m = next(data)
        packed = m.packed_sequences()
        packed.routing = None if replay is None else replay.routing(m, model)
        output = model(m.tokens[None], packed, labels=m.labels[None], temperature=temperature, entropy=entropy)
        return output, partial(reduce, m)

    schedule = get_forward_backward_func(parallel.pp, parallel.vpp if parallel.vpp > 1 else None)
    several = len(chunks) > 1
    return schedule(
        forward_step_func=forward_step,
        data_iterator=[batches() for _ in chunks] if several else batches(),
        model=list(chunks) if several else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=1,  # shapes travel with the tensors (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


@contextlib.contextmanager
def _evaluating(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Eval mode without gradients; each chunk's mode is put back afterwards."""
    modes = [chunk.training for chunk in chunks]
    try:
        for chunk in chunks:
            chunk.eval()
        with torch.no_grad():
            yield
    finally:
        for chunk, mode in zip(chunks, modes, strict=True):
            chunk.train(mode)


def score(
    chunks: Sequence[nn.Module],
    micro_batches: Sequence[MicroBatch],
    parallel: Parallel,
    *,
    temperature: float,
    entropy: bool = False,
    replay: Replay | None = None,
) -> Scores:
    """Log-probs of every next token under softmax(logits / temperature), in natural log.

    Leaves no trace: no gradient, no buffer and no random state changes. The result is on the last stage, elsewhere [].
    """
    check_counts(micro_batches, parallel)

    def keep(m: MicroBatch, output: torch.Tensor, non_loss_data: bool = True) -> Any:
        return m, output

    options: dict[str, Any] = {"temperature": temperature, "entropy": entropy, "replay": replay}
    with _evaluating(chunks):
        return _scores(_run(chunks, micro_batches, parallel, keep, **options, forward_only=True))


def _scores(kept: Sequence[tuple[MicroBatch, torch.Tensor]]) -> Scores:
    """Of micro-batches and their outputs float32 [1 or 2, T]. All are read at the end, so that no micro-batch waits for the one
    before it."""
    rows = [(m, [m.unpack(row) for row in output.cpu()]) for m, output in kept]
    return [(m.ids, found[0], found[1] if len(found) > 1 else None) for m, found in rows]


def accumulate_gradients(
    chunks: Sequence[nn.Module],
    micro_batches: Sequence[MicroBatch],
    loss_fn: LossFn,
    parallel: Parallel,
    *,
    temperature: float,
    replay: Replay | None = None,
    scored: bool = False,
) -> tuple[float, dict[str, float], Scores]:
    """Add the gradient of the summed loss to the chunks' buffers, reduced over data-parallel ranks.

    Returns the summed loss and the named sums, on all ranks; and with `scored` what `score` would have found on these
    weights, log-probs and entropies, else [].
    """
    check_counts(micro_batches, parallel)
    kept: list[tuple[MicroBatch, torch.Tensor]] = []

    def loss(m: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        if scored:
            kept.append((m, output.detach()))
        value, sums = loss_fn(output[0], output[1].detach(), m.fields)
        # The count in the middle makes the schedule take the loss as it is, undivided
        return value, torch.tensor(len(m.tokens), dtype=torch.int32), {"loss": value.detach(), **sums}

    options: dict[str, Any] = {"temperature": temperature, "entropy": True, "replay": replay}
    stored = _run(chunks, micro_batches, parallel, loss, **options, forward_only=False)
    sums = _reduce(stored, parallel)
    return sums.pop("loss"), sums, _scores(kept)


def _reduce(stored: list[dict[str, torch.Tensor]], parallel: Parallel) -> dict[str, float]:
    """Sums (``max_*``: maxima) over micro-batches and data-parallel ranks in float64, then known to all stages."""
    box: list[Any] = [None]
    if parallel.is_last:
        box[0] = {}
        for op, names in (
            (dist.ReduceOp.SUM, [n for n in stored[0] if not n.startswith("max_")]),
            (dist.ReduceOp.MAX, [n for n in stored[0] if n.startswith("max_")]),
        ):
            if not names:
                continue
            rows = torch.stack([torch.stack([s[n].double() for n in names]) for s in stored])
            total = rows.sum(0) if op == dist.ReduceOp.SUM else rows.amax(0)
            dist.all_reduce(total, op=op, group=parallel.groups.dp)
            box[0].update(zip(names, total.tolist(), strict=True))
    if parallel.pp > 1:
        last = dist.get_global_rank(parallel.groups.pp, parallel.pp - 1)
        dist.broadcast_object_list(box, src=last, group=parallel.groups.pp)
    return box[0]
