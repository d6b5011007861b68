"""The stage notation, the balanced default and its checks; megatron-core's own parser is the reference."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.config.layout import (
    default_stages,
    expand,
    format_stages,
    layers_of,
    parse,
    resolve_stages,
    validate_stages,
)
from moe_rl.errors import UserError


@pytest.mark.parametrize(
    ("stages", "expanded"),
    [
        ("Et|tL", "Et|tL"),
        ("Et*3|t*2L", "Ettt|ttL"),
        ("E t*2 | t L", "Ett|tL"),
        ("Et|(tt|)*3,L", "Et|tt|tt|tt|L"),
        ("E(t|)*2tL", "Et|t|tL"),
        ("E|t*12L", "E|" + "t" * 12 + "L"),
        ("(t*2|)*2L", "tt|tt|L"),
    ],
)
def test_expand(stages: str, expanded: str):
    assert expand(stages) == expanded


def test_format_is_short_and_reads_back():
    assert format_stages(["Ettt", "ttL"]) == "Et*3|ttL"
    assert expand(format_stages(["E" + "t" * 7, "tttt", "tL"])) == "Ettttttt|tttt|tL"


@pytest.mark.parametrize("stages", ["Ex|L", "Ettm|L", "E*|L", "Et|tL)", "Et*99999999999|tL"])
def test_bad_notation(stages: str):
    with pytest.raises(UserError, match="layout.stages"):
        expand(stages)
    [problem] = validate_stages(stages, 3, (), 2, 1, True)
    assert problem.rule == "layout.stages" and problem.fix


@pytest.mark.parametrize(
    ("layers", "hashed", "pp", "vpp", "pin", "expected"),
    [
        (5, (0, 1), 1, 1, True, "EtttttL"),
        (5, (0, 1), 2, 1, True, "Ettt|ttL"),
        (5, (), 4, 1, True, "Et|tt|t|tL"),
        (6, (), 4, 1, True, "Et|tt|tt|tL"),
        (7, (), 4, 1, True, "Ett|tt|tt|tL"),
        (6, (0, 1, 2), 4, 1, True, "Ettt|t|t|tL"),
        (8, (0, 1, 2), 4, 1, True, "Ettt|tt|tt|tL"),
        (6, (0, 1, 2), 4, 1, False, "Et|tt|tt|tL"),
        (4, (0,), 2, 2, True, "Et|t|t|tL"),
        (6, (2,), 2, 2, True, "Ettt|t|t|tL"),
    ],
)
def test_default(layers, hashed, pp, vpp, pin, expected):
    assert default_stages(layers, hashed, pp, vpp, pin) == expected


@pytest.mark.parametrize(
    ("layers", "hashed", "pp", "vpp", "pin", "most"),
    [(3, (), 4, 1, True, 3), (4, (0, 1), 4, 1, True, 3), (5, (0, 1, 2), 2, 2, True, 3), (2, (), 1, 3, True, 2)],
)
def test_too_many_stages(layers, hashed, pp, vpp, pin, most):
    with pytest.raises(UserError) as caught:
        default_stages(layers, hashed, pp, vpp, pin)
    assert caught.value.rule == "layout.too_many_stages"
    assert f"at most {most}" in caught.value.fix


def test_a_pin_is_lifted_where_it_alone_stands_in_the_way():
    with pytest.raises(UserError, match="pin_hash_layers=false"):
        default_stages(4, (0, 1), 4)
    assert default_stages(4, (0, 1), 4, pin_hash_layers=False) == "Et|t|t|tL"


@given(
    layers=st.integers(1, 70), hashed=st.integers(0, 4), pp=st.integers(1, 16), vpp=st.integers(1, 4), pin=st.booleans()
)
def test_default_is_valid_and_balanced(layers, hashed, pp, vpp, pin):
    hash_layers = tuple(range(min(hashed, layers)))
    try:
        stages = default_stages(layers, hash_layers, pp, vpp, pin)
    except UserError:
        pinned = len(hash_layers) if pin and pp * vpp > 1 else 0
        assert pp * vpp > layers - max(pinned - 1, 0)
        return
    assert validate_stages(stages, layers, hash_layers, pp, vpp, pin) == []
    counts = [segment.count("t") for segment in parse(stages)]
    free = counts[1:] if counts[0] == len(hash_layers) else counts
    assert not free or max(free) - min(free) <= 1
    assert counts[-1] == min(counts[1:] or counts)  # the loss stage never holds more than another
    assert resolve_stages("", layers, hash_layers, pp, vpp, pin) == stages


@pytest.mark.parametrize(
    ("stages", "rule"),
    [
        ("Ettt|tt|L", "layout.segments"),
        ("Ettt|tL", "layout.layers"),
        ("Ettt|tttL", "layout.layers"),
        ("tttE|ttL", "layout.ends"),
        ("Ettt|tt", "layout.ends"),
        ("EtttL|ttL", "layout.ends"),
        ("Ettt|tLt", "layout.ends"),
        ("Ettttt|L", "layout.empty_stage"),
        ("Et|ttttL", "layout.hash_layers"),
    ],
)
def test_validate_names_the_fault(stages: str, rule: str):
    problems = validate_stages(stages, 5, (0, 1), 2, 1, True)
    assert rule in [p.rule for p in problems]
    assert all(p.why and p.fix and p.key == "layout.stages" for p in problems)


def test_hash_layers_may_be_spread_when_asked():
    assert validate_stages("Et|ttttL", 5, (0, 1), 2, 1, False) == []
    assert validate_stages("EtttttL", 5, (0, 4), 1, 1, True) == []  # one stage holds everything


def test_layers_of_counts_on():
    assert layers_of("Ett|t|tttL") == [range(0, 2), range(2, 3), range(3, 6)]


@pytest.mark.parametrize(("stages", "pp"), [("Ettt|ttL", 2), ("Ett|t|t|tL", 2), ("Et*3|(tt|)*5tL", 7), ("EtL", 1)])
def test_megatron_reads_the_same_layers(stages: str, pp: int):
    module = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    layout = module.PipelineParallelLayerLayout(expand(stages), pp)
    vpp = layout.virtual_pipeline_model_parallel_size
    assert layout.virtual_pipeline_model_parallel_size * pp == len(parse(stages))
    for i, layers in enumerate(layers_of(stages)):
        chunk, rank = i // pp, i % pp
        offset = sum(
            layout.layout[r][v].count(module.LayerType.decoder) for v in range(vpp) for r in range(pp) if v * pp + r < i
        )
        assert layout.layout[rank][chunk].count(module.LayerType.decoder) == len(layers)
        assert offset == layers.start
    layout.validate_layer_layout(sum(map(len, layers_of(stages))), 0)
