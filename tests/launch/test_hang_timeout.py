"""When a measurement is called hung: never while a rank moves, and later where it may wait for compilers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoddp.codec import replace
from autoddp.launch.hang_timeout import Patience
from autoddp.wire import Measure

SHORT, LONG = Measure(0, {}, 1, 3), Measure(0, {}, 1, 20, compare=4)


def test_seconds_without_a_sign_of_life() -> None:
    unknown, fast, slow = Patience(), Patience(step_seconds=0.01), Patience(step_seconds=4.0)
    assert unknown.with_(SHORT) > slow.with_(LONG) / 3 > fast.with_(LONG) == fast.with_(SHORT)
    assert slow.with_(LONG) > slow.with_(SHORT) > 4 * slow.step_seconds
    assert slow.with_(replace(LONG, at_once=4)) == 4 * slow.with_(LONG)


def test_compilers_are_waited_for() -> None:
    eager, compiled = Patience(step_seconds=0.01), Patience(step_seconds=0.01, compiles=True)
    assert compiled.with_(SHORT) > 5 * eager.with_(SHORT)
    assert Patience(step_seconds=9.0, compiles=True).with_(LONG) == Patience(step_seconds=9.0).with_(LONG)


@pytest.mark.parametrize("jump", [0.0, 3600.0, -3600.0])
def test_a_rank_that_moves_is_not_hung_and_one_that_does_not_is(jump: float, tmp_path: Path) -> None:
    """Whatever the system's time, which dates the files, does in between."""
    now = began = 100.0
    patience = Patience(clock=lambda: now)
    patience.attempt_begins(tmp_path)
    place = tmp_path / "0"
    place.write_text("")
    assert not patience.is_over(began, 30)
    now += 29
    os.utime(place, (1e9, 1e9 + jump))
    assert not patience.is_over(began, 30)
    now += 29
    assert not patience.is_over(began, 30)
    now += 1
    assert patience.is_over(began, 30)
    assert not patience.is_over(now, 30)
