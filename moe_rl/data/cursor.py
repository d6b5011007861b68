"""The position in the training set: which prompts the next step takes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from moe_rl.errors import UserError

from .sources import Record


def epoch_order(size: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(size) that depends on its arguments alone: indices sorted by a keyed hash.

    No generator's state or algorithm is involved, so the order is the same in any process and Python version.
    """

    def key(index: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=16).digest()

    return sorted(range(size), key=key)


def check_batch(records: Sequence[Record], count: int) -> None:
    """Raise UserError where a data set has fewer records than one step takes."""
    if count > len(records):
        raise UserError(
            "data.batch",
            f"a step takes {count} prompts, but the data set has {len(records)}",
            "A prompt may stand only once in a step.",
            f"lower data.prompts_per_step to at most {len(records)}, or add data",
        )


class Cursor:
    """Hands out batches of distinct records, each record once per epoch, for ever.

    A batch may span the end of an epoch. A record of the new epoch that already stands in that batch is held back and
    leads the next one: its samples' seeds come from (run, step, prompt, sample), so twice in one step it would be the
    same completions twice.

    Args:
        records: the training set.
        seed: shuffles each epoch anew, by (seed, epoch).
        shuffle: False keeps the order of the file.
    """

    def __init__(self, records: Sequence[Record], *, seed: int = 1, shuffle: bool = True) -> None:
        self.records = records
        self.seed, self.shuffle = seed, shuffle
        self.epoch, self.position = 0, 0
        self.held_back: list[int] = []
        self._order = self._make_order()
        self._fingerprint = hashlib.sha256("".join(r.id for r in records).encode()).hexdigest()[:16]

    def _make_order(self) -> list[int]:
        return epoch_order(len(self.records), self.seed, self.epoch) if self.shuffle else [*range(len(self.records))]

    def next(self, count: int) -> list[Record]:
        """The next `count` records, all different.

        Raises:
            UserError: the data set has fewer than `count` records.
        """
        check_batch(self.records, count)
        batch = self.held_back[:count]
        self.held_back = self.held_back[count:]
        taken = set(batch)
        while len(batch) < count:
            if self.position == len(self._order):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._make_order()
            index = self._order[self.position]
            self.position += 1
            if index in taken:
                self.held_back.append(index)
            else:
                batch.append(index)
                taken.add(index)
        return [self.records[i] for i in batch]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on exactly here; plain JSON values."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "held_back": list(self.held_back),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "size": len(self.records),
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            UserError: it was saved over another data set, seed or shuffle setting.
        """
        mine = self.state_dict()
        differing = [k for k in ("size", "fingerprint", "seed", "shuffle") if state[k] != mine[k]]
        if differing:
            raise UserError(
                "data.resume",
                "the checkpoint's position belongs to another training set or order",
                "; ".join(f"{k}: saved {state[k]}, now {mine[k]}" for k in differing),
                "resume with the data.train, data.shuffle, template and trainer.seed the run was started with",
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self.held_back = list(state["held_back"])
        self._order = self._make_order()
