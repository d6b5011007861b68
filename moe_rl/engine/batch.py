"""A micro-batch: sequences laid end to end in one row of tokens, with what each position says of its next token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from moe_rl.errors import UserError
from moe_rl.models.packed import PackedSequences, to_device


@dataclass(frozen=True)
class MicroBatch:
    """Sequences packed into one row of T tokens.

    Position t speaks of token t+1: `labels[t]` is that token's id and each of `fields` holds its value for that token.
    The last position of a sequence has no next token; label and fields are 0 there.

    Attributes:
        ids: the caller's number of each sequence.
        lengths: tokens of each sequence, prompt included; they sum to T.
        tokens: int64 [T].
        labels: int64 [T].
        fields: float32 [T] each.
        routes: int16 [T, layers, k], the experts to replay, -1 where there are none; None: nothing is replayed.
    """

    ids: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: torch.Tensor
    labels: torch.Tensor
    fields: dict[str, torch.Tensor] = field(default_factory=dict)
    routes: torch.Tensor | None = None

    @classmethod
    def pack(
        cls,
        sequences: Sequence[np.ndarray | Sequence[int]],
        fields: Sequence[Mapping[str, np.ndarray | Sequence[float]]] | None = None,
        ids: Sequence[int] | None = None,
    ) -> MicroBatch:
        """Lay `sequences` (L token ids each) end to end.

        Args:
            fields: for each sequence, named arrays of L-1 numbers: value i belongs to token i+1. All sequences have
                the same names.
            ids: a number for each sequence, given back beside its results; by default its place in the list.

        Raises:
            UserError: no sequence, an empty one, or fields whose names or lengths do not fit.
        """
        lengths = tuple(len(s) for s in sequences)
        fields = [{} for _ in sequences] if fields is None else fields
        ids = tuple(range(len(lengths))) if ids is None else tuple(ids)
        _check(lengths, fields, ids)
        tokens = torch.from_numpy(np.concatenate([np.asarray(s, dtype=np.int64) for s in sequences]))
        labels = torch.zeros_like(tokens)
        labels[:-1] = tokens[1:]
        ends = torch.tensor(lengths).cumsum(0) - 1
        labels[ends] = 0
        packed = {name: _row([f[name] for f in fields]) for name in fields[0]}
        return cls(ids, lengths, tokens, labels, packed)

    def unpack(self, values: torch.Tensor) -> list[np.ndarray]:
        """Cut per-position `values` [T] back into one float32 array [L-1] per sequence, without the last positions."""
        rows = values.detach().float().cpu().numpy()
        if rows.shape != (len(self.tokens),):
            raise ValueError(f"values have shape {rows.shape}, the micro-batch has {len(self.tokens)} tokens")
        ends = np.cumsum(self.lengths)
        return [rows[end - length : end - 1].copy() for end, length in zip(ends, self.lengths, strict=True)]

    def packed_sequences(self) -> PackedSequences:
        """Where each sequence lies in the row, for the attention of the model; on the device of the tokens."""
        return PackedSequences.from_lengths(self.lengths, self.tokens.device)

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch with its tensors on `device`."""
        fields = {name: to_device(value, device) for name, value in self.fields.items()}
        routes = None if self.routes is None else to_device(self.routes, device)
        tokens, labels = to_device(self.tokens, device), to_device(self.labels, device)
        return MicroBatch(self.ids, self.lengths, tokens, labels, fields, routes)


def _row(values: Sequence[np.ndarray | Sequence[float]]) -> torch.Tensor:
    """Per-token values of each sequence, a 0 after each, in one float32 row."""
    parts = [part for v in values for part in (np.asarray(v, dtype=np.float32), np.zeros(1, np.float32))]
    return torch.from_numpy(np.concatenate(parts))


def _check(lengths: tuple[int, ...], fields: Sequence[Mapping], ids: tuple[int, ...]) -> None:
    if not lengths or min(lengths) < 1:
        raise UserError("batch.empty", "a micro-batch needs at least one sequence of at least one token")
    if len(fields) != len(lengths) or len(ids) != len(lengths):
        raise UserError(
            "batch.fields", f"{len(lengths)} sequences, but {len(fields)} sets of fields and {len(ids)} ids"
        )
    for i, (length, values) in enumerate(zip(lengths, fields, strict=True)):
        if values.keys() != fields[0].keys():
            raise UserError(
                "batch.fields",
                f"sequence {ids[i]} has fields {sorted(values)}, the first one has {sorted(fields[0])}",
                "All sequences of a micro-batch carry the same fields.",
            )
        for name, value in values.items():
            if np.shape(value) != (length - 1,):
                raise UserError(
                    "batch.fields",
                    f"field {name} of sequence {ids[i]} has shape {np.shape(value)}, its tokens after the first are {length - 1}",
                    "A field holds one number for each token but the first.",
                )
