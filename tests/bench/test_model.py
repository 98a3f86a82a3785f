"""The piecewise model finds what made the data, never falls with size, and survives JSON."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddp.bench import LinkModel, Segment, fit, sizes
from autoddp.codec import decode, encode

SIZES = sizes(2**30)
GENEROUS = settings(max_examples=60, deadline=None)


def one(size: float) -> float:
    return 30e-6 + size / 10e9


def two(size: float) -> float:
    """A latency that grows slowly up to 64 KiB, then a bandwidth: both meet there."""
    return 50e-6 + size / 2e9 if size <= 65536 else 50e-6 + 65536 / 2e9 + (size - 65536) / 10e9


def three(size: float) -> float:
    """Convex at the end: the messages outgrow a cache, and the last line's alpha is negative."""
    return two(size) if size <= 2**24 else two(2**24) + (size - 2**24) / 3e9


def jump(size: float) -> float:
    """A second protocol that begins with a handshake."""
    return 20e-6 + size / 5e9 if size <= 2**15 else 90e-6 + size / 12e9


CURVES: dict[str, tuple[Callable[[float], float], int]] = {
    "one line": (one, 1),
    "two lines": (two, 2),
    "three lines": (three, 3),
    "a jump": (jump, 2),
}


@pytest.mark.parametrize("name", CURVES)
def test_the_lines_are_found(name: str) -> None:
    curve, lines = CURVES[name]
    model = fit([(size, curve(size)) for size in SIZES])
    assert len(model.segments) <= lines
    assert model.worst <= 0.05


def test_three_lines_and_their_breakpoints() -> None:
    def curve(size: float) -> float:
        return min(100e-6 + size / 1e9, 400e-6 + size / 4e9) if size <= 2**22 else curve(2**22) + (size - 2**22) / 5e8

    model = fit([(size, curve(size)) for size in SIZES])
    assert [s.from_bytes for s in model.segments] == pytest.approx([0, 4e5, 2**22], rel=1e-6)
    assert [s.beta for s in model.segments] == pytest.approx([1e9, 4e9, 5e8], rel=1e-6)
    assert [s.alpha_seconds for s in model.segments[:2]] == pytest.approx([100e-6, 400e-6], rel=1e-6)
    assert model.alpha == model.segments[0].alpha_seconds
    assert model.worst < 1e-6
    for size in (1, 3000, 300_000, 5_000_000, 2**31):  # between the sizes measured, and beyond them
        assert model.seconds(size) == pytest.approx(curve(size), rel=1e-6)


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("seed", range(5))
def test_noise_of_three_percent(name: str, seed: int) -> None:
    curve, _ = CURVES[name]
    noise = random.Random(seed)
    model = fit([(size, curve(size) * noise.uniform(0.97, 1.03)) for size in SIZES])
    assert model.worst <= 0.10
    assert all(model.seconds(size) == pytest.approx(curve(size), rel=0.10) for size in SIZES)


def test_the_order_of_points_does_not_matter() -> None:
    points = [(size, three(size)) for size in SIZES]
    assert fit(points[::-1]) == fit(points)


def test_time_that_falls_with_size_is_levelled() -> None:
    model = fit([(1024, 2e-3), (2048, 2e-3), (4096, 1e-3), (8192, 1e-3), (16384, 1e-3)])
    assert model.seconds(16384) >= model.seconds(4096) >= model.seconds(1024)


def test_beta_without_a_slope() -> None:
    assert Segment(0, 1e-3, 0).beta == float("inf")
    assert fit([(1024, 1e-3), (2048, 1e-3)]).segments[0].seconds_per_byte == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ([], "two or more sizes"),
        ([(1024, 1e-3)], "two or more sizes"),
        ([(1024, 1e-3), (1024, 2e-3)], "each once"),
        ([(1024, 1e-3), (2048, 0.0)], "must be positive"),
        ([(1024, 1e-3), (2048, float("nan"))], "must be positive"),
    ],
)
def test_what_cannot_be_fitted(points: list[tuple[int, float]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fit(points)


counts = st.lists(st.integers(1, 2**31), min_size=2, max_size=12, unique=True)
times = st.floats(1e-7, 1e3)


@GENEROUS
@given(data=st.data(), at=counts)
def test_whatever_was_measured(data: st.DataObject, at: list[int]) -> None:
    """Positive, never falling, and not worse than the straight line; residuals say what the model does."""
    points = [(size, data.draw(times)) for size in at]
    model = fit(points)
    places = sorted({0.0, *map(float, at), *(s.from_bytes for s in model.segments), 2.0**32})
    predicted = [model.seconds(place) for place in places]
    assert all(a <= b for a, b in pairwise(predicted))
    assert predicted[1] > 0
    for (size, seconds), residual in zip(sorted(points), model.residuals, strict=True):
        same, error = residual.bytes, residual.relative_error
        assert same == size
        assert model.seconds(size) == pytest.approx(seconds * (1 + error))
    starts = [s.from_bytes for s in model.segments]
    assert starts[0] == 0
    assert starts == sorted(starts)


@GENEROUS
@given(alpha=st.floats(1e-6, 1e-2), beta=st.floats(1e6, 1e12), at=counts)
def test_a_straight_line_is_its_own_model(alpha: float, beta: float, at: list[int]) -> None:
    model = fit([(size, alpha + size / beta) for size in at])
    assert model.worst < 1e-3


@GENEROUS
@given(data=st.data(), at=counts)
def test_json_round_trip(data: st.DataObject, at: list[int]) -> None:
    model = fit([(size, data.draw(times)) for size in at])
    text = encode(model)
    assert "NaN" not in text
    assert "Infinity" not in text
    assert decode(text, LinkModel) == model
