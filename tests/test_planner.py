"""The planner: the reference run's figures, layouts it proposes, and what it says of a broken one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.cli import run as command
from moe_rl.config import Config, load_config
from moe_rl.config.facts import LayerWidths, ModelFacts, TensorSize
from moe_rl.config.plan_rules import plan_problems
from moe_rl.errors import UserError
from moe_rl.models.family import read_facts
from moe_rl.planner.inventory import Inventory, released_bytes
from moe_rl.planner.memory import ray_default_store
from moe_rl.planner.plan import Plan
from moe_rl.planner.search import changed, levers, longest_response, search
from moe_rl.planner.stages import balance
from moe_rl.planning import keep_comparison, read_source, run, with_rates

GIB, GB = 2**30, 10**9


def planned(*overrides: str, hw: str | None = None) -> Plan:
    config = read_source("dsv4-pro", overrides, hw, ())
    facts = read_facts(config.model)
    return Plan.of(config, facts, plan_problems(config, facts))


def test_the_reference_run_is_predicted():
    """verl PR #8383, 64 nodes of 8 H100: nodes whose stages hold 3, 2 and 1 layers, and the trainer's share of a GPU."""
    plan = planned(hw="h100")
    node = [size / GB for size in plan.host_per_stage()]
    assert [len(s.layers) for s in plan.memory.inventory.stages][:2] == [3, 2]
    assert node[0] == pytest.approx(558, rel=0.1) and node[5] == pytest.approx(409, rel=0.1)
    assert node[30] == pytest.approx(244, rel=0.1)
    assert 0.9 * 25.5 < plan.actor_mean() / GIB < 1.1 * 26.2


def test_what_a_rollout_rank_holds():
    """vLLM cuts over tp only some tensors: as many bytes as the weight update brings, planned for every rank of every replica
    (sync_plan.json). They and the trainer's weights fit a GPU together, with what the kernels keep of activations."""
    plan = planned(hw="h100")
    file = Path(__file__).parent.parent / "benchmarks" / "results" / "sync_plan.json"
    case = json.loads(file.read_text())["cases"]["h100"]
    assert plan.memory.rollout.weights == pytest.approx(case["bytes_total"] / case["receivers"], rel=1e-3)
    assert plan.memory.rollout.weights == pytest.approx(plan.sync.bytes_per_gpu_max, rel=1e-6)
    assert plan.fits and not planned("engine.attention_backend=plain", hw="h100").fits
    assert planned("layout.pin_hash_layers=false", "engine.attention_backend=plain", hw="h100").fits


def test_vllm_keeps_its_memory_in_every_phase():
    """It does not sleep: its share of a GPU is taken throughout, and each node of a replica has a copy of what its ranks hold."""
    keys = [
        "rollout.engine=vllm",
        "rollout.gpu_memory_utilization=0.25",
        "rollout.tp=8",
        "rollout.dp=8",
        "rollout.ep=64",
    ]
    plan = planned(*keys, "rollout.replicas=8", hw="h100")
    for items in plan.memory.stages[5].gpu.values():
        share = items["rollout weights"] + items["kv cache"] + items["contexts"] / 2
        assert share == pytest.approx(max(0.25 * 79.6 * GIB, items["rollout weights"] + GIB))
    dense, experts = released_bytes(plan.facts)
    assert dense + experts == pytest.approx(892e9, rel=0.05) and experts > 10 * dense
    copies = [plan.memory.processes(node)["rollout copies"] for node in (0, 8, 63)]
    assert copies == [dense + experts // 8] * 3  # a replica lies on eight nodes


def test_what_the_modes_cost():
    """By hand: a stage's node of 8 ranks holds half of 2 layers' experts (EP8, two copies) and 1/2 of the rest, 12 bytes each."""
    plan = planned(hw="h100")
    tensors = [t for t in plan.facts.tensors if t.layer == 10 and t.trained]
    layer = sum(t.numel * (384 if t.expert else 1) for t in tensors)
    node = plan.memory.nodes[2]["update"]
    assert node["masters"] + node["moments"] == pytest.approx(12 * 2 * layer / 2, rel=0.002)
    plain = planned("optimizer.precision_aware=false", "optimizer.grad_dtype=fp32", hw="h100").memory
    assert plain.stages[2].gpu["update"]["gradients"] == pytest.approx(
        2 * plan.memory.stages[2].gpu["update"]["gradients"], rel=0.01
    )
    assert plain.nodes[2]["update"]["pinned rounding"] > 100 * node["pinned rounding"] > 0
    half = planned("optimizer.offload_fraction=0.5", hw="h100").memory.nodes[2]["update"]
    assert half["moments"] == pytest.approx(node["moments"] / 2, rel=0.02)  # parameters go whole


def test_plan_is_quick_and_needs_no_torch():
    code = (
        "import sys, time, resource\nfrom moe_rl.cli import run\n"
        "assert run(['plan', 'dsv4-pro', '--hw', 'h100', '--json']) == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_utime, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    seconds, torch = done.stderr.split()[-2:]
    assert done.returncode == 0 and torch == "False" and float(seconds) < 3
    found = json.loads(done.stdout)
    assert found["layout"]["world_size"] == 512 and found["layout"]["stages"].startswith("Et*3|tt|")
    assert (
        found["host_gib"]["max_node"] == max(found["host_gib"]["per_stage"])
        and len(found["gpu_gib"]["per_stage"]) == 32
    )
    assert sum(found["host_gib"]["items"].values()) == pytest.approx(found["host_gib"]["max_node"])
    assert sum(found["gpu_gib"]["items"].values()) == pytest.approx(found["gpu_gib"]["max"])
    assert found["pipeline"]["bubble_fraction"] == pytest.approx(31 / 35)
    assert found["model"]["params_total"] == pytest.approx(1.573e12, rel=1e-3) and all(
        rule["ok"] for rule in found["rules"]
    )


def test_a_broken_layout_is_named():
    text = run("dsv4-pro", ["layout.ep=7", "layout.stages=Ett|t*59L", "layout.pp=2"], hw=None, files=(), search=False,
               measured=None, as_json=True).text  # fmt: skip
    rules = {rule["id"] for rule in json.loads(text)["rules"] if not rule["ok"]}
    assert {"layout.experts", "layout.hash_layers", "layout.ep"} <= rules


BROKEN = {
    "layout.world": ["layout.pp=3"],
    "layout.experts": ["layout.ep=3"],
    "rollout.group": ["rollout.n=1"],
    "rollout.positions": ["data.max_prompt=100000"],
    "algorithm.minibatches": ["algorithm.minibatches=7"],
    "checkpoint.contents": ["checkpoint.contents=[extra]"],
    "memory.host": ["machine.host_memory_gib=0.5"],
}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("rule", BROKEN)
def test_a_script_can_ask_whether_a_rule_is_broken(rule, as_json, capsys):
    """Exit code 2 with one error; the plan, or as much of it as there is, is whole on stdout all the same."""
    assert command(["plan", "dsv4-tiny", *BROKEN[rule], *(["--json"] if as_json else [])]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: rules are broken: ") and err.count("[plan.rules]") == 1 and rule in err.split("\n")[0]
    if as_json:
        assert rule in {r["id"] for r in json.loads(out)["rules"] if not r["ok"]}
    else:
        assert f"[{rule}]\n  why: " in out.split("rules that this breaks:\n")[1]


@pytest.mark.parametrize("name", ["dsv4-tiny", "dsv4-mini", "dsv4-flash", "dsv4-pro", "qwen3-moe-tiny", "qwen2-tiny"])
def test_shipped_recipes_break_no_rule(name, capsys):
    assert command(["plan", name]) == 0
    assert capsys.readouterr().err == ""


def test_a_search_asks_for_another_layout(capsys):
    """What it is asked from may be broken; only that there is no layout is a no."""
    assert command(["plan", "dsv4-tiny", "layout.pp=3", "--search"]) == 0
    assert "layouts that fit" in capsys.readouterr().out
    for cause in ("machine.host_memory_gib=0.5", "rollout.n=1"):
        assert command(["plan", "dsv4-tiny", cause, "--search", "--json"]) == 2
        out, err = capsys.readouterr()
        assert json.loads(out)["search"] == [] and err.startswith("error: no layout fits [plan.search]")


def test_a_config_json_is_enough():
    source = read_facts(load_config("qwen3-moe-tiny", []).model.path).path
    text = run(f"{source}/config.json", ["engine.device=cpu", "engine.dtype=fp32", "data.max_prompt=16"], hw=None, files=(), search=True,
               measured=None, as_json=False).text  # fmt: skip
    assert "layouts that fit" in text and "GiB" in text


@pytest.mark.parametrize("backend", ["triton", "plain"])
def test_the_largest_response_just_fits(backend):
    """It fits, the next length does not; and it is less with the backend that keeps more."""
    keys = [f"engine.attention_backend={backend}", "layout.pin_hash_layers=false"]
    found = longest_response(planned(*keys, hw="h100"))
    assert found["backend"] == backend and found["rests_on"]
    for tokens, fits in ((found["tokens"], True), (found["tokens"] + 64, False)):
        longer = [f"rollout.max_response={tokens}", f"engine.max_tokens_per_micro_batch={2048 + tokens}"]
        plan = planned(*keys, *longer, hw="h100")
        assert (max(plan.gpu_per_stage()) <= 79.6 * GIB) == fits
    assert longest_response(planned("engine.device=cpu", hw="h100")) is None


def test_levers_say_what_they_save():
    found = {lever.lever: lever for lever in levers(planned(hw="h100"))}
    spread = found["layout.pin_hash_layers=false"]
    assert 130 < spread.host_gib_saved < 170  # a layer's worth of the node that has three
    assert (
        found["optimizer.offload_fraction=0.5"].gpu_gib_saved
        < 0
        < found["optimizer.offload_fraction=0.5"].host_gib_saved
    )


def test_rays_own_store():
    assert ray_default_store(100 * GB, 1000 * GB) == 30 * GB
    assert ray_default_store(2000 * GB, 1000 * GB) == 200 * GB
    assert ray_default_store(2000 * GB, 100 * GB) == 95 * GB


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.1, 9), min_size=1, max_size=9),
    st.integers(1, 6),
    st.integers(0, 3),
    st.floats(0, 9),
    st.floats(0, 9),
)
def test_balance_is_the_best_there_is(costs, segments, pinned, first, last):
    """Against all ways to cut the layers."""
    from itertools import combinations

    def dearest(counts):
        ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
        sums = [sum(costs[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
        sums[0], sums[-1] = sums[0] + first, sums[-1] + last
        return max(sums)

    cuts = combinations(range(1, len(costs)), segments - 1)
    ways = [[b - a for a, b in zip((0, *c), (*c, len(costs)), strict=True)] for c in cuts]
    ways = [w for w in ways if w[0] >= max(pinned, 1)]
    found = balance(costs, segments, first, last, pinned)
    assert (found is None) == (not ways)
    if found:
        assert sum(found) == len(costs) and found[0] >= pinned
        assert dearest(found) == pytest.approx(min(map(dearest, ways)))


@st.composite
def clusters(draw):
    """A random model and cluster."""
    layers, experts = draw(st.integers(1, 7)), draw(st.sampled_from([0, 4, 6, 8]))
    tensors = [TensorSize("embedding", None, False, 800, 2, False, True, True, 800, False)]
    tensors.append(TensorSize("head", None, False, 800, 2, False, True, True, 800, False))
    for i in range(layers):
        tensors.append(TensorSize("layer", i, False, draw(st.integers(1, 900)), 2, False, True, False, 100, False))
        if experts:
            tensors.append(TensorSize("layer", i, True, 700, 2, False, True, False, 400, False))
    hashed = tuple(range(draw(st.integers(0, min(3, layers))))) if experts else ()
    facts = ModelFacts(
        "qwen", layers, hashed, 100, 4096, experts, 2 if experts else 0, 8, 4, None, draw(st.booleans()), "model",
        num_kv_heads=2, ffn_size=0 if experts else 16, expert_size=8, tensors=tuple(tensors),
        layers=(LayerWidths(native=64, fp32=8, stream=8, dense=100, expert=700 if experts else 0),) * layers, boundary=8,
    )  # fmt: skip
    config = Config()
    config.engine.device, config.optimizer.offload_fraction = "cuda", draw(st.sampled_from([0.0, 1.0]))
    config.cluster.nodes, config.cluster.gpus_per_node = (
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1, 2, 4, 8])),
    )
    config.machine.gpu_memory_gib = draw(st.sampled_from([80.0, 3.00001]))
    return config, facts


@settings(max_examples=25, deadline=None)
@given(clusters())
def test_every_proposal_passes_every_rule(case):
    config, facts = case
    found = search(config, facts)
    for proposal in found:
        again = changed(config, {f"layout.{k}": v for k, v in proposal.keys.items()})
        assert plan_problems(again, facts) == [] and Plan.of(again, facts).fits
        assert proposal.gpu_gib <= config.machine.gpu_memory_gib
        stages = Inventory.of(again, facts).stages
        assert sorted(i for s in stages for i in s.layers) == list(range(facts.num_layers))
    for keys in ({"pp": pp, "ep": ep, "tp": tp} for pp in (1, 2, 3, 5) for ep in (1, 2, 3, 4) for tp in (1, 2)):
        if plan_problems(changed(config, {f"layout.{k}": v for k, v in keys.items()}), facts):
            assert not any(keys.items() <= p.keys.items() and p.keys["pin_hash_layers"] for p in found)


def test_rates_of_a_run_count(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"rates": {"decode_layer_ms": 2.12}}))
    options = dict(hw="h100", files=(), search=False, as_json=True)
    plain = json.loads(run("dsv4-pro", [], measured=None, **options).text)["step"]["rollout"]
    again = json.loads(run("dsv4-pro", [], measured=tmp_path, **options).text)
    assert again["step"]["rollout"] == pytest.approx(2 * plain)
    assert again["rates"]["decode_layer_ms"] == {"value": 2.12, "origin": str(tmp_path / "plan.json")}
    assert "optimizers_h200.json" in again["rates"]["pcie_gbps"]["source"]


@pytest.mark.parametrize("content", [
    b"", b"garbage", b"\xff\x00", b"[" * 100_000, b"[1]", b"{}", b'{"rates": [1]}', b'{"rates": {"nope": 1}}',
    b'{"rates": {"gpu_memory_gib": 1}}', *(b'{"rates": {"disk_gbps": %s}}' % v for v in (
    b'"x"', b"null", b"true", b"0", b"-1", b"NaN", b"Infinity", b"[1]")),
])  # fmt: skip
def test_damaged_rates_are_named(tmp_path, content):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(UserError) as caught:
        run("dsv4-tiny", [], hw=None, files=(), search=False, measured=tmp_path, as_json=False)
    assert caught.value.rule == "plan.measured" and str(tmp_path / "plan.json") in caught.value.what


def test_a_runs_plan_is_kept_beside_what_it_measured(tmp_path):
    config = load_config("dsv4-tiny", [])
    assert keep_comparison(tmp_path, config) == ""  # nothing was measured
    phases = {name: {"gpu_gib": 0.0, "host_gib": 4.0, "seconds": 2.0} for name in ("rollout", "update", "checkpoint")}
    (tmp_path / "measured.json").write_text(json.dumps({"phases": phases, "step": 3}))
    assert "host_gib" in keep_comparison(tmp_path, config)
    kept = json.loads((tmp_path / "plan.json").read_text())
    assert kept["phases"]["update"]["host_gib"]["measured"] == 4.0
    again = Plan.of(with_rates(config, tmp_path), read_facts(config.model.path)).timing
    assert again.rollout == pytest.approx(2.0) and again.update == pytest.approx(2.0, rel=0.01)
    with pytest.raises(UserError, match="plan.json does not exist"):
        with_rates(config, tmp_path / "none")


def test_more_tokens_take_more():
    short, long = (
        planned(hw="h100"),
        planned("rollout.max_response=8192", "engine.max_tokens_per_micro_batch=10240", hw="h100"),
    )
    for phase in ("log_prob", "update"):
        assert sum(long.memory.stages[0].gpu[phase].values()) > sum(short.memory.stages[0].gpu[phase].values())
    assert long.timing.rollout == 2 * short.timing.rollout
    assert replace(short.timing, sync=1.0).step == pytest.approx(short.timing.step - short.timing.sync + 1)
