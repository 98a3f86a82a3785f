"""Waiting with a limit looks once more when the limit has passed, as after the process itself was stopped."""

from __future__ import annotations

import time

from autoddp.processes.polling import polls


def test_the_last_look_comes_after_the_limit() -> None:
    looks = list(polls(0.05, every=0.2))
    assert len(looks) == 2
    assert looks[0] < 0.05 < looks[1]


def test_a_process_that_was_stopped_still_looks() -> None:
    waits = polls(0.05, every=0.01)
    next(waits)
    time.sleep(0.2)  # it does not run
    assert next(waits) > 0.05
    assert list(waits) == []
