"""Chat messages to the text of a prompt: by a tokenizer's jinja template, or in DeepSeek-V4's own encoding."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from moe_rl.errors import UserError

Messages = Sequence[Mapping[str, Any]]  # of role and content
Renderer = Callable[[Messages], str]  # up to where the assistant is to begin

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, THOUGHT = "<think>", "</think>"
DEEPSEEK_V4_TOKENS = (BOS, EOS, USER, ASSISTANT, THINK, THOUGHT)


def encode_deepseek_v4(messages: Messages, enable_thinking: bool = True) -> str:
    """DeepSeek-V4's encoding of a conversation (the release's `encoding` directory), the assistant's next turn opened.

    User messages in a row are one turn. With thinking the answer begins inside `<think>`; of earlier answers only those
    after the last user turn keep their `reasoning` (or `reasoning_content`), all others and those without thinking begin
    behind a bare `</think>`. A reasoning effort is text at the very beginning: write it into the system message.

    Args:
        messages: `role` is system, user or assistant, `content` is text.

    Raises:
        ValueError: another role, a message with tools or other parts that change the encoding, or nothing to answer.
    """
    turns: list[tuple[str, str, str]] = []
    for number, message in enumerate(messages, 1):
        role, content = message["role"], message["content"]
        if role not in ("system", "user", "assistant"):
            raise ValueError(f"message {number} has the role {role!r}; DeepSeek-V4's here are system, user, assistant")
        if more := sorted(k for k in _NOT_ENCODED if message.get(k)):
            raise ValueError(f"message {number} has {', '.join(more)}; only text and reasoning are encoded")
        if role == "user" and turns and turns[-1][0] == "user":
            turns[-1] = ("user", f"{turns[-1][1]}\n\n{content}", "")
        else:
            turns.append((role, content, message.get("reasoning") or message.get("reasoning_content") or ""))
    if not turns or turns[-1][0] == "assistant":
        raise ValueError("the conversation ends with the assistant's answer, so that there is nothing to answer")
    last_user = max((i for i, turn in enumerate(turns) if turn[0] == "user"), default=-1)
    text = BOS
    for i, (role, content, reasoning) in enumerate(turns):
        if role == "assistant":
            kept = f"{reasoning}{THOUGHT}" if enable_thinking and i > last_user else ""
            text += f"{kept}{content}{EOS}"
            continue
        text += USER + content if role == "user" else content
        if i + 1 == len(turns) or turns[i + 1][0] == "assistant":
            text += ASSISTANT + (THINK if enable_thinking and i >= last_user else THOUGHT)
    return text


_NOT_ENCODED = ("tools", "tool_calls", "response_format", "task", "content_blocks", "wo_eos")


def jinja_renderer(template: str, special: Mapping[str, str], enable_thinking: bool = True) -> Renderer:
    """A renderer by a chat template, as transformers runs it, that raises UserError where the template fails.

    Args:
        template: jinja source. It is told `enable_thinking`, which DeepSeek's templates call `thinking`.
        special: text of bos_token, eos_token and pad_token, where there is one.
    """
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _raise
    environment.filters["tojson"] = _tojson
    compiled = cache(lambda: environment.from_string(template))  # at the first prompt, whose error it is
    names = {**special, "enable_thinking": enable_thinking, "thinking": enable_thinking, "add_generation_prompt": True}

    def render(messages: Messages) -> str:
        try:
            return compiled().render(messages=list(messages), **names)
        except Exception as error:  # a template is a program: it can raise anything
            what = f"the model's chat template refuses a prompt: {type(error).__name__}: {error}"
            raise UserError("data.chat_template", what, "", "set data.chat_template=none, or correct it") from None

    return render


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    """Plain JSON: jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
