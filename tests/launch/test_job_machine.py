"""Every event in every state of the tuning job, the seen defect in all orders of its events, and any order at all."""

from __future__ import annotations

import itertools
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
from desk import VARIABLES, Desk, Rank

from autoddp.attempts.job.events import Closed, MeasureAsked, Said, TakenOver, Worker
from autoddp.attempts.job.machine import TOO_SHORT, State
from autoddp.codec import decode
from autoddp.knobs import Configuration
from autoddp.processes import children
from autoddp.study import INTERRUPTED, TrialFailed, TuningOver
from autoddp.wire import VERSION, BlockDone, Entry, Finish, Goodbye, Hello, Measure, Start, Welcome

EVENTS: dict[str, Callable[[Desk], Any]] = {
    "another rank says hello": lambda desk: desk.hello(2),
    "rank 0 is ready": lambda desk: desk.ready(),
    "rank 0 has a block": lambda desk: desk.block(),
    "rank 1 has a block": lambda desk: desk.block(rank=1),
    "rank 0 ends": lambda desk: desk.goodbye(0),
    "rank 1 ends": lambda desk: desk.goodbye(1),
    "rank 1 raises": lambda desk: desk.goodbye(1, "RuntimeError"),
    "rank 1 vanishes": lambda desk: desk.closed(1),
    "process 1 ends": lambda desk: desk.process_ended(1, "killed by SIGABRT"),
    "stop": lambda desk: desk.stop(),
    "stop for the overlay": lambda desk: desk.stop(overlay_is_to_blame=True),
    "finish": lambda desk: desk.finish(),
    "finish, again": lambda desk: desk.finish(again=True),
    "elsewhere": lambda desk: desk.ended_elsewhere(),
    "gave up": lambda desk: desk.gives_up(),
    "study asks": lambda desk: desk.asks(),
    "study asks for a start": lambda desk: desk.asks(VARIABLES),
    "study finishes": lambda desk: desk.finishes(),
    "attempt ended": lambda desk: desk.ended(),
    "attempt failed": lambda desk: desk.ended("rank 1 ended with exit code 1"),
    "tick": lambda desk: desk.passes(),
    "tick 11 s later": lambda desk: desk.passes(11),
}
# Columns: the state before. Cells: the state after; a dot where it stays, and a blank for what cannot be: the
# launcher's main thread ends no attempt twice, and the study asks nothing while it waits.
AFTER = {
    #                                 B S R M L V J O
    "another rank says hello": "       . . . . . . . .",
    "rank 0 is ready": "               . R . . . . . .",
    "rank 0 has a block": "            . . . R V . . .",
    "rank 1 has a block": "            . . . . . . . .",
    "rank 0 ends": "                   . V V L V . . .",
    "rank 1 ends": "                   . V V . . . . .",
    "rank 1 raises": "                 . V V L . . . .",
    "rank 1 vanishes": "               . V V L . . . .",
    "process 1 ends": "                . . . . . . . .",
    "stop": "                          O O O O O O O .",
    "stop for the overlay": "          . V V V V . . .",
    "finish": "                        O O O O O O O .",
    "finish, again": "                 . V V V V . . .",
    "elsewhere": "                     . V V L . . . .",
    "gave up": "                       O O O O O O O .",
    "study asks": "                      . M     . B .",
    "study asks for a start": "          . V     . B .",
    "study finishes": "                  O O     O O .",
    "attempt ended": "                   J J B J J   .",
    "attempt failed": "                  J J J J J   .",
    "tick": "                          . . . . . . . .",
    "tick 11 s later": "               . . . . V . B .",
}
LETTERS = dict(zip("BSRMLVJO", State, strict=True))
CELLS = [
    (LETTERS[before], event, LETTERS.get(after, LETTERS[before]))
    for event, row in AFTER.items()
    for before, after in zip("BSRMLVJO", row[-15::2], strict=True)
    if after != " "
]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "journal.jsonl")


@pytest.mark.parametrize(("before", "event", "after"), CELLS, ids=lambda value: getattr(value, "name", value))
def test_each_event_in_each_state(desk: Desk, before: State, event: str, after: State) -> None:
    desk.reach(before)
    EVENTS[event](desk)
    assert desk.state is after


# What is done with it


@pytest.mark.parametrize("state", State)
def test_who_may_go(desk: Desk, state: State) -> None:
    """A rank takes part from its Hello on, unless its attempt is of no more use."""
    desk.reach(state)
    late = desk.hello(2)
    assert late.told == [Welcome(state in (State.STARTING, State.READY, State.MEASURING))]


def test_a_rank_of_an_attempt_that_was_judged_is_sent_away(desk: Desk) -> None:
    desk.reach(State.BETWEEN)
    desk.begins()
    late = Rank(0)
    desk.happens(Said(desk.number - 1, late, late.hello))
    assert late.told == [Welcome(False)]
    present = desk.hello(0)
    desk.happens(Closed(desk.number - 1, late))
    desk.ready()
    assert desk.state is State.MEASURING
    assert len(present.orders) == 1


def test_the_study_gets_facts_and_blocks(desk: Desk) -> None:
    facts = desk.asks_facts()
    desk.reach(State.READY)
    assert facts.result(0).world_size == 2
    block = desk.asks()
    desk.block(index=7)  # of no order
    assert not block.done()
    desk.block(index=0)
    assert block.result(0).seconds == (0.05,) * 3


def test_the_cause_is_the_rank_that_was_killed(desk: Desk) -> None:
    """Its peer complains first, and elastic ends the others with SIGTERM."""
    desk.reach(State.READY)
    block = desk.asks()
    desk.goodbye(0, "RuntimeError: Connection closed by peer")
    assert desk.state is State.LOST
    desk.process_ended(1, "killed by SIGABRT")
    desk.closed(1)
    assert desk.state is State.LEAVING
    with pytest.raises(TrialFailed, match=r"^rank 1 killed by SIGABRT$"):
        block.result(0)


def test_the_first_failure_is_the_cause(desk: Desk) -> None:
    desk.reach(State.READY)
    block = desk.asks()
    desk.goodbye(1, "RuntimeError: of rank 1")
    desk.process_ended(0, "killed by SIGTERM")
    with pytest.raises(TrialFailed, match=r"^rank 1: RuntimeError: of rank 1$"):
        block.result(0)


def test_the_first_failure_may_be_heard_of_later(desk: Desk) -> None:
    desk.reach(State.READY)
    block = desk.asks()
    desk.goodbye(0, "RuntimeError: Connection closed by peer", at=2.5)
    desk.goodbye(1, "RuntimeError: of rank 1", at=2.4)
    desk.process_ended(0, "exit code 1")
    desk.process_ended(1, "exit code 1")
    desk.passes(6)
    with pytest.raises(TrialFailed, match=r"^rank 1: RuntimeError: of rank 1$"):
        block.result(0)


def test_a_rank_without_a_word_vanishes(desk: Desk) -> None:
    desk.reach(State.READY)
    block = desk.asks()
    desk.closed(0)
    desk.passes(4)
    assert not block.done()
    desk.passes(2)
    with pytest.raises(TrialFailed, match=r"^rank 0 vanished$"):
        block.result(0)


def test_a_process_that_this_launcher_has_not_started_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank in a PID namespace of its own, as by `unshare --pid`, tells a number that is another process's here."""
    with subprocess.Popen(["sleep", "100"]) as other:
        worker = Worker(cast("Any", None), Hello(VERSION, 0, 0, other.pid, 0))
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(children.os, "getpid", lambda: 2**30)
            worker.kill()
        assert other.poll() is None
        worker.kill()
        assert other.wait(60) == -signal.SIGKILL
        worker.kill()  # gone


def test_ranks_that_hang_are_killed(desk: Desk) -> None:
    desk.reach(State.READY)
    block = desk.asks()
    desk.passes(1000)
    assert not block.done()
    desk.hang_timeout.hangs = True
    desk.passes()
    with pytest.raises(TrialFailed, match=r"^hung: for 5 min 0 s every rank has waited for another one; "):
        block.result(0)
    assert all(rank.was_killed for rank in desk.ranks.values())
    assert desk.state is State.LEAVING


def test_a_script_that_ends_is_asked_again_for_half(desk: Desk) -> None:
    desk.reach(State.READY)
    block = desk.asks(steps=40)
    desk.goodbye(0)
    desk.goodbye(1)
    assert desk.ended().result(0) is True
    desk.begins()
    leader = desk.hello(0)
    desk.ready()
    assert [order.steps for order in leader.orders] == [20]
    assert not block.done()


def starts(desk: Desk, ready_at: int = 6) -> Rank:
    """An attempt whose script has made so many steps when it can be measured, three seconds after its beginning."""
    desk.begins()
    leader = desk.hello(0)
    desk.hello(1)
    desk.passes(3.0)
    desk.ready(steps=ready_at)
    return leader


def script_ends(desk: Desk, steps: int) -> Future[bool]:
    desk.goodbye(0, steps=steps)
    desk.goodbye(1, steps=steps)
    return desk.ended()


def test_the_study_knows_the_start_and_the_length_of_the_script(desk: Desk) -> None:
    starts(desk)
    block = desk.asks()
    desk.block()
    assert block.result(0).start == Start(0, 3.0, 6, None, spent=3.0)
    block = desk.asks()
    script_ends(desk, 60)
    starts(desk)
    desk.block(1)
    assert block.result(0).start == Start(1, 3.0, 6, 60, spent=6.0)
    assert '"length": 60' in desk.journal.read_text()
    block = desk.asks()
    script_ends(desk, 90)  # it ends at another step in each start: the shortest one is what can be relied on
    starts(desk)
    desk.block(2)
    assert block.result(0).start.length == 60


def test_a_further_start_of_the_script_is_told_from_the_first(desk: Desk) -> None:
    """After "2 ranks on 1 node …" the first line of a slow start again said that its first steps were waited for."""
    desk.begins()
    assert desk.machine.in_words == "waiting for the script's first steps"
    desk.hello(0)
    desk.hello(1)
    desk.ready()
    desk.asks()
    script_ends(desk, 60)
    desk.begins()
    assert desk.machine.in_words == "the script was started again, waiting for its first steps"


def test_a_measurement_that_has_just_begun_has_not_taken_0_s(desk: Desk) -> None:
    """A line comes after 25 seconds of silence, which a start of the script may have taken."""
    starts(desk)
    desk.asks()
    desk.now += 0.2
    assert desk.machine.in_words == "measuring the script as written"
    desk.now += 3.0
    assert desk.machine.in_words == "measuring the script as written, 3 s so far"


def test_what_a_short_start_has_no_room_for_is_cut_to_a_third_of_it(desk: Desk) -> None:
    starts(desk)
    desk.asks(steps=40)
    script_ends(desk, 36)
    assert starts(desk).orders[-1].steps == 10


def left_within(desk: Desk) -> Future[BlockDone]:
    """The block that was asked for when both ranks have said goodbye after 60 steps."""
    starts(desk)
    desk.asks()
    desk.block()
    block = desk.asks(steps=40)
    desk.goodbye(0, steps=60)
    desk.goodbye(1, steps=60)
    return block


def test_a_script_that_leaves_by_an_exit_code_has_failed(desk: Desk) -> None:
    """As many do where their loss is NaN: `sys.exit(1)` raises nothing that a rank could tell."""
    block = left_within(desk)
    desk.process_ended(0, "ended with exit code 1")
    desk.process_ended(1, "ended with exit code 1")
    desk.ended("rank 0 ended with exit code 1")
    with pytest.raises(TrialFailed, match=r"^rank 0 ended with exit code 1$"):
        block.result(0)
    desk.asks(steps=40)
    assert starts(desk).orders[-1].steps == 40


@pytest.mark.parametrize("signal", ["SIGSEGV", "SIGABRT"])
def test_a_killed_rank_of_a_script_without_ddp_is_named_before_the_one_that_has_lost_it(
    desk: Desk, signal: str
) -> None:
    """It has said nothing to the launcher: elastic alone knows how it ended. By SIGABRT gloo may end one that fails."""
    desk.begins()
    desk.hello(0, built_ddp=False)
    desk.goodbye(0, "RuntimeError: Connection reset by peer")
    desk.ended(f"rank 1 killed by {signal}")
    desk.passes(30)
    assert desk.machine.why_over.startswith("rank 1 killed by" if signal == "SIGSEGV" else "rank 0: RuntimeError")


def test_a_script_that_has_ended_and_is_killed_then_is_asked_again(desk: Desk) -> None:
    """On gloo a process may end by SIGABRT although it has trained."""
    block = left_within(desk)
    desk.process_ended(1, "killed by SIGABRT")
    assert desk.ended("rank 1 ended with exit code -6").result(0) is True
    assert starts(desk).orders[-1].steps == 18
    assert not block.done()


def test_several_steps_in_one_for_which_a_start_is_too_short_fail_alone(desk: Desk) -> None:
    """Else the script would be started for them until tuning is given up, before any final round."""
    starts(desk)
    desk.asks()
    desk.block()
    block: Future[BlockDone] = Future()
    sixteen = Measure(1, Configuration({"accumulate_steps": 16}), 2, 2, at_once=16)
    desk.happens(MeasureAsked(sixteen, {}, block))
    script_ends(desk, 60)
    with pytest.raises(TrialFailed, match="gives 54 steps to measure, and 64 are needed"):
        block.result(0)


def test_the_starts_of_a_study_that_goes_on_are_others(desk: Desk) -> None:
    earlier = Entry(Measure(0, {}, 1, 40, start=Start(4)), BlockDone(0, (0.05,), 0.05, 0.001))
    desk.happens(TakenOver([earlier], Future()))
    starts(desk)
    desk.asks()  # answered by the earlier study
    block = desk.asks()
    desk.block(1)
    assert block.result(0).start.number == 5


@pytest.mark.parametrize(("why", "counts"), [("the script cannot be started", True), (INTERRUPTED, False)])
def test_what_was_measured_before_counts_where_tuning_is_over_but_for_a_signal(
    desk: Desk, why: str, counts: bool
) -> None:
    """A long study takes many seconds to go through again, and a scheduler ten before it kills the launcher."""
    earlier = Entry(Measure(0, {}, 1, 40), BlockDone(0, (0.05,), 0.05, 0.001))
    desk.happens(TakenOver([earlier], Future()))
    starts(desk)
    desk.gives_up(why)
    answer = desk.asks()
    assert answer.done()
    assert (answer.exception() is None) is counts
    assert isinstance(desk.asks().exception(), TuningOver)


def test_a_script_that_gives_few_steps_is_not_started_again_and_again(desk: Desk) -> None:
    starts(desk)
    desk.asks()
    desk.block()
    desk.asks()
    assert script_ends(desk, 13).result(0) is False
    few = "a start of the script gives 7 steps to measure, and 8 are needed"
    assert desk.machine.why_over == f"{few}; give it more data, or another epoch"


def test_a_script_that_ends_early_under_what_was_tried_may_be_longer(desk: Desk) -> None:
    starts(desk)
    desk.asks()
    desk.block()
    desk.asks(reduce=False)
    assert script_ends(desk, 13).result(0) is True


def test_a_script_that_ends_in_steps_without_reduction_again_and_again_cannot_make_them(desk: Desk) -> None:
    """The first time it may have been at its end in any case."""
    starts(desk)
    desk.asks()
    desk.block()
    block = desk.asks(reduce=False)
    script_ends(desk, 60)
    starts(desk)
    assert not block.done()
    script_ends(desk, 9)
    ended = "the script ended with exit code 0 after 9 steps, while autoddp tried steps without reduction"
    with pytest.raises(TrialFailed, match=ended):
        block.result(0)
    desk.asks()
    assert starts(desk).orders[-1].reduce


def after_steps_without_reduction(desk: Desk, index: int) -> Future[BlockDone]:
    """A block without reduction has been measured in the present attempt; the next order is out."""
    desk.asks(reduce=False)
    desk.block(index)
    return desk.asks()


def fails(desk: Desk, why: str = "AssertionError: ranks differ", steps: int = 0, rank: int = 1) -> None:
    """The order that is out fails, and the next attempt is ready, if there is one."""
    desk.goodbye(rank, why, steps)
    desk.process_ended(1 - rank, "killed by SIGTERM")
    desk.closed(1 - rank)
    desk.ended(f"rank {rank} ended with exit code 1")
    desk.passes(10.0)
    if desk.begins() is not None:
        desk.hello(0)
        desk.hello(1)
        desk.ready()


def test_what_fails_after_steps_without_reduction_is_tried_once_more(desk: Desk) -> None:
    """A script may check that its ranks are alike. After such steps they are not, and no configuration is to blame."""
    desk.reach(State.READY)
    block = after_steps_without_reduction(desk, 0)
    fails(desk)
    assert not block.done()
    (order,) = desk.ranks[0].orders
    assert (order.index, order.steps, order.apply) == (1, 40, True)
    fails(desk)
    with pytest.raises(TrialFailed, match=r"^rank 1: AssertionError: ranks differ$"):
        block.result(0)


def test_few_orders_are_given_once_more(desk: Desk) -> None:
    desk.reach(State.READY)
    for index in (0, 2):
        block = after_steps_without_reduction(desk, index)
        fails(desk)
        desk.block(index + 1)
        assert block.done()
    block = after_steps_without_reduction(desk, 4)
    desk.goodbye(1, "AssertionError")
    desk.process_ended(0, "killed by SIGTERM")
    desk.closed(0)
    with pytest.raises(TrialFailed):
        block.result(0)


VIEW = Configuration({"gradient_as_bucket_view": True})
BF16 = Configuration({"hook": "bf16"})


def tried(desk: Desk, configuration: Configuration, before: int, steps: int, why: str, rank: int = 1) -> str:
    """After measurements `before`, it fails after `steps` of the start; why tuning is over, or ""."""
    for _ in range(before):
        desk.asks()
        desk.block(desk.asked - 1)
    block = desk.asks(configuration=configuration)
    fails(desk, why, steps, rank)
    with pytest.raises(TrialFailed, match=why):
        block.result(0)
    return desk.machine.why_over


def test_a_script_that_fails_at_one_step_whatever_is_tried_is_to_blame_itself(desk: Desk) -> None:
    desk.reach(State.READY)
    assert tried(desk, BF16, 3, 30, "IndexError: list index out of range", rank=0) == ""
    why = tried(desk, VIEW, 1, 30, "IndexError: list index out of range")
    assert why.startswith("after 30 steps the script failed in the same way under different settings")
    assert why.endswith(": IndexError: list index out of range")


@pytest.mark.parametrize(
    ("configuration", "before", "steps", "why"),
    [
        (VIEW, 3, 30, "IndexError: list index"),  # each may have failed at once
        (BF16, 1, 30, "IndexError: list index"),
        (Configuration({"hook": "fp16"}), 1, 30, "IndexError: list index"),  # neither is exact
        (VIEW, 1, 20, "IndexError: list index"),
        (VIEW, 1, 0, "IndexError: list index"),
        (VIEW, 1, 30, "AssertionError: NaN"),
    ],
    ids=["same place", "same settings", "inexact", "another step", "unknown step", "another error"],
)
def test_a_setting_that_may_be_to_blame_is(
    desk: Desk, configuration: Configuration, before: int, steps: int, why: str
) -> None:
    desk.reach(State.READY)
    assert tried(desk, BF16, 3, steps and 30, "IndexError: list index") == ""
    assert tried(desk, configuration, before, steps, why) == ""


def test_what_fails_without_reduction_or_hangs_is_not_tried_again(desk: Desk) -> None:
    desk.reach(State.READY)
    block = desk.asks(reduce=False)
    fails(desk)
    assert block.done()
    block = after_steps_without_reduction(desk, 1)
    desk.hang_timeout.hangs = True
    desk.passes()
    with pytest.raises(TrialFailed, match=r"^hung"):
        block.result(0)


def test_an_order_that_cannot_be_sent_blames_no_configuration(desk: Desk) -> None:
    desk.reach(State.READY)
    desk.asks()
    desk.block()
    desk.ranks[0].is_gone = True
    block = desk.asks()
    assert desk.state is State.LEAVING
    assert desk.ended("rank 0 ended with exit code 1").result(0) is True
    assert not block.done()
    desk.begins()
    desk.hello(0)
    desk.ready()
    desk.block(index=1)
    assert block.done()


def test_nothing_is_in_effect_after_a_start(desk: Desk) -> None:
    desk.reach(State.READY)
    desk.asks()
    desk.goodbye(1, "RuntimeError")
    desk.goodbye(0)
    desk.asks(apply=False)
    assert desk.ended("rank 1 ended with exit code 1").result(0) is True
    desk.begins()
    leader = desk.hello(0)
    desk.ready()
    (order,) = leader.orders
    assert (order.apply, order.warmup) == (True, 2)
    assert [entry.failure for entry in order.missed] == ["rank 1: RuntimeError"]


def test_a_start_with_variables(desk: Desk) -> None:
    desk.reach(State.READY)
    block = desk.asks(VARIABLES)
    assert desk.ranks[0].told[-1] == Finish(again=True)
    desk.closed(0)
    desk.closed(1)
    assert desk.ended().result(0) is True
    assert desk.begins() == VARIABLES
    desk.hello(0)
    desk.ready()
    desk.block()
    assert block.done()
    assert desk.state is State.READY


def a_start_with_variables(desk: Desk) -> Future[Any]:
    """A first one without, then one with variables, which has not come to its measurement."""
    desk.reach(State.READY)
    block = desk.asks(VARIABLES)
    assert desk.ended().result(0) is True
    desk.begins()
    return block


def test_a_start_that_fails_fails_its_measurement(desk: Desk) -> None:
    block = a_start_with_variables(desk)
    more = desk.ended("rank 1 ended with exit code 1")
    with pytest.raises(TrialFailed, match=r"^rank 1 ended with exit code 1$"):
        block.result(0)
    assert not more.done()  # the study may want yet another start
    desk.asks({"OTHER": "1"})
    assert more.result(0) is True
    assert desk.begins() == {"OTHER": "1"}


def test_a_start_that_hangs_fails_its_measurement(desk: Desk) -> None:
    block = a_start_with_variables(desk)
    desk.passes(119)
    assert not block.done()
    desk.passes(2)
    with pytest.raises(TrialFailed, match="did not get going with GLOO_SOCKET_IFNAME=eth0,eth1"):
        block.result(0)
    assert desk.machine.attempt_must_end
    desk.asks()
    assert desk.ended("torch elastic was killed by SIGKILL").result(0) is True
    assert desk.begins() == {}
    assert not desk.machine.attempt_must_end


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("seen", [True, False])  # else the end of the attempt is the first sign of the other rank's
def test_a_script_that_ends_without_a_word_has_not_failed(desk: Desk, first: int, seen: bool) -> None:
    """It may end by os._exit(0), or become another program."""
    desk.reach(State.READY)
    block = desk.asks(steps=40)
    for rank in (1, 0):
        desk.closed(rank)
    desk.process_ended(first, "ended with exit code 0")
    if seen:
        desk.process_ended(1 - first, "ended with exit code 0")
    assert desk.ended().result(0) is True
    desk.begins()
    leader = desk.hello(0)
    desk.ready()
    assert [order.steps for order in leader.orders] == [20]
    desk.block()
    assert block.done()
    assert not block.exception()


def test_a_rank_that_ends_alone_is_the_cause(desk: Desk) -> None:
    desk.reach(State.READY)
    block = desk.asks()
    desk.closed(1)
    desk.process_ended(1, "ended with exit code 0")
    desk.goodbye(0, "RuntimeError: Connection closed by peer")
    desk.process_ended(0, "ended with exit code 1")
    desk.ended("rank 0 ended with exit code 1")
    with pytest.raises(TrialFailed, match=r"^rank 1 ended with exit code 0$"):
        block.result(0)


def test_a_study_that_is_busy_is_waited_for_ten_seconds(desk: Desk) -> None:
    desk.reach(State.READY)
    desk.goodbye(0)
    more = desk.ended()
    desk.passes(9.9)
    assert not more.done()
    desk.passes(0.2)
    assert more.result(0) is True


@pytest.mark.parametrize(
    ("state", "seconds"), [(State.STARTING, None), (State.READY, None), (State.LEAVING, 20), (State.OVER, 20)]
)
def test_when_an_attempt_must_end(desk: Desk, state: State, seconds: float | None) -> None:
    desk.reach(state)
    desk.passes(1000 if seconds is None else seconds - 1)
    assert not desk.machine.attempt_must_end
    desk.passes(2)
    assert desk.machine.attempt_must_end is (seconds is not None)


@pytest.mark.parametrize("event", ["stop", "stop for the overlay", "elsewhere"])
def test_what_ends_an_attempt_at_once(desk: Desk, event: str) -> None:
    desk.reach(State.MEASURING)
    EVENTS[event](desk)
    assert desk.machine.attempt_must_end


def test_the_overlay_is_to_blame_and_no_configuration(desk: Desk) -> None:
    """Ranks that are killed then are no fault either."""
    desk.reach(State.READY)
    block = desk.asks()
    desk.stop(overlay_is_to_blame=True)
    desk.closed(0)
    desk.closed(1)
    assert desk.ended("torch elastic was killed by SIGKILL").result(0) is True
    assert desk.machine.overlay_failed == "it sends mail"
    assert not block.done()


def test_a_script_that_fails_to_start_under_the_overlay_of_several_hosts(desk: Desk) -> None:
    desk.begins()
    desk.asks_facts()
    assert desk.ended("rank 1 ended with exit code 1", blames_overlay=True).result(0) is True
    assert desk.machine.overlay_failed == "rank 1 ended with exit code 1"


def test_ranks_that_are_ended_after_the_script_are_no_fault(desk: Desk) -> None:
    desk.reach(State.READY)
    desk.asks()
    desk.block()
    desk.goodbye(0)
    desk.asks()
    desk.passes(21)
    assert desk.machine.attempt_must_end
    desk.closed(1)
    assert desk.ended("torch elastic was killed by SIGKILL").result(0) is True
    assert desk.machine._faults == 0


@pytest.mark.parametrize(
    ("failure", "attempts", "why"),
    [
        ("", 3, TOO_SHORT),
        ("rank 0 ended with exit code 1", 1, "rank 0: ValueError"),
    ],
)
def test_attempts_that_bring_nothing(desk: Desk, failure: str, attempts: int, why: str) -> None:
    desk.asks_facts()
    for number in range(attempts):
        desk.begins()
        desk.hello(0)
        desk.ready()
        if number == 0:
            desk.asks()
        desk.goodbye(0, "ValueError" if failure else "")
        if failure:
            desk.passes(6)
            desk.gives_up(why)  # as the study does where the script fails as written
        more = desk.ended(failure)
        assert more.result(0) is (number < attempts - 1)
    assert desk.machine.why_over == why


def test_attempts_may_fail_twelve_times(desk: Desk) -> None:
    for number in range(13):
        desk.begins()
        desk.hello(0)
        desk.ready()
        desk.asks()
        if number == 0:
            desk.block()
            desk.asks()
        desk.goodbye(0, "RuntimeError")
        desk.closed(0)
        more = desk.ended("rank 0 ended with exit code 1")
        desk.passes(11)
        assert more.result(0) is (number < 12)
    assert desk.machine.why_over == "13 attempts have failed; the last: rank 0: RuntimeError"


def test_a_script_without_ddp(desk: Desk) -> None:
    facts = desk.asks_facts()
    desk.begins()
    assert desk.ended().result(0) is False
    with pytest.raises(TuningOver, match=r"^the script built no DistributedDataParallel model$"):
        facts.result(0)


def test_a_script_that_ends_well_before_it_has_trained_is_started_once(desk: Desk) -> None:
    """It evaluates, perhaps for an hour, or finds that its training is finished."""
    facts = desk.asks_facts()
    desk.begins()
    desk.hello(0)
    desk.hello(1)
    desk.goodbye(0)
    desk.goodbye(1)
    assert desk.ended().result(0) is False
    with pytest.raises(TuningOver, match=rf"^{TOO_SHORT}$"):
        facts.result(0)


def test_a_rank_that_fails_before_it_has_built_a_model_has_built_none(desk: Desk) -> None:
    """Its job is launched with one rank. Nor has one that elastic kills for it before it can say with what it fails."""
    desk.begins()
    desk.hello(0, built_ddp=False)
    desk.hello(1, built_ddp=False)
    desk.says(0, Goodbye(0, "OSError: Address already in use"))
    desk.closed(1)
    assert not desk.machine.built_ddp
    desk.ended("rank 0 ended with exit code 1")
    assert not desk.machine.built_ddp
    desk.begins()
    desk.hello(0)
    assert desk.machine.built_ddp


@pytest.fixture
def follower(tmp_path: Path) -> Desk:
    """In the first attempt: rank 1 is here, and rank 0 on another host."""
    desk = Desk(tmp_path / "journal", nodes=2, budget=100.0)
    desk.begins()
    desk.hello(1)
    desk.ready(1)
    assert (desk.machine.leads, desk.machine.follows) == (False, True)
    return desk


def lines(desk: Desk) -> list[str]:
    return desk.journal.read_text().splitlines()


def test_a_follower_copies_what_the_leader_measures(follower: Desk) -> None:
    follower.block(index=0, rank=1)
    failed = Entry(Measure(1, Configuration(), 1, 3), None, "it failed there")
    follower.says(1, BlockDone(2, (0.05,) * 3, 0.05, 0.001, Measure(2, Configuration(), 1, 3, missed=(failed,))))
    assert [decode(line, Entry).failure for line in lines(follower)] == ["", "it failed there", ""]
    follower.finish()
    assert (follower.state, follower.machine.why_over) == (State.OVER, "")


def test_a_follower_leaves_it_to_the_leader_when_tuning_ends(follower: Desk) -> None:
    """Its clock may be another one, and it does not know what the study has in mind."""
    follower.passes(1000)
    assert (follower.state, follower.machine.at_most) == (State.READY, None)
    for _ in range(20):  # a leader would give up
        follower.goodbye(1)
        assert follower.ended().result(0) is True  # at once: no study says what it wants next
        follower.begins()
        follower.hello(1)
        follower.ready(1)


def test_a_follower_ends_tuning_where_the_script_cannot_start_here(follower: Desk) -> None:
    follower.goodbye(1)
    follower.ended()
    follower.begins()
    assert follower.ended("rank 1 ended with exit code 1").result(0) is False
    assert follower.machine.why_over == "rank 1 ended with exit code 1"


def test_a_start_with_variables_that_fails_elsewhere_fails_its_measurement(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "journal", nodes=2)
    block = a_start_with_variables(desk)
    desk.hello(0)
    desk.ended_elsewhere("rank 1 ended with exit code 1")
    more = desk.ended("elastic gave up: it was ended by SIGTERM")
    with pytest.raises(TrialFailed, match=r"^rank 1 ended with exit code 1$"):
        block.result(0)
    desk.asks()
    assert more.result(0) is True


def test_a_script_that_has_ended_on_another_host_blames_no_configuration(tmp_path: Path) -> None:
    """Here rank 0 still evaluates; it is killed, because the other host waits for the next start."""
    desk = Desk(tmp_path / "journal", nodes=2)
    desk.reach(State.READY)
    block = desk.asks(steps=40)
    desk.ended_elsewhere()
    assert desk.machine.attempt_must_end
    desk.closed(0)
    assert desk.ended("torch elastic was killed by SIGKILL").result(0) is True
    assert desk.machine._faults == 0
    assert not block.done()


def test_a_rank_that_leaves_another_host_while_others_wait_for_it_fails_the_measurement(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "journal", nodes=2)
    desk.reach(State.READY)
    block = desk.asks()
    desk.hang_timeout.hangs = True
    desk.ended_elsewhere()
    desk.ended("torch elastic was killed by SIGKILL")
    with pytest.raises(TrialFailed, match=r"^it ended on another host$"):
        block.result(0)


def test_a_follower_that_ends_the_ranks_of_a_script_that_has_ended_has_not_failed(follower: Desk) -> None:
    follower.goodbye(1)
    assert not follower.machine.ended_by_us
    follower.passes(21)
    assert follower.machine.ended_by_us


@pytest.mark.parametrize("leads", [True, False])
def test_one_launcher_leads_to_the_end(tmp_path: Path, leads: bool) -> None:
    """The other one does not know what the study has in mind: what was measured until then decides."""
    desk = Desk(tmp_path / "journal", nodes=2)
    desk.begins()
    desk.hello(1 - leads)
    desk.ready(1 - leads)
    asked = desk.asks() if leads else None
    desk.goodbye(1 - leads)
    assert desk.ended().result(0) is True
    desk.begins()
    desk.hello(leads)
    desk.ready(leads)
    assert (desk.state, desk.machine.leads) == (State.OVER, leads)
    assert desk.machine.why_over == "rank 0 is on another host than before"
    if asked:
        with pytest.raises(TuningOver, match="rank 0 is on another host"):
            asked.result(0)


def test_the_end_is_told_on_several_hosts(tmp_path: Path) -> None:
    """It may take another attempt until a rank 0 is there to be told."""
    desk = Desk(tmp_path / "journal", nodes=2)
    desk.reach(State.READY)
    desk.goodbye(0)
    finished = desk.finishes()
    assert not finished.done()
    assert desk.ended().result(0) is True
    desk.begins()
    leader = desk.hello(0)
    desk.ready()
    assert finished.result(0) is None
    assert leader.told[-1] == Finish()
    assert leader.was_hung_up
    assert desk.machine.why_over == ""


def test_over_is_over(desk: Desk) -> None:
    desk.reach(State.READY)
    desk.asks()
    desk.block()
    desk.gives_up("first")
    desk.gives_up("second")
    assert desk.machine.why_over == "first"
    assert all(rank.was_hung_up for rank in desk.ranks.values())
    desk.asked = 0
    assert desk.asks().result(0).seconds == (0.05,) * 3  # what is known stays known
    with pytest.raises(TuningOver, match=r"^first$"):
        desk.asks().result(0)
    assert desk.ended().result(0) is False
    assert desk.begins() is None
    assert desk.finishes().result(0) is None  # with what was known


# An exception in one rank in the first steps: it ended in a wait for ever in 3 runs of 7

RANK0 = (
    lambda desk: desk.hello(0),
    lambda desk: desk.ready(),
    lambda desk: desk.process_ended(0, "killed by SIGTERM"),
    lambda desk: desk.closed(0),
)
RANK1 = (
    lambda desk: desk.hello(1),
    lambda desk: desk.goodbye(1, "RuntimeError: in the first steps"),
    lambda desk: desk.closed(1),
)


def orders_of(*sources: int) -> Iterator[tuple[int, ...]]:
    """All ways in which sources of so many events each may take turns."""
    if not any(sources):
        yield ()
    for number, left in enumerate(sources):
        if left:
            for rest in orders_of(*(each - (at == number) for at, each in enumerate(sources))):
                yield (number, *rest)


@pytest.mark.parametrize("restarted", [False, True], ids=["", "rank 0 comes again"])
def test_an_exception_in_the_first_steps_ends_in_every_order(tmp_path: Path, restarted: bool) -> None:
    """The study asks at any time, asks on, and gives up where the script fails as written."""
    rank0 = (*RANK0, RANK0[0]) if restarted else RANK0
    seen = 0
    for order, turn in itertools.product(orders_of(len(rank0), len(RANK1)), range(len(rank0) + len(RANK1) + 1)):
        desk = Desk(tmp_path / f"journal{seen}")
        study = Study(desk)
        sources = (iter(rank0), iter(RANK1))
        desk.begins()
        for number, source in enumerate(order):
            if number == turn:
                study.begins()
            next(sources[source])(desk)
            study.goes_on()
        study.begins()
        more = desk.ended("rank 1 ended with exit code 1")
        study.goes_on()
        assert more.result(0) is False, order
        assert desk.state is State.OVER
        assert study.end, order
        late = desk.hello(0)
        assert late.told == [Welcome(False)]
        assert desk.begins() is None
        seen += 1
    assert seen > 250


class Study:
    """Asks for the facts, then again and again for a measurement; the first one must not fail."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._reply: Future[Any] | None = None
        self.end = ""

    def begins(self) -> None:
        if self._reply is None:
            self._reply = self._desk.asks_facts()
            self.goes_on()

    def goes_on(self) -> None:
        while self._reply is not None and self._reply.done() and not self.end:
            error = self._reply.exception(0)
            if isinstance(error, TrialFailed):
                self._desk.gives_up(f"the script fails as written: {error}")
            if error is not None:
                self.end = str(error)
            else:
                self._reply = self._desk.asks()


def test_how_long_the_study_waits_for_a_measurement(tmp_path: Path) -> None:
    """Of an attempt whose ranks are ready: whoever looks says so to the user if it is long."""
    desk = Desk(tmp_path / "journal")

    def attempt_begins() -> None:
        desk.begins()
        desk.hello(0)
        desk.passes(50)
        assert desk.machine.measuring == 0.0
        desk.ready()

    attempt_begins()
    desk.passes(50)
    assert desk.machine.measuring == 0.0
    desk.asks()
    desk.passes(40)
    assert desk.machine.measuring == 40.0
    desk.block()
    desk.passes(40)
    assert desk.machine.measuring == 0.0
    desk.asks()
    desk.passes(3)
    assert desk.machine.measuring == 3.0
    desk.goodbye(0)
    desk.ended()
    attempt_begins()
    desk.passes(7)
    assert desk.machine.measuring == 7.0  # and not also what the start has taken
