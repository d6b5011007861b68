"""Our tokenizer against transformers' on the same files."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from moe_rl.data.tokenizer import load_tokenizer
from moe_rl.errors import UserError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'bad' %}{{ raise_exception('no ' + m['role']) }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def directory(tmp_path):
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(symbols)} | {"ab": 256, "abc": 257}
    backend = Tokenizer(models.BPE(vocab, [("a", "b"), ("ab", "c")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<pad>")])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 258)])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True, "lstrip": False, "rstrip": False},
        "chat_template": TEMPLATE,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"pad_token_id": 260, "eos_token_id": [257, 3]}))
    return tmp_path


def test_ids_and_text_are_transformers(directory):
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)
    chat = load_tokenizer(directory, "tokenizer")
    for text in ("", "abcabx", "sort 4215=", "naïve – 漢字 🙂\n\t", "a</s>b"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text.replace("</s>", "")
    messages = [{"role": "user", "content": "x > 1"}, {"role": "assistant", "content": "é"}]
    text = chat.apply_chat(messages)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.encode(text) == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert chat.encode(text) == ours.encode(text) and chat.encode("a") == theirs.encode("a", add_special_tokens=False)
    assert ours.encode(text).count(ours.bos_id) == 1


def test_special_tokens_come_from_the_settings_and_then_the_config(directory):
    tokenizer = load_tokenizer(directory)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (258, 259, 260, 261)


def test_bytes_that_are_no_text_decode_to_the_replacement_character(directory):
    tokenizer = load_tokenizer(directory)
    first, *_ = [i for i in tokenizer.encode("é") if i != tokenizer.bos_id]
    assert tokenizer.decode([first]) == "\ufffd"


def test_a_template_may_be_a_file_of_its_own(directory):
    (directory / "chat_template.jinja").write_text("{{ messages[0]['content'] | tojson }}")
    assert not hasattr(load_tokenizer(directory), "apply_chat")
    assert load_tokenizer(directory, "auto").apply_chat([{"role": "user", "content": "<é>"}]) == '"<é>"'


def test_a_template_that_refuses_is_the_users_error(directory):
    with pytest.raises(UserError, match="no bad"):
        load_tokenizer(directory, "auto").apply_chat([{"role": "bad", "content": ""}])


def test_faults_of_the_files_are_named(directory):
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(UserError, match="<end>"):
        load_tokenizer(directory)
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer_config.json is not JSON"):
        load_tokenizer(directory)
    (directory / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(UserError, match="is not a tokenizer"):
        load_tokenizer(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="no tokenizer.json"):
        load_tokenizer(directory)


def test_it_imports_neither_torch_nor_transformers(directory):
    code = (
        f"import sys; from moe_rl.data.tokenizer import load_tokenizer; load_tokenizer({str(directory)!r}).encode('a');"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
