"""Tells what a rank says of the steps that it was asked to measure: seconds per step of the script."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from autoddp.knobs import AS_WRITTEN
from autoddp.wire import BlockDone, Finish, Measure, Message
from autoddp.worker.trial.runner import TrialRunner


class Laps:
    """A stopwatch that gives the seconds it was made with, and keeps the number of the step that ended each lap."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds
        self.step = self.started = 0
        self.ended: list[int] = []

    def start(self) -> None:
        self.started = self.step

    def lap(self) -> None:
        self.ended.append(self.step)

    def stop(self) -> list[float]:
        return list(self.seconds)


@pytest.mark.parametrize(
    ("at_once", "started", "ended", "per_step"),
    [(1, 2, [3, 4, 5], (0.4, 0.8, 0.4)), (4, 8, [12, 16, 20], (0.1, 0.2, 0.1))],
)
def test_several_steps_in_one_are_told_by_the_step(
    at_once: int, started: int, ended: list[int], per_step: tuple[float, ...]
) -> None:
    """Told by the update, what trains on four steps' samples at once would look four times as slow."""
    laps, told = Laps(0.4, 0.8, 0.4), []
    asked = Measure(0, AS_WRITTEN, 2, 3, at_once=at_once)
    orders: list[Message] = [asked, Finish()]

    def next_order(done: BlockDone | None) -> Message:
        told.append(done)
        return orders.pop(0)

    ranks: Any = SimpleNamespace(
        rank=0, broadcast=lambda order: order, gather=lambda of_rank: [of_rank], part=lambda: None
    )
    director: Any = SimpleNamespace(next=next_order, finish=lambda _: None)
    model: Any = MagicMock(compilations=0)
    watch: Any = laps
    runner = TrialRunner(model, ranks, director, watch)
    runner.begin()
    for laps.step in range(1, ended[-1] + 1):
        runner.on_step()
    assert (laps.started, laps.ended, orders) == (started, ended, [])
    assert told[0] is None
    assert told[1].seconds == pytest.approx(per_step)
