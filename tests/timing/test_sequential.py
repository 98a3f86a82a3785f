"""Bounds that are looked at again and again: what they let through where nothing gains, and what they find."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autoddp.timing import LOOKS, bound, likely, speedup
from autoddp.timing.sequential import ERROR, TESTS

ROWS = 400_000


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    """Student's t of rows of normal noise at each look."""
    rows = np.random.default_rng(7).standard_normal((ROWS, LOOKS[-1]))
    return np.stack([rows[:, :n].mean(1) / (rows[:, :n].std(1, ddof=1) / math.sqrt(n)) for n in LOOKS], axis=1)


@pytest.mark.parametrize("tests", TESTS[:4])
def test_whoever_looks_each_time_is_wrong_as_often_as_said(noise: np.ndarray, tests: int) -> None:
    """Of all rows, over all looks together. Their number gives the share a spread of a few percent of itself."""
    reached = (noise > np.array([bound(rounds, tests) for rounds in LOOKS])).any(axis=1)
    assert reached.mean() == pytest.approx(ERROR / tests, rel=0.15)


def test_the_usual_interval_would_be_wrong_far_more_often(noise: np.ndarray) -> None:
    usual = np.array([9.925, 5.841, 4.604, 4.032, 3.499, 3.250, 3.106])  # two-sided 99 %
    assert (noise > usual).any(axis=1).mean() > 2 * ERROR


def test_bounds_fall_with_rounds_and_rise_with_configurations() -> None:
    for tests in TESTS:
        of_looks = [bound(rounds, tests) for rounds in LOOKS]
        assert of_looks == sorted(of_looks, reverse=True)
    for rounds in LOOKS:
        of_tests = [bound(rounds, tests) for tests in TESTS]
        assert of_tests == sorted(of_tests)
    assert (bound(7, 1), bound(20, 1), bound(3, 5), bound(3, 99)) == (
        bound(8, 1),
        bound(12, 1),
        bound(3, 6),
        bound(3, TESTS[-1]),
    )


def test_a_large_gain_is_sure_after_three_rounds_and_a_small_one_is_not() -> None:
    before = [1.00, 1.02, 0.98]
    assert speedup(before, [0.50, 0.51, 0.50], bound(3, 2)).sure
    assert not speedup(before, [0.95, 0.96, 0.97], bound(3, 2)).sure


def test_what_is_likely_lies_within_what_is_sure() -> None:
    before, after = [1.00, 1.02, 0.98, 1.01], [0.80, 0.82, 0.79, 0.78]
    low, high = likely(before, after)
    sure = speedup(before, after, bound(4, 1))
    assert sure.low < low < sure.ratio < high < sure.high
    assert likely(before[:2], after[:2]) == (0.0, math.inf)
