"""One rank's saves: one at a time, here and now or in a thread beside the training."""

from __future__ import annotations

import datetime
import threading

import torch.distributed as dist

from moe_rl.engine import shards
from moe_rl.engine.memory import give_back
from moe_rl.engine.shards import AllOrNone, Work
from moe_rl.errors import MoeRLError


class Saver:
    """Completes what `shards.plan` began, and answers for it.

    In the background it is a thread, not a process: staged tensors need no second copy to get there, a rank that dies
    takes its writer along, and nothing is forked beside CUDA, gloo and Ray threads. Writing and hashing do without the
    interpreter's lock. The ranks' writers speak over a gloo group of their own, never over the training's.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._fault: MoeRLError | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The writers' group; made at the first use, which all ranks must share."""
        if self._group is None:
            # How long a disk takes is not a collective's business: whoever waits for a save has a limit of its own
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=7))
        return self._group

    def complete(self, work: Work) -> None:
        """Write the files of all ranks; afterwards the checkpoint is whole on disk.

        Raises:
            RunFailed: on all ranks, if one failed.
        """
        with AllOrNone("written", work.root, self.group) as step:
            step.mine = shards.write(work)
        with AllOrNone("written", work.root, self.group):
            if work.rank == 0:
                shards.finish(work, step.all)
        give_back()

    def start(self, work: Work) -> None:
        """`complete` staged work in a thread; `check` and `wait` tell of its failure. The one before must be done."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint writer", daemon=True)
        self._thread.start()

    def _run(self, work: Work) -> None:
        try:
            self.complete(work)
        except Exception as error:  # where a peer has died, the exchange itself
            self._fault = shards.as_ours(error, "written", work.root)
            work.items.clear()

    def check(self) -> None:
        """Raise what a background save failed with. Never waits."""
        if self._fault is not None:
            raise self._fault

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            RunFailed: it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
