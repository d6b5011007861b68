"""Preflight rules: each fires on its fault, names it, and is silent on a run without fault."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from moe_rl.config import Config, ModelFacts, check, host, load_config, preflight
from moe_rl.config.layout_rules import layout_problems
from moe_rl.config.rules import checkpoint_bytes
from moe_rl.errors import UserError


@pytest.fixture
def config(tmp_path: Path) -> Config:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    return load_config(
        None,
        [
            f"model.path={model}",
            f"data.train={tmp_path}/train.jsonl",
            f"data.validation={tmp_path}/validation.jsonl",
            "layout.pp=2",
            "layout.ep=2",
            "cluster.gpus_per_node=4",
        ],
    )


FACTS = ModelFacts(
    family="deepseek_v4",
    num_layers=5,
    hash_layers=(0, 1),
    vocab_size=64,
    max_positions=256,
    num_experts=4,
    top_k=2,
    hidden_size=32,
    num_heads=4,
    tokenizer_vocab=64,
    supports_tp=False,
    path="MODEL",
    tp_reason="one key-value head",
    weight_files=1,
    num_parameters=1000,
)


def test_a_good_run_has_no_problem(config: Config, tmp_path: Path):
    assert check(config, FACTS, run_dir=tmp_path / "runs" / "new") == []
    preflight(config, FACTS, run_dir=tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "rule", "says"),
    [
        ("cluster.gpus_per_node", 3, "layout.world", "= 3 rank(s) are not a multiple"),
        ("layout.pp", 3, "layout.world", "layout.pp 3 = 3"),
        ("layout.ep", 3, "layout.ep", "= 6"),
        ("layout.ep", 3, "layout.experts", "does not divide the model's 4 experts"),
        ("layout.stages", "Et|ttttL", "layout.hash_layers", "hash layer(s) 1 stand outside stage 0"),
        ("layout.stages", "Ettt|tL", "layout.layers", "has 4 layers, the model has 5"),
        ("layout.vpp", 3, "layout.too_many_stages", "at most 4"),
        ("layout.tp", 2, "layout.tp", "one key-value head"),
        ("layout.pp", 10**9, "config.range", "at most 1000000"),
        ("cluster.nodes", 10**400, "config.range", "at most 10000."),
        ("rollout.max_response", 10**12, "config.range", "at most 16777216"),
        ("trainer.steps", 10**12, "config.range", "at most 1000000000"),
        ("layout.etp", 2, "layout.tp", "layout.etp is 2"),
        ("rollout.n", 1, "rollout.group", "always zero"),
        ("rollout.replicas", 17, "rollout.replicas", "more than data.prompts_per_step 16"),
        ("rollout.top_p", 0.9, "rollout.top_p", "renormalises"),
        ("rollout.top_k", 5, "rollout.top_k", "renormalises"),
        ("rollout.temperature", 0.0, "config.range", "above 0"),
        ("algorithm.minibatches", 3, "algorithm.minibatches", "16 does not divide into"),
        ("algorithm.dual_clip", 1.0, "algorithm.dual_clip", "above 1"),
        ("algorithm.clip_low", -0.1, "config.range", "at least 0"),
        ("algorithm.advantage", "gae", "config.choice", "group_std"),
        ("engine.max_tokens_per_micro_batch", 79, "engine.token_budget", "64 + rollout.max_response 16 = 80"),
        ("rollout.max_response", 193, "rollout.positions", "= 257 tokens, the model has 256 positions"),
        ("optimizer.betas", [0.9], "optimizer.betas", "has 1 values"),
        ("optimizer.min_lr", 1.0, "optimizer.min_lr", "above optimizer.lr"),
        ("optimizer.lr", 0.0, "config.range", "above 0"),
        ("data.template", "hello", "data.template", "{question}"),
        ("data.train", "", "data.train", "is empty"),
        ("data.train", "/nowhere.jsonl", "data.path", "does not exist"),
        ("data.validation", "", "data.validation", "trainer.validate_every is 10"),
        ("checkpoint.contents", ["optimizer"], "checkpoint.contents", "has no model"),
        ("checkpoint.every", 0, "config.range", "at least 1"),
        ("engine.dtype", "bf16", "engine.dtype", "on a CPU"),
    ],
)
def test_rule_fires(config: Config, key: str, value: object, rule: str, says: str):
    section, _, name = key.rpartition(".")
    setattr(config.get(section), name, value)
    config.origins[key] = "command line"
    found = [p for p in check(config, FACTS) if p.rule == rule]
    assert found, [p.rule for p in check(config, FACTS)]
    text = str(found[0].error())
    assert says in text and "command line" in text
    assert found[0].why and found[0].fix and found[0].key


@pytest.mark.parametrize(
    ("mode", "key", "value", "says"),
    [
        ("update", "algorithm.epochs", 2, "2 optimizer steps"),
        ("update", "algorithm.kl", "k1", "off the rewards"),
        ("rollout", "algorithm.correction", "token_mask", "weighs tokens"),
        ("rollout", "rollout.router_replay", "R2", "replays the experts"),
    ],
)
def test_old_log_probs_that_something_needs_first(config: Config, mode: str, key: str, value: object, says: str):
    config.algorithm.old_logprobs = mode
    assert check(config, FACTS) == []
    section, _, name = key.rpartition(".")
    setattr(config.get(section), name, value)
    [problem] = [p for p in check(config, FACTS) if p.rule == "algorithm.old_logprobs"]
    assert says in problem.why
    config.algorithm.old_logprobs = "recompute"
    assert check(config, FACTS) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine.max_tokens_per_micro_batch", 80),
        ("rollout.max_response", 192),
        ("layout.stages", "Ett|tttL"),
        ("layout.vpp", 2),
        ("algorithm.minibatches", 16),
        ("algorithm.dual_clip", 0.0),
        ("rollout.n", 2),
        ("optimizer.warmup_steps", 60),  # a recipe's warm-up may outlast a short trial run
        ("data.train", "reasoning_gym:chain_sum?size=10"),
        ("checkpoint.contents", ["model"]),
    ],
)
def test_the_last_value_that_is_right(config: Config, key: str, value: object):
    section, _, name = key.rpartition(".")
    setattr(config.get(section), name, value)
    assert check(config, FACTS) == []


def test_pinning_lifted_lets_hash_layers_spread(config: Config):
    config.layout.stages, config.layout.pin_hash_layers = "Et|ttttL", False
    assert check(config, FACTS) == []


def test_virtual_stages_need_a_pipeline(config: Config):
    config.layout.pp, config.layout.vpp = 1, 2
    assert "layout.vpp" in [p.rule for p in check(config, FACTS)]


def test_a_family_with_tensor_parallelism_needs_heads_that_divide(config: Config):
    facts = replace(FACTS, supports_tp=True, num_heads=3, num_kv_heads=2)
    config.layout.tp = 2
    assert [p.rule for p in check(config, facts)] == ["layout.heads"]
    assert check(config, replace(facts, num_heads=4)) == []


@pytest.mark.parametrize(
    ("keys", "facts", "rule"),
    [
        ({"tp": 2}, {"num_kv_heads": 1}, "layout.heads"),
        ({"tp": 2}, {"ffn_size": 7}, "layout.columns"),
        ({"tp": 2, "etp": 2, "ep": 1}, {"expert_size": 7}, "layout.columns"),
        ({"tp": 2, "etp": 2, "ep": 1}, {"num_experts": 0}, "layout.experts"),
        ({"etp": 2, "ep": 1}, {}, "layout.etp"),
        ({"tp": 2}, {"vocab_size": 1, "tokenizer_vocab": 1}, "layout.vocabulary"),
        ({"tp": 2}, {}, None),
        ({"tp": 2, "etp": 2, "ep": 1}, {}, None),
    ],
)
def test_what_tensor_parallelism_must_divide(config: Config, keys: dict, facts: dict, rule: str | None):
    for key, size in keys.items():
        setattr(config.layout, key, size)
    able = replace(FACTS, supports_tp=True, num_kv_heads=2, ffn_size=8, expert_size=8)
    assert [p.rule for p in check(config, replace(able, **facts))] == ([rule] if rule else [])


def test_a_dense_model_has_no_expert_parallelism(config: Config):
    dense = replace(FACTS, num_experts=0)
    assert [p.rule for p in check(config, dense)] == ["layout.experts"]
    config.layout.ep = 1
    assert check(config, dense) == []


def test_layout_problems_for_a_world_of_ones_own(config: Config):
    assert layout_problems(config, FACTS, world=8) == []
    [problem] = layout_problems(config, FACTS, world=7)
    assert problem.rule == "layout.world" and "7 rank(s)" in problem.what


@pytest.mark.parametrize(("vocab", "rule"), [(65, "model.vocabulary"), (None, "model.tokenizer")])
def test_tokenizer(config: Config, vocab: int | None, rule: str):
    assert [p.rule for p in check(config, replace(FACTS, tokenizer_vocab=vocab))] == [rule]
    assert check(config, replace(FACTS, tokenizer_vocab=60)) == []


def test_model_directory(config: Config, tmp_path: Path):
    def rule(path: object) -> str:
        config.model.path = str(path)
        [problem] = check(config)
        return problem.rule

    assert rule("") == "model.path"
    assert rule(tmp_path / "none") == "model.path"
    assert rule(tmp_path / "train.jsonl") == "model.path"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert rule(empty) == "model.config"
    for text in ("{", "[1]", ""):
        (empty / "config.json").write_text(text)
        assert rule(empty) == "model.config"
    (empty / "config.json").write_text(json.dumps({"a": 1}))
    assert check(config) == []


def test_own_data_needs_no_files(config: Config):
    config.data.train = ""
    config.data.validation = ""
    assert check(config, FACTS, own_data=True) == []
    config.data.template = "hello"
    assert [p.rule for p in check(config, FACTS, own_data=True)] == ["data.template"]


@pytest.mark.parametrize("contents", [["model"], ["model", "extra"], ["model", "optimizer"]])
@pytest.mark.parametrize("keep, steps", [(1, 50), (2, 50), (3, 5), (2, 20), (2, 10)])
def test_advice_on_a_full_disk_names_what_would_help(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contents: list[str], keep: int, steps: int
):
    """A key is named if and only if a run with it changed takes less; by the rule and by a node alike."""
    monkeypatch.setattr(host, "free_bytes", lambda path: 0)
    config.checkpoint.contents, config.checkpoint.keep, config.trainer.steps = contents, keep, steps

    def taken() -> float:
        [problem] = check(config, FACTS, run_dir=tmp_path)
        assert problem.rule == "checkpoint.disk"
        return int(problem.what.split()[0]) * checkpoint_bytes(config, FACTS)

    before, [problem] = taken(), check(config, FACTS, run_dir=tmp_path)
    config.checkpoint.keep = 1
    assert ("lower checkpoint.keep" in problem.fix) is (taken() < before)
    config.checkpoint.keep, config.checkpoint.contents = keep, [part for part in contents if part != "optimizer"]
    assert ("leave optimizer out" in problem.fix) is (taken() < before)
    assert problem.fix.startswith("Free space") and problem.fix.count(" or ") == 1


def test_port(config: Config):
    with socket.socket() as s:
        s.bind(("", 0))
        s.listen()
        config.cluster.port = s.getsockname()[1]
        [problem] = check(config, FACTS)
        assert problem.rule == "cluster.port" and str(config.cluster.port) in problem.what
    assert check(config, FACTS) == []


def test_a_free_port_is_one_that_no_outgoing_connection_takes(tmp_path: Path):
    outgoing = tmp_path / "ip_local_port_range"
    outgoing.write_text("21000\t60999\n")
    ports = {host.free_port(outgoing) for _ in range(200)}
    assert len(ports) > 100 and all(20000 <= port < 21000 for port in ports)
    outgoing.write_text("20999\t60999\n")  # too few below
    assert host.port_is_free(host.free_port(outgoing)) and host.port_is_free(host.free_port(tmp_path / "none"))


def test_a_free_port_is_not_one_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(host.random.SystemRandom, "sample", lambda self, ports, k: [port, port, 20001])
        assert host.free_port() != port


def test_disk(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    facts = replace(FACTS, num_parameters=10**6)
    assert checkpoint_bytes(config, facts) == 16 * 10**6  # fp32 weights, master copy and two moments
    config.checkpoint.contents = ["model"]
    assert checkpoint_bytes(config, facts) == 4 * 10**6
    config.checkpoint.contents = ["model", "optimizer"]
    free = 3 * 16 * 10**6
    monkeypatch.setattr(host, "free_bytes", lambda path: free)
    assert check(config, facts, run_dir=tmp_path) == []  # keep 2 and the one being written
    free -= 1
    assert [p.rule for p in check(config, facts, run_dir=tmp_path)] == ["checkpoint.disk"]
    config.trainer.steps = 20  # two saves in all
    assert check(config, facts, run_dir=tmp_path) == []
    huge = replace(FACTS, num_parameters=10**15)
    monkeypatch.undo()
    assert [p.rule for p in check(config, huge, run_dir=tmp_path / "not" / "yet")] == ["checkpoint.disk"]


def test_gpus(config: Config, monkeypatch: pytest.MonkeyPatch):
    config.engine.device = "cuda"
    for count, rules in ((0, ["engine.device"]), (2, ["cluster.gpus"]), (4, [])):
        monkeypatch.setattr(host, "gpu_count", lambda count=count: count)
        found = [p.rule for p in check(config, FACTS)]
        assert found == rules


def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path(f"/dev/nvidia{x}") for x in (0, 1, "ctl", "-uvm")])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert host.gpu_count() == 2 and host.resolve_device("auto") == "cuda"
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "1")
    assert host.gpu_count() == 1
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    assert host.gpu_count() == 0 and host.resolve_device("auto") == "cpu"
    assert host.resolve_device("cuda") == "cuda"


def test_a_model_without_weights(config: Config):
    [problem] = check(config, replace(FACTS, weight_files=0))
    assert (problem.rule, problem.key, problem.origin) == ("model.weights", "model.path", "command line")
    assert problem.what.startswith("model.path MODEL holds no weights") and "Copy the weights" in problem.fix


def test_all_problems_in_one_error(config: Config):
    config.rollout.n, config.rollout.top_p = 1, 0.5
    with pytest.raises(UserError) as caught:
        preflight(config, FACTS)
    text = str(caught.value)
    assert text.startswith("2 problems [config.several]\n1. rollout.n is 1")
    assert "[rollout.group]" in text and "[rollout.top_p]" in text and caught.value.exit_code == 2
