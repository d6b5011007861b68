"""`moe-rl score` through the command line: one answer in all layouts, transformers' own; and what it refuses."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from moe_rl.cli import run
from moe_rl.config.load import ASSETS
from moe_rl.errors import UserError
from moe_rl.trainer.scoring import read_tokens
from tests.test_wrong_input import write_good

MODEL = ASSETS / "models" / "dsv4-tiny"
LENGTHS = (1, 40, 2, 3, 129, 1, 17, 64, 8, 5)
LAYOUTS = {
    "PP2 uneven": ["layout.pp=2", "layout.stages=Ettt|tL", "cluster.gpus_per_node=2"],
    "EP2": ["layout.ep=2", "cluster.gpus_per_node=2"],
    "VPP2": ["layout.pp=2", "layout.vpp=2", "cluster.gpus_per_node=2", "engine.max_tokens_per_micro_batch=64"],
    "PP2xEP2": ["layout.pp=2", "layout.ep=2", "cluster.gpus_per_node=4", "engine.max_tokens_per_micro_batch=80"],
}


def sequences(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(258) for _ in range(length)] for length in lengths]


def score(source: Path, tokens: list[list[int]], work: Path, *overrides: str) -> list[np.ndarray]:
    """Log-probs by line, from the command itself."""
    (work / "tokens.jsonl").write_text("".join(json.dumps({"tokens": t}) + "\n" for t in tokens))
    out = work / "out.jsonl"
    assert run(["score", str(source), "--tokens", str(work / "tokens.jsonl"), "--out", str(out), *overrides]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(list(row) == ["logprobs"] for row in rows)
    assert [len(row["logprobs"]) for row in rows] == [len(t) - 1 for t in tokens]
    return [np.array(row["logprobs"]) for row in rows]


def assert_close(found: list[np.ndarray], expected: list[np.ndarray], tolerance: float = 1e-5) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape and np.abs(a - b).max(initial=0.0) <= tolerance, (i, np.abs(a - b).max(initial=0.0))


# --------------------------------------------------------------------------------------------------- what it refuses
def test_tokens_are_read_line_by_line(tmp_path: Path):
    file = tmp_path / "t.jsonl"
    file.write_text('{"tokens": [0, 9]}\n\n{"tokens": [3], "note": "kept out"}\n')
    assert [s.tolist() for s in read_tokens(file, 10, 4)] == [[0, 9], [3]]
    assert read_tokens(file, 10, 4)[0].dtype == np.int32


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nonsense", "is not JSON"),
        ("[1, 2]", "is a JSON list, not an object"),
        ('{"token": [1]}', "has no list of one or more token ids"),
        ('{"tokens": []}', "has no list of one or more token ids"),
        ('{"tokens": "12"}', "has no list of one or more token ids"),
        ('{"tokens": [1, 10]}', "10 is no token id; they go from 0 to 9"),
        ('{"tokens": [-1]}', "-1 is no token id"),
        ('{"tokens": [true]}', "true is no token id"),
        ('{"tokens": [1.0]}', "1.0 is no token id"),
        ('{"tokens": [null]}', "null is no token id"),
        ('{"tokens": [1, 2, 3, 4, 5]}', "5 tokens, but the model has 4 positions"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, says: str):
    file = tmp_path / "t.jsonl"
    file.write_text(f'{{"tokens": [1]}}\n\n{line}\n')
    with pytest.raises(UserError) as error:
        read_tokens(file, 10, 4)
    assert error.value.rule == "score.tokens"
    assert f"{file}:3: " in str(error.value) and says in str(error.value) and f"{file}:1" not in str(error.value)


def test_many_wrong_lines_are_counted_and_an_empty_file_is_one(tmp_path: Path):
    file = tmp_path / "t.jsonl"
    file.write_text("{}\n" * 14)
    with pytest.raises(UserError, match=r"14 line\(s\) cannot be scored(.|\n)*:10: (.|\n)*and 4 more"):
        read_tokens(file, 10, 4)
    file.write_text("\n")
    with pytest.raises(UserError, match="holds no sequence"):
        read_tokens(file, 10, 4)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=":1: is not UTF-8"):
        read_tokens(file, 10, 4)


def test_wrong_input_ends_before_anything_is_started(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    write_good(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text('{"tokens": [1, 2]}\n{"tokens": [1, 999]}\n')
    Path("good.jsonl").write_text('{"tokens": [1, 2]}\n')
    Path("model/tokenizer.json").unlink()  # scoring has no use for it

    def message(*arguments: str) -> str:
        command = ["score", "model", "--tokens", "good.jsonl", "--out", "o.jsonl"]
        options = {"--tokens", "--out"} & set(arguments)
        assert run([*(a for i, a in enumerate(command) if not {a, command[i - 1]} & options), *arguments]) == 2
        return capsys.readouterr().err

    assert "t.jsonl:2: 999 is no token id; they go from 0 to 259" in message("--tokens", "t.jsonl")
    assert "[score.out]" in message("--out", "nowhere/o.jsonl") and "[score.out]" in message("--out", "model")
    assert "[layout.world]" in message("layout.pp=3", "cluster.gpus_per_node=2")
    assert "[layout.experts]" in message("layout.ep=3", "cluster.gpus_per_node=3")
    assert "[engine.dtype]" in message("engine.dtype=bf16")
    Path("model/model.safetensors").unlink()
    assert "[model.weights]" in message()
    assert not Path("o.jsonl").exists()


# ------------------------------------------------------------------------------------------------------- the answer
@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    """transformers' log-probs of each sequence alone."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    rows = []
    for tokens in sequences(LENGTHS):
        ids = torch.tensor([tokens])
        with torch.no_grad():
            logprobs = model(ids).logits.float().log_softmax(-1)[0, :-1]
        rows.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy())
    return rows


@pytest.mark.slow
def test_one_process_agrees_with_transformers(expected: list[np.ndarray], tmp_path: Path, capsys):
    assert_close(score(MODEL, sequences(LENGTHS), tmp_path), expected)
    assert capsys.readouterr().out == f"{tmp_path}/out.jsonl: log-probs of {len(LENGTHS)} sequences\n"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_agrees(layout: str, expected: list[np.ndarray], tmp_path: Path):
    assert_close(score(MODEL, sequences(LENGTHS), tmp_path, *LAYOUTS[layout]), expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [["cluster.gpus_per_node=2"], LAYOUTS["VPP2"]], ids=["DP2", "VPP2"])
def test_fewer_sequences_than_the_layout_has_slots(layout: list[str], expected: list[np.ndarray], tmp_path: Path):
    third, [found] = expected[3], score(MODEL, [sequences(LENGTHS)[3]], tmp_path, *layout)
    assert found.shape == third.shape and np.abs(found - third).max() <= 1e-5


@pytest.mark.slow
@pytest.mark.timeout(600)  # a run and two scorings
def test_a_checkpoint_scores_as_the_run_sampled(tmp_path: Path, capsys):
    """Step 2 sampled from the weights that step 1 saved: transformers' sampled log-probs are those of the checkpoint."""
    from moe_rl.data.tokenizer import load_tokenizer

    overrides = ["trainer.steps=2", "checkpoint.every=1", "data.prompts_per_step=4", "rollout.n=4"]
    overrides += ["trainer.validate_every=0", "observe.samples_per_step=16"]
    directory = tmp_path / "run"
    assert run(["train", "dsv4-tiny", *overrides, "--run-dir", str(directory)]) == 0
    lines = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    tokenizer, step2 = load_tokenizer(MODEL), [line for line in lines if line["step"] == 2]
    assert len(step2) == 16
    prompts = [list(tokenizer.encode(line["prompt"])) for line in step2]
    tokens = [prompt + line["tokens"] for prompt, line in zip(prompts, step2, strict=True)]

    def response(rows: list[np.ndarray]) -> list[np.ndarray]:
        return [row[len(prompt) - 1 :] for row, prompt in zip(rows, prompts, strict=True)]

    first = directory / "checkpoints" / "step_000001"
    own_layout = score(first, tokens, tmp_path)  # the run's four ranks, of which no override speaks
    assert_close(response(own_layout), [np.array(line["rollout_logprobs"]) for line in step2])
    assert_close(response(own_layout), [np.array(line["trainer_logprobs"]) for line in step2])
    one = ["layout.pp=1", "layout.ep=1", "cluster.gpus_per_node=1"]
    newest = score(directory, tokens, tmp_path, *one)  # a run directory means its newest checkpoint
    assert max(np.abs(a - b).max() for a, b in zip(newest, own_layout, strict=True)) > 1e-3
