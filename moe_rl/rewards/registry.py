"""Which verifier a name means: a shipped one, `module:function`, `path/to/file.py:function`, or a Python callable."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_rl.errors import UserError

from .verifiers import FACTORIES, check_dapo, is_trusted

NAMES = tuple(FACTORIES)
CONTEXT = ("prompt_text", "extra", "completion_tokens", "truncated", "max_response")


@dataclass(frozen=True)
class RewardItem:
    """One completion to score.

    `id` names it in messages; `completion_tokens` are its token ids; `truncated` tells that it was cut at
    `max_response` tokens; `extra` holds the other fields of its record.
    """

    id: str
    completion: str
    answer: str
    prompt_text: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    completion_tokens: Sequence[int] = ()
    truncated: bool = False
    max_response: int = 0


@dataclass(frozen=True)
class VerifierSpec:
    """A verifier by description, to be built in the process that runs it. `pickled` holds a callable, by value."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)
    pickled: bytes = b""

    @property
    def trusted(self) -> bool:
        return not self.pickled and is_trusted(self.name, self.args)


Scorer = Callable[[RewardItem], Any]


def describe(
    verifier: str | Callable[..., Any], args: Mapping[str, Any] | None = None, max_response: int | None = None
) -> VerifierSpec:
    """Check what can be checked without running anything of the user's.

    Args:
        verifier: a name of `NAMES`, ``module:function``, ``path/to/file.py:function``, or a callable
            ``f(completion, answer, ...)``. A callable is pickled by value with cloudpickle, lambdas and closures
            included, and runs in other processes: what it changes there is not seen here.
        args: further keyword arguments of the verifier (`reward.args`).
        max_response: tokens of the longest response, where known, to check `args` against.

    Raises:
        UserError: an unknown name, an argument that a shipped verifier does not have or take, or a callable that
            cannot be pickled or called as it would be.
    """
    args = dict(args or {})
    if callable(verifier):
        bind(verifier, args, _name_of(verifier))
        return VerifierSpec(_name_of(verifier), args, _pickle(verifier))
    if verifier in FACTORIES:
        known = inspect.signature(FACTORIES[verifier]).parameters
        unknown = [a for a in args if a not in known]
        if unknown:
            raise UserError(
                "reward.args",
                f"the verifier {verifier} has no argument {', '.join(unknown)}",
                f"It takes {', '.join(known) or 'none'}.",
                "correct reward.args",
            )
        if verifier == "dapo":
            check_dapo(**args, max_response=max_response)
        return VerifierSpec(verifier, args)
    module, colon, function = verifier.rpartition(":")
    if not colon or not module or not function:
        near = difflib.get_close_matches(verifier, NAMES, n=1)
        raise UserError(
            "reward.name",
            f"there is no verifier {verifier!r}",
            f"Shipped are {', '.join(NAMES)}.",
            f"did you mean {near[0]}?" if near else "name a shipped one, or your own as module:function",
        )
    if module.endswith(".py") and not Path(module).is_file():
        raise UserError("reward.name", f"reward.name: there is no file {module}", "", "give the path of a Python file")
    return VerifierSpec(verifier, args)


def resolve(spec: VerifierSpec) -> Scorer:
    """Build the verifier in this process: a function of a :class:`RewardItem`.

    Raises:
        UserError: its module, file or function cannot be imported or called as it would be.
    """
    if spec.pickled:
        return bind(pickle.loads(spec.pickled), spec.args, spec.name)
    if spec.name in FACTORIES:
        return bind(FACTORIES[spec.name](**spec.args), {}, spec.name)
    return bind(_import(spec.name), spec.args, spec.name)


def bind(function: Callable[..., Any], args: Mapping[str, Any], name: str) -> Scorer:
    """Fit a verifier to a :class:`RewardItem`: of the context (`CONTEXT`) it is given what its signature names.

    Raises:
        UserError: it cannot be called with (completion, answer), `args` and the context.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return lambda item: function(item.completion, item.answer, **args)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    wanted = [c for c in CONTEXT if c not in args and (open_ended or c in named)]
    try:
        inspect.signature(function).bind("", "", **args, **dict.fromkeys(wanted))
    except TypeError as e:
        raise UserError(
            "reward.signature",
            f"the verifier {name}{inspect.signature(function)} cannot be called: {e}",
            f"It is called as f(completion, answer, ...) with reward.args and, by name, any of {', '.join(CONTEXT)}.",
            "write it as def reward(completion, answer, **context)",
        ) from None

    def score(item: RewardItem) -> Any:
        context = {c: getattr(item, c) for c in wanted}
        return function(item.completion, item.answer, **args, **context)

    return score


def _import(name: str) -> Callable[..., Any]:
    place, _, attribute = name.rpartition(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    except Exception as e:
        raise UserError(
            "reward.import",
            f"reward.name: importing {place} failed",
            f"{type(e).__name__}: {e}",
            "modules are looked for in the working directory and on Python's path",
        ) from None
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        state = "is not callable" if found is not None else "is not there"
        functions = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise UserError(
            "reward.import",
            f"reward.name: {attribute} in {place} {state}",
            f"Its functions are {', '.join(functions)}." if functions else "It defines no function.",
            "write reward.name=module:function",
        )
    return found


def _load_module(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def _load_file(path: Path) -> Any:
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader, path
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent))  # stays: the file may import its neighbours when called
    spec.loader.exec_module(module)
    return module


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__).replace("<locals>.", "")


def _pickle(function: Callable[..., Any]) -> bytes:
    from ray import cloudpickle

    try:
        return cloudpickle.dumps(function)
    except Exception as e:
        raise UserError(
            "reward.pickle",
            f"the reward function {_name_of(function)} cannot be sent to the processes that run it",
            f"It holds something that cannot be pickled: {e}.",
            "open files, locks and connections inside the function, or put it in a module and name module:function",
        ) from None
