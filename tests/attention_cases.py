"""Random cases of DeepSeek-V4's attention, and the fused kernels' and the plain functions' errors against float64.

TRITON_INTERPRET=1 python -m tests.attention_cases     # the kernels, interpreted on a CPU
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from moe_rl.models.deepseek_v4.attention import _top, sink_attention
from moe_rl.models.deepseek_v4.layers import unit_rms
from moe_rl.models.deepseek_v4.rotary import rotate
from moe_rl.models.packed import PackedSequences
from tests.tiny_v4 import tiny_config

EPS = 1e-6


@dataclass
class Case:
    """Inputs of `fused_attention.attend` and a gradient of its output."""

    q: torch.Tensor
    kv: torch.Tensor
    sinks: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    seen: Any
    grad: torch.Tensor


def draw(
    lengths: Sequence[int], heads: int, d: int, rope: int, window: int, ratio: int = 0, top_k: int = 0,
    dtype=torch.float32, device="cpu", seed: int = 0,
) -> Case:  # fmt: skip
    """A random case; `ratio` 0: no entries; `top_k` 0: all entries of the token's past. Rows without a choice hold rubbish."""
    from moe_rl.models.deepseek_v4.fused_attention import Visible

    packed, generator = PackedSequences.from_lengths(lengths, device), torch.Generator(device).manual_seed(seed)
    total, count = packed.total, packed.windows(ratio).count if ratio else 0

    def normal(*shape: int, dtype=dtype, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    seen = Visible(packed.positions, window)
    if count:
        first, chosen = packed.first_windows(ratio), None
        if top_k:
            closed = (packed.positions + 1) // ratio
            chosen = torch.full((total, top_k), 2**30, dtype=torch.int32, device=device)
            for start in range(0, total, 2048):
                rows = slice(start, start + 2048)
                ranked = torch.rand(len(closed[rows]), int(closed.max()), generator=generator, device=device)
                outside = torch.arange(ranked.shape[1], device=device) >= closed[rows, None]
                best = ranked.masked_fill(outside, -1.0).topk(min(top_k, ranked.shape[1])).indices.sort().values
                choosing = closed[rows] > top_k
                if bool(choosing.any()):
                    chosen[rows][choosing] = (best + first[rows, None])[choosing].int()
        seen = Visible(packed.positions, window, first, ratio, chosen)
    angles = normal(total, rope, dtype=torch.float32)
    scale = 1.1  # as an attention factor would have it
    return Case(
        normal(total, heads, d, scale=3.0),
        normal(total + count, d),
        normal(heads, dtype=torch.float32),
        angles.cos() * scale,
        angles.sin() * scale,
        seen,
        normal(total, heads, d),
    )


def allowed(case: Case) -> torch.Tensor:
    """bool [T, T + N]: which token meets which row of the keys."""
    seen, total = case.seen, len(case.q)
    place = seen.positions
    row, column = torch.arange(total, device=place.device)[:, None], torch.arange(total, device=place.device)[None]
    begin = (row[:, 0] - place)[:, None]
    mask = (column <= row) & (column > row - seen.window) & (column >= begin)
    if seen.first is None:
        return mask
    entry = torch.arange(len(case.kv) - total, device=place.device)[None]
    closed = ((place + 1) // seen.ratio)[:, None]
    inside = (entry >= seen.first[:, None]) & (entry < seen.first[:, None] + closed)
    if seen.chosen is not None:
        choosing = closed > seen.chosen.shape[1]
        picks = torch.where(choosing, seen.chosen, 0).long()
        picked = torch.zeros_like(inside).scatter(1, picks, True)
        inside = torch.where(choosing, picked, inside)
    return torch.cat((mask, inside), 1)


def exact(q, kv, sinks, cos, sin, mask) -> torch.Tensor:
    """The definition, in the dtype of q: softmax over the keys and the sink, nothing rounded in between."""
    q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + EPS)
    turn = torch.complex(cos, sin).to(torch.complex128)[:, None]

    def turned(x, by):
        head, tail = x[..., : -2 * cos.shape[1]], x[..., -2 * cos.shape[1] :].contiguous()
        pairs = torch.view_as_complex(tail.unflatten(-1, (-1, 2))) * by
        return torch.cat((head, torch.view_as_real(pairs).flatten(-2)), -1)

    logits = (turned(q, turn) @ kv.t() * q.shape[-1] ** -0.5).masked_fill(~mask[:, None], float("-inf"))
    logits = torch.cat((logits, sinks[None, :, None].expand(len(q), -1, 1)), -1)
    return turned(logits.softmax(-1)[..., :-1] @ kv, turn.conj())


def plain(q, kv, sinks, cos, sin, mask) -> torch.Tensor:
    """As `Attention._attend` does it."""
    q = rotate(unit_rms(q, EPS), cos[:, None], sin[:, None])
    return rotate(sink_attention(q, kv, mask, sinks), cos[:, None], -sin[:, None])


def gradients(case: Case, attend, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Output and gradients of q, kv and sinks."""
    leaves = [t.detach().clone().to(dtype or t.dtype).requires_grad_() for t in (case.q, case.kv, case.sinks)]
    tables = [t.to(dtype or t.dtype) for t in (case.cos, case.sin)]
    out = attend(*leaves, *tables)
    return [out.detach(), *torch.autograd.grad(out, leaves, case.grad.to(out.dtype))]


def errors(case: Case, **launches) -> dict[str, tuple[float, float]]:
    """Of output and gradients: plain's and the fused kernels' distance from float64, as a share of its norm.

    What the kernels leave unwritten is NaN.
    """
    from moe_rl.models.deepseek_v4.fused_attention import attend

    mask = allowed(case)
    wanted = gradients(case, lambda *a: exact(*a, mask), torch.float64)
    slow = gradients(case, lambda *a: plain(*a, mask))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns
    try:
        fast = gradients(case, lambda *a: attend(*a, case.seen, EPS, **launches))
    finally:
        torch.use_deterministic_algorithms(before)

    def share(found, right):
        return float((found.double() - right).norm() / right.norm())

    names = ("out", "q", "kv", "sinks")
    return {n: (share(s, w), share(f, w)) for n, s, f, w in zip(names, slow, fast, wanted, strict=True)}


def check(found: dict[str, tuple[float, float]]) -> None:
    """The fused kernels are at most twice as far from float64 as plain PyTorch, or as float32 can be."""
    for name, (slow, fast) in found.items():
        assert fast <= max(2 * slow, 2e-7), f"{name}: fused is off by {fast:.2e}, plain by {slow:.2e}"


def choices(
    lengths: Sequence[int], ratio: int, top_k: int, heads: int, d: int, dtype, device: str, seed: int = 0
) -> int:
    """The indexer's kernels against the plain scores and a stable sort, on whole numbers: nothing rounds, much ties.

    Returns the number of tokens that had to choose.
    """
    from moe_rl.models.deepseek_v4.fused_indexer import choose

    packed, generator = PackedSequences.from_lengths(lengths, device), torch.Generator(device).manual_seed(seed)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator, device=device).to(dtype)

    keys, q, weights = whole(packed.windows(ratio).count, d), whole(packed.total, heads, d), whole(packed.total, heads)
    indexer = SimpleNamespace(
        width=d,
        entries=lambda x, packed: keys,
        queries=lambda x, latent, packed, start: (q[start : start + len(x)], weights[start : start + len(x)].float()),
    )
    x = q.flatten(1)
    chosen = choose(SimpleNamespace(indexer=indexer, ratio=ratio, top_k=top_k), x, x, packed)  # type: ignore[arg-type]
    closed, first = (packed.positions + 1) // ratio, packed.first_windows(ratio)
    entry = torch.arange(len(keys), device=device)
    mask = (entry >= first[:, None]) & (entry < (first + closed)[:, None])
    hits = torch.relu(q.float() @ keys.float().t()) * d**-0.5
    best = _top((hits * weights.float()[..., None]).sum(1), mask, top_k) & mask
    choosing = closed > top_k
    assert chosen is not None
    wanted = best[choosing].nonzero()[:, 1].view(-1, top_k)
    assert torch.equal(chosen[choosing].long(), wanted), "the kernels choose other entries than a stable sort"
    return int(choosing.sum())


SMALL = [  # lengths, heads, d, rope pairs, window, ratio, top-k
    ((5, 1, 17), 3, 16, 2, 6, 0, 0),
    ((19, 3), 17, 16, 1, 4, 4, 2),
    ((2, 21), 2, 32, 4, 30, 8, 0),
    ((13,), 16, 16, 2, 1, 2, 3),
]


def blocks(backend: str, arch, layer: int, lengths: Sequence[int], dtype, device: str) -> list[torch.Tensor]:
    """Output, gradient of the input and of every trained weight of an attention block with random weights."""
    from moe_rl.models.deepseek_v4.attention import Attention

    packed, generator = PackedSequences.from_lengths(lengths, device), torch.Generator(device).manual_seed(1)
    block = Attention(arch, layer, 16, dtype, torch.device(device), backend)
    for p in block.parameters():
        p.data.copy_(
            torch.randn(p.shape, generator=generator, device=device) * (p.shape[-1] ** -0.5 if p.ndim > 1 else 1)
        )
    x, grad = torch.randn(2, packed.total, arch.hidden_size, generator=generator, device=device).to(dtype)
    x.requires_grad_()
    out = block(x, packed)
    out.backward(grad)
    return [out.detach(), x.grad, *(p.grad for p in block.parameters() if p.requires_grad)]


def main() -> None:
    from moe_rl.models.deepseek_v4.fused_attention import Launch

    for i, (lengths, heads, d, rope, window, ratio, top_k) in enumerate(SMALL):
        case = draw(lengths, heads, d, rope, window, ratio, top_k, seed=i)
        found = errors(case, forward=Launch(8, 4, 1), backward=Launch(4 * (1 + i % 2), 4, 1, 2 * (1 + i % 2)))
        print(*(f"{name} {slow:.1e} {fast:.1e}" for name, (slow, fast) in found.items()), sep="; ")
        check(found)
    print("chose", choices((30, 9, 27), 2, 5, 4, 16, torch.float32, "cpu"))
    arch = DeepseekV4Arch.from_dict(tiny_config(index_n_heads=16, index_head_dim=16))
    for found, wanted in zip(
        *(blocks(b, arch, 1, (7, 1, 22), torch.float32, "cpu") for b in ("triton", "plain")), strict=True
    ):
        assert float((found - wanted).norm()) < 1e-5 * float(wanted.norm())


if __name__ == "__main__":
    main()
