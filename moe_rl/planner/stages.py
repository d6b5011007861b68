"""Shares of the layers over the pipeline's segments that even out a cost: bytes or seconds."""

from __future__ import annotations

from collections.abc import Sequence

from moe_rl.config.layout import format_stages


def balance(
    costs: Sequence[float], segments: int, first: float = 0.0, last: float = 0.0, pinned: int = 0
) -> list[int] | None:
    """Layers of each segment, in order, so that the dearest segment is as cheap as it can be; None if there is no way.

    `costs` are the layers'; segment 0 bears `first` beside (the embedding) and holds at least `pinned` layers, the last
    bears `last` (the loss). Every segment has a layer. Exact, by dynamic programming.
    """
    n = len(costs)
    least = max(pinned, 1)
    if segments < 1 or n < least + segments - 1:
        return None
    total = [0.0]
    for one in costs:
        total.append(total[-1] + one)

    def cost(segment: int, start: int, stop: int) -> float:
        return total[stop] - total[start] + (first if segment == 0 else 0) + (last if segment == segments - 1 else 0)

    if segments == 1:
        return [n]
    # best[j]: the dearest of the segments so far, which hold the first j layers, and where the last of them starts
    best = {j: (cost(0, 0, j), [j]) for j in range(least, n - segments + 2)}
    for segment in range(1, segments):
        ends = [n] if segment == segments - 1 else range(least + segment, n - (segments - 1 - segment) + 1)
        best = {
            end: min(
                ((max(best[j][0], cost(segment, j, end)), [*best[j][1], end - j]) for j in best if j < end),
                key=lambda found: found[0],
            )
            for end in ends
        }
    return best[n][1]


def write(counts: Sequence[int]) -> str:
    """Layers of each segment in the notation of layout.stages: [3, 2] -> ``Et*3|ttL``."""
    parts = ["t" * count for count in counts]
    parts[0] = "E" + parts[0]
    parts[-1] += "L"
    return format_stages(parts)
