"""When a measurement is called hung: never while a rank moves, and later where it may wait for compilers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoddp.codec import replace
from autoddp.launch.hang_timeout import HangTimeout
from autoddp.wire import Measure

SHORT, LONG = Measure(0, {}, 1, 3), Measure(0, {}, 1, 20, compare=4)


def test_seconds_without_a_sign_of_life() -> None:
    unknown, fast, slow = HangTimeout(), HangTimeout(step_seconds=0.01), HangTimeout(step_seconds=4.0)
    assert unknown.of(SHORT) > slow.of(LONG) / 3 > fast.of(LONG) == fast.of(SHORT)
    assert slow.of(LONG) > slow.of(SHORT) > 4 * slow.step_seconds
    assert slow.of(replace(LONG, at_once=4)) == 4 * slow.of(LONG)


def test_compilers_are_waited_for() -> None:
    eager, compiled = HangTimeout(step_seconds=0.01), HangTimeout(step_seconds=0.01, compiles=True)
    assert compiled.of(SHORT) > 5 * eager.of(SHORT)
    assert HangTimeout(step_seconds=9.0, compiles=True).of(LONG) == HangTimeout(step_seconds=9.0).of(LONG)


@pytest.mark.parametrize("jump", [0.0, 3600.0, -3600.0])
def test_a_rank_that_moves_is_not_hung_and_one_that_does_not_is(jump: float, tmp_path: Path) -> None:
    """Whatever the system's time, which dates the files, does in between."""
    now = began = 100.0
    timeout = HangTimeout(clock=lambda: now)
    timeout.attempt_begins(tmp_path)
    place = tmp_path / "0"
    place.write_text("")
    assert not timeout.is_over(began, 30)
    now += 29
    os.utime(place, (1e9, 1e9 + jump))
    assert not timeout.is_over(began, 30)
    now += 29
    assert not timeout.is_over(began, 30)
    now += 1
    assert timeout.is_over(began, 30)
    assert not timeout.is_over(now, 30)
