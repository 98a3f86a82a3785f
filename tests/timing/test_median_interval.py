"""An interval for the median that assumes nothing about the distribution."""

from __future__ import annotations

import random

import pytest

from autoddp.timing import median_interval


def test_it_covers_the_median_about_as_often_as_it_says() -> None:
    source = random.Random(1)
    for count in (8, 12, 30, 41):
        samples = ([source.expovariate(1.0) for _ in range(count)] for _ in range(2000))
        covered = sum(low <= 0.6931 <= high for low, high in map(median_interval, samples))
        assert covered / 2000 > 0.985  # at least 99 %, less three sigma


def test_it_narrows() -> None:
    values = [float(value) for value in range(41)]
    assert median_interval(values[:7]) == (0.0, 6.0)
    assert median_interval(values) == (11.0, 29.0)
    assert median_interval([2.0]) == (2.0, 2.0)
    with pytest.raises(ValueError, match="no values"):
        median_interval([])
