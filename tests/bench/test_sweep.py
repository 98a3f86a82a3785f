"""How often a size is measured and where a sweep ends, on links of plain arithmetic that have a clock of their own."""

from __future__ import annotations

import random

import pytest

from autoddp.bench import Point, measure_size, sizes, sweep
from autoddp.bench.sweep import BATCH, BLOCK, MOST_BLOCKS, MOST_ITERATIONS, SMALL


class Link:
    """A link of `alpha` seconds and `beta` bytes per second, and the clock that its messages move on."""

    def __init__(self, alpha: float, beta: float, noise: float = 0.0) -> None:
        self.alpha, self.beta, self.noise = alpha, beta, noise
        self.time = 0.0
        self.calls: list[tuple[int, int, int]] = []
        self._random = random.Random(0)

    def now(self) -> float:
        return self.time

    def measure(self, size: int, iterations: int, blocks: int) -> list[float]:
        self.calls.append((size, iterations, blocks))
        exact = self.alpha + size / self.beta
        seconds = [exact * (1 + self._random.uniform(-self.noise, self.noise)) for _ in range(blocks)]
        self.time += sum(seconds) * iterations
        return seconds


def test_a_fast_link_is_measured_whole() -> None:
    link = Link(20e-6, 10e9)
    seen: list[Point] = []
    points, stopped = sweep(link.measure, sizes(2**30), 20.0, seen.append, link.now)
    assert stopped == ""
    assert [point.bytes for point in points] == sizes(2**30)
    assert seen == points
    assert link.time < 20.0
    for point in points:
        assert point.seconds == pytest.approx(20e-6 + point.bytes / 10e9)
        assert point.low <= point.seconds <= point.high


@pytest.mark.parametrize("mbit", [1, 10, 100, 1000])
def test_a_slow_link_keeps_to_the_budget(mbit: int) -> None:
    link = Link(500e-6, mbit * 125e3, noise=0.1)
    points, stopped = sweep(link.measure, sizes(2**30), 20.0, now=link.now)
    assert "stopped before" in stopped
    assert "are left" in stopped
    assert 10.0 < link.time < 22.0  # most of it is used
    assert len(points) > 5


def test_the_first_size_is_always_measured() -> None:
    link = Link(10.0, 1e3)
    points, stopped = sweep(link.measure, sizes(2**20), 1.0, now=link.now)
    assert [point.bytes for point in points] == [1024]
    assert stopped == "stopped before 2.0 KiB: it needs about 2 min 13 s, 0 s are left"


def test_small_messages_go_in_long_blocks() -> None:
    link = Link(20e-6, 10e9)
    point = measure_size(link.measure, 1024, 1.0, link.now)
    (_, first, _), (_, warm, _), *blocks = link.calls
    assert first == 1
    assert warm == pytest.approx(250, abs=2)
    assert all(iterations * 20e-6 == pytest.approx(BLOCK, rel=0.1) for _, iterations, _ in blocks)
    assert point.repetitions == sum(iterations * count for _, iterations, count in blocks)
    assert len(blocks) == 2  # of five blocks each: without noise the interval is narrow at once
    quick = Link(1e-9, 1e15)
    measure_size(quick.measure, 1024, 1.0, quick.now)
    assert max(iterations for _, iterations, _ in quick.calls) == MOST_ITERATIONS


def test_noise_asks_for_more_blocks_but_not_without_end() -> None:
    link = Link(10e-3, 1e12, noise=0.5)
    measure_size(link.measure, 1024, 1e9, link.now)
    assert sum(blocks for *_, blocks in link.calls[1:]) == MOST_BLOCKS
    hurried = Link(10e-3, 1e12, noise=0.5)
    measure_size(hurried.measure, 1024, 0.0, hurried.now)
    assert hurried.calls == [(1024, 1, 1), (1024, 1, BATCH)]


def test_a_machine_that_is_slow_for_a_while_hides_no_small_size() -> None:
    """For three seconds out of six, every message takes three times as long."""

    class Moody(Link):
        def measure(self, size: int, iterations: int, blocks: int) -> list[float]:
            slow = 3.0 if int(self.time / 3) % 2 else 1.0
            found = [slow * seconds for seconds in super().measure(size, iterations, blocks)]
            self.time += sum(found) * iterations * (slow - 1) / slow
            return found

    link = Moody(400e-6, 125e6, noise=0.02)
    points, _ = sweep(link.measure, sizes(2**20), 60.0, now=link.now)
    for point in points:
        if point.bytes <= SMALL:
            assert point.seconds == pytest.approx(400e-6 + point.bytes / 125e6, rel=0.05)
