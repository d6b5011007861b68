"""The ledger of patches: what each mends, whether this process needs it, and what became of it.

A patch is applied only where its probe shows, by running the target on a few numbers, that the target misbehaves; the
version that is installed is a hint for the reader and decides nothing. After a patch is applied its probe runs again,
so that a patch which does not mend its target is an error and not a hope.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

APPLIED, NOT_NEEDED, DISABLED, MISSING = "applied", "not needed", "disabled", "target missing"
SWITCH = "MOE_PATCHES_DISABLE"
_MARK = "__moe_patches__"


class Patch(Protocol):
    """One mended fault of a library.

    Attributes:
        name: what `apply(disable=...)` and the environment switch call it.
        package: the distribution that is patched.
        target: dotted names of what is replaced.
        fault: what goes wrong without it, in a sentence.
        upstream: issue or pull request, or how the fault was found where there is none.
        versions: the releases in which the fault was seen.
    """

    name: str
    package: str
    target: str
    fault: str
    upstream: str
    versions: str

    def applied(self) -> bool:
        """Whether the target carries this patch; raises ImportError or AttributeError if there is no such target."""

    def probe(self) -> bool:
        """Whether the target as it stands misbehaves."""

    def apply(self) -> None:
        """Replace the target."""


@dataclass(frozen=True)
class PatchState:
    """What became of a patch in this process. `state` is one of: applied, not needed, disabled, target missing."""

    name: str
    state: str
    target: str
    upstream: str
    versions: str
    note: str = ""

    def as_dict(self) -> dict[str, str]:
        """All fields, for JSON."""
        return asdict(self)


def mark(replacement: Callable, name: str) -> Callable:
    """Note on a function that it carries patch `name`; `functools.wraps` hands the mark on to whatever wraps it."""
    setattr(replacement, _MARK, marks(replacement) | {name})
    return replacement


def marks(function: Any) -> frozenset[str]:
    """Names of the patches that a function carries, those beneath it included."""
    return getattr(getattr(function, "__func__", function), _MARK, frozenset())


def resolve_disabled(disable: Iterable[str] | None, known: Sequence[str]) -> tuple[str, ...]:
    """Names of the patches to leave out, in the ledger's order: those given, or with None those of MOE_PATCHES_DISABLE.

    Raises:
        ValueError: a name that is no patch; ``all`` stands for every one.
    """
    if disable is None:
        disable = [name.strip() for name in os.environ.get(SWITCH, "").split(",") if name.strip()]
    asked = set(disable)
    unknown = sorted(asked - set(known) - {"all"})
    if unknown:
        raise ValueError(f"no patch is called {', '.join(unknown)}; there are {', '.join(known)}, or all")
    return tuple(name for name in known if "all" in asked or name in asked)


def installed(package: str) -> str:
    """``NAME VERSION`` of an installed distribution, or that it is not there."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} is not installed"


def settle(patch: Patch, disabled: bool) -> PatchState:
    """Apply one patch if it is neither disabled nor needless nor there already.

    Raises:
        RuntimeError: the target misbehaves as before although it was replaced.
    """

    def state(which: str, note: str = "") -> PatchState:
        note = note or installed(patch.package)
        return PatchState(patch.name, which, patch.target, patch.upstream, patch.versions, note)

    try:
        if patch.applied():
            return state(APPLIED)
        if disabled:
            return state(DISABLED)
        if not patch.probe():
            return state(NOT_NEEDED)
    except (ImportError, AttributeError, TypeError) as error:
        # A target of another shape is not the one this patch was written for
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return state(DISABLED if disabled else MISSING, f"{installed(patch.package)}; {why}")
    patch.apply()
    if patch.probe():
        raise RuntimeError(f"patch {patch.name} was applied to {patch.target}, which misbehaves as before")
    return state(APPLIED)
