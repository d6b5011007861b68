"""Runtime patches of megatron-core, for any trainer: ``import moe_patches; moe_patches.apply()``.

`apply` mends what its probes find broken, in this process, and says what it did; README.md lists the patches. Beside the
ledger stands :mod:`moe_patches.cpu`, which lets megatron-core run without a GPU and which `apply` never touches.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from .ledger import SWITCH, Patch, PatchState, resolve_disabled, settle

__all__ = ["SWITCH", "PatchState", "apply", "disabled", "names", "patches", "report"]

_lock = threading.Lock()


def patches() -> list[Patch]:
    """Every patch of the ledger, in the order in which they are applied. Imports torch, and no target."""
    from .fused_masters import FusedMasters
    from .grad_dtypes import DtypeSafeGradients
    from .hybrid_gradients import HybridGradients
    from .hybrid_masters import HybridMasters
    from .hybrid_reload import HybridReload
    from .hybrid_staging import HybridStaging
    from .hybrid_step import HybridStep
    from .hybrid_streams import HybridStreams
    from .no_grad import NoGradMainParams
    from .optimizer_states import OptimizerStates

    return [
        NoGradMainParams(),
        DtypeSafeGradients(),
        HybridMasters(),
        OptimizerStates(),
        HybridReload(),
        HybridGradients(),
        HybridStep(),
        HybridStreams(),
        HybridStaging(),
        FusedMasters(),
    ]


def names() -> list[str]:
    """Names of all patches."""
    return [patch.name for patch in patches()]


def disabled(disable: Iterable[str] | None = None) -> tuple[str, ...]:
    """The patches that `apply(disable)` would leave out; ValueError for a name that is none."""
    return resolve_disabled(disable, names())


def apply(disable: Iterable[str] | None = None) -> list[PatchState]:
    """Apply every patch that is needed, and return what became of each. Call it before an optimizer is built.

    A second call changes nothing, whoever makes it; after a target module was reloaded it patches the new one. A patch
    that is there already stays, whatever `disable` says.

    Args:
        disable: names of patches to leave out, or ``all``; None takes them from MOE_PATCHES_DISABLE (names divided by
            commas).

    Raises:
        ValueError: `disable` names no patch. RuntimeError: a target misbehaves although it was patched.
    """
    off = disabled(disable)
    with _lock:
        return [settle(patch, patch.name in off) for patch in patches()]


def report(states: Iterable[PatchState]) -> str:
    """What :func:`apply` returned, as lines for a reader."""
    rows = [(s.state, s.name, s.target, s.upstream, s.note) for s in states]
    widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
    lines = []
    for state, name, target, upstream, note in rows:
        lines += [f"{state:<{widths[0]}}  {name:<{widths[1]}}  {note}"]
        lines += [f"{'':<{widths[0]}}  {'':<{widths[1]}}  {text}" for text in (target, upstream)]
    return "\n".join(lines)
