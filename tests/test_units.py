"""Sizes in messages: readable at every size, never "0.0" of something that is there."""

from __future__ import annotations

import pytest

from moe_rl.units import size_text

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@pytest.mark.parametrize("power", range(50))
def test_a_size_is_told_within_a_twentieth_in_at_most_six_characters(power: int):
    for size in (2**power - 1, 2**power, 2**power + 1, 3 * 2**power // 2, 2**power * 1023 // 1024):
        number, unit = size_text(size).split()
        assert abs(float(number) * UNITS[unit] - size) <= size / 20
        assert len(number) <= 6 and (float(number) < 1024 or unit == "TiB")


def test_sizes_in_words():
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 2_536_244: "2.4 MiB", 2**30 - 1: "1.0 GiB", 2**50: "1024.0 TiB"}
    assert {n: size_text(n) for n in sizes} == sizes
