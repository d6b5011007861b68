"""Batching: every index once, budgets kept, ranks in step, and close to balanced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.config import load_config
from moe_rl.config.facts import LayerWidths
from moe_rl.config.flops import Flops
from moe_rl.grpo.batching import micro_batches, minibatches
from moe_rl.models.family import read_facts

lengths_strategy = st.lists(st.integers(1, 60), min_size=1, max_size=60)


@settings(max_examples=300, deadline=None)
@given(lengths_strategy, st.integers(1, 100), st.integers(1, 5), st.integers(1, 4))
def test_micro_batch_properties(lengths, max_tokens, dp, multiple_of):
    ranks = micro_batches(lengths, max_tokens, dp, multiple_of)
    assert len(ranks) == dp
    assert len({len(r) for r in ranks}) == 1 and len(ranks[0]) % multiple_of == 0 and ranks[0]
    real = [m for r in ranks for m in r if not m.filler]
    fillers = [m for r in ranks for m in r if m.filler]
    assert sorted(i for m in real for i in m.indices) == list(range(len(lengths)))
    for m in real:
        assert m.indices and (len(m.indices) == 1 or sum(lengths[i] for i in m.indices) <= max_tokens)
    for m in fillers:
        assert len(m.indices) == 1 and lengths[m.indices[0]] == min(lengths)
    assert not fillers or len(real) == len(lengths)  # a filler only where samples are fewer than slots
    assert ranks == micro_batches(list(lengths), max_tokens, dp, multiple_of)


def test_hand_worked():
    # two bins: 5, 5, then 4 and 4 beside them, and 2 has no room; three: 5 | 5 | 4, 4 to the third, 2 to the first
    ranks = micro_batches([5, 4, 2, 5, 4], 10, dp=1)
    assert [m.indices for m in ranks[0]] == [(1, 4), (0, 2), (3,)]
    ranks = micro_batches([8, 8, 1, 1], 9, dp=2)
    assert [[m.indices for m in r] for r in ranks] == [[(0, 2)], [(1, 3)]]


def test_a_sequence_over_the_budget_stands_alone():
    ranks = micro_batches([50, 3, 3, 3], 10, dp=1)
    assert [m.indices for m in ranks[0]] == [(0,), (1, 2, 3)]


def test_fewer_samples_than_slots():
    ranks = micro_batches([7, 3], 10, dp=2, multiple_of=2)
    assert [len(r) for r in ranks] == [2, 2]
    assert sum(m.filler for r in ranks for m in r) == 2
    assert all(m.indices == (1,) for r in ranks for m in r if m.filler)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=8, max_size=80), st.integers(2, 4))
def test_ranks_are_balanced(lengths, dp):
    """Graham's bound: the heaviest of m holds at most sum / m + (1 - 1 / m) * longest; ranks differ by one at most."""
    ranks = micro_batches(lengths, 64, dp)
    loads = [sum(lengths[i] for m in r for i in m.indices) for r in ranks]
    costs = [sum(lengths[i] for i in m.indices) for r in ranks for m in r]
    assert max(loads) - min(loads) <= max(costs)
    assert max(costs) <= sum(lengths) / len(costs) + (1 - 1 / len(costs)) * max(lengths) + 1e-9


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=8, max_size=80), st.integers(1, 4), st.integers(40, 200))
def test_costs_are_balanced_within_the_budget(lengths, dp, budget):
    """With a cost that grows faster than the length: Graham's bound wherever no bin was passed over for its tokens; the budget
    and each index once, always."""

    def cost(length: int) -> float:
        return length + length**2 / 8

    ranks = micro_batches(lengths, budget, dp, 1, cost)
    batches = [m for r in ranks for m in r]
    assert sorted(i for m in batches if not m.filler for i in m.indices) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in m.indices) <= budget for m in batches)
    costs = [sum(cost(lengths[i]) for i in m.indices) for m in batches]
    if max(sum(lengths[i] for i in m.indices) for m in batches) + max(lengths) <= budget:
        assert max(costs) <= sum(costs) / len(costs) + max(map(cost, lengths)) + 1e-9
    loads = [sum(cost(lengths[i]) for m in r for i in m.indices) for r in ranks]
    assert max(loads) - min(loads) <= max(costs)


def test_a_long_answer_weighs_more_than_its_tokens():
    """By tokens 8 | 4 4 would be even; by cost the rank with the long one is given nothing else, and four go three and one."""
    assert [[m.indices for m in r] for r in micro_batches([8, 4, 4, 1, 1], 100, dp=2)] == [[(0, 3)], [(1, 2, 4)]]
    ranks = micro_batches([8, 4, 4, 1, 1], 100, 2, 1, lambda length: length**2)
    assert [[m.indices for m in r] for r in ranks] == [[(0,)], [(1, 2, 3, 4)]]
    # the cheapest has no room: the next one takes it
    ranks = micro_batches([6, 5, 5, 2], 12, 2, 1, lambda length: length**2)
    assert [[m.indices for m in r] for r in ranks] == [[(1, 2)], [(0, 3)]]


@pytest.mark.parametrize(("model", "gain"), [("dsv4-pro", 1.03), ("causal", 1.2)])
def test_ranks_wait_less_by_cost_than_by_tokens(model, gain):
    """Lengths as of a reasoning task, 20 steps: the mean rank's idle share. Causal attention (the sizes are Qwen3-30B's) grows
    much faster with the length than DeepSeek-V4's."""
    flops = Flops(6 * 3e9, (LayerWidths(pair_work=2 * 4096),) * 48)
    if model != "causal":
        flops = Flops.of(read_facts(load_config(model).model.path))
    random, waits = np.random.default_rng(0), {"tokens": 0.0, "cost": 0.0}
    for _ in range(20):
        lengths = np.minimum(random.lognormal(7.5, 1.0, 64).astype(int) + 16, 16384).tolist()
        for name, cost in (("tokens", float), ("cost", flops.sequence)):
            loads = [
                sum(flops.sequence(lengths[i]) for m in r if not m.filler for i in m.indices)
                for r in micro_batches(lengths, 16384, 4, 1, cost)
            ]
            waits[name] += 1 - np.mean(loads) / max(loads)
    assert waits["tokens"] > gain * waits["cost"]


def test_micro_batches_refuse():
    for args in (([], 5), ([0], 5), ([1], 0), ([1], 5, 0), ([1], 5, 1, 0)):
        with pytest.raises(ValueError):
            micro_batches(*args)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 6), st.integers(0, 99))
def test_minibatches(groups, group, count, seed):
    n = groups * group
    if count > groups:
        with pytest.raises(ValueError):
            minibatches(n, count, group=group, seed=seed)
        return
    parts = minibatches(n, count, group=group, seed=seed)
    assert len(parts) == count and sorted(i for p in parts for i in p) == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= group
    for part in parts:  # a group is never torn
        assert all(len([i for i in part if i // group == g]) == group for g in {i // group for i in part})
    assert parts == minibatches(n, count, group=group, seed=seed)


def test_minibatches_shuffle_by_seed():
    assert minibatches(8, 1, seed=3) == [list(range(8))]
    cuts = {str(minibatches(16, 4, group=2, seed=s)) for s in range(5)}
    assert len(cuts) == 5
    with pytest.raises(ValueError):
        minibatches(7, 2, group=2)
