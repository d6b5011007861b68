"""The model's tokenizer, from `tokenizer.json` by the tokenizers library alone: no torch, no import of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from moe_rl.errors import UserError


class Tokenizer:
    """Text to token ids and back. `bos_id`, `eos_id`, `pad_id` are None where the model directory names none.

    `vocab_size` is the number of ids that it can produce (highest id + 1).
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: Mapping[str, str | None]) -> None:
        self._backend = backend
        self._bos = special.get("bos_token")
        self.bos_id, self.eos_id, self.pad_id = (
            None if special.get(f"{kind}_token") is None else backend.token_to_id(special[f"{kind}_token"] or "")
            for kind in ("bos", "eos", "pad")
        )
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that `tokenizer.json` adds, but never a second beginning-of-sequence."""
        begun = self._bos is not None and text.startswith(self._bos)
        return self._backend.encode(text, add_special_tokens=not begun).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)


class ChatTokenizer(Tokenizer):
    """A tokenizer whose model directory has a chat template (jinja, as transformers renders it)."""

    def __init__(self, backend: tokenizers.Tokenizer, special: Mapping[str, str | None], template: str) -> None:
        super().__init__(backend, special)
        self._text = template
        self._special = {name: text for name, text in special.items() if text is not None}

    @cached_property
    def _template(self) -> Any:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = _tojson
        return environment.from_string(self._text)

    def apply_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt's text for messages of `role` and `content`, up to where the assistant is to begin.

        Raises:
            UserError: the template is none, or refuses the messages.
        """
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._special)
        except Exception as error:  # a template is a program: it can raise anything
            what = f"the model's chat template refuses a prompt: {type(error).__name__}: {error}"
            raise UserError("data.chat_template", what, "", "set data.chat_template=false, or correct it") from None


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    """Plain JSON: jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model directory: `tokenizer.json`, and the special tokens of `tokenizer_config.json`.

    A special token that is named nowhere is looked up by the id in `config.json`. A directory with a chat template
    gives a `ChatTokenizer`.

    Raises:
        UserError: `tokenizer.json` is missing or damaged, or a special token is not in its vocabulary.
    """
    root = Path(path)
    file = root / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            "model.tokenizer", f"no tokenizer.json in {root}", "prompts are text", "copy it beside the weights"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise UserError("model.tokenizer", f"{file} is not a tokenizer", str(error), "copy the file again") from None
    backend.no_padding()
    backend.no_truncation()
    settings = _json(root / "tokenizer_config.json")
    special = _special_tokens(backend, settings, _json(root / "config.json"))
    absent = {name: text for name, text in special.items() if text is not None and backend.token_to_id(text) is None}
    if absent:
        raise UserError(
            "model.tokenizer",
            f"{root}/tokenizer_config.json names tokens that tokenizer.json does not have: {absent}",
            "they could never be read or written",
            "use the two files that belong together",
        )
    template = _chat_template(root, settings)
    return Tokenizer(backend, special) if template is None else ChatTokenizer(backend, special, template)


def _json(file: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError("model.tokenizer", f"{file} is not JSON", str(error), "copy the file again") from None
    return value if isinstance(value, dict) else {}


def _special_tokens(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, str | None]:
    """Text of bos_token, eos_token and pad_token."""
    special: dict[str, str | None] = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        number = config.get(f"{name}_id")
        number = number[0] if isinstance(number, list) and number else number
        if token is None and isinstance(number, int) and number >= 0:
            token = backend.id_to_token(number)
        if token is not None and not isinstance(token, str):
            what = f"tokenizer_config.json: {name} is {json.dumps(token)}, not the text of a token"
            raise UserError("model.tokenizer", what, "", "copy the file again")
        special[name] = token
    return special


def _chat_template(root: Path, settings: Mapping[str, Any]) -> str | None:
    file = root / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        what = f"tokenizer_config.json: chat_template is of type {type(template).__name__}, not text"
        raise UserError("data.chat_template", what, "", "copy the file again")
    return template
