"""The alpha-beta model of an all-reduce, piece by piece: seconds = alpha + bytes / beta on each of up to three ranges.

    model = fit([(1024, 95e-6), (65536, 140e-6), (1048576, 1.3e-3), …])
    model.seconds(300_000), model.worst

Backends change their protocol with the size, and messages outgrow caches: one line is 30 % off somewhere, three are
rarely 5 % off. Ranges are cut where the sum of squared relative errors is least; a further range is used only while the
worst error is above `ENOUGH`. Time never falls with size: a model for planning must not reward a larger message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

MOST_SEGMENTS = 3
"""Ranges of sizes with a line of their own: NCCL has three protocols, and a fourth line would fit noise."""
ENOUGH = 0.05
"""Worst relative error that needs no further range: half of the 10 % that are promised."""


@dataclass(frozen=True)
class Segment:
    """A straight line, from `from_bytes` bytes (exclusive; the first: from 0) to the next segment's."""

    from_bytes: float
    alpha_seconds: float
    """The line's value at no bytes, so it may be negative in all but the first segment."""
    seconds_per_byte: float
    """1 / beta; 0 where size does not matter."""

    @property
    def beta(self) -> float:
        """Bytes per second; infinite where size does not matter."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte else math.inf

    def seconds(self, size: float) -> float:
        """The line at `size` bytes."""
        return self.alpha_seconds + size * self.seconds_per_byte


@dataclass(frozen=True)
class Residual:
    """How far the model is off at a measured size."""

    bytes: int
    relative_error: float
    """model / measured - 1"""


@dataclass(frozen=True)
class LinkModel:
    """Seconds of an all-reduce by its bytes per rank; beyond the largest size measured, the last line goes on."""

    segments: tuple[Segment, ...]
    residuals: tuple[Residual, ...] = ()
    """Residuals, one for each measured size."""

    def seconds(self, size: float) -> float:
        """Seconds of an all-reduce of `size` bytes. Never less than for fewer bytes."""
        floor = 0.0
        for segment, following in pairwise(self.segments):
            if size <= following.from_bytes:
                return max(segment.seconds(size), floor)
            floor = max(segment.seconds(following.from_bytes), floor)
        return max(self.segments[-1].seconds(size), floor)

    @property
    def alpha(self) -> float:
        """Seconds of the smallest message there is."""
        return self.segments[0].alpha_seconds

    @property
    def worst(self) -> float:
        """The largest relative error at a measured size."""
        return max((abs(one.relative_error) for one in self.residuals), default=0.0)


def fit(points: Sequence[tuple[int, float]]) -> LinkModel:
    """The model of (bytes, seconds) pairs in any order.

    ValueError for fewer than two sizes, a size that comes twice, and values that are not positive and finite.
    """
    ordered = sorted(points)
    if len(ordered) < 2 or any(a[0] == b[0] for a, b in pairwise(ordered)):
        raise ValueError(f"a model needs two or more sizes, each once: got {[size for size, _ in ordered]}")
    if not all(0 < value < math.inf for point in ordered for value in point):
        raise ValueError("sizes and times must be positive")
    best = _model(ordered, ())
    for cuts in range(1, MOST_SEGMENTS):
        if best.worst <= ENOUGH:
            break
        candidates = [_model(ordered, places) for places in _places(len(ordered), cuts)]
        best = min([best, *candidates], key=_squares)
    return best


def _places(count: int, cuts: int) -> list[tuple[int, ...]]:
    """All ways to cut `count` points at `cuts` places so that each part keeps at least two."""
    found = combinations(range(2, count - 1), cuts)
    return [places for places in found if all(b - a >= 2 for a, b in pairwise(places))]


def _model(points: Sequence[tuple[int, float]], places: tuple[int, ...]) -> LinkModel:
    segments: list[Segment] = []
    for begin, end in zip((0, *places), (*places, len(points)), strict=True):
        alpha, per_byte = _line(points[begin:end], through_zero=begin == 0)
        start = _joint(segments[-1], alpha, per_byte, points[begin - 1][0], points[begin][0]) if segments else 0.0
        segments.append(Segment(start, alpha, per_byte))
    bare = LinkModel(tuple(segments))
    return LinkModel(bare.segments, tuple(Residual(size, bare.seconds(size) / seconds - 1) for size, seconds in points))


def _squares(model: LinkModel) -> float:
    return sum(one.relative_error**2 for one in model.residuals)


def _line(points: Sequence[tuple[int, float]], through_zero: bool) -> tuple[float, float]:
    """Alpha and seconds per byte with the least squared relative error, the slope not negative.

    The first line reaches down to no bytes, so its alpha must not be negative either. Where the free minimum breaks a
    rule, the constrained one lies on that rule's edge, because the error is convex.
    """
    scale = float(points[-1][0])  # sizes up to 1, or the sums would differ by eighteen digits
    ones = [1 / seconds for _, seconds in points]
    slopes = [size / scale / seconds for size, seconds in points]
    aa, bb = math.fsum(a * a for a in ones), math.fsum(b * b for b in slopes)
    ab = math.fsum(a * b for a, b in zip(ones, slopes, strict=True))
    a, b = math.fsum(ones), math.fsum(slopes)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:  # the sizes are too close together to tell a slope
        return a / aa, 0.0
    alpha, slope = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if slope < 0:
        return a / aa, 0.0
    if through_zero and alpha < 0:
        return 0.0, b / bb / scale
    return alpha, slope / scale


def _joint(before: Segment, alpha: float, per_byte: float, last: int, first: int) -> float:
    """Bytes at which one line hands over to the next: where they cross if from `last` to `first`, else `last`."""
    turn = before.seconds_per_byte - per_byte
    crossing = (alpha - before.alpha_seconds) / turn if turn else math.inf
    return crossing if last <= crossing <= first else float(last)
