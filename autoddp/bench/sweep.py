"""How often each size is measured, and when to stop: a slow link must not take minutes.

    points, stopped = sweep(measure, sizes(2**30), budget=20.0)

`measure` runs the all-reduces, and has to make all ranks do the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoddp.bench.result import Point
from autoddp.timing import median, median_interval
from autoddp.units import data_size, duration

Measure = Callable[[int, int, int], "list[float]"]
"""(bytes, iterations, blocks) → for each block the seconds of one of its back-to-back iterations."""

BLOCK = 0.005  # seconds; far above the clock's resolution and the skew with which ranks begin a block
MOST_ITERATIONS = 500  # of a block: at ten microseconds each, the fastest there are, they fill it
BATCH = 5  # blocks between two looks at the clock, and the fewest for a size
MOST_BLOCKS = 40  # of a visit: the interval of the median is narrow by then, or the machine is too noisy for it
SMALL = 2**18  # bytes; up to here latency counts, and disturbances by other processes
SHARE_AGAIN = 0.2  # of the budget, for all visits but the first
MOST_VISITS = 8  # of a small size, spread over the sweep; the fastest counts
PRECISION = 0.02  # half the interval over the median: no more blocks are needed


@dataclass(frozen=True)
class Settings:
    """What the user may choose; rank 0's count for all."""

    budget: float = 20.0
    """Seconds of measuring, start-up not counted."""
    largest: int = 2**30
    """Bytes per rank."""
    factor: int = 2
    """Ratio of each size to the one before."""
    backend: str = ""
    """`gloo` or `nccl`; "": nccl where every rank has a GPU of its own, else gloo."""


def sweep(
    measure: Measure,
    sizes: Sequence[int],
    budget: float,
    seen: Callable[[Point], None] = lambda point: None,
    now: Callable[[], float] = time.monotonic,
) -> tuple[list[Point], str]:
    """Measure size after size in about `budget` seconds; the points, and why it ended early ("" if it did not).

    The small sizes are visited again and again at the end, and the fastest visit counts: what disturbs a machine for
    a while, and what has to warm up, makes them slower and never faster.

    A size is begun only if its warm-up and its fewest blocks are expected to fit, by the time per byte of the size
    before: that is too careful only where messages are so small that it costs nothing. The first size is always
    measured.
    """
    last = now() + budget
    deadline = last - budget * SHARE_AGAIN
    points: list[Point] = []
    stopped = ""
    for place, size in enumerate(sizes):
        left = deadline - now()
        if points:
            expected = (1 + BATCH) * points[-1].seconds * size / points[-1].bytes
            if expected > left:
                needs = f"it needs about {duration(math.ceil(expected))}, {duration(max(left, 0))} are left"
                stopped = f"stopped before {data_size(size)}: {needs}"
                break
        points.append(measure_size(measure, size, left / (len(sizes) - place), now))
        seen(points[-1])
    return _again(measure, points, last, now), stopped


def _again(measure: Measure, points: Sequence[Point], deadline: float, now: Callable[[], float]) -> list[Point]:
    """Visit each small size again, as often as there is time for; the points, each the fastest of its visits."""
    found = list(points)
    small = [place for place, point in enumerate(points) if point.bytes <= SMALL]
    visits = [place for _ in range(MOST_VISITS - 1) for place in small]
    for number, place in enumerate(visits):
        left = deadline - now()
        if (2 + BATCH) * max(points[place].seconds, BLOCK) > left:
            break
        once_more = measure_size(measure, points[place].bytes, left / (len(visits) - number), now)
        found[place] = min(found[place], once_more, key=lambda point: point.seconds)
    return found


def measure_size(measure: Measure, size: int, allotted: float, now: Callable[[], float] = time.monotonic) -> Point:
    """One size, in about `allotted` seconds: at least one warm-up and five blocks, more until the median is sure."""
    began = now()
    once = measure(size, 1, 1)[0]
    iterations = max(1, min(MOST_ITERATIONS, math.ceil(BLOCK / once)))
    if iterations > 1:  # the very first one sets up connections and takes longer than the others
        once = min(once, measure(size, iterations, 1)[0])
        iterations = max(1, min(MOST_ITERATIONS, math.ceil(BLOCK / once)))
    seconds: list[float] = []
    while True:
        seconds += measure(size, iterations, BATCH)
        middle, (low, high) = median(seconds), median_interval(seconds)
        sure = len(seconds) > BATCH and high - low <= 2 * PRECISION * middle
        if sure or len(seconds) >= MOST_BLOCKS or now() - began + BATCH * iterations * middle > allotted:
            return Point(size, middle, low, high, len(seconds) * iterations)
