"""When tuning must be over: by the user's budget, by five minutes of steps, or by the length of the script itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from desk import VARIABLES, Desk
from launchers import environment

from autoddp.attempts.job.deadline import Deadline
from autoddp.attempts.job.machine import State
from autoddp.study import TuningOver

ENDED = "the script ended with exit code 0"


COMMAND = """
import time
from autoddp.cli import main
main.load_torchrun, main.with_project = lambda: None, lambda options: options
main.prepare = lambda options, began: print(time.monotonic() - began)
main.run(lambda: None)
"""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_budget_counts_from_the_command() -> None:
    clock = Clock()
    deadline = Deadline(60.0, began=90.0, clock=clock)
    assert deadline.left == 50.0
    deadline.stepped()
    deadline.script_took(5.0, 100, ENDED)
    clock.now = 150.0
    assert (deadline.left, deadline.why_over) == (0.0, "")
    clock.now = 157.0
    assert deadline.why_over == "the --budget of 1 min 0 s is over"


def test_what_a_shell_has_done_before_the_command_does_not_count() -> None:
    """As `bash -c "pip install … && autoddp …"`: bash becomes its last command, and the process is as old as bash."""
    words = ["bash", "-c", 'sleep 3 && exec "$0" -c "$1"', sys.executable, COMMAND]
    said = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)
    assert float(said.stdout) < 3.0


def test_without_a_budget_it_counts_from_the_first_step() -> None:
    clock = Clock()
    deadline = Deadline(clock=clock)
    clock.now = 1000.0
    assert (deadline.left, deadline.why_over) == (None, "")
    deadline.stepped()
    clock.now = 1299.0
    deadline.stepped()
    assert deadline.left == 1.0
    clock.now = 1331.0
    assert deadline.why_over == "tuning has taken 5 min 0 s; --budget allows more"


@pytest.mark.parametrize(("took", "seconds"), [(3.0, 30.0), (50.0, 50.0), (1000.0, 300.0)])
def test_it_takes_no_longer_than_the_script_itself(took: float, seconds: float) -> None:
    clock = Clock()
    deadline = Deadline(clock=clock)
    deadline.stepped()
    deadline.script_took(took, 100, ENDED)
    assert deadline.left == seconds
    clock.now += 1.2 * seconds
    assert "--budget allows more" in deadline.why_over
    assert (ENDED in deadline.why_over) is (took < 300.0)


def test_the_length_of_the_script_is_no_limit_where_trials_were_asked_for() -> None:
    clock = Clock()
    deadline = Deadline(clock=clock, by_length=False)
    deadline.stepped()
    deadline.script_took(3.0, 100, ENDED)
    assert (deadline.left, deadline.is_open) == (300.0, False)
    clock.now += 331.0
    assert deadline.why_over == "tuning has taken 5 min 0 s; --budget allows more"


def test_whether_the_script_will_set_a_limit_is_known() -> None:
    clock = Clock()
    deadline = Deadline(clock=clock)
    deadline.stepped()
    clock.now += 40.0
    assert (deadline.is_open, deadline.spent, deadline.left) == (True, 40.0, 260.0)
    deadline.script_took(45.0, 100, ENDED)
    assert (deadline.is_open, deadline.left) == (False, 5.0)
    assert not Deadline(60.0, clock=clock).is_open


def test_a_start_of_fewer_steps_than_another_does_not_tell_the_length_of_the_script() -> None:
    deadline = Deadline(clock=Clock())
    deadline.stepped()
    deadline.script_took(200.0, 1000, ENDED)
    deadline.script_took(40.0, 150, ENDED)
    assert deadline.left == 200.0
    deadline.script_took(180.0, 1000, ENDED)
    assert deadline.left == 180.0
    deadline.script_took(250.0, 1200, ENDED)
    assert deadline.left == 250.0


def test_a_script_that_does_not_start_ends_with_the_budget(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "journal", budget=10.0)
    desk.begins()
    facts = desk.asks_facts()
    desk.passes(10.5)
    assert desk.state is State.STARTING
    desk.passes(1.0)
    assert desk.state is State.OVER
    assert isinstance(facts.exception(0), TuningOver)
    assert desk.machine.why_over == "the --budget of 10 s is over"


def test_a_budget_that_is_spent_on_starts_without_a_measurement_names_their_steps(tmp_path: Path) -> None:
    """The budget alone told nobody that the script itself was too short."""
    desk = Desk(tmp_path / "journal", budget=10.0)
    desk.begins()
    desk.hello(0)
    desk.hello(1)
    desk.ready()
    block = desk.asks()
    desk.goodbye(0, steps=8)
    desk.goodbye(1, steps=8)
    assert desk.ended().result(0) is True
    desk.begins()
    desk.passes(12.0)
    why = "no start of 8 steps was long enough for a measurement: the --budget of 10 s is over"
    assert str(block.exception(0)) == desk.machine.why_over == why


def test_an_order_that_is_out_ends_with_the_budget(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "journal", budget=10.0)
    desk.reach(State.MEASURING)
    desk.passes(12.0)
    assert desk.state is State.OVER
    assert desk.ended().result(0) is False


def test_each_order_says_how_much_time_is_left(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "journal", budget=60.0)
    desk.reach(State.READY)
    desk.passes(20.0)
    asked = desk.asks()
    assert desk.ranks[0].told[-1].left == 40.0
    desk.passes(1.0)
    desk.block()
    assert asked.result(0).left == 40.0
    assert '"left": 40.0' in (tmp_path / "journal").read_text()


def test_a_script_that_ends_tells_its_length(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "journal", budget=None)
    desk.reach(State.MEASURING)
    desk.passes(40.0)
    desk.goodbye(0)
    desk.goodbye(1)
    assert desk.ended().result(0) is True
    desk.begins()
    desk.hello(0)
    desk.hello(1)
    desk.ready()
    assert desk.ranks[0].told[-1].left == 0.0  # of forty seconds


def test_an_attempt_that_was_told_to_leave_tells_no_length(tmp_path: Path) -> None:
    """Another start with other variables, on the host that leads and on one that follows."""
    leads = Desk(tmp_path / "leads", budget=None)
    leads.reach(State.READY)
    leads.passes(3.0)
    leads.asks(VARIABLES)
    follows = Desk(tmp_path / "follows", nodes=2, budget=None)
    follows.reach(State.READY)
    follows.asks()
    follows.passes(3.0)
    follows.finish(again=True)
    for desk in (leads, follows):
        for rank in (0, 1):
            desk.goodbye(rank)
        desk.ended()
        assert desk.machine._deadline.left == 297.0


def test_a_script_that_was_made_faster_is_as_long_as_it_is_as_written(tmp_path: Path) -> None:
    """Its steps took 0.05 s as written: 1000 of them are 50 s, although this start took 35."""
    desk = Desk(tmp_path / "journal", budget=None)
    desk.reach(State.MEASURING)
    desk.block()
    desk.asks()
    desk.passes(35.0)
    for rank in (0, 1):
        desk.goodbye(rank, steps=1000)
    desk.ended()
    assert desk.machine._deadline.left == 15.0


def test_a_finished_study_is_not_cut(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "journal", nodes=2, budget=10.0)
    desk.reach(State.STARTING)
    desk.says(1, desk.ready_message())
    finished = desk.finishes()
    desk.passes(100.0)
    assert not finished.done()
    assert desk.state is State.READY
