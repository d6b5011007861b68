"""The process that runs verifiers: it is told which one, then answers one item at a time until its parent is gone."""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection

from moe_rl.errors import UserError

from .judge import describe_exception, failed, judge
from .registry import VerifierSpec, resolve


def die_with_parent(lifeline: int) -> None:
    """Let the kernel end this process when the parent's end of a pipe closes, however the parent ends.

    The pipe's closing raises SIGIO, whose default is to terminate. No thread or interpreter lock is needed, so a
    verifier that hangs in C code dies too.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    os.set_blocking(lifeline, False)
    try:
        if os.read(lifeline, 1) == b"":  # it closed before the signal was set up
            raise SystemExit(0)
    except BlockingIOError:
        pass


def main(connection: int, lifeline: int) -> None:
    """Serve a pool over an inherited socket: one pickled VerifierSpec, then pairs (index, RewardItem)."""
    die_with_parent(lifeline)
    parent = Connection(connection)
    spec: VerifierSpec = pickle.loads(parent.recv_bytes())
    try:
        score = resolve(spec)
    except UserError as e:
        parent.send((e.rule, e.what, e.why, e.fix))
        return
    except BaseException as e:
        parent.send(
            ("reward.import", f"the verifier {spec.name} cannot be loaded", describe_exception(e), "correct it")
        )
        return
    parent.send(())
    while True:
        try:
            message = parent.recv_bytes()
        except EOFError:
            return
        try:
            item = pickle.loads(message)
        except Exception as e:
            verdict = failed(f"could not be given its record: {describe_exception(e)}")
        else:
            verdict = judge(score, item, BaseException)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):  # closed or replaced by the verifier
                pass
        parent.send(tuple(verdict))
