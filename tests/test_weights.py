"""The weight map and released checkpoints, against transformers' own reading of the same names."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from moe_rl.errors import RunFailed, UserError
from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from moe_rl.models.deepseek_v4.weights import expected, transformers_views, weight_table
from moe_rl.models.headers import read_headers
from moe_rl.models.load import check_released, load_released, save_released
from moe_rl.models.weights import whole_parts
from tests.tiny_v4 import randomise, tiny_config

ARCH = DeepseekV4Arch.from_dict(tiny_config())
TABLE = weight_table(ARCH)


def hf_model(config=None):
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    return DeepseekV4ForCausalLM(DeepseekV4Config(**(config or tiny_config()))).float().eval()


@pytest.fixture(scope="module")
def model():
    model = hf_model()
    randomise(transformers_views(model, ARCH), seed=1)
    return model


@pytest.fixture
def saved(model, tmp_path):
    path = tmp_path / "model"
    save_released(path, transformers_views(model, ARCH).items(), TABLE, tiny_config(), dtype="fp32")
    return path


def edit(path, change):
    """Rewrite the weights of a one-file checkpoint with `change(tensors)` applied."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    (path / "model.safetensors.index.json").unlink()


# The table


def test_expected_names_and_shapes_of_the_released_checkpoint():
    specs = expected(ARCH)
    assert len(specs) == 6 + 4 * (16 + 1 + 24 + 3) + 4 + 3 * 4 + 2 * 6
    assert specs["embed.weight"][:2] == ((61, 32), "bf16")
    assert specs["layers.0.ffn.gate.tid2eid"] == ((61, 2), "int32", 0, None)
    assert "layers.2.ffn.gate.tid2eid" not in specs and "layers.0.ffn.gate.bias" not in specs
    assert specs["layers.2.ffn.gate.bias"] == ((8,), "fp32", 2, None)
    assert specs["layers.3.ffn.experts.7.w2.weight"] == ((32, 16), "bf16", 3, 7)
    assert specs["layers.1.attn.compressor.ape"] == ((4, 32), "fp32", 1, None)
    assert specs["layers.2.attn.compressor.ape"] == ((8, 16), "fp32", 2, None)
    assert "layers.0.attn.compressor.ape" not in specs and "layers.2.attn.indexer.wq_b.weight" not in specs
    assert specs["layers.1.attn.indexer.compressor.wkv.weight"].shape == (16, 32)
    assert specs["layers.0.hc_attn_fn"] == ((24, 128), "fp32", 0, None)
    assert specs["layers.0.attn.wo_a.weight"].shape == (24, 32)


def test_the_number_of_parameters_is_transformers():
    parameters = sum(p.numel() for p in hf_model().parameters())
    buffers = 2 * 61 * 2 + 2 * 8  # two tables and two biases
    assert sum(spec.numel for spec in expected(ARCH).values()) == parameters + buffers


def test_transformers_views_are_live_and_agree_with_its_own_loading(model, saved):
    """Released names read by transformers' conversion table land where our views say they do."""
    from transformers import AutoModelForCausalLM

    loaded, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    theirs = transformers_views(loaded, ARCH)
    for name, ours in transformers_views(model, ARCH).items():
        assert torch.equal(ours, theirs[name]), name
    tokens = torch.randint(0, 61, (2, 21), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, loaded.eval()(tokens).logits)
        before = model(tokens).logits
        view = transformers_views(model, ARCH)["layers.3.ffn.experts.5.w3.weight"]
        view.add_(1.0)
        assert not torch.equal(before, model(tokens).logits)
        view.sub_(1.0)


class _Expert(nn.Module):
    def __init__(self, arch):
        super().__init__()
        self.linear_fc1 = nn.Linear(arch.hidden_size, 2 * arch.moe_intermediate_size, bias=False)
        self.linear_fc2 = nn.Linear(arch.moe_intermediate_size, arch.hidden_size, bias=False)


def _experts_chunk(arch, layers, experts):
    """The expert part of a trainer chunk: enough for what the map says of slices and ranks."""
    chunk = nn.Module()
    chunk.layers = nn.ModuleDict()
    for layer in layers:
        chunk.layers[str(layer)] = nn.Module()
        chunk.layers[str(layer)].mlp = nn.Module()
        chunk.layers[str(layer)].mlp.experts = nn.Module()
        chunk.layers[str(layer)].mlp.experts.local_experts = nn.ModuleList(_Expert(arch) for _ in range(experts))
    return chunk


def _experts_table():
    return TABLE.__class__(
        tuple(r for r in TABLE.rows if "{e}" in r.released), TABLE.layers, TABLE.experts, TABLE.sizes, TABLE.has
    )


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_expert_ranks_hold_disjoint_shares_whose_union_is_everything(ep_size):
    table, seen = _experts_table(), {}
    for ep_rank in range(ep_size):
        chunk = _experts_chunk(ARCH, range(4), 8 // ep_size)
        views = table.trainer_views(chunk, ep_rank=ep_rank, ep_size=ep_size)
        assert not seen.keys() & views.keys()
        seen |= views
        first = ep_rank * (8 // ep_size)
        fc1 = chunk.layers["2"].mlp.experts.local_experts[0].linear_fc1.weight
        assert torch.equal(views[f"layers.2.ffn.experts.{first}.w1.weight"], fc1[:16])
        assert torch.equal(views[f"layers.2.ffn.experts.{first}.w3.weight"], fc1[16:])
        views[f"layers.2.ffn.experts.{first}.w3.weight"].fill_(7)
        assert (fc1[16:] == 7).all() and not (fc1[:16] == 7).any()
    assert seen.keys() == table.expected().keys()


def test_views_go_through_wrappers():
    wrapped = nn.Module()
    wrapped.module = _experts_chunk(ARCH, [1], 8)
    assert len(_experts_table().trainer_views(wrapped)) == 24


def test_a_parameter_outside_the_table_is_an_error():
    chunk = _experts_chunk(ARCH, [0], 8)
    chunk.layers["0"].mlp.gamma = nn.Parameter(torch.ones(3))
    with pytest.raises(RunFailed, match="0 of the 3 elements of layers.0.mlp.gamma"):
        _experts_table().trainer_views(chunk)


def test_a_layer_with_half_its_tensors_is_an_error():
    chunk = _experts_chunk(ARCH, [0, 1], 8)
    del chunk.layers["1"].mlp.experts.local_experts[7].linear_fc2
    with pytest.raises(RunFailed, match="no tensor layers.1.mlp.experts.local_experts.7.linear_fc2.weight"):
        _experts_table().trainer_views(chunk)


def test_too_many_local_experts_are_an_error():
    with pytest.raises(RunFailed, match="local_experts.4.linear_fc1.weight"):
        _experts_table().trainer_views(_experts_chunk(ARCH, [0], 8), ep_rank=0, ep_size=2)


def test_a_wrong_shape_is_an_error():
    chunk = _experts_chunk(ARCH, [0], 8)
    chunk.layers["0"].mlp.experts.local_experts[3].linear_fc2 = nn.Linear(32, 16, bias=False)
    with pytest.raises(RunFailed, match=r"experts.3.w2.weight is .* of shape \(16, 32\), not \(32, 16\)"):
        _experts_table().trainer_views(chunk)


def test_the_map_and_the_checks_need_no_torch(saved):
    code = (
        "import json, sys; from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch;"
        "from moe_rl.models.deepseek_v4.weights import weight_table; from moe_rl.models.load import check_released;"
        f"c = json.load(open({str(saved / 'config.json')!r}));"
        f"print(len(check_released({str(saved)!r}, weight_table(DeepseekV4Arch.from_dict(c)))[0]), 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == [str(len(expected(ARCH))), "False"]


# Released checkpoints on disk


def test_save_then_load_is_exact(model, saved):
    other = hf_model()
    views = transformers_views(other, ARCH)
    load_released(saved, whole_parts(views), TABLE)
    for name, value in transformers_views(model, ARCH).items():
        assert torch.equal(views[name], value), name
    assert sorted(p.name for p in saved.iterdir()) == [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ]
    assert not [p for p in saved.parent.iterdir() if p != saved]


def test_bf16_writes_the_released_dtypes(model, tmp_path):
    save_released(tmp_path / "m", transformers_views(model, ARCH).items(), TABLE, tiny_config())
    kinds = {"bf16": "BF16", "fp32": "F32", "int32": "I32"}
    stored, _ = check_released(tmp_path / "m", TABLE)
    assert {n: s.dtype for n, s in stored.items()} == {n: kinds[s.dtype] for n, s in expected(ARCH).items()}
    assert json.loads((tmp_path / "m" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_model_of_several_files_is_the_same_model(model, saved, tmp_path):
    from transformers import AutoModelForCausalLM

    views = transformers_views(model, ARCH)
    save_released(tmp_path / "many", views.items(), TABLE, tiny_config(), dtype="fp32", max_file_bytes=50_000)
    stored, _ = check_released(tmp_path / "many", TABLE)
    files = {s.file for s in stored.values()}
    assert len(files) > 3 and all((tmp_path / "many" / f).stat().st_size < 60_000 for f in files)
    again = transformers_views(AutoModelForCausalLM.from_pretrained(tmp_path / "many"), ARCH)
    assert all(torch.equal(again[name], view) for name, view in views.items())


def test_tokenizer_files_are_copied(model, tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "tokenizer.json").write_text("{}")
    views = transformers_views(model, ARCH)
    save_released(tmp_path / "m", views.items(), TABLE, tiny_config(), tokenizer_dir=tmp_path / "from")
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("fault", ["missing", "unknown", "twice", "shape"])
def test_a_failed_save_leaves_nothing(model, tmp_path, fault):
    items = list(transformers_views(model, ARCH).items())
    name, value = items[7]
    items[7:8] = {
        "missing": [],
        "unknown": [(name, value), ("layers.9.attn_norm.weight", value)],
        "twice": [(name, value), (name, value)],
        "shape": [(name, value[None])],
    }[fault]
    with pytest.raises(RunFailed, match="layers.9" if fault == "unknown" else name.replace(".", r"\.")):
        save_released(tmp_path / "m", items, TABLE, tiny_config())
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(model, saved):
    with pytest.raises(UserError, match="exists"):
        save_released(saved, transformers_views(model, ARCH).items(), TABLE, tiny_config())


def test_all_faults_are_listed_in_one_error(saved):
    def change(tensors):
        tensors.pop("layers.1.attn.wq_a.weight")
        tensors.pop("layers.0.ffn.gate.tid2eid")
        tensors["layers.4.attn.wq_a.weight"] = torch.zeros(2)
        tensors["layers.3.ffn.experts.7.w2.weight"] = torch.zeros(3, 16)
        tensors["head.weight"] = torch.zeros(61, 32, dtype=torch.int8)
        tensors["mtp.0.anything"] = torch.zeros(1)

    edit(saved, change)
    with pytest.raises(UserError) as error:
        check_released(saved, TABLE)
    text = str(error.value)
    assert "2 missing: layers.0.ffn.gate.tid2eid, layers.1.attn.wq_a.weight" in text
    assert "1 not a tensor of this model: layers.4.attn.wq_a.weight (model.safetensors)" in text
    assert "layers.3.ffn.experts.7.w2.weight is [3, 16], not [32, 16] (model.safetensors)" in text
    assert "head.weight is I8, not BF16 (model.safetensors)" in text
    assert "mtp" not in text
    with pytest.raises(UserError, match="2 missing"):
        load_released(saved, whole_parts(transformers_views(hf_model(), ARCH)), TABLE)


@pytest.mark.parametrize("keep", [0, 5, 4000, -1])
def test_a_truncated_file_is_named(saved, keep):
    file = saved / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    with pytest.raises(UserError, match="model.safetensors is truncated"):
        check_released(saved, TABLE)


def test_a_damaged_header_is_named(saved):
    file = saved / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[9] = 0xFF
    file.write_bytes(data)
    with pytest.raises(UserError, match="model.safetensors has a damaged header"):
        read_headers(saved)


def test_a_missing_file_of_the_index_is_named(saved):
    index = saved / "model.safetensors.index.json"
    text = index.read_text().replace('"head.weight": "model.', '"head.weight": "model-2.')
    index.write_text(text)
    with pytest.raises(UserError, match="model-2.safetensors is missing"):
        read_headers(saved)


def test_a_tensor_in_two_files_is_named(saved):
    (saved / "model.safetensors.index.json").unlink()
    save_file({"head.weight": torch.zeros(61, 32)}, saved / "more.safetensors")
    with pytest.raises(UserError, match="head.weight is both in model.safetensors and in more.safetensors"):
        read_headers(saved)


def test_a_directory_without_weights(tmp_path):
    with pytest.raises(UserError, match="no \\*.safetensors"):
        read_headers(tmp_path)
    with pytest.raises(UserError, match="not a directory"):
        read_headers(tmp_path / "absent")


def test_integers_that_do_not_fit_are_refused(saved):
    def change(tensors):
        tensors["layers.0.ffn.gate.tid2eid"] = torch.full((61, 2), 2**40)

    edit(saved, change)
    views = {"layers.0.ffn.gate.tid2eid": torch.zeros(61, 2, dtype=torch.int32)}
    with pytest.raises(UserError, match="tid2eid .model.safetensors. names expert 1099511627776; they go from 0 to 7"):
        load_released(saved, whole_parts(views), TABLE)


def test_the_trainer_loads_what_transformers_holds_and_writes_the_same_files(megatron_world, model, saved, tmp_path):
    """transformers -> disk -> trainer chunk -> disk: each tensor is where transformers' own modules keep it."""
    from moe_rl.models.deepseek_v4.build import build_chunk, make_transformer_config

    chunk = build_chunk(ARCH, make_transformer_config(ARCH))
    views = TABLE.trainer_views(chunk)
    assert views.keys() == expected(ARCH).keys()
    for view in views.values():
        view.fill_(torch.nan if view.is_floating_point() else -1)
    load_released(saved, whole_parts(views), TABLE)
    theirs = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    compared = 0
    for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
        other = theirs.get(
            "model." + name.replace("mlp.router.", "mlp.gate.").replace("expert_bias", "e_score_correction_bias")
        )
        if other is None and ".local_experts." in name:
            before, after = name.split(".local_experts.")
            stacked = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}[after.split(".")[1]]
            other = theirs[f"model.{before}.{stacked}"][int(after.split(".")[0])]
        elif other is None and ".shared_experts.linear_fc1" in name:
            parent = "model." + name.removesuffix("linear_fc1.weight")
            other = torch.cat([theirs[f"{parent}gate_proj.weight"], theirs[f"{parent}up_proj.weight"]])
        elif other is None and ".shared_experts.linear_fc2" in name:
            other = theirs["model." + name.replace("linear_fc2", "down_proj")]
        elif other is None:
            other = theirs[
                {
                    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
                    "output_layer.weight": "lm_head.weight",
                }[name]
            ]
        assert torch.equal(tensor, other), name
        compared += tensor.numel()
    assert compared == sum(spec.numel for spec in expected(ARCH).values())
    save_released(tmp_path / "again", views.items(), TABLE, tiny_config(), dtype="fp32")
    for file in saved.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
