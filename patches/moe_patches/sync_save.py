"""Synchronous dist-checkpoint saves without a helper process.

megatron-core 0.19 passes the results of a save through a queue that lives in a manager process of its own, although a
synchronous save writes in the calling process. That manager cannot start in a daemonic process, costs a fresh import
of the main module, and stays behind when its parent is killed. A queue in this process does the same work.
"""

from __future__ import annotations

import queue


def install() -> None:
    """Give megatron's checkpoint writer a queue in this process. Idempotent; asynchronous saves must not use it."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if not isinstance(filesystem_async._results_queue, queue.Queue):
        filesystem_async._results_queue = queue.Queue()
