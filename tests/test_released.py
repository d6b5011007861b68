"""Quantised released checkpoints: decoded exactly, scored as transformers scores their values, in whatever form they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_rl.errors import UserError
from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from moe_rl.models.deepseek_v4.weights import weight_table
from moe_rl.models.headers import recognise
from moe_rl.models.load import check_released, load_released
from moe_rl.models.weights import Part, torch_dtype, whole_parts
from moe_rl.models.wire import Wire
from tests.released_v4 import dequantised, released_config, write_released
from tests.test_score import assert_close, score

TABLE = weight_table(DeepseekV4Arch.from_dict(released_config()))


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_released(tmp_path_factory.mktemp("released") / "v4")


def empty(dtype: str | None = None) -> dict[str, torch.Tensor]:
    """A tensor of each entry, filled with what no checkpoint holds."""
    kinds = {"int32": torch.int64}
    return {
        name: torch.full(spec.shape, -1, dtype=kinds.get(spec.dtype) or torch_dtype(dtype or spec.dtype))
        for name, spec in TABLE.expected().items()
    }


@pytest.mark.parametrize("dtype", ["fp32", None])
def test_values_are_those_of_the_codes(released: Path, dtype: str | None):
    """In fp32, and no less in the table's dtypes: bf16 holds each product of a code and a power of two."""
    views, expected = empty(dtype), dequantised(released)
    load_released(released, whole_parts(views), TABLE)
    for name, view in views.items():
        assert np.array_equal(view.to(torch.float64).numpy(), expected[name].astype(np.float64)), name


def test_fp8_experts_with_float32_scales(tmp_path: Path):
    path = write_released(tmp_path / "base", expert_dtype="fp8")
    assert check_released(path, TABLE)[1] == Wire("fp8", "fp8", "F32", "I8")
    views, expected = empty("fp32"), dequantised(path)
    load_released(path, whole_parts(views), TABLE)
    for name, view in views.items():
        assert np.array_equal(view.to(torch.float64).numpy(), expected[name].astype(np.float64)), name


@pytest.mark.parametrize("name", ["layers.0.attn.wo_b.weight", "layers.1.ffn.experts.2.w2.weight", "embed.weight"])
def test_a_block_is_read_out_of_the_middle(released: Path, name: str):
    whole = torch.from_numpy(dequantised(released)[name])
    rows, columns = whole.shape
    parts = [
        Part(torch.zeros(3, columns), (rows - 3, 0), (rows, columns)),
        Part(torch.zeros(rows - 40, 16), (0, columns - 16), (rows, columns)),
    ]
    load_released(released, {name: parts}, TABLE)
    for part in parts:
        assert torch.equal(part.view, whole[part.slices])


def test_what_a_directory_holds_is_told_by_its_content(released: Path, tmp_path: Path):
    assert recognise(released) == "safetensors" and recognise(tmp_path) == ""
    for mark in (".metadata", "metadata.json"):
        (tmp_path / mark).write_text("")
    assert recognise(tmp_path) == "dist"
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(UserError, match="which is the model"):
        recognise(tmp_path)
    with pytest.raises(UserError, match="not a directory"):
        recognise(tmp_path / "absent")


def reference_scores(path: Path, tokens: list[list[int]]) -> list[np.ndarray]:
    """transformers' log-probs of each sequence under the dequantised weights, fp32."""
    from moe_rl.models.deepseek_v4.transformers_model import build_transformers_model
    from moe_rl.models.deepseek_v4.weights import transformers_views

    torch.set_num_threads(1)
    arch = DeepseekV4Arch.from_dict(released_config())
    model = build_transformers_model(released_config(), arch, dtype=torch.float32)
    values = dequantised(path)
    with torch.no_grad():
        for name, view in transformers_views(model, arch).items():
            view.copy_(torch.from_numpy(values[name]))
        rows = []
        for ids in map(torch.tensor, tokens):
            logprobs = model(ids[None]).logits.float().log_softmax(-1)[0, :-1]
            rows.append(logprobs.gather(-1, ids[1:, None])[:, 0].numpy())
    return rows


def draw_tokens(vocab: int = 150) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, vocab, n).tolist() for n in (3, 40, 9, 65)]


@pytest.mark.slow
def test_scores_are_transformers_on_the_dequantised_weights(released: Path, tmp_path: Path):
    found = score(released, draw_tokens(), tmp_path, "cluster.gpus_per_node=1")
    assert_close(found, reference_scores(released, draw_tokens()), 1e-4)


@pytest.mark.slow
def test_a_converted_one_scores_alike(released: Path, tmp_path: Path):
    """The dist-checkpoint holds the same numbers; whatever layout it was written for."""
    from moe_rl.convert.job import convert
    from moe_rl.convert.plan import Request

    convert(Request(released, tmp_path / "dist", "dist", pp=2))
    layout = ["layout.pp=2", "layout.ep=2", "cluster.gpus_per_node=4"]
    assert_close(
        score(tmp_path / "dist", draw_tokens(), tmp_path, *layout), reference_scores(released, draw_tokens()), 1e-4
    )


@pytest.mark.slow
@pytest.mark.timeout(600)  # two runs and two scorings
def test_runs_start_from_every_form(tmp_path: Path):
    """dsv4-tiny quantised and as a dist-checkpoint: each trains (plain is what the recipe itself does), from its own weights."""
    from moe_rl.cli import run
    from moe_rl.config.load import ASSETS
    from moe_rl.convert.job import convert
    from moe_rl.convert.plan import Request

    model = ASSETS / "models" / "dsv4-tiny"
    convert(Request(model, tmp_path / "released", "released"))
    convert(Request(model, tmp_path / "dist", "dist"))
    options = ["trainer.steps=1", "data.prompts_per_step=2", "rollout.n=2", "trainer.validate_every=0"]
    rewards = {}
    for name, path in (("released", tmp_path / "released"), ("dist", tmp_path / "dist")):
        directory = tmp_path / f"run-{name}"
        assert run(["train", "dsv4-tiny", f"model.path={path}", *options, "--run-dir", str(directory)]) == 0
        lines = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
        rewards[name] = [(line["tokens"], line["rollout_logprobs"]) for line in lines]
    assert rewards["dist"] != rewards["released"]
    # the run's own checkpoint is a model to start from, taken out of its run
    shutil.copytree(tmp_path / "run-dist" / "checkpoints" / "step_000001", tmp_path / "taken")
    tokens = [[1, 2, 3, 4, 5]]
    one = ["layout.pp=1", "layout.ep=1", "cluster.gpus_per_node=1"]
    assert_close(
        score(tmp_path / "taken", tokens, tmp_path, "cluster.gpus_per_node=1"),
        score(tmp_path / "run-dist", tokens, tmp_path, *one),
    )
