"""Several sequences end to end in one row of tokens, and the compressed windows inside each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moe_rl.errors import UserError


@dataclass(frozen=True)
class Windows:
    """The complete windows of `ratio` tokens of every sequence, in packed order; N of them.

    `tokens` int64 [N, ratio]: index in the packed row; `sequence` int64 [N]: whose window; `index` int64 [N]: its
    number within its sequence; `first` numpy int64 [n + 1]: number of windows before each sequence, and in all.
    """

    ratio: int
    tokens: torch.Tensor
    sequence: torch.Tensor
    index: torch.Tensor
    first: np.ndarray

    @property
    def count(self) -> int:
        return int(self.first[-1])


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on `device`. The host does not wait for what a GPU has queued: a copy from pinned memory is queued, too."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class PackedSequences:
    """Boundaries of n sequences packed in one row of T tokens.

    Attributes: `lengths` (tuple), `total` T, `cu_seqlens` int32 [n + 1], `positions` int64 [T] (from 0 in each
    sequence), `sequence_ids` int64 [T]. Boundaries are kept on the host too, so that slicing never waits for a device.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.lengths = tuple(int(n) for n in lengths)
        if not self.lengths or min(self.lengths) < 1:
            raise UserError(
                "batch.empty",
                f"a pack of sequences with lengths {self.lengths}",
                "every sequence needs a token",
                "drop it",
            )
        self.device = torch.device(device)
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        self._ids = np.repeat(np.arange(len(self.lengths)), self.lengths)
        self._positions = np.arange(self.total) - self._starts[self._ids]
        self.routing: Any = None  # a models.routing.Routing, where routers replay or record
        self.cu_seqlens = self._tensor(self._starts.astype(np.int32))
        self.positions = self._tensor(self._positions)
        self.sequence_ids = self._tensor(self._ids)
        self._windows: dict[int, Windows] = {}
        self._first: dict[int, torch.Tensor] = {}
        self._cache: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedSequences:
        """Pack sequences of these lengths (in tokens, each at least 1)."""
        return cls(lengths, device)

    def followed_by(self, length: int) -> PackedSequences:
        """The same sequences and one more of `length` tokens."""
        longer = PackedSequences((*self.lengths, length), self.device)
        longer.routing = self.routing
        return longer

    @property
    def total(self) -> int:
        return int(self._starts[-1])

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(array)), self.device)

    def windows(self, ratio: int) -> Windows:
        """The complete windows of `ratio` tokens (computed once per ratio); trailing tokens belong to none."""
        if ratio not in self._windows:
            counts = np.asarray(self.lengths) // ratio
            first = np.concatenate([[0], np.cumsum(counts)])
            sequence = np.repeat(np.arange(len(counts)), counts)
            index = np.arange(first[-1]) - first[sequence]
            tokens = (self._starts[sequence] + index * ratio)[:, None] + np.arange(ratio)
            self._windows[ratio] = Windows(
                ratio, self._tensor(tokens), self._tensor(sequence), self._tensor(index), first
            )
        return self._windows[ratio]

    def visible_windows(self, start: int, stop: int, ratio: int) -> tuple[int, int, int]:
        """Windows that any of the tokens [start, stop) may attend to.

        Returns:
            (first, end, most): they lie in [first, end) of the packed windows; no single token sees more than `most`.
        """
        window = self.windows(ratio)
        first_seq, last_seq = self._ids[start], self._ids[stop - 1]
        closed = (self._positions[start:stop] + 1) // ratio
        return int(window.first[first_seq]), int(window.first[last_seq] + closed[-1]), int(closed.max())

    def first_windows(self, ratio: int) -> torch.Tensor:
        """int32 [T]: the first window of each token's sequence (where it would be, if the sequence has none)."""
        if ratio not in self._first:
            self._first[ratio] = self._tensor(self.windows(ratio).first[self._ids].astype(np.int32))
        return self._first[ratio]

    def cached(self, key: object, build) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables that depend on the packing alone (rotary cosines), shared by all layers: built at first use."""
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]
