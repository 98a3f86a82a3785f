"""When a measurement is called hung: once all ranks have waited for each other, later where they may wait longer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoddp.attempts.job.hang_timeout import HangTimeout
from autoddp.codec import encode, replace
from autoddp.wire import Heartbeat, Measure

SHORT, LONG = Measure(0, {}, 1, 3), Measure(0, {}, 1, 20, compare=4)


def test_seconds_that_ranks_may_wait_for_each_other() -> None:
    unknown, fast, slow = HangTimeout(), HangTimeout(step_seconds=0.01), HangTimeout(step_seconds=4.0)
    assert unknown.of(SHORT) > slow.of(LONG) / 3 > fast.of(LONG) == fast.of(SHORT)
    assert slow.of(LONG) > slow.of(SHORT) > 4 * slow.step_seconds
    assert slow.of(replace(LONG, at_once=4)) == 4 * slow.of(LONG)


def test_compilers_are_waited_for() -> None:
    eager, compiled = HangTimeout(step_seconds=0.01), HangTimeout(step_seconds=0.01, compiles=True)
    assert compiled.of(SHORT) > 5 * eager.of(SHORT)
    assert HangTimeout(step_seconds=9.0, compiles=True).of(LONG) == HangTimeout(step_seconds=9.0).of(LONG)


class Job:
    """Two ranks' files, and the launcher's clock. The system's time, which dates the files, jumps at each beat."""

    def __init__(self, folder: Path, jump: float = 0.0, elsewhere: float = 1e9) -> None:
        self.folder, self.jump, self.stamp = folder, jump, 1e9
        self.began = self.now = 100.0
        self.timeout = HangTimeout(clock=lambda: self.now, elsewhere=lambda: elsewhere)
        self.timeout.attempt_begins(folder)

    def beats(self, **waits: float) -> None:
        """What the ranks say now: `r0=5.0` is rank 0, which has waited for 5 s."""
        for rank, seconds in waits.items():
            place = self.folder / rank.removeprefix("r")
            place.write_text(encode(Heartbeat("all_reduce, called in train.py, line 3", seconds, seconds)))
            self.stamp += 1 + self.jump
            os.utime(place, (self.stamp, self.stamp))

    def is_hung(self, *ended: int) -> bool:
        return self.timeout.is_over(self.began, 30, ended)


@pytest.mark.parametrize("jump", [0.0, 3600.0, -3600.0])
def test_a_trial_hangs_once_every_rank_has_waited_that_long(jump: float, tmp_path: Path) -> None:
    job = Job(tmp_path, jump)
    job.now += 40
    job.beats(r0=40.0, r1=0.0)  # rank 1 works
    assert not job.is_hung()
    job.beats(r0=40.0, r1=29.0)
    assert not job.is_hung()
    job.beats(r0=41.0, r1=30.0)
    assert job.is_hung()
    assert job.timeout.says(30) == (
        "hung: for 30 s every rank has waited for another one; ranks 0, 1 wait in all_reduce, called in train.py, "
        f"line 3 (host {os.uname().nodename})"
    )


def test_a_wait_before_the_order_does_not_count(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.now += 29
    job.beats(r0=500.0, r1=500.0)
    assert not job.is_hung()
    job.now += 1
    assert job.is_hung()


def test_a_rank_that_says_nothing_may_work(tmp_path: Path) -> None:
    """A library may hold Python's lock for a minute; the last heartbeat before that said that the rank waited."""
    job = Job(tmp_path)
    job.now += 40
    job.beats(r0=40.0, r1=40.0)
    assert job.is_hung()
    job.now += 6
    job.beats(r0=46.0)
    assert not job.is_hung()
    job.beats(r1=46.0)
    assert job.is_hung()


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.now += 40
    job.beats(r0=40.0, r1=0.0)
    assert job.is_hung(1)
    assert not job.is_hung(0, 1)  # nobody waits; the attempt is about to end


def test_a_rank_of_another_host_that_works_is_waited_for(tmp_path: Path) -> None:
    for elsewhere, hangs in ((0.0, False), (30.0, True)):
        job = Job(tmp_path, elsewhere=elsewhere)
        job.now += 40
        job.beats(r0=40.0)
        assert job.is_hung() is hangs
