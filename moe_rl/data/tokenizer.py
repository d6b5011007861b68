"""The model's tokenizer, from `tokenizer.json` by the tokenizers library alone: no torch, no import of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from moe_rl.config.figures import overridden
from moe_rl.data import chat
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
    """A tokenizer of prompts that are chats. `apply_chat` gives a prompt's text, special tokens included."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special: Mapping[str, str | None], apply_chat: chat.Renderer
    ) -> None:
        super().__init__(backend, special)
        self.apply_chat = apply_chat

    def encode(self, text: str) -> list[int]:
        """Token ids of a chat's text, to which nothing is added."""
        return self._backend.encode(text, add_special_tokens=False).ids


def load_tokenizer(
    path: str | Path,
    chat_template: str = "none",
    enable_thinking: bool = True,
    figures: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """The tokenizer of a model directory: `tokenizer.json`, and the special tokens of `tokenizer_config.json`.

    A special token that is named nowhere is looked up by the id in `config.json`. `chat_template=auto` takes the
    template that comes with the tokenizer, or else DeepSeek-V4's encoding where the vocabulary has its tokens.

    Args:
        chat_template: `data.chat_template`; other than `none` it gives a `ChatTokenizer`.
        enable_thinking: `data.enable_thinking`.
        figures: `model.config`, in place of those of `config.json`.

    Raises:
        UserError: `tokenizer.json` is missing or damaged, a special token is not in its vocabulary, or the chat
            template that is asked for is not there or does not fit the vocabulary.
    """
    root = Path(path)
    backend = _backend(root)
    settings = _json(root / "tokenizer_config.json")
    config, _ = overridden(_json(root / "config.json"), figures or {})
    special = _special_tokens(backend, settings, config)
    absent = {name: text for name, text in special.items() if text is not None and backend.token_to_id(text) is None}
    if absent:
        raise UserError(
            "model.tokenizer",
            f"{root}/tokenizer_config.json names tokens that tokenizer.json does not have: {absent}",
            "they could never be read or written",
            "use the two files that belong together",
        )
    if chat_template == "none":
        return Tokenizer(backend, special)
    template = _chat_template(root, settings)
    unknown = [t for t in chat.DEEPSEEK_V4_TOKENS if len(backend.encode(t, add_special_tokens=False).ids) != 1]
    if template is not None and chat_template != "deepseek_v4":
        named = {name: text for name, text in special.items() if text is not None}
        return ChatTokenizer(backend, special, chat.jinja_renderer(template, named, enable_thinking))
    if not unknown and chat_template != "tokenizer":
        special |= {"bos_token": chat.BOS, "eos_token": chat.EOS}
        return ChatTokenizer(backend, special, partial(chat.encode_deepseek_v4, enable_thinking=enable_thinking))
    why = {
        "tokenizer": "Neither chat_template.jinja nor tokenizer_config.json holds a template.",
        "deepseek_v4": f"Its encoding writes each of these as one token, and tokenizer.json does not: {' '.join(unknown)}",
    }
    raise UserError(
        "data.chat_template",
        f"data.chat_template={chat_template}: {root} has no such chat format",
        " ".join(text for kind, text in why.items() if chat_template in (kind, "auto")),
        "set data.chat_template=none and write the format into data.template, or use the tokenizer that has one",
    )


def _backend(root: Path) -> tokenizers.Tokenizer:
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
    return backend


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
