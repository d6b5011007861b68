"""From a trainer in shards to a rollout, both real."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.sync_plan import trainer_shares
from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from moe_rl.models.deepseek_v4.weights import weight_table
from moe_rl.models.digest import digest_all
from moe_rl.models.weights import whole_parts
from moe_rl.reshard.plan import Owned, make_plan, plan_shares, shares
from moe_rl.reshard.transport import pack
from tests.distributed import run_ranks
from tests.small_v4 import model_config, run_config, sequences, write_model

SEQUENCES = sequences((23, 9, 40, 14))


def _trained_shards(rank, world, port, path):
    """One update at PP2 x EP2; what this rank owns afterwards, and log-probs where this rank has them."""
    from moe_rl.engine.batch import MicroBatch
    from moe_rl.engine.engine import Engine
    from moe_rl.models.weights import dtype_name

    keys = dict(layout__pp=2, layout__stages="Ettt|ttL", layout__ep=2)
    engine = Engine.create(run_config(path, world, **keys), rank, world, f"127.0.0.1:{port}", random_init=True)
    batches = [MicroBatch.pack([s], [{"weight": np.full(len(s) - 1, 0.01)}], [i]) for i, s in enumerate(SEQUENCES)]
    engine.update(
        batches, lambda logprobs, entropy, fields: (-(logprobs * fields["weight"]).sum(), {}), temperature=1.0
    )
    scores = {ids[0]: logprobs[0] for ids, logprobs, *_ in engine.log_probs(batches, temperature=1.0)}
    views = {name: part.view for name, (part,) in engine.weights().items()}
    owned = [Owned(rank, name, tuple(v.shape), dtype_name(v)) for name, v in views.items()]
    arrays = {name: v.numpy().copy() for name, v in views.items()}
    digests = engine.digest()
    engine.close()
    return engine.parallel.ep_rank, owned, arrays, digests, scores


def test_a_trained_model_in_shards_becomes_one_rollout_that_scores_alike(tmp_path):
    """PP2 x EP2 after an update -> plan -> packets -> live transformers model: same bits, same log-probs."""
    from moe_rl.rollout.transformers_engine import TransformersEngine

    path = write_model(tmp_path / "model")
    ranks = run_ranks(_trained_shards, 4, str(path))
    specs = weight_table(DeepseekV4Arch.from_dict(model_config())).expected()
    names = [{o.name for o in owned} for _, owned, *_ in ranks]
    assert set().union(*names) == specs.keys()
    for mine, (ep_rank, *_) in zip(names, ranks, strict=True):
        assert {specs[n].expert // 2 for n in mine if specs[n].expert is not None} == {ep_rank}
    engine = TransformersEngine(path)
    held = engine.holdings(0)
    plan = make_plan([o for _, owned, *_ in ranks for o in owned], held)
    assert len(plan.transfers) == 4
    # what the ranks of this layout list without each other, as full-size plans are made, is what the real ones list
    alone = trainer_shares(str(path), pp=2, ep=2, world=4, stages="Ettt|ttL", dtype="fp32")
    assert plan_shares(alone, shares(held)) == plan
    dtypes = {h.name: h.dtype for h in held}
    packets = []
    for source, _, boxes, _ in plan.transfers:
        parts = whole_parts({n: torch.from_numpy(a) for n, a in ranks[source][2].items()})
        packets += pack(parts, boxes, dtypes, version=1, source=source)
    assert sum(packet.nbytes for packet in packets) == plan.nbytes
    engine.receive(packets, 1, plan.names[0])
    live = digest_all({name: part.view for name, (part,) in engine._receiver._parts.items()})
    for _, _, _, digests, _ in ranks:
        assert all(live[name] == value for name, value in digests.items())
    scores = {k: v for *_, found in ranks for k, v in found.items()}
    assert scores.keys() == set(range(len(SEQUENCES)))
    for i, sequence in enumerate(SEQUENCES):
        tokens = torch.from_numpy(sequence)[None]
        with torch.no_grad():
            logprobs = engine._model(tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
        np.testing.assert_allclose(scores[i], logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy(), atol=1e-5)
