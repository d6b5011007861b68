"""Prompts and answers from files, generated tasks or any iterable, checked record by record before a run starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from moe_rl.errors import UserError

PROMPT_KEYS = ("question", "prompt", "messages")
ANSWER_KEYS = ("answer", "reward_model.ground_truth")
GENERATED = "reasoning_gym:"
SHOWN = 10  # malformed records listed in one message


class Tokenizer(Protocol):
    """What is asked of a tokenizer here."""

    def encode(self, text: str) -> list[int]: ...


class ChatTokenizer(Tokenizer, Protocol):
    """What is asked of it where data.chat_template is not none. ValueError says why messages cannot be rendered."""

    def apply_chat(self, messages: Sequence[Mapping[str, Any]]) -> str: ...


class DataConfig(Protocol):
    """The keys of the configuration's section `data` that are read here."""

    prompt_key: str
    answer_key: str
    template: str
    max_prompt: int
    chat_template: str


@dataclass(frozen=True)
class Record:
    """One prompt.

    `index` is its position in the data set, `id` the first 16 hex digits of the SHA-256 of `prompt_text` (the text the
    model is given, template applied), `answer` the reference answer as text, `extra` every other field of the record.
    """

    index: int
    id: str
    prompt_text: str
    prompt_tokens: tuple[int, ...]
    answer: str
    extra: Mapping[str, Any] = field(default_factory=dict)


class Row(NamedTuple):
    """One record as read: where it stands (``file:line``), its fields, or what is wrong with it."""

    where: str
    fields: Mapping[str, Any]
    problem: str = ""


class _Unusable(ValueError):
    """What is wrong with one record."""


def load(
    source: str | Path | Iterable[Mapping[str, Any]], data: DataConfig, tokenizer: Tokenizer, name: str = "data.train"
) -> list[Record]:
    """Read every record of a source.

    Args:
        source: a ``.jsonl`` file (UTF-8, one object a line), a ``.parquet`` file, ``reasoning_gym:NAME?size=N&seed=N``
            (further options go to the task), or a finite iterable of dicts.
        data: names of the fields (dotted for nested ones; ``auto`` takes the first of `PROMPT_KEYS` and `ANSWER_KEYS`
            that a record has), template, longest prompt. A prompt is text or a list of chat messages.
        tokenizer: turns the prompt into token ids.
        name: the key the source came from, for messages.

    Raises:
        UserError: the source cannot be read or is empty, or any record cannot be used; the first ten such records are
            named with file and line, and the others counted. No record is ever left out.
    """
    records: list[Record] = []
    problems: list[str] = []
    total = 0
    generated = isinstance(source, str) and source.startswith(GENERATED)
    for row in _rows(source, data, name):
        try:
            if row.problem:
                raise _Unusable(row.problem)
            records.append(_record(total, row.fields, data, tokenizer, answer_optional=generated))
        except _Unusable as e:
            problems.append(f"{row.where}: {e}")
        total += 1
    label = _label(source)
    if problems:
        shown = problems[:SHOWN] + ([f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else [])
        raise UserError(
            "data.record",
            f"{name}: {len(problems)} of {total} records of {label} cannot be used",
            "\n       ".join(shown),
            "correct or remove these records; none is skipped silently",
        )
    if not records:
        raise UserError("data.empty", f"{name}: {label} holds no record", "", "give a source with at least one record")
    return records


def check_overlap(train: Sequence[Record], validation: Sequence[Record]) -> None:
    """Raise UserError where a validation prompt also stands in the training set (same text, template applied)."""
    seen = {record.id: record.index for record in train}
    shared = [r for r in validation if r.id in seen]
    if shared:
        first = ", ".join(f"validation record {r.index} = training record {seen[r.id]}" for r in shared[:3])
        raise UserError(
            "data.overlap",
            f"{len(shared)} of {len(validation)} validation prompts also stand in the training set",
            f"An accuracy on prompts that were trained on says nothing of unseen ones. {first}",
            "remove them from data.train or data.validation",
        )


def _label(source: Any) -> str:
    return str(source) if isinstance(source, (str, Path)) else f"the given {type(source).__name__}"


def _rows(source: Any, data: DataConfig, name: str) -> Iterator[Row]:
    if isinstance(source, str) and source.startswith(GENERATED):
        return _reasoning_gym(source, name)
    if not isinstance(source, (str, Path)):
        return _iterable(source, name)
    path = Path(source)
    if not path.is_file():
        why = "It is a directory." if path.is_dir() else "There is no such file."
        raise UserError("data.path", f"{name}: cannot read {path}", why, "give a .jsonl or .parquet file")
    if path.suffix in (".jsonl", ".ndjson", ".json"):
        return read_jsonl(path, name)
    if path.suffix in (".parquet", ".pq"):
        return _parquet(path, data, name)
    raise UserError(
        "data.format",
        f"{name}: {path} has the unknown suffix {path.suffix!r}",
        "Known are .jsonl (one JSON object a line) and .parquet.",
        "convert the file, or pass its rows as a Python iterable of dicts",
    )


def _iterable(source: Any, name: str) -> Iterator[Row]:
    try:
        rows = iter(source)
    except TypeError:
        raise UserError(
            "data.source",
            f"{name}: a {type(source).__name__} is no source of records",
            "A source is a path, a reasoning_gym name, or an iterable of dicts.",
            "pass for example a list of {'question': ..., 'answer': ...}",
        ) from None
    for i, row in enumerate(rows):
        if isinstance(row, Mapping):
            yield Row(f"record {i}", row)
        else:
            yield Row(f"record {i}", {}, f"is of type {type(row).__name__}, not a dict")


def read_jsonl(path: Path, name: str) -> Iterator[Row]:
    """The lines of a JSONL file, blank ones aside; one that is no JSON object has a `problem`. `name` is for messages.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        file = path.open("rb")
    except OSError as e:
        raise UserError("data.path", f"{name}: cannot read {path}", str(e), "make the file readable") from None
    with file:
        for number, raw in enumerate(file, 1):
            where = f"{path}:{number}"
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            try:
                text = raw.decode("utf-8").strip()
            except UnicodeDecodeError as e:
                yield Row(where, {}, f"is not UTF-8 (byte {raw[e.start]:#04x} at column {e.start + 1})")
                continue
            if not text:
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as e:
                yield Row(where, {}, f"is not JSON ({e})")
                continue
            if isinstance(row, dict):
                yield Row(where, row)
            else:
                yield Row(where, {}, f"is a JSON {type(row).__name__}, not an object; one object a line is expected")


def _parquet(path: Path, data: DataConfig, name: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        columns = table.schema_arrow.names
        for wanted in (_candidates(data.prompt_key, PROMPT_KEYS), _candidates(data.answer_key, ANSWER_KEYS)):
            if not any(key in columns or key.split(".")[0] in columns for key in wanted):
                raise UserError(
                    "data.column",
                    f"{name}: {path} has no column {' or '.join(wanted)}",
                    f"Its columns are {', '.join(columns)}.",
                    "name the right ones with data.prompt_key and data.answer_key",
                )
        number = 0
        for batch in table.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield Row(f"{path}:row {number}", row)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
        raise UserError(
            "data.parquet", f"{name}: {path} cannot be read as Parquet", str(e), "write the file anew"
        ) from None


def _reasoning_gym(spec: str, name: str) -> Iterator[Row]:
    from moe_rl.data.generated import make_task

    task, items = make_task(spec, name)
    for i, item in enumerate(items):
        yield Row(f"{spec} item {i}", {**item, "entry": item, "task": task})


def _candidates(key: str, defaults: tuple[str, ...]) -> tuple[str, ...]:
    return defaults if key == "auto" else (key,)


def _field(fields: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, Any]:
    """The first of `keys` that the record has, with its value; a dot steps into a nested object."""
    for key in keys:
        if key in fields:
            return key, fields[key]
        node: Any = fields
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                break
            node = node[part]
        else:
            return key, node
    raise _Unusable(f"has no field {' or '.join(keys)}; it has {', '.join(map(str, fields)) or 'none'}")


def _record(
    index: int, fields: Mapping[str, Any], data: DataConfig, tokenizer: Tokenizer, answer_optional: bool
) -> Record:
    prompt_key, prompt = _field(fields, _candidates(data.prompt_key, PROMPT_KEYS))
    answer_key, answer = _field(fields, _candidates(data.answer_key, ANSWER_KEYS))
    text = _prompt_text(prompt_key, prompt, data, tokenizer)
    answer = "" if answer is None and answer_optional else _answer_text(answer_key, answer)
    try:
        digest = hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
    except UnicodeEncodeError:
        raise _Unusable(f"the {prompt_key} holds half of a surrogate pair, which is no text") from None
    try:
        tokens = tuple(tokenizer.encode(text))
    except Exception as e:  # tokenizers raise what they like on a character they do not know
        raise _Unusable(f"the tokenizer refuses the prompt {_short(text)}: {type(e).__name__}: {e}") from None
    if not tokens:
        raise _Unusable(f"the prompt {_short(text)} has no token")
    if len(tokens) > data.max_prompt:
        raise _Unusable(f"the prompt has {len(tokens)} tokens, data.max_prompt is {data.max_prompt}")
    taken = {prompt_key, answer_key}
    return Record(index, digest, text, tokens, answer, {k: v for k, v in fields.items() if k not in taken})


def _prompt_text(key: str, prompt: Any, data: DataConfig, tokenizer: Tokenizer) -> str:
    """The text the model is given: the template around the question, rendered as a chat where that is asked for."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if prompt is None or not isinstance(messages, Sequence):
        raise _Unusable(
            f"{key} is {'null' if prompt is None else f'of type {type(prompt).__name__}'}; text is expected"
        )
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or "role" not in message:
            raise _Unusable(f"{key} is a list, but not of chat messages with a role and a content")
    if not messages or not messages[-1]["content"].strip():
        raise _Unusable(f"{key} is empty")
    question = data.template.replace("{question}", messages[-1]["content"])
    if data.chat_template == "none":
        if len(messages) > 1:
            raise _Unusable(f"{key} holds {len(messages)} chat messages, which need data.chat_template=auto")
        return question
    try:
        return cast(ChatTokenizer, tokenizer).apply_chat([*messages[:-1], {**messages[-1], "content": question}])
    except ValueError as e:
        raise _Unusable(f"{key}: {e}") from None


def _answer_text(key: str, answer: Any) -> str:
    if answer is None or answer != answer:  # a missing number is NaN in many Parquet files
        raise _Unusable(f"{key} is {'null' if answer is None else 'NaN'}")
    if not isinstance(answer, (str, int, float)):
        raise _Unusable(f"{key} is of type {type(answer).__name__}; text or a number is expected")
    text = str(answer)
    if not text.strip():
        raise _Unusable(f"{key} is empty")
    return text


def _short(text: str, width: int = 40) -> str:
    return repr(text if len(text) <= width else text[: width - 3] + "...")
