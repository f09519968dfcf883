"""The numbers on an axis."""

from __future__ import annotations

from verifiers.train.watching.ticks import round_ticks


def test_ticks_are_round_and_span_the_data() -> None:
    assert round_ticks([0.03, 0.97], 5) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert round_ticks([0, 60], 6) == [0, 10, 20, 30, 40, 50, 60]
    assert round_ticks([900, 1200], 5) == [900, 1000, 1100, 1200]
    assert round_ticks([], 5) == [0, 0.2, 0.4, 0.6, 0.8, 1]


def test_equal_values_have_a_scale_around_them() -> None:
    assert round_ticks([0.7, 0.7], 5)[0] < 0.7 < round_ticks([0.7, 0.7], 5)[-1]
