"""Loading a configuration: precedence, origins, types, messages, round trip."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from moe_rl.config import Config, load_config
from moe_rl.config.keys import keys, sections
from moe_rl.config.load import ASSETS, resolve_path, shipped
from moe_rl.errors import UserError


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("layout:\n  pp: 2\n  ep: 4\noptimizer:\n  lr: 1e-3\nengine:\n  dtype: bf16\nrollout: {n: 4}\n")
    return path


def failure(*args, **kwargs) -> UserError:
    with pytest.raises(UserError) as caught:
        load_config(*args, **kwargs)
    return caught.value


def test_precedence_and_origins(recipe: Path, tmp_path: Path):
    extra = tmp_path / "extra.yaml"
    extra.write_text("# a comment\nlayout:\n  ep: 3\nrollout:\n  n: 5\n")
    last = tmp_path / "last.yaml"
    last.write_text("rollout:\n  n: 6\n  max_response: 3\n")
    config = load_config(str(recipe), ["rollout.max_response=7"], hw="cpu", files=[extra, last])
    assert (config.layout.tp, config.layout.pp, config.layout.ep) == (1, 2, 3)
    assert (config.rollout.n, config.rollout.max_response) == (6, 7)
    assert (config.engine.dtype, config.engine.device) == ("fp32", "cpu")  # a profile wins over a recipe
    assert config.optimizer.lr == 0.001 and isinstance(config.optimizer.lr, float)
    assert config.origin("layout.tp") == "default"
    assert config.origin("layout.pp") == f"file {recipe}:2"
    assert config.origin("layout.ep") == f"file {extra}:3"
    assert config.origin("rollout.n") == f"file {last}:2"
    assert config.origin("rollout.max_response") == "command line"
    assert config.origin("engine.dtype") == "profile cpu"
    assert load_config("dsv4-tiny").origin("layout.pp") == "recipe dsv4-tiny"


def test_defaults_alone_are_the_schema_under_the_cpu_profile():
    config = load_config(None)
    expected = Config()
    expected.engine.device, expected.engine.dtype = "cpu", "fp32"
    assert config.machine.host_memory_gib == 16
    expected.machine = config.machine  # the profile's rates
    assert config == expected
    assert set(config.origins.values()) == {"profile cpu"}


def test_world_and_dp():
    config = load_config("dsv4-tiny", ["cluster.nodes=3", "cluster.gpus_per_node=8", "layout.pp=4", "layout.tp=2"])
    assert (config.world, config.dp) == (24, 3)


def test_every_shipped_file_loads():
    assert "dsv4-tiny" in shipped("recipe") and "cpu" in shipped("profile")
    for name in shipped("recipe"):
        assert load_config(name).recipe == name
    for name in shipped("profile"):
        assert load_config(None, hw=name).profile == name


def test_every_key_has_help_and_a_default_that_is_allowed():
    assert set(sections()) >= {"model", "layout", "engine", "trainer", "trainer.gates"}
    for info in keys().values():
        assert len(info.help) > 10 and info.help[-1] in ".;", info.name
    assert load_config(None).engine.dtype in keys()["engine.dtype"].choices


def test_values_of_the_command_line():
    config = load_config(
        None,
        [
            "data.template=Q: {question} costs ${x}, answer: [",
            "data.train='a: b.jsonl'",
            "optimizer.betas=[0.8, 0.9]",
            "optimizer.eps=1e-5",
            "checkpoint.contents=[model]",
            "data.shuffle=false",
            "layout.stages=Et*2|tL",
            "reward.args.buffer=32",
            "reward.args.mode=hard",
            "trainer.gates.pearson_min=0.9",
        ],
    )
    assert config.data.template == "Q: {question} costs ${x}, answer: ["
    assert config.data.train == str(Path.cwd() / "a: b.jsonl")
    assert config.optimizer.betas == [0.8, 0.9] and config.optimizer.eps == 1e-5
    assert config.checkpoint.contents == ["model"] and config.data.shuffle is False
    assert config.layout.stages == "Et*2|tL" and config.trainer.gates.pearson_min == 0.9
    assert config.reward.args == {"buffer": 32, "mode": "hard"}
    assert config.origin("reward.args.buffer") == "command line"
    assert config.get("reward.args.buffer") == 32


def test_verifier_arguments_merge_and_an_empty_mapping_clears_them(tmp_path: Path):
    path = tmp_path / "r.yaml"
    path.write_text("reward:\n  args:\n    a: 1\n    deep: {b: 2, c: 3}\n")
    merged = load_config(str(path), ["reward.args.deep.b=5"])
    assert merged.reward.args == {"a": 1, "deep": {"b": 5, "c": 3}}
    assert merged.origin("reward.args.deep.c") == f"file {path}:4"
    cleared = load_config(str(path), ["reward.args={}"])
    assert cleared.reward.args == {} and not any(o.startswith("reward.args.") for o in cleared.origins)


def test_round_trip(recipe: Path, tmp_path: Path):
    overrides = ["reward.args.x=[1, {y: z}]", "data.template=a # b\n{question}: 'q' \"p\" é", "layout.stages='E|tL'"]
    config = load_config(str(recipe), overrides)
    path = tmp_path / "config.resolved.yaml"
    path.write_text(config.to_yaml())
    again = Config.from_resolved(path)
    assert again == config
    assert all(again.origin(name) == config.origin(name) for name in keys())
    assert (again.recipe, again.profile) == (config.recipe, config.profile)
    assert again.to_yaml() == config.to_yaml()
    changed = load_config(path, ["layout.pp=1"])  # a resolved file is a recipe too, and brings its profile along
    assert (changed.layout.pp, changed.layout.ep, changed.origin("engine.dtype")) == (1, 4, "profile cpu")
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config and copy.origins == config.origins and copy.profile == config.profile


def test_resolved_without_origins_names_the_file(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text(load_config(None).to_yaml(origins=False))
    assert Config.from_resolved(path).origin("model.path") == f"file {path}:3"
    path.write_text("layout: {pp: 1}\n")
    with pytest.raises(UserError, match="no resolved configuration"):
        Config.from_resolved(path)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "here.jsonl").write_text("")
    path = tmp_path / "r.yaml"
    path.write_text("data:\n  train: here.jsonl\n  validation: elsewhere.jsonl\nmodel:\n  path: pkg:models/dsv4-tiny\n")
    monkeypatch.chdir("/")
    config = load_config(str(path))
    assert config.data.train == str(tmp_path / "here.jsonl")
    assert config.data.validation == "/elsewhere.jsonl"
    assert config.model.path == str(ASSETS / "models/dsv4-tiny")
    assert resolve_path("reasoning_gym:chain_sum?size=3&seed=1") == "reasoning_gym:chain_sum?size=3&seed=1"
    assert resolve_path("/abs/x") == "/abs/x" and resolve_path("") == ""


@pytest.mark.parametrize(
    ("override", "rule", "says"),
    [
        ("layout.ppp=2", "config.unknown_key", "nearest: layout.pp"),
        ("lr=1", "config.unknown_key", "nearest: optimizer.lr"),
        ("optimiser.lr=1", "config.unknown_key", "nearest: optimizer.lr"),
        ("zzzzzz=1", "config.unknown_key", "unknown key zzzzzz (from command line)"),
        ("hw=cpu", "config.unknown_key", "unknown key hw"),
        ("profile=cpu", "config.unknown_key", "--hw"),
        ("layout=2", "config.section", "layout.pp"),
        ("layout.pp=two", "config.type", "layout.pp is 'two', which is not of type int (from command line)"),
        ("layout.pp=1.5", "config.type", "not of type int"),
        ("layout.pp=true", "config.type", "not of type int"),
        ("layout.pp=", "config.type", "not of type int"),
        ("optimizer.lr=[1]", "config.type", "not of type float"),
        ("optimizer.betas=3", "config.type", "list[float]"),
        ("data.shuffle=maybe", "config.type", "not of type bool"),
        ("reward.args=3", "config.type", "reward.args"),
        ("engine.dtype=bf17", "config.choice", "nearest: bf16"),
        ("checkpoint.contents=[model,optimiser]", "config.choice", "nearest: optimizer"),
        ("optimizer.lr=0", "config.range", "above 0"),
        ("optimizer.lr=.nan", "config.range", "nan"),
        ("optimizer.betas=[0.9,1.0]", "config.range", "optimizer.betas is 1.0"),
        ("cluster.port=70000", "config.range", "at most 65535"),
        ("layout.pp", "config.override", "layout.pp=VALUE"),
        ("layout.pp=[", "config.override", "cannot be read"),
    ],
)
def test_wrong_override(override: str, rule: str, says: str):
    error = failure(None, [override])
    assert error.rule == rule
    assert says in str(error)
    assert error.exit_code == 2


def test_several_problems_are_told_together():
    text = str(failure(None, ["layout.ppp=2", "optimizer.lr=x", "rollout.n=4"]))
    assert "2 problems [config.several]" in text
    assert "1. unknown key layout.ppp" in text and "2. optimizer.lr is 'x'" in text


@pytest.mark.parametrize(
    ("text", "rule", "says"),
    [
        ("layout:\n  pp: 2\n  pp: 3\n", "config.duplicate", ":3 gives layout.pp a second time"),
        ("layout: [\n", "config.yaml", "is not YAML"),
        ("- a\n", "config.yaml", "not a mapping"),
        ("layout:\n  pp: many\n", "config.type", ":2)"),
        ("layot:\n  pp: 2\n", "config.unknown_key", "unknown key layot"),
        ("layout:\n  - pp\n", "config.section", "layout is a section"),
    ],
)
def test_wrong_file(tmp_path: Path, text: str, rule: str, says: str):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    error = failure(None, files=[path])
    assert error.rule == rule
    assert says in str(error)


def test_unknown_recipe_profile_and_file(tmp_path: Path):
    assert "nearest: dsv4-tiny" in str(failure("dsv4-tinny"))
    assert "nearest: cpu" in str(failure("dsv4-tiny", hw="cpus"))
    assert failure(None, files=[tmp_path / "no.yaml"]).rule == "config.file"
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert failure(str(tmp_path / "bytes.yaml")).rule == "config.yaml"


def test_an_empty_section_and_dotted_keys_are_fine(tmp_path: Path):
    path = tmp_path / "r.yaml"
    path.write_text("layout:\nrollout.n: 3\n")
    assert load_config(None, files=[path]).rollout.n == 3


def test_schema_has_no_key_outside_a_section():
    assert all(is_dataclass(f.default_factory) for f in fields(Config))
