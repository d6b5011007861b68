"""A forward pass on weights rounded as the rollouts hold them, while gradients and optimizer keep the unrounded ones.

Each weight goes through the codec of a released checkpoint (encode, decode) where its layer runs; the gradient passes as
if nothing had been rounded (straight-through, Bengio et al. 2013, arXiv 1308.3432). So trainer and rollout compute with the
same numbers, bit for bit. Rounding happens at each run of a layer, anew in a recomputed one: beside the weights one layer's
rounded ones are held, or without `engine.recompute` those of all layers that wait for their backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moe_rl.errors import UserError
from moe_rl.models import codec
from moe_rl.models.weights import Part, WeightTable
from moe_rl.models.wire import Wire, cut_inside

Parts = Mapping[str, Sequence[Part]]
EXPERTS, ALL = "experts", "all"


def kinds(table: WeightTable, wire: Wire, which: str) -> dict[str, str]:
    """Released name -> "fp8" or "mxfp4" of each tensor to round; `which` is "experts" (routed ones) or "all"."""
    chosen = {entry.name: wire.kind(entry) for entry in table.entries if which == ALL or entry.row.quant == "mxfp4"}
    return {name: kind for name, kind in chosen.items() if kind}


def rounded(weight: torch.Tensor, kind: str, scale: str) -> torch.Tensor:
    """decode(encode(weight)) in the weight's dtype; `scale` is safetensors' name of the FP8 scales' dtype.

    Values that are not finite come out as anything: a loss tells of them, without a wait for the device at each use.
    """
    checks = codec.NonFinite()
    if kind == "mxfp4":
        return codec.mxfp4_decode(*codec.mxfp4_encode(weight, checks=checks), weight.dtype, checks=checks)
    form = "fp32" if scale == "F32" else "e8m0"
    return codec.fp8_decode(*codec.fp8_encode(weight, scale_dtype=form, checks=checks), weight.dtype, checks=checks)


def rounded_parts(parts: Parts, names: Iterable[str], kinds: Mapping[str, str], scale: str) -> dict[str, list[Part]]:
    """Copies of the named tensors' parts, rounded where `kinds` says so; what a rollout is sent."""
    return {
        name: [p._replace(view=rounded(p.view.detach(), kinds[name], scale)) for p in parts[name]]
        for name in names
        if name in kinds and name in parts
    }


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, blocks: Sequence[tuple[slice, str]], scale: str) -> torch.Tensor:
        whole = torch.empty_like(weight)
        for rows, kind in blocks:
            whole[rows] = rounded(weight[rows], kind, scale)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0], None, None


def install(layer: nn.Module, parts: Parts, kinds: Mapping[str, str], scale: str) -> int:
    """Let every forward pass through `layer` use rounded weights, whichever of its modules reads them; their number.

    Raises:
        UserError: a block of the format lies on two ranks, so that neither knows its scale.
    """
    blocks: dict[int, list[tuple[int, Part, str]]] = {}
    owners = {id(p): (owner, name, p) for owner in layer.modules() for name, p in owner.named_parameters(recurse=False)}
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, key) for key, (_, _, p) in owners.items())
    for name in parts.keys() & kinds.keys():
        for part in parts[name]:
            _check_blocks(name, part, kinds[name])
            address = part.view.data_ptr()
            first, key = next(((start, key) for start, end, key in spans if start <= address < end), (0, 0))
            if not key:
                continue  # of another layer
            row = (address - first) // (part.view.stride(0) * part.view.element_size())
            blocks.setdefault(key, []).append((row, part, kinds[name]))
    for key, found in blocks.items():
        owner, name, param = owners[key]
        rows = [(slice(row, row + len(part.view)), kind) for row, part, kind in sorted(found, key=lambda b: b[0])]
        assert sum(r.stop - r.start for r, _ in rows) == len(param), f"{name} is quantised in part"
        _shadow(layer, owner, name, rows, scale)
    return len(blocks)


def _shadow(layer: nn.Module, owner: nn.Module, name: str, rows: Sequence[tuple[slice, str]], scale: str) -> None:
    """During the layer's forward the owner's attribute is the rounded weight: an instance's own attributes come before those
    that torch keeps as parameters, which stay as they are for all else."""

    def before(module: nn.Module, args: Any) -> None:
        owner.__dict__[name] = _StraightThrough.apply(owner._parameters[name], rows, scale)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        owner.__dict__.pop(name, None)

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after, always_call=True)


def _check_blocks(name: str, part: Part, kind: str) -> None:
    if where := cut_inside(kind, part.box(name), part.shape):
        raise UserError(
            "engine.fake_quant",
            where,
            "Ranks that share a block of the format do not know its scale.",
            "Use a smaller layout.tp or layout.etp, or engine.fake_quant=none.",
        )
