"""Packed micro-batches and the learning-rate schedule, against values worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.engine.batch import MicroBatch
from moe_rl.engine.schedule import learning_rate, scheduled_rate
from moe_rl.errors import UserError
from tests.small_v4 import run_config


def test_pack_lays_sequences_end_to_end():
    m = MicroBatch.pack(
        [np.array([5, 6, 7]), np.array([8]), np.array([9, 1])],
        [{"w": np.array([0.5, 0.25])}, {"w": np.zeros(0)}, {"w": np.array([2.0])}],
        [10, 11, 12],
    )
    assert m.ids == (10, 11, 12) and m.lengths == (3, 1, 2)
    assert m.tokens.tolist() == [5, 6, 7, 8, 9, 1] and m.tokens.dtype == torch.int64
    # a label is the next token of the same sequence; where there is none, label and field are 0
    assert m.labels.tolist() == [6, 7, 0, 0, 1, 0]
    assert m.fields["w"].tolist() == [0.5, 0.25, 0, 0, 2, 0] and m.fields["w"].dtype == torch.float32


def test_unpack_drops_the_last_position_of_each_sequence():
    m = MicroBatch.pack([[5, 6, 7], [8], [9, 1]])
    parts = m.unpack(torch.tensor([1.0, 2, 99, 99, 3, 99], dtype=torch.float64))
    assert [p.tolist() for p in parts] == [[1, 2], [], [3]]
    assert all(p.dtype == np.float32 for p in parts)
    with pytest.raises(ValueError, match="6 tokens"):
        m.unpack(torch.zeros(5))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_fields_come_back_as_they_went_in(lengths, random):
    fields = [{"a": np.array([random.random() for _ in range(n - 1)], dtype=np.float32)} for n in lengths]
    m = MicroBatch.pack([np.arange(n) for n in lengths], fields)
    for given_, found in zip(fields, m.unpack(m.fields["a"]), strict=True):
        assert np.array_equal(given_["a"], found)
    packed = m.packed_sequences()
    assert packed.total == len(m.tokens) == sum(lengths)
    assert packed.positions.tolist() == [i for n in lengths for i in range(n)]


@pytest.mark.parametrize(
    ("sequences", "fields", "says"),
    [
        ([], [], "at least one sequence"),
        ([[1, 2], []], None, "at least one token"),
        ([[1, 2, 3]], [{"w": np.zeros(3)}], "tokens after the first are 2"),
        ([[1, 2], [3, 4]], [{"w": np.zeros(1)}, {"v": np.zeros(1)}], "same fields"),
        ([[1, 2], [3, 4]], [{"w": np.zeros(1)}], "1 sets of fields"),
    ],
)
def test_refused(sequences, fields, says):
    with pytest.raises(UserError, match=says):
        MicroBatch.pack(sequences, fields)


def test_rates_by_hand():
    # warm-up of 4 steps to 8, then 5 more steps (4..8) down to 2: the last of 9 steps has the floor
    shape = dict(peak=8.0, floor=2.0, warmup_steps=4, total_steps=9)
    assert [learning_rate(s, shape="linear", **shape) for s in range(11)] == [2, 4, 6, 8, 8, 6.5, 5, 3.5, 2, 2, 2]
    cosine = [learning_rate(s, shape="cosine", **shape) for s in (4, 5, 6, 8, 20)]
    assert cosine == pytest.approx([8, 2 + 6 * (0.5 + math.sqrt(0.125)), 5, 2, 2])
    assert [learning_rate(s, shape="constant", **shape) for s in (0, 3, 4, 100)] == [2, 8, 8, 8]
    assert learning_rate(0, peak=1.0, floor=0.0, shape="linear", warmup_steps=0, total_steps=1) == 1.0


def test_a_run_spans_all_its_optimizer_steps():
    config = run_config(
        "m", optimizer__lr=1.0, optimizer__schedule="linear", trainer__steps=3, algorithm__minibatches=2
    )
    config.algorithm.epochs = 2
    # 3 steps of 2 minibatches twice over: 12 optimizer steps, the 12th (index 11) ends at the floor
    assert [scheduled_rate(config, s) for s in (0, 11)] == [1.0, 0.0]
    assert scheduled_rate(config, 1) == pytest.approx(10 / 11)
