"""The arithmetic on recorded collectives, on recordings made here: steps, waiting, merged calls, first uses."""

from __future__ import annotations

import inspect
import re
import statistics
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, count

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoddp.diagnose.collectives import CommunicationDiagnosis, examined
from autoddp.diagnose.collectives.cause import Job, Suspicion
from autoddp.diagnose.collectives.causes import CAUSES
from autoddp.diagnose.collectives.examination import _least_in_calls, _programs_in_time, _saved_in_gaps
from autoddp.diagnose.collectives.fewer_threads import found, planned
from autoddp.diagnose.collectives.merging import merged, runs, side_by_side
from autoddp.diagnose.collectives.program import Played, Script, _idle, _of_gaps, script_of
from autoddp.diagnose.collectives.recording import Call, Group, Look, Place, Process, Recording, Sums, Use
from autoddp.diagnose.collectives.recording_files import (
    _without_start,
    _without_trial,
    stands_in_several,
    with_waits_at_once,
)
from autoddp.diagnose.collectives.standing import where_ranks_stand
from autoddp.diagnose.collectives.steps import period_of, steps_of
from autoddp.diagnose.collectives.table import beside_ddp, calls_of, different_calls, table
from autoddp.report import communication_text
from autoddp.tables import text_of
from autoddp.wire.recorded_calls import CALLS, ThreadsTrial
from autoddp.wire.replayed_calls import DESTROY_GROUP, MAKE_GROUP, REST, WAIT, Act, Program, Replayed

PAIR = Group((0, 1), "pair", "gloo")


def place(line: int, collective: str = "all_reduce", method: str = "allreduce", group: Group | None = PAIR) -> Place:
    return Place("train.py", line, "main", collective, method, 0, group)


def call(where: Place, number: int, began: float, seconds: float, size: int = 400, blocking: bool = True) -> Call:
    return Call(where, number, size, began, began + 1e-6, began + 1e-6, began + seconds, is_blocking=blocking)


def process(rank: int, calls: list[Call], **facts: object) -> Process:
    sums: dict[Place, Sums] = {}
    for one in calls:
        before = sums.get(one.place, Sums(0, 0, 0.0))
        sums[one.place] = Sums(before.count + 1, before.bytes + one.bytes, before.seconds + one.seconds)
    seconds = calls[-1].ended - calls[0].began
    known = {"pid": 1, "is_launched": True, "host": "vm", "cores": 2, "threads": 1, "look": Look()} | facts
    return Process(rank=rank, ranks=2, began=calls[0].began, seconds=seconds, calls=calls, sums=sums, **known)  # type: ignore[arg-type]


def loop(
    steps: int, late: float = 0.0, where: tuple[int, ...] = (10, 11, 12), gap: float = 1e-5, between: float = 5e-3
) -> Recording:
    """Two ranks with a call in each of these lines in every step, 1 ms each; rank 1 is late in the first."""
    of_ranks: list[list[Call]] = [[], []]
    now, number = 1.0, 0
    for _ in range(steps):
        now += between
        for nth, line in enumerate(where):
            begins = [now, now + (late if nth == 0 else 0.0)]
            end = max(begins) + 1e-3
            for rank, began in enumerate(begins):
                of_ranks[rank].append(call(place(line), number, began, end - began))
            now, number = end + gap, number + 1
    return Recording(tuple(process(rank, calls) for rank, calls in enumerate(of_ranks)))


def changed_by(cause: str, recording: Recording) -> tuple[Script, Script]:
    """What is done again as written, and without a cause that is the only suspicion of its kind."""
    steps = steps_of(recording)
    script = script_of(recording, steps)
    assert script is not None
    (suspected,) = CAUSES[cause].suspect(Job(recording, steps, [], script, 2))
    assert suspected.changed is not None
    return script, suspected.changed


@pytest.mark.parametrize(("lines", "period"), [((1, 2, 3), 3), ((1,), 1), ((1, 1, 1, 1, 1, 2), 6)])
def test_the_period_of_calls(lines: tuple[int, ...], period: int) -> None:
    """The last calls may be others: those behind the loop."""
    calls = [call(place(line), n, 1.0 + n, 0.5) for n, line in enumerate([*lines * 50, 7, 8])]
    assert period_of(calls) == period


def test_calls_without_order_have_no_period() -> None:
    places = [1 if n * n % 7 in (1, 4) or n % 11 == 3 else 2 for n in range(200)]
    assert period_of([call(place(line), n, 1.0 + n, 0.5) for n, line in enumerate(places)]) in (0, 77)


def test_a_step_ends_where_an_optimizer_steps() -> None:
    recording = loop(20)
    step = place(30, "step of SGD", "step of SGD", None)
    of_rank = [call(step, -1, one.ended, 0.0) for one in recording.processes[0].calls[2::3]]
    both = sorted([*recording.processes[0].calls, *of_rank], key=lambda one: one.began)
    steps = steps_of(Recording((process(0, both), recording.processes[1])))
    assert (steps.unit, round(steps.seconds, 4)) == ("step", 0.008)
    assert "20 steps of SGD (train.py:30)" in steps.how


def test_the_least_duration_is_transfer() -> None:
    first, second, _ = sorted(table(loop(30, late=4e-3)), key=lambda row: row.line)
    assert first.share > second.share
    assert (first.last, first.last_in) == (1, 1.0)
    assert first.transfer is not None
    assert second.waiting == pytest.approx(0.0)
    # Rank 0 waits 4 of its 5 ms, rank 1 none of its one: the mean of both.
    assert first.waiting == pytest.approx(4 / 12 / 2, rel=0.05)


def pipeline(*computing: float, micro_batches: int = 4) -> Recording:
    """A step is so many micro-batches on their way from rank to rank, then a pause in which nothing is called."""
    ranks, number = len(computing), 0
    of_ranks: list[list[Call]] = [[] for _ in computing]
    free = [1.0] * ranks
    step = place(30, "step of SGD", "step of SGD", None)
    for _ in range(20):
        for _ in range(micro_batches):
            arrives = free[0]
            for rank, seconds in enumerate(computing):
                if rank:
                    began = free[rank]
                    free[rank] = max(arrives, began) + 1e-4
                    received = call(place(20, "recv", "recv"), -1, began, free[rank] - began)
                    of_ranks[rank].append(received)
                free[rank] += seconds
                arrives = free[rank]
                if rank < ranks - 1:
                    of_ranks[rank].append(call(place(25, "send", "send"), -1, free[rank], 1e-4))
                    free[rank] += 1e-4
        for rank in range(ranks):
            of_ranks[rank].append(call(step, -1, free[rank], 0.0))
            number += 1
    return Recording(tuple(replace(process(rank, calls), ranks=ranks) for rank, calls in enumerate(of_ranks)))


def suspected_late(recording: Recording) -> list[Suspicion]:
    steps = steps_of(recording)
    return list(CAUSES["waiting_for_rank"].suspect(Job(recording, steps, [], script_of(recording, steps), 2)))


def test_the_stage_for_which_a_pipeline_waits() -> None:
    (found,) = suspected_late(pipeline(5e-3, 5e-3, 15e-3, 5e-3))
    assert found.ranks == (2,)
    assert found.guess == pytest.approx(30e-3, rel=0.1)  # of 60 ms: with 7.5 ms on each rank a step takes 30
    assert "rank 2 does between train.py:20 and train.py:25" in found.fix
    (of_last,) = suspected_late(pipeline(5e-3, 5e-3, 15e-3))
    assert "rank 2 does between two calls of train.py:20, such as" in of_last.fix
    diagnosis = examined(pipeline(5e-3, 5e-3, 15e-3, 5e-3), 2, lambda _: "", lambda _: None)
    assert (diagnosis.findings[0].cause, diagnosis.findings[0].status) == ("waiting_for_rank", "suspected")


@pytest.mark.parametrize("computing", [(5e-3,) * 4, (5e-3, 5.2e-3)])
def test_a_balanced_pipeline_waits_for_no_rank(computing: tuple[float, ...]) -> None:
    assert not suspected_late(pipeline(*computing))


def one_after_another() -> list[Process]:
    """Each of two ranks waits for the other one's answer."""
    of_ranks: list[list[Call]] = [[], []]
    for n in range(60):
        at = 1.0 + n * 0.1
        of_ranks[0] += [call(place(20, "send", "send"), -1, at, 1e-4), call(place(21, "recv", "recv"), -1, at, 0.068)]
        of_ranks[1] += [call(place(23, "recv", "recv"), -1, at - 0.03, 0.031), call(place(24), -1, at + 0.068, 1e-4)]
    return [process(rank, calls) for rank, calls in enumerate(of_ranks)]


def test_stages_that_compute_one_after_another_are_not_told_to_divide_otherwise() -> None:
    """A step takes as long, whatever each of them does."""
    assert not suspected_late(Recording(tuple(one_after_another())))


def test_a_rank_that_calls_nobody_holds_up_no_pipeline() -> None:
    """It trains by itself, for example, while the others are a pipeline."""
    step = place(30, "step of SGD", "step of SGD", None)
    alone = process(2, [call(step, -1, 1.0 + n * 0.1, 0.0) for n in range(60)])
    assert not suspected_late(Recording(tuple(replace(one, ranks=3) for one in (*one_after_another(), alone))))


def started(at: float, number: int, waits: float, takes: float = 1e-3, line: int = 10) -> Call:
    """A call that the script has started at this time, and waits for after so many seconds."""
    back = at + 5e-6
    return Call(place(line), number, 400, at, back, back + waits, back + waits + takes, is_blocking=False)


def test_a_call_that_is_waited_for_at_once_is_blocking() -> None:
    """`all_reduce(t, async_op=True).wait()` many times in a row is many small calls, though each is only started."""
    calls = [started(1.0 + step * 0.1 + nth * 1.1e-3, 20 * step + nth, 2e-6) for step in range(10) for nth in range(20)]
    recording = Recording(tuple(process(rank, with_waits_at_once(calls)) for rank in (0, 1)))
    steps = steps_of(recording)
    (row,) = table(recording)
    assert row.is_blocking
    assert row.waiting is not None
    assert [*CAUSES["small_collectives"].suspect(Job(recording, steps, [row], script_of(recording, steps), 2))]


@pytest.mark.parametrize(
    "calls",
    [
        [started(1.0 + n * 5e-3, n, 1e-3) for n in range(40)],  # something is computed meanwhile
        [started(1.0 + n // 2 * 5e-3 + n % 2 * 1e-5, n, 2e-5 if n % 2 == 0 else 1.1e-3) for n in range(40)],
        [started(1.0 + n * 5e-3, n, 2e-6 if n % 2 else 1e-3) for n in range(40)],  # now so, now otherwise
    ],
)
def test_a_call_beside_which_something_goes_on_is_only_started(calls: list[Call]) -> None:
    assert with_waits_at_once(calls) == calls


def test_parts_of_one_call_are_one_call() -> None:
    sizes, data = place(5, "all_gather_object", "allgather"), place(5, "all_gather_object", "_allgather_base")
    assert calls_of({sizes: Sums(10, 80, 1.0), data: Sums(10, 900, 1.0)}) == 10
    assert calls_of({sizes: Sums(10, 80, 1.0), data: Sums(3, 900, 1.0)}) == 13


@pytest.mark.parametrize("later", [0.0, 5e-4])
def test_as_many_calls_as_steps_are_done_again(later: float) -> None:
    """A rank may be back from the last call of a step when the other one has begun the next step."""
    one, two = loop(60, where=(10,)).processes
    step = place(30, "step of SGD", "step of SGD", None)
    ends = [call(step, -1, made.ended, 0.0) for made in one.calls]
    both = sorted([*one.calls, *ends], key=lambda made: made.began)
    back_later = [replace(made, wait_ended=made.wait_ended + later) for made in two.calls]
    recording = Recording((process(0, both), replace(process(1, back_later), seconds=0.1)))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    of_rank = script.played[0]
    assert sum(made.act.call == "allreduce" for made in of_rank) == script.covers > 3
    assert script.seconds / script.covers == pytest.approx(6e-3, rel=0.02)


def test_ranks_that_make_different_calls() -> None:
    one, two = loop(3).processes
    barrier = call(place(44, "barrier", "barrier"), 2, two.calls[2].began, 1e-3)
    said = different_calls(Recording((one, process(1, [*two.calls[:2], barrier]))))
    assert "in call 3 rank 0 calls all_reduce (train.py:12), rank 1 calls barrier (train.py:44)" in said
    assert different_calls(loop(3)) == ""


@pytest.mark.parametrize(("at", "priced"), [(3, False), (179, True)])
def test_what_ranks_do_before_they_part_is_priced(at: int, priced: bool) -> None:
    """One has fewer batches, and goes to a barrier behind its steps. Calls that never were the same have no price."""
    one, two = loop(60).processes
    barriers = [replace(made, place=place(44, "barrier", "barrier")) for made in two.calls[at:]]
    recording = Recording((one, process(1, [*two.calls[:at], *barriers])))
    said = examined(recording, 2, lambda programs: "not tried here", lambda line: None)
    assert ("small_collectives" in {found.cause for found in said.findings}) is priced
    assert said.not_measured[0].startswith("ranks 0, 1 do not make the same calls: in call")


@pytest.mark.parametrize("takes", [30e-3, 4e-3])
def test_calls_of_threads_are_not_done_again_one_after_another(takes: float) -> None:
    """A thread gathers numbers beside the training, which it does not hold up: without its calls nothing is saved."""
    beside, ranks = Group((0, 1), "beside", "gloo"), []
    for one in loop(60).processes:
        begins = [made.ended + 5e-4 for made in one.calls[2::15]]  # behind a step, in a gap of 5 ms
        both = with_calls(one, [call(place(50, group=beside), n, at, takes, 8) for n, at in enumerate(begins)])
        ranks.append(replace(both, in_threads=stands_in_several(both.calls)))
    said = examined(Recording(tuple(ranks)), 2, lambda programs: "not tried here", lambda line: None)
    told = [line for line in said.not_measured if "threads of ranks 0, 1" in line]
    assert bool(told) is (takes > 5e-3), "a call that no other one meets may be of the same thread"
    assert bool(said.findings) is not bool(told)


def test_a_thread_that_saves_once_leaves_the_prices_of_the_training() -> None:
    """As `dcp.async_save`: some calls of its thread take a second, in which the training calls a hundred times."""
    beside, ranks = Group((0, 1), "beside", "gloo"), []
    for one in loop(200).processes:
        saves = [call(place(50 + n, group=beside), n, one.calls[99].ended + n * 0.5, 0.4, 9) for n in range(2)]
        both = with_calls(one, saves)
        ranks.append(replace(both, in_threads=stands_in_several(both.calls)))
    said = examined(Recording(tuple(ranks)), 2, lambda programs: "not tried here", lambda line: None)
    assert "small_collectives" in {one.cause for one in said.findings}


def test_a_group_that_ended_before_all_have_called_is_left_out() -> None:
    one, two = loop(20).processes
    script = script_of(Recording((one, process(1, list(two.calls[:-7])))), steps_of(loop(20)))
    assert script is not None
    assert {key for key, of_ranks in script.of_key.items() if len(of_ranks) != 2} == set()


def test_a_gap_computes_as_much_as_its_thread_did() -> None:
    """Not as much as all gaps on average: what runs beside a gap in which a rank sleeps has the core for itself."""
    ranks = []
    for rank in loop(40, where=(10, 11), gap=4e-3).processes:
        cpu, calls = 1.0, []
        for made in rank.calls:
            cpu += 3e-3 if made.place.line == 11 else 0.0
            calls.append(replace(made, cpu_returned=cpu))
        # On average it would be a fifth.
        look = Look(seconds=rank.seconds, cpu_of_thread=rank.seconds / 5)
        ranks.append(replace(rank, calls=calls, look=look))
    recording = Recording(tuple(ranks))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    for one in script.played[0][1:]:
        if one.key[1] % 2:  # line 11
            assert (one.act.computes, one.act.sleeps) == pytest.approx((3e-3, 1e-3), abs=2e-6)
        else:
            assert (one.act.computes, one.act.sleeps) == (0.0, pytest.approx(9e-3))


def test_a_gap_is_slept_in_as_many_turns_as_in_the_script() -> None:
    """Ranks that leave a call together and share cores would all compute first, and then all sleep."""
    look = Look(seconds=0.3, cpu_of_thread=0.075, cpu_of_process=0.075, pauses=50 * (8 + 1))
    recording = Recording(tuple(replace(one, look=look) for one in loop(50, where=(10,)).processes))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    gap = max(act.sleeps for act in script.program.acts[0])
    assert gap / script.program.pauses[0] == pytest.approx(8, rel=0.2)


def test_what_a_rank_has_waited_for_a_core_is_taken_from_the_gaps_in_which_it_has() -> None:
    """Ranks that have to wait by turns are late by turns: if that stayed, they would be late twice in the replay."""
    ranks: dict[int, list[Call]] = {0: [], 1: []}
    now, number = 1.0, 0
    for step in range(50):
        late = step % 2
        for rank, calls in ranks.items():  # 5 ms of sleep, and for one of them 2 ms without a core
            began = now + 5e-3 + (2e-3 if rank == late else 0.0)
            calls.append(replace(call(place(10), number, began, now + 8e-3 - began), cpu_returned=1.0))
        now, number = now + 8e-3, number + 1
    look = Look(seconds=0.4, cpu_of_thread=1e-4, cpu_of_process=1e-4)
    recording = Recording(tuple(process(rank, calls, look=look, waits_in_gaps=1 / 6) for rank, calls in ranks.items()))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    for rank in (0, 1):
        sleeps = [one.act.sleeps for one in script.played[rank][1:] if one.act.call != REST]
        assert sleeps == pytest.approx([5e-3] * len(sleeps), rel=0.05)


def test_small_calls_in_a_row_become_one_on_all_ranks() -> None:
    recording = loop(40)
    script = script_of(recording, steps_of(recording))
    assert script is not None
    changed = merged(script, runs(script, range(65, 1000)))
    for rank in (0, 1):
        acts = [one.act for one in changed.played[rank]]
        assert {(act.bytes, act.tensors) for act in acts[1:-1]} == {(1200, 3)}
    assert [one.key for one in changed.played[0]] == [one.key for one in changed.played[1]]
    later = [one.act for one in side_by_side(script, runs(script, range(65, 1000))).played[0]]
    assert sum(act.call == WAIT for act in later) >= len(later) // 4 - 1
    assert not any(act.waits for act in later[:3] if act.call != WAIT)


@pytest.mark.parametrize(("roots", "operations"), [((0, 1), ("", "")), ((-1, -1, -1), ("SUM", "MAX", "PRODUCT"))])
def test_what_each_rank_sends_becomes_no_one_call(roots: tuple[int, ...], operations: tuple[str, ...]) -> None:
    """Nor do a sum and a maximum: one call of them would train something else."""
    ranks, count = [], len(roots)
    for one in loop(40, where=(10, 11, 12)[:count]).processes:
        calls = [
            replace(
                made,
                root=roots[nth % count],
                place=replace(made.place, reduction=operations[nth % count], method="broadcast"),
            )
            for nth, made in enumerate(one.calls)
        ]
        ranks.append(process(one.rank, calls))
    recording = Recording(tuple(ranks))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    assert runs(script, range(65, 1000)) == {}
    assert [act.root for act in script.program.acts[0][:count]] == list(roots)


@pytest.mark.parametrize(("what", "method"), [("all_reduce", "allreduce"), ("all_gather", "allgather")])
def test_the_lines_to_change_do_what_the_script_does(what: str, method: str) -> None:
    """Its operation stays; what was gathered is not in the tensor that was given."""
    ranks = []
    for one in loop(40).processes:
        calls = [replace(made, place=place(made.place.line, what, method)) for made in one.calls]
        ranks.append(process(one.rank, calls))
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    (found,) = CAUSES["small_collectives"].suspect(Job(recording, steps, [], script_of(recording, steps), 2))
    assert ("the other arguments that it has now" in found.fix) is (what == "all_reduce")
    assert ("copy_(" in found.fix) is (what == "all_reduce")


def test_the_lines_to_change_take_parameters() -> None:
    """A script may broadcast its parameters with gradients switched on; an in-place copy into these would raise."""
    recording = loop(40)
    steps = steps_of(recording)
    (found,) = CAUSES["small_collectives"].suspect(Job(recording, steps, [], script_of(recording, steps), 2))
    tensors = [nn.Parameter(torch.full(shape, 2.0)) for shape in ((2, 3), (4,))]
    first, _, last = (line.strip() for line in found.fix[found.fix.index("flat = ") :].split(";"))
    names = {"torch": torch, "tensors": tensors}
    exec("\n".join((first, "flat = flat / 2", last)), names)
    assert all(torch.equal(one, torch.ones_like(one)) and one.grad_fn is None for one in tensors)


@pytest.mark.parametrize(("what", "method"), [("all_reduce", "allreduce"), ("reduce_scatter", "reduce_scatter")])
def test_the_lines_to_change_take_no_result_before_it_is_there(what: str, method: str) -> None:
    """Who starts all calls and waits for them later would take the pieces of a sum that is still being made."""
    calls, now = [], 1.0
    for number in range(0, 120, 3):
        for nth in range(3):
            began = now + nth * 1e-5
            waits = now + 3e-5 + nth * 1e-5
            of_line = place(10 + nth, what, method)
            calls.append(Call(of_line, number + nth, 400, began, began + 5e-6, waits, waits + 5e-6, is_blocking=False))
        now += 5e-3
    recording = Recording((process(0, calls), process(1, calls)))
    steps = steps_of(recording)
    (found,) = CAUSES["small_collectives"].suspect(Job(recording, steps, [], script_of(recording, steps), 2))
    starts, waits_there = found.fix.index(f"work = dist.{what}("), found.fix.index("work.wait(); ")
    assert starts < waits_there < found.fix.index("for t, piece" if what == "all_reduce" else "got.split(")
    assert not found.beside, "the script does that already"


@pytest.mark.parametrize(
    ("method", "function"),
    [
        ("allreduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce_coalesced"),
        ("allgather", "all_gather"),
        ("alltoall", "all_to_all"),
        ("broadcast", "broadcast"),
        ("reduce_scatter", "reduce_scatter"),
    ],
)
def test_a_method_of_a_group_is_advised_as_a_function_that_there_is(method: str, function: str) -> None:
    assert place(10, method, method).as_function == function
    assert callable(getattr(dist, function))


@pytest.mark.parametrize(("method", "call_of_all"), [("allreduce", "dist.all_reduce(flat"), ("alltoall", "(got, rows")])
def test_the_lines_to_change_for_methods_of_a_group_call_functions(method: str, call_of_all: str) -> None:
    ranks = []
    for one in loop(40).processes:
        calls = [replace(made, place=place(made.place.line, method, method)) for made in one.calls]
        ranks.append(process(one.rank, calls))
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    (found,) = CAUSES["small_collectives"].suspect(Job(recording, steps, [], script_of(recording, steps), 2))
    assert call_of_all in found.fix


@pytest.mark.parametrize(
    ("what", "method"), [("all_to_all_single", "alltoall_base"), ("reduce_scatter", "reduce_scatter")]
)
def test_the_lines_to_change_keep_the_pieces_of_each_rank(what: str, method: str) -> None:
    """Tokens of several experts, or gradients of several layers: two ranks do here what the lines say."""
    ranks = []
    for one in loop(40).processes:
        ranks.append(
            process(one.rank, [replace(made, place=place(made.place.line, what, method)) for made in one.calls])
        )
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    (found,) = CAUSES["small_collectives"].suspect(Job(recording, steps, [], script_of(recording, steps), 2))
    given = [[torch.arange(6.0) + 10 * rank, torch.arange(4.0) - 10 * rank] for rank in (0, 1)]
    (rows,) = re.findall(r"rows = (torch\.cat\(.*?, 1\))", found.fix)
    of_ranks = [eval(rows, {"torch": torch, "n": 2, "tensors": tensors}) for tensors in given]
    (results,) = re.findall(r"(got\.split\(.*?\)) are the results", found.fix)
    for rank in (0, 1):
        pieces = torch.stack([of_rank[rank] for of_rank in of_ranks])  # as the one call brings them
        got = pieces if "all_to_all" in what else pieces.sum(0)
        said = eval(results, {"got": got, "n": 2, "tensors": given[rank]})
        for nth, result in enumerate(said):
            own = torch.stack([tensors[nth].chunk(2)[rank] for tensors in given])
            assert torch.equal(result.flatten(), own.flatten() if "all_to_all" in what else own.sum(0))


@pytest.mark.parametrize("several", [True, False])
def test_all_lines_of_a_price_are_named_with_their_functions(several: bool) -> None:
    """Gradients go to rank 0 by one line, and weights come back by another one, which makes more of the calls."""
    weights = (11, 11, 11) if several else (11, 12, 13)
    ranks = []
    for one in loop(40, where=(10, 10, *weights)).processes:
        of_line = {10: place(10, "reduce", "reduce")}
        calls = [
            replace(made, place=of_line.get(made.place.line) or place(made.place.line, "broadcast", "broadcast"))
            for made in one.calls
        ]
        calls = [replace(made, bytes=200) if made.place.line == 10 else made for made in calls]
        ranks.append(process(one.rank, calls))
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    (found,) = CAUSES["small_collectives"].suspect(Job(recording, steps, [], script_of(recording, steps), 2))
    assert found.seen.startswith("train.py:11 calls broadcast" if several else "train.py:10 calls reduce")
    assert f"with {400 if several else 200} B each" in found.seen
    other = "train.py:10 (reduce)" if several else "train.py:11 (broadcast) and at train.py:12 (broadcast) and at"
    assert f"; do the same at {other}" in found.fix
    alone = Recording(tuple(process(one.rank, [made for made in one.calls if made.place.line != 10]) for one in ranks))
    (found,) = CAUSES["small_collectives"].suspect(
        Job(alone, steps_of(alone), [], script_of(alone, steps_of(alone)), 2)
    )
    together = "" if several else " and of those of train.py:12 and of those of train.py:13"
    assert found.fix.startswith(
        f"train.py:11: make one call of them{together}, one for each dtype and operation, where"
    )
    assert "do the same" not in found.fix


def test_a_call_of_what_the_one_before_has_brought_becomes_no_one_call_with_it() -> None:
    """A mean and then a variance, or the layers of a network that lies on several ranks: one call would be wrong."""
    builds = {place(11).of_any_group: 1}
    recording = Recording(tuple(replace(one, builds=builds) for one in loop(40).processes))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    into = runs(script, range(65, 1000))
    assert {one.call.place.line for one in script.played[0] if one.key in into} == {12}
    assert all(key[1] - first[1] == 1 for key, first in into.items())


@pytest.mark.parametrize(
    ("back", "left"), [(0, {(800, 2, 0), (16, 2, 0), (400, 1, 1)}), (2, {(800, 2, 0), (8, 1, 0), (400, 1, 1)})]
)
def test_calls_of_several_kinds_in_turn_become_one_of_each(back: int, left: set[tuple[int, int, int]]) -> None:
    """Statistics of a batch norm and its counter, or weights that have one rank each that sends them.

    But a call that is given what the call two before has brought is not made together with that.
    """
    of_line = {
        "statistics": (replace(place(10, "broadcast", "broadcast"), dtype="float32"), 400, 0),
        "counter": (replace(place(10, "broadcast", "broadcast"), dtype="int64"), 8, 0),
        "another root": (replace(place(10, "broadcast", "broadcast"), dtype="float32", part=1), 400, 1),
    }
    in_turn = ("statistics", "counter", "another root", "statistics", "counter")
    ranks = []
    for one in loop(40, where=(10,) * len(in_turn)).processes:
        calls = []
        for nth, made in enumerate(one.calls):
            where, size, root = of_line[in_turn[nth % len(in_turn)]]
            calls.append(replace(made, place=where, bytes=size, root=root))
        builds = {of_line["counter"][0].of_any_group: back} if back else {}
        ranks.append(process(one.rank, calls, builds=builds))
    recording = Recording(tuple(ranks))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    into = runs(script, range(65, 1000))
    made_so = [one.act for one in merged(script, into).played[0]][5:-5]
    assert {(act.bytes, act.tensors, act.root) for act in made_so if act.call != REST} == left
    later = [one.act for one in side_by_side(script, into).played[0]]
    assert sum(act.call == WAIT for act in later) < len(later) / (5 if back else 4)


def test_calls_with_work_between_them_stay_apart() -> None:
    recording = loop(40, gap=2e-3)
    script = script_of(recording, steps_of(recording))
    assert script is not None
    assert runs(script, range(65, 1000)) == {}


@pytest.mark.parametrize("size", [8, 30_000])
def test_calls_of_several_steps_become_no_one_call_however_long_they_take(size: int) -> None:
    """Where a network is slow, or cores are short, a call takes much longer than what is computed between two of them.

    The optimizer needs its result before the next one can be computed.
    """
    step, ranks = place(30, "step of SGD", "step of SGD", None), []
    for rank in (0, 1):
        calls = []
        for number in range(100):
            now = 1.0 + 0.07 * number
            calls.append(call(place(10), number, now, 0.05, size))
            calls.append(call(step, -1, now + 0.051, 0.0))
        ranks.append(process(rank, calls))
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    script = script_of(recording, steps)
    assert script is not None
    job = Job(recording, steps, [], script, 2)
    assert not [*CAUSES["small_collectives"].suspect(job)]
    assert {one.tried for one in CAUSES["scalar_collectives"].suspect(job)} <= {"a tenth of these calls"}


def test_calls_that_are_left_out_leave_what_is_computed_between_them() -> None:
    """Also behind the last one that stays: else a step without them would be shorter than it is."""
    ranks = []
    for rank in loop(97, where=(10,)).processes:
        ranks.append(replace(rank, calls=[replace(made, bytes=8) for made in rank.calls]))
    script, changed = changed_by("scalar_collectives", Recording(tuple(ranks)))
    for rank in (0, 1):
        before, after = ([one.act for one in of.played[rank]] for of in (script, changed))
        assert sum(act.computes > 0 for act in before) == sum(act.call != REST for act in before), "as many gaps"
        assert before[-1].call == REST
        assert after[-1].call == REST
        assert sum(act.computes for act in after) == pytest.approx(sum(act.computes for act in before))
    assert script.covers == pytest.approx(sum(one.act.call != REST for one in script.played[0]), rel=0.02)


@pytest.mark.parametrize("others", [4, 5, 9])
@pytest.mark.parametrize("first", [0, 1])
def test_a_tenth_of_the_numbers_is_sent_whatever_lies_between_them(others: int, first: int) -> None:
    """Where a step has ten calls, the number of each single number's call ends in the same digit."""
    ranks = []
    for rank in loop(100, where=tuple(range(10, 11 + others)), gap=1e-3).processes:
        sizes = [8 if one.place.line == 10 else 4000 for one in rank.calls]
        calls = [
            replace(one, number=one.number + first, bytes=size) for one, size in zip(rank.calls, sizes, strict=True)
        ]
        ranks.append(replace(rank, calls=calls))
    script, changed = changed_by("scalar_collectives", Recording(tuple(ranks)))
    before, after = (sum(one.act.bytes == 8 for one in of.played[0]) for of in (script, changed))
    assert before > 10
    assert after / before == pytest.approx(0.1, abs=0.05)


@pytest.mark.parametrize(("every", "is_found"), [(2, True), (10, False)])
def test_who_logs_rarely_is_not_told_to_log_less_often(every: int, is_found: bool) -> None:
    step, ranks = place(30, "step of SGD", "step of SGD", None), []
    for one in loop(40, where=(10,)).processes:
        calls = [replace(made, bytes=8) for made in one.calls]
        last = calls[0].began
        with_steps: list[Call] = []
        for made in calls:
            length = (made.began - last) / every
            with_steps += [call(step, -1, last + (n + 1) * length - 1e-6, 0.0) for n in range(every) if length]
            with_steps.append(made)
            last = made.ended
        ranks.append(process(one.rank, with_steps))
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    assert "steps of SGD" in steps.how
    job = Job(recording, steps, [], script_of(recording, steps), 2)
    assert bool(list(CAUSES["scalar_collectives"].suspect(job))) is is_found


def test_a_pipeline_that_logs_rarely_is_not_told_to_log_less_often() -> None:
    """It sends in each step, which is not done again. So its one number counts for all steps up to the next one."""
    step, ranks = place(30, "step of SGD", "step of SGD", None), []
    for rank in (0, 1):
        calls = []
        for number in range(400):
            now = 1.0 + 0.04 * number
            calls.append(call(place(20, "isend", "send"), -1, now, 1e-4, 8000, blocking=False))
            if number % 30 == 7:
                calls.append(call(place(10), number // 30, now + 1e-3, 5e-3, 8))
            calls.append(call(step, -1, now + 0.03, 0.0))
        ranks.append(process(rank, calls))
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    script = script_of(recording, steps)
    assert script is not None
    assert script.covers / len(script.of_key) == pytest.approx(30, rel=0.1)
    assert not list(CAUSES["scalar_collectives"].suspect(Job(recording, steps, [], script, 2)))


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_sends_behind_the_last_call_of_a_step_are_a_part_of_it(has_optimizer: bool) -> None:
    """A grid sends in each 20 ms and adds up one number in each twentieth time: a step of it takes 400 ms, not two."""
    ranks = []
    for rank in (0, 1):
        calls = []
        for number in range(900):
            now = 1.0 + 0.02 * number
            calls.append(call(place(20, "isend", "send"), -1, now, 1e-4, 8000, blocking=False))
            calls += [call(place(10), number // 20, now + 0.018, 1e-3, 8)] if number % 20 == 7 else []
            step = place(30, "step of SGD", "step of SGD", None)
            calls += [call(step, -1, now + 0.0195, 0.0)] if has_optimizer else []
        ranks.append(process(rank, calls))
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    assert steps.seconds == pytest.approx(0.02 if has_optimizer else 0.4, rel=0.01)
    script = script_of(recording, steps)
    assert script is not None
    assert script.seconds / script.covers == pytest.approx(steps.seconds, rel=0.01)


@pytest.mark.parametrize(("what", "method"), [("broadcast", "broadcast"), ("all_reduce", "allreduce")])
@pytest.mark.parametrize("where", [(10,), (10, 11, 12)])
def test_numbers_that_one_rank_sends_are_not_added_up(what: str, method: str, where: tuple[int, ...]) -> None:
    """A rate and a sign to stop come from rank 0: an all-reduce would make their sum of them."""
    ranks = []
    for one in loop(97, where=where).processes:
        calls = []
        for made in one.calls:
            line = replace(place(made.place.line, what, method), reduction="RedOpType.SUM")
            calls.append(replace(made, bytes=8, root=0, place=line))
        ranks.append(process(one.rank, calls))
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    (found,) = CAUSES["scalar_collectives"].suspect(Job(recording, steps, [], script_of(recording, steps), 2))
    assert f"dist.{what}(" in found.fix
    assert ("add them up" in found.fix) is (what == "all_reduce" and len(where) == 1)
    assert what == "all_reduce" or "all_reduce" not in found.fix
    assert ("only logged" in found.fix) is (what == "all_reduce" and len(where) == 1)
    lines = "train.py:10 sends single" if len(where) == 1 else "train.py:10 and train.py:11 send single"
    assert found.seen.startswith(lines)


def test_numbers_that_are_no_sum_are_in_no_call_with_sums() -> None:
    """Ranks would go on with the sum of what they need the largest of, or of what rank 0 alone knows."""
    ranks, ways = [], {13: ("all_reduce", "allreduce", "RedOpType.MAX", -1), 14: ("broadcast", "broadcast", "", 0)}
    for one in loop(97, where=(10, 11, 12, 13, 14, 14)).processes:
        calls = []
        for made in one.calls:
            what, method, reduction, root = ways.get(made.place.line, ("all_reduce", "allreduce", "RedOpType.SUM", -1))
            line = replace(place(made.place.line, what, method), reduction=reduction)
            calls.append(replace(made, bytes=4, root=root, place=line))
        ranks.append(process(one.rank, calls))
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    (found,) = CAUSES["scalar_collectives"].suspect(Job(recording, steps, [], script_of(recording, steps), 2))
    together, _, apart = found.fix.partition(" Those of ")
    assert found.fix.startswith("train.py:10: ")
    assert "dist.all_reduce(numbers" in together
    assert [f"train.py:{line}" in together for line in range(10, 15)] == [True, True, True, False, False]
    assert apart.startswith("train.py:14 and train.py:13 have another dtype, operation, sender or group")


def test_what_rank_0_tells_the_others_is_not_called_logged() -> None:
    """A rate that the others go on with: no training would be the same with one that comes in every tenth step."""
    ranks = []
    for one in loop(97, where=(10, 11), gap=1e-3).processes:
        ways = {10: place(10), 11: place(11, "broadcast", "broadcast")}
        calls = [replace(made, bytes=8, place=ways[made.place.line]) for made in one.calls]
        ranks.append(process(one.rank, calls))
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    (found,) = CAUSES["scalar_collectives"].suspect(Job(recording, steps, [], script_of(recording, steps), 2))
    assert found.fix.startswith("train.py:10: numbers that are only logged: ")
    assert found.lines == ("train.py:10",)


def test_the_largest_of_numbers_is_none_of_their_sums() -> None:
    """As of the time of a step: to add it up on each rank first would log something else."""
    ranks = []
    for one in loop(97, where=(10,)).processes:
        calls = [replace(made, bytes=8, place=replace(made.place, reduction="RedOpType.MAX")) for made in one.calls]
        ranks.append(process(one.rank, calls))
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    (found,) = CAUSES["scalar_collectives"].suspect(Job(recording, steps, [], script_of(recording, steps), 2))
    assert "add them up" not in found.fix


@pytest.mark.parametrize(("sizes", "is_found"), [(11, False), (1, True)])
def test_a_number_that_tells_how_much_is_sent_next_is_not_only_logged(sizes: int, is_found: bool) -> None:
    """Ranks that gather texts or tokens send the longest size first: without it they would not ask for the same."""
    ranks = []
    for one in loop(97, where=(10, 11)).processes:
        calls = [
            replace(made, bytes=8 if made.place.line == 10 else 4000 + n // 2 % sizes * 400)
            for n, made in enumerate(one.calls)
        ]
        ranks.append(process(one.rank, calls))
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    job = Job(recording, steps, [], script_of(recording, steps), 2)
    assert bool(list(CAUSES["scalar_collectives"].suspect(job))) is is_found


@pytest.mark.parametrize(
    ("lines", "sizes", "gap", "is_found"),
    [
        ((10, 10, 10), (4000, 400, 40), 1e-5, False),  # right behind a larger one
        ((10, 10, 10, 10), (40, 3000, 4000, 400), 2e-3, False),  # first in a backward pass, of many sizes
        ((10, 10, 11), (4000, 400, 40), 1e-5, True),
        ((10, 10), (4, 4000), 2e-3, True),  # a helper that is called for a loss, and then for gradients
    ],
)
def test_a_bias_of_few_numbers_is_no_number_that_is_only_logged(
    lines: tuple[int, ...], sizes: tuple[int, ...], gap: float, is_found: bool
) -> None:
    """A loop over gradients sends it: with a tenth of these calls the ranks would train other models."""
    ranks = []
    for one in loop(60, where=lines, gap=gap).processes:
        step = place(30, "step of SGD", "step of SGD", None)
        calls = [replace(made, bytes=sizes[n % len(sizes)]) for n, made in enumerate(one.calls)]
        ends = [call(step, -1, made.ended, 0.0) for made in calls[len(sizes) - 1 :: len(sizes)]]
        ranks.append(process(one.rank, sorted([*calls, *ends], key=lambda made: made.began)))
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    job = Job(recording, steps, [], script_of(recording, steps), 2)
    assert bool(list(CAUSES["scalar_collectives"].suspect(job))) is is_found


@pytest.mark.parametrize("steps", [30, 33, 37, 39])
def test_calls_and_gaps_are_those_of_whole_steps(steps: int) -> None:
    """The last calls are left out, wherever in a step that ends: a price is of as many calls as a step has."""
    recording = loop(steps, where=tuple(range(10, 40)), between=0.97)
    script = script_of(recording, steps_of(recording))
    assert script is not None
    calls = sum(one.act.call != REST for one in script.played[0])
    assert calls / script.covers == pytest.approx(30, rel=0.05)


@pytest.mark.parametrize("every", [1, 20, 100, 600])
def test_calls_of_some_steps_only_count_for_all_of_them(every: int) -> None:
    """Ranks that train by themselves, and average their weights now and then. A long pause is cut when it is done."""
    of_ranks: list[list[Call]] = [[], []]
    now, number = 1.0, 0
    for step in range(12 * every if every > 1 else 200):
        now += 10e-3
        for calls in of_ranks:
            calls.append(replace(call(place(30, "step of SGD", "step of SGD", None), -1, now, 0.0, 0), returned=now))
        for line in range(10, 20) if step % every == every - 1 else ():
            now += 1e-5
            for calls in of_ranks:
                calls.append(call(place(line), number, now, 1e-3))
            now, number = now + 1e-3, number + 1
    recording = Recording(tuple(process(rank, calls) for rank, calls in enumerate(of_ranks)))
    steps = steps_of(recording)
    assert steps.unit == "step"
    script = script_of(recording, steps)
    assert script is not None
    calls_again = sum(one.act.call != REST for one in script.played[0])
    assert calls_again / script.covers == pytest.approx(10 / every, rel=0.1)
    assert script.seconds < 3.5
    assert sum(one.act.computes for one in script.played[0]) == pytest.approx(
        script.seconds - calls_again * 1e-3, rel=0.05
    )


def average_step(steps: Iterable[tuple[float, bool]]) -> float:
    """Seconds that a step takes by what is done again. `steps`: when each ends, and whether a call of 1 ms follows."""
    step, calls = place(30, "step of SGD", "step of SGD", None), []
    for number, (ends, is_followed) in enumerate(steps):
        calls.append(replace(call(step, -1, ends, 0.0, 0), returned=ends))
        calls += [call(place(10), number, ends + 1e-5, 1e-3)] if is_followed else []
    recording = Recording((process(0, calls), process(1, calls)))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    return script.seconds / script.covers * script.pace


def test_a_step_takes_what_steps_take_on_average_without_pauses() -> None:
    """Each fourth stretch of steps is slower, and an evaluation of 4 s comes once: it is no part of a step.

    Nor is what autoddp adds at first, while it looks at more than calls, nor another program that uses the cores once.
    """
    takes = [(15e-3 if n // 24 % 4 == 0 else 10e-3) + (5e-3 if n < 1000 else 0.0) for n in range(2400)]
    takes[2000] += 4.0
    takes[2100:2150] = [40e-3] * 50
    assert average_step((1.0 + ends, True) for ends in accumulate(takes)) == pytest.approx(11.25e-3, rel=0.03)


def test_a_pause_that_is_shorter_than_a_stretch_of_steps_is_no_part_of_a_step() -> None:
    """An evaluation of 0.3 s behind each hundredth step, of which forty are done again."""
    takes = [10e-3 + (0.3 if n % 100 == 0 else 0.0) for n in range(2000)]
    assert average_step((1.0 + ends, True) for ends in accumulate(takes)) == pytest.approx(10e-3, rel=0.03)


def test_a_step_takes_as_long_where_calls_come_at_odd_steps() -> None:
    """In each tenth step and in each 25th: some stretches between two calls have half as many steps as others."""
    steps = ((1.0 + n * 30e-3, n % 10 == 0 or n % 25 == 0) for n in range(660))
    assert average_step(steps) == pytest.approx(30e-3, rel=0.03)


def test_a_call_that_is_waited_for_much_later_is_a_part_of_its_step() -> None:
    """A step ends where nothing is open, and not in the middle of what runs beside a call."""
    ranks = []
    for one in loop(20, where=(10, 11), between=0.97).processes:
        calls = [
            replace(made, is_blocking=False, wait_began=made.began + 0.6, wait_ended=made.began + 0.61)
            if made.place.line == 11
            else made
            for made in one.calls
        ]
        ranks.append(process(one.rank, calls))
    recording = Recording(tuple(ranks))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    calls_again = [one.act for one in script.played[0] if one.act.call not in (WAIT, REST)]
    assert [act.waits for act in calls_again] == [True, False]
    assert script.covers == pytest.approx(1.0, rel=0.05)


def test_a_call_to_which_ranks_give_more_or_less_is_done_again_with_one_size() -> None:
    """Of experts, for example. Pieces of different sizes end the ranks of the replay."""
    ranks = []
    for rank in loop(60, where=(10,)).processes:
        shared = place(10, "all_to_all_single", "alltoall_base")
        calls = [replace(one, place=shared, bytes=4000 + 4000 * rank.rank) for one in rank.calls]
        ranks.append(process(rank.rank, calls))
    recording = Recording(tuple(ranks))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    assert {act.bytes for of_rank in script.program.acts for act in of_rank if act.call != REST} == {8000}


def test_ranks_may_call_at_the_same_moment() -> None:
    """To the nanosecond, and leave the call at different ones: it was a traceback."""
    one, other = loop(40).processes
    later = [replace(each, wait_ended=each.wait_ended + 1e-6) for each in other.calls]
    recording = Recording((one, process(1, later)))
    assert script_of(recording, steps_of(recording)) is not None


def test_a_call_may_go_on_when_a_trial_of_fewer_threads_begins() -> None:
    """The next call that is kept comes behind the trial, and may end before it: it was a traceback."""
    ranks = []
    for one in loop(60, where=(10,), between=0.5).processes:
        calls = [replace(each, wait_ended=each.ended + 1.5 * (each.number == 45)) for each in one.calls]
        ranks.append(_without_trial(process(one.rank, calls), ThreadsTrial(1, calls[45].began + 1e-4, 1.0, 2)))
    recording = Recording(tuple(ranks))
    assert script_of(recording, steps_of(recording)) is not None


def test_objects_take_as_long_as_all_of_their_function() -> None:
    """Pickling and the second call are a part of it. The sizes may travel last."""
    parts = [
        replace(place(10, "scatter_object_list", method), part=part)
        for part, method in enumerate(("broadcast", "scatter", "scatter"))
    ]
    whole = place(10, "scatter_object_list", "scatter_object_list", None)
    ranks = []
    for rank in (0, 1):
        calls, now, number = [], 1.0, 0
        for _ in range(100):
            began = now
            for part, size in zip(parts, (8, 9000, 8), strict=True):
                calls.append(call(part, number, now + 1e-3, 1e-4, size))
                now, number = now + 1.1e-3, number + 1
            calls.append(replace(call(whole, -1, began, now - began, 0), returned=now, wait_began=now))
            now += 5e-3
        ranks.append(process(rank, calls))
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    job = Job(recording, steps, [], script_of(recording, steps), 2)
    (found,) = CAUSES["object_collectives"].suspect(job)
    assert job.script is not None
    assert {one.act.bytes for one in job.script.played[0] if one.act.call != REST} == {9000}
    assert found.guess * job.script.covers == pytest.approx(len(job.script.of_key) * 3.3e-3, rel=0.05)


def test_a_part_of_a_function_for_objects_is_no_call_of_its_own() -> None:
    """Its first call may lie in a trial of fewer threads on one rank. Some ranks do something else in between."""
    world, some = Group((0, 1, 2), "all", "gloo"), Group((0, 2), "some", "gloo")
    parts = [replace(place(10, "broadcast_object_list", "broadcast", world), part=part) for part in (0, 1)]
    of_ranks: list[list[Call]] = [[], [], []]
    for number in range(60):
        now = 1.0 + number * 5e-3
        for rank, calls in enumerate(of_ranks):
            if rank in some.ranks:
                calls.append(call(place(11, "barrier", "barrier", some), number, now, 1e-3))
            for part, where in enumerate(parts):
                calls.append(call(where, 2 * number + part, now + (1 + part) * 1e-3, 1e-3 - rank * 1e-6))
            calls.append(call(place(10, *["broadcast_object_list"] * 2, None), -1, now + 1e-3, 2e-3))
    of_ranks[1] = [one for one in of_ranks[1] if (one.number, one.place.part) != (80, 0)]
    recording = Recording(tuple(replace(process(rank, calls), ranks=3) for rank, calls in enumerate(of_ranks)))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    made = [[one.key for one in script.played[rank] if one.act.call == "broadcast_object_list"] for rank in range(3)]
    assert made[0] == made[1] == made[2]


def test_where_calls_were_lost_all_of_the_time_counts() -> None:
    """The sums are of all calls then, and not of those that were kept."""
    one, _ = loop(60).processes
    trial = ThreadsTrial(1, one.calls[30].began, 0.005, 4)
    lost = replace(one, made=CALLS + 1, seconds=10.0)
    assert _without_trial(lost, trial).seconds == 10.0
    assert _without_trial(replace(lost, made=len(one.calls)), trial).seconds < one.seconds


def test_what_ranks_do_at_their_start_is_no_part_of_the_steps() -> None:
    """They wait for each other, and get the parameters from rank 0."""
    (rank, _) = loop(100, where=(10,)).processes
    at_start = [call(place(3, "barrier", "barrier"), 0, -8.0, 8.0)]
    at_start += [call(place(5, "broadcast"), 1 + number, 0.5 + number * 1e-3, 1e-3) for number in range(5)]
    began = [*at_start, *(replace(one, number=one.number + 6) for one in rank.calls)]
    found = _without_start(process(0, began, made=len(began)))
    assert {one.line for one in found.sums} == {10}
    assert found.seconds == pytest.approx(rank.seconds)
    few = [*at_start, *began[6:20]]
    assert _without_start(process(0, few, made=len(few))).calls == few, "too few to tell"
    other = [*rank.calls, *(replace(one, place=place(20), began=one.began + 9) for one in rank.calls)]
    assert len(_without_start(process(0, other, made=len(other))).calls) == 200, "an evaluation that comes later"


def test_a_start_is_cut_only_from_steps_that_call_a_group() -> None:
    """What is known of groups and devices comes from the calls; and pauses are between steps, behind any start."""
    at_start = [call(place(5, "broadcast"), number, 0.5 + number * 1e-3, 1e-3) for number in range(5)]
    step = place(30, "step of SGD", "step of SGD", None)
    alone = [*at_start, *(call(step, -1, 1.0 + nth * 1e-2, 0.0) for nth in range(100))]
    found = _without_start(process(0, alone, made=len(alone)))
    assert found.calls == alone
    assert Recording((found,)).groups == [PAIR]
    with_pauses = [*at_start, *loop(100).processes[0].calls]
    one = replace(process(0, with_pauses, made=len(with_pauses), paused=100.0), seconds=2.0)
    assert _without_start(one).seconds == 2.0


def test_a_wait_at_the_start_is_no_gap_of_the_steps() -> None:
    """The others wait for a minute, until rank 0 has prepared the data; in half of each gap a rank computes."""
    (rank, _) = loop(200, where=(10,)).processes
    gaps = rank.seconds - 200 * 1e-3
    look = Look(seconds=60.0 + rank.seconds, cpu_of_thread=gaps / 2, waited_of_thread=gaps / 2, began=-59.0)
    began = [call(place(3, "barrier", "barrier"), 0, -59.0, 60.0), *rank.calls]
    found = _of_gaps(_without_start(process(0, began, made=len(began), look=look)))
    assert found.computes == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(("waits", "idle"), [(0.0, 1.0), (0.1, 0.6), (0.25, 0.0), (0.4, 0.0)])
def test_what_a_rank_waits_for_a_core_is_no_sleep(waits: float, idle: float) -> None:
    """It computes in three quarters of each gap."""
    (rank, _) = loop(200, where=(10,)).processes
    gap = Played(Act("allreduce", computes=3e-3, sleeps=1e-3), (0, 0), rank.calls[0])
    assert _idle(process(0, rank.calls, waits_in_gaps=waits), [gap]) == pytest.approx(idle)


def test_a_wait_at_the_start_that_no_look_has_seen_is_taken_from_none() -> None:
    """Calls before a trial are moved; so is the first look, or a wait before it would seem to lie behind it."""
    (rank, _) = loop(200, where=(10,)).processes
    look = Look(seconds=rank.seconds, cpu_of_thread=rank.seconds / 2, began=1.0)
    began = [call(place(3, "barrier", "barrier"), 0, -59.0, 60.0), *rank.calls]
    trial = ThreadsTrial(1, rank.calls[150].began, 0.5, 24)
    found = _without_start(_without_trial(process(0, began, made=len(began), look=look), trial))
    assert {one.line for one in found.sums} == {10}
    assert found.look.seconds == pytest.approx(rank.seconds)


def test_groups_of_an_earlier_world_are_not_done_again() -> None:
    """Ranks 2 and 3 go on as ranks 0 and 1 of a smaller world."""
    before = Group((2, 3), "before", "gloo")
    ranks = []
    for one in loop(40).processes:
        earlier = [call(place(10, group=before), made.number, made.began - 0.9, 1e-3) for made in one.calls]
        ranks.append(process(one.rank, [*earlier, *one.calls]))
    recording = Recording(tuple(ranks))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    assert script.groups == (PAIR,)


def test_what_a_rank_starts_beside_its_training_is_not_the_rank() -> None:
    """A process with an optimizer of its own, and no group, has RANK from the rank that has started it."""
    recording = loop(40)
    step = place(30, "step of SGD", "step of SGD", None)
    beside = process(0, [call(step, -1, 1.5 + nth * 1e-3, 0.0) for nth in range(2000)])
    both = Recording((*recording.processes, replace(beside, ranks=1)))
    assert both.of_rank == recording.of_rank
    assert steps_of(both) == steps_of(recording)
    assert script_of(both, steps_of(both)) is not None


@pytest.mark.parametrize(("world", "is_launched", "began"), [(1, True, 0.0), (1, False, 1e-3), (2, False, 1e-3)])
def test_a_world_beside_the_training_is_not_the_ranks(world: int, is_launched: bool, began: float) -> None:
    """As of processes that generate, or send data: a smaller one, or one that the ranks have started. It is told."""
    recording = loop(60)
    own = Group(tuple(range(world)), "default", "gloo")
    calls = [call(place(40, group=own), n, 1.006 + began + n * 1e-3, 5e-4) for n in range(100)]
    other = replace(process(0, calls, is_launched=is_launched), ranks=world)
    both = Recording((*recording.processes, other))
    assert both.of_rank == recording.of_rank
    assert both.beside == [other]
    said = examined(both, 2, lambda programs: "not tried here", lambda line: None)
    assert any("in a world of its own" in line for line in said.not_measured)
    calls = [replace(one, began=one.began + 9, wait_ended=one.ended + 9) for one in calls]
    later = replace(other, calls=calls, began=10.0)
    assert Recording((*recording.processes, later)).of_rank[0] == later, "of worlds one after another it is the last"


def test_the_rank_that_is_late_is_told_with_its_place() -> None:
    recording = loop(60, late=6e-3)
    steps = steps_of(recording)
    job = Job(recording, steps, table(recording), script_of(recording, steps), cores=2)
    (found,) = CAUSES["waiting_for_rank"].suspect(job)
    assert found.ranks == (1,)
    assert "from train.py:12 to train.py:10 it takes" in found.seen
    assert found.changed is not None
    assert list(CAUSES["waiting_for_rank"].suspect(Job(loop(60), steps, [], script_of(loop(60), steps), 2))) == []


@pytest.mark.parametrize(("method", "late"), [("broadcast", 0), ("scatter", 0), ("gather", 1), ("reduce", 1)])
def test_the_rank_for_which_a_root_waits_or_that_is_the_root_itself(method: str, late: int) -> None:
    """Rank 0 alone reads the data and sends them, or collects what rank 1 is late with; no other call waits for it."""
    of_ranks: list[list[Call]] = [[], []]
    for number in range(60):
        begins = [1.0 + number * 0.01 + (6e-3 if rank == late else 1e-3) for rank in range(2)]
        for rank, began in enumerate(begins):
            ends = max(begins) + 1e-3 if rank != late else began + 1e-3
            of_ranks[rank].append(replace(call(place(10, method, method), number, began, ends - began), root=0))
    recording = Recording(tuple(process(rank, calls) for rank, calls in enumerate(of_ranks)))
    rows = table(recording)
    assert (rows[0].last, rows[0].waiting) == (late, pytest.approx(0.25, rel=0.05))  # 5 of 10 ms, of one of two ranks
    steps = steps_of(recording)
    (found,) = CAUSES["waiting_for_rank"].suspect(Job(recording, steps, rows, script_of(recording, steps), 2))
    assert (found.ranks, round(found.guess, 4)) == ((late,), 5e-3)


@pytest.mark.parametrize(("waits", "is_found"), [(60e-3, False), (1e-3, True)])
def test_a_rank_that_waits_for_the_others_itself_is_not_called_late(waits: float, is_found: bool) -> None:
    """The first stage of a pipeline gets its gradients last, in a receive that is not done again. It does no more."""
    of_ranks: list[list[Call]] = [[], []]
    receives, now = place(50, "recv", "recv"), 1.0
    for number in range(30):
        of_ranks[0].append(call(receives, -1, now + 0.02, waits))
        of_ranks[1].append(call(receives, -1, now, 0.02))
        for calls, began in zip(of_ranks, (now + 0.12, now + 0.08), strict=True):
            calls.append(call(place(10), number, began, now + 0.121 - began))
        now += 0.125
    recording = Recording(tuple(process(rank, calls) for rank, calls in enumerate(of_ranks)))
    steps = steps_of(recording)
    job = Job(recording, steps, [], script_of(recording, steps), 2)
    assert bool(list(CAUSES["waiting_for_rank"].suspect(job))) is is_found


def test_a_rank_that_meets_others_in_between_is_not_called_late() -> None:
    """The leader of a host adds up with the other leaders, while its host waits in the next call."""
    leaders, of_ranks = Group((0, 2), "leaders", "gloo"), dict[int, list[Call]]({0: [], 1: [], 2: []})
    now = 1.0
    for number in range(60):
        for rank in (0, 1):
            of_ranks[rank].append(call(place(10), 2 * number, now, 1e-3))
        for rank in (0, 2):
            of_ranks[rank].append(call(place(20, group=leaders), number, now + 1.02e-3, 4e-3))
        for rank, began in ((0, now + 5.04e-3), (1, now + 1.01e-3)):
            of_ranks[rank].append(call(place(11), 2 * number + 1, began, now + 6e-3 - began))
        now += 11e-3
    recording = Recording(tuple(replace(process(rank, calls), ranks=3) for rank, calls in of_ranks.items()))
    said = examined(recording, 2, lambda programs: "not tried here", lambda line: None)
    assert "waiting_for_rank" not in {one.cause for one in said.findings}


@pytest.mark.parametrize("what", ["all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"])
@pytest.mark.parametrize(("backend", "size"), [("gloo", 8), ("nccl", 8), ("gloo", 100_000)])
def test_numbers_in_place_of_objects_stay_in_their_group(what: str, backend: str, size: int) -> None:
    """Else some ranks would call the group of all, and wait for ever. NCCL takes no numbers of the host.

    What is large is no few numbers, and what is small may be a text.
    """
    part = place(10, what, "broadcast" if "list" in what else "allgather", Group((0, 1), "evaluators", backend))
    calls = []
    for number in range(100):
        now = 1.0 + number * 5e-3
        calls.append(call(part, number, now, 1e-3, size))
        whole = call(place(10, what, what, None), -1, now, 2e-3, 0)
        calls.append(replace(whole, returned=whole.wait_ended, wait_began=whole.wait_ended))
    recording = Recording(tuple(process(rank, calls) for rank in (0, 1)))
    steps = steps_of(recording)
    (found,) = CAUSES["object_collectives"].suspect(Job(recording, steps, [], script_of(recording, steps), 2))
    assert ("where these objects are numbers" in found.fix and "group=group)" in found.fix) is (size == 8)
    assert ("torch.tensor(" in found.fix or "torch.empty(" in found.fix) is (size == 8)
    assert ("device='cuda'" in found.fix) is (backend == "nccl")
    # A seed in single precision is another one on the ranks that get it than on the rank that has drawn it.
    assert ("(2, dtype=torch.float64" in found.fix or "], dtype=torch.float64" in found.fix) is (size == 8)


def test_each_line_that_sends_objects_has_a_fix_of_its_own() -> None:
    """A plan from rank 0 before each step, and numbers of all ranks behind it: the price is that of both."""
    calls = []
    for number in range(100):
        for nth, (what, method) in enumerate(
            (("broadcast_object_list", "broadcast"), ("gather_object", "allgather"), ("gather_object", "allgather"))
        ):
            now = 1.0 + number * 15e-3 + nth * 5e-3
            calls.append(call(place(10 + min(nth, 1), what, method), 3 * number + nth, now, 1e-3))
            whole = call(place(10 + min(nth, 1), what, what, None), -1, now, 2e-3, 0)
            calls.append(replace(whole, returned=whole.wait_ended, wait_began=whole.wait_ended))
    recording = Recording(tuple(process(rank, calls) for rank in (0, 1)))
    steps = steps_of(recording)
    (found,) = CAUSES["object_collectives"].suspect(Job(recording, steps, [], script_of(recording, steps), 2))
    assert found.lines == ("train.py:11", "train.py:10")
    assert found.seen.startswith("train.py:11 sends Python objects by gather_object")
    first, _, second = found.fix.partition("; train.py:10: ")
    assert "dist.all_gather(" in first
    assert "dist.broadcast(" in second


@pytest.mark.parametrize("cause", sorted(CAUSES))
def test_no_advice_names_a_function_that_torch_calls_deprecated(cause: str) -> None:
    source = inspect.getsource(inspect.getmodule(CAUSES[cause]))  # type: ignore[arg-type]
    named = set(re.findall(r"\bdist\.(\w+)\(", source))
    assert [name for name in named if hasattr(getattr(dist, name), "__deprecated__")] == []


def test_calls_are_done_again_by_the_backend_of_their_group() -> None:
    """Numbers of the host go over gloo beside NCCL, and over NCCL they would take another time."""
    on_gpu = replace(place(10, group=Group((0, 1), "all", "nccl")), device="cuda")
    on_host = replace(place(11, group=Group((0, 1), "host", "gloo")), device="cpu")
    calls = []
    for number in range(60):
        now = 1.0 + number * 5e-3
        calls += [call(on_gpu, number, now, 1e-4), call(on_host, number, now + 2e-3, 1e-3)]
    recording = Recording(tuple(process(rank, calls) for rank in (0, 1)))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    assert script.program.backends == ("nccl", "gloo")
    assert {(act.group, act.device) for act in script.program.acts[0] if act.call != REST} == {(0, "cuda"), (1, "cpu")}
    assert recording.uses_nccl


@pytest.mark.parametrize(
    ("backend", "device", "uses_nccl"),
    [
        ("nccl", "cuda", True),
        ("nccl", "", True),  # a barrier has no tensor
        ("undefined", "cuda", True),
        ("undefined", "cpu", False),
        ("gloo", "cuda", False),
        ("gloo", "cpu", False),
    ],
)
def test_what_the_ranks_of_a_replay_meet_by(backend: str, device: str, uses_nccl: bool) -> None:
    where = replace(place(10, group=Group((0, 1), "all", backend)), device=device)
    assert Recording((process(0, [call(where, 0, 1.0, 1e-3)]),)).uses_nccl is uses_nccl


@pytest.mark.parametrize(("backend", "is_tried"), [("mpi", False), ("cpu:gloo,cuda:nccl", True), ("", True)])
def test_what_another_backend_takes_is_not_tried_by_ours(backend: str, is_tried: bool) -> None:
    """A price over Gloo is none of a job over MPI."""
    ranks, tried = [], []
    group = replace(PAIR, backend=backend)
    for one in loop(60).processes:
        ranks.append(process(one.rank, [replace(made, place=replace(made.place, group=group)) for made in one.calls]))

    def replay(programs: dict[str, Program]) -> str:
        tried.append(programs)
        return "not tried here"

    (found,) = examined(Recording(tuple(ranks)), 2, replay, lambda line: None).findings
    assert bool(tried) is is_tried
    assert ("go by mpi" in found.text) is not is_tried


USE, NEXT = Use(1, 0.5, "train.py:30"), Use(0, 0.0, "train.py:12")
AGAIN = Use(2, 1.0, "train.py:11")
"""Nobody is seen to read it: numpy may, which has the memory of a tensor that is reduced in each step."""


@pytest.mark.parametrize(
    ("of_ranks", "found"),
    [
        ((USE, USE), True),
        ((USE, None), False),
        ((USE, NEXT), False),
        ((AGAIN, AGAIN), False),
        ((USE, AGAIN), False),
    ],
)
def test_a_result_that_is_used_later(of_ranks: tuple[Use | None, ...], found: bool) -> None:
    """Only where it was seen on each rank, and where something lies in between on each."""
    recording = loop(60, gap=2e-3)
    used = place(11)
    ranks = [
        replace(one, uses={(used, -1): use} if use else {})
        for one, use in zip(recording.processes, of_ranks, strict=True)
    ]
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    suspected = list(CAUSES["blocking_collectives"].suspect(Job(recording, steps, [], script_of(recording, steps), 2)))
    assert bool(suspected) is found
    if found:
        (one,) = suspected
        assert "used in train.py:30 first" in one.seen
        assert one.changed is not None
        acts = [played.act for played in one.changed.played[0]]
        number = next(number for number, act in enumerate(acts) if not act.waits)
        # The next call, then half of the gap before the one behind it.
        assert [act.call for act in acts[number : number + 4]] == ["allreduce", "allreduce", WAIT, "allreduce"]
        assert acts[number + 2].computes == pytest.approx(acts[number + 3].computes)


def test_each_line_is_told_with_all_that_has_to_wait_for_it() -> None:
    """A mean that stays before the wait is one of a sum that is not there yet; so is an earlier one of two uses."""
    step, ranks = place(30, "step of SGD", "step of SGD", None), []
    for one in loop(60, where=(10, 11, 11), gap=2e-3).processes:
        steps = [call(step, -1, made.ended + 1e-5, 0.0) for made in one.calls[2::3]]
        uses = {
            (place(10), 0): Use(1, 0.5, "train.py:40", "train.py:9"),
            (place(11), 0): Use(1, 0.5, "train.py:41", "train.py:12"),
            (place(11), 1): Use(1, 0.5, "train.py:42"),
        }
        calls = sorted([*one.calls, *steps], key=lambda made: made.began)
        ranks.append(replace(process(one.rank, calls), uses=uses))
    recording = Recording(tuple(ranks))
    job = Job(recording, steps_of(recording), [], script_of(recording, steps_of(recording)), 2)
    (found,) = CAUSES["blocking_collectives"].suspect(job)
    assert found.lines == ("train.py:11", "train.py:10")
    assert "work.wait() before train.py:41 and train.py:42, and" in found.fix
    assert "move what train.py:12 does to the result behind work.wait(), too" in found.fix
    assert found.fix.endswith("and so train.py:10, before train.py:40, with what train.py:9 does behind the wait")


def test_a_first_use_outside_of_the_steps_is_none_of_them() -> None:
    """As at the start, or in another world beside that of the ranks. It was an error, and there was no answer."""
    at_the_start, elsewhere = (place(5), -1), (place(7, group=Group((0, 1), "beside")), -1)
    one, other = (replace(one, uses={at_the_start: USE}) for one in loop(60, gap=2e-3).processes)
    beside = replace(one, pid=2, is_launched=False, uses={elsewhere: USE})
    said = examined(Recording((one, other, beside)), 2, lambda programs: "not tried here", lambda line: None)
    assert "blocking_collectives" not in {found.cause for found in said.findings}


def test_sends_between_a_call_and_its_first_use_move_the_wait_no_further() -> None:
    """They are counted where first uses are seen, and are not done again."""
    ranks = []
    for one in loop(60, gap=2e-3).processes:
        sends = [
            call(place(50, "send", "send"), -1, made.ended + 1e-4, 1e-4) for made in one.calls if made.place.line == 11
        ]
        calls = sorted([*one.calls, *sends], key=lambda made: made.began)
        ranks.append(replace(process(one.rank, calls), uses={(place(11), -1): Use(2, 0.5, "train.py:30")}))
    script, changed = changed_by("blocking_collectives", Recording(tuple(ranks)))
    assert "send" not in {one.act.call for one in script.played[0]}
    acts = [one.act for one in changed.played[0]]
    number = next(number for number, act in enumerate(acts) if not act.waits)
    assert [act.call for act in acts[number : number + 4]] == ["allreduce", "allreduce", WAIT, "allreduce"]


def test_a_wait_that_comes_long_before_the_first_use() -> None:
    """The script has started the call itself, and waits for it at once. The wait moves, and what is computed stays."""
    one, two = loop(60, gap=2e-3).processes
    ranks = []
    for rank in (one, two):
        calls = [
            replace(made, is_blocking=False, wait_began=made.returned + 1e-5) if made.place.line == 11 else made
            for made in rank.calls
        ]
        ranks.append(replace(rank, calls=calls, uses={(place(11), -1): USE}))
    recording = Recording(tuple(ranks))
    script, changed = changed_by("blocking_collectives", recording)
    (found,) = CAUSES["blocking_collectives"].suspect(Job(recording, steps_of(recording), [], script, 2))
    assert "train.py:11: let it run meanwhile: it has async_op=True: move its work.wait() to stand before " in found.fix
    before, after = ([one.act for one in of.played[0]] for of in (script, changed))
    number = next(number for number, act in enumerate(before) if act.call == WAIT)
    assert [act.call for act in after[number - 1 : number + 3]] == ["allreduce", "allreduce", WAIT, "allreduce"]
    assert sum(act.computes for act in after) == pytest.approx(sum(act.computes for act in before))


def test_a_wait_is_for_its_own_call() -> None:
    """A script that keeps handles waits for one call while another one runs."""
    ranks = []
    for one in loop(60, where=(10, 11), gap=2e-3).processes:
        calls = []
        for first, second in zip(one.calls[::2], one.calls[1::2], strict=True):  # both run when the first is over
            begins = second.ended + 1e-3
            calls.append(replace(first, is_blocking=False, wait_began=begins, wait_ended=begins + 1e-4))
            calls.append(replace(second, is_blocking=False, wait_began=begins + 1e-3, wait_ended=begins + 1.5e-3))
        ranks.append(process(one.rank, calls))
    recording = Recording(tuple(ranks))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    acts = [act for act in script.program.acts[0] if act.call != REST]
    assert [(act.call, act.after) for act in acts[:4]] == [("allreduce", 0), ("allreduce", 0), (WAIT, 2), (WAIT, 2)]


def test_fewer_groups_at_a_time_keep_what_their_ranks_do() -> None:
    """Also what lies before the wait for a call that was only started."""
    ranks = []
    for rank in range(4):
        pair = Group((0, 1) if rank < 2 else (2, 3), str(rank // 2), "gloo")
        calls = []
        for number in range(40):
            made = call(place(10, group=pair), number, 1.0 + number * 0.02, 0.015, blocking=False)
            calls.append(replace(made, wait_began=made.began + 0.01))
        look = Look(seconds=1.0, cpu_of_thread=1.0, cpu_of_process=1.0, waited_of_thread=0.5)
        ranks.append(replace(process(rank, calls), ranks=4, look=look))
    script, changed = changed_by("oversubscribed_cores", Recording(tuple(ranks)))
    assert changed.played == {rank: script.played[rank] for rank in (0, 1)}
    assert WAIT in {one.act.call for one in changed.played[0]}


@pytest.mark.parametrize(("share", "found"), [(0.02, False), (0.99, True)])
def test_a_result_that_is_used_before_a_group_is_made_is_not_used_later(share: float, found: bool) -> None:
    """What is done with groups lies in the gap before the next call: all of it counted as before the use."""
    new, always = place(20, "new_group", "new_group", None), Group((0, 1), "always", "gloo")
    of_ranks: list[list[Call]] = [[], []]
    for number in range(60):
        now = 1.0 + number * 2e-2
        mine = Group((0, 1), f"group {number}", "gloo")
        for calls in of_ranks:
            calls.append(call(place(11, group=always), number, now, 2e-3))
            calls.append(replace(call(new, number, now + 2.1e-3, 4e-3), returned=now + 6.1e-3, wait_began=now + 6.1e-3))
            calls.append(call(place(21, group=mine), 0, now + 6.2e-3, 1e-3))
    events = {number: Group((0, 1), f"group {number}") for number in range(60)}
    uses = {(place(11, group=always), -1): Use(0, share, "train.py:12")}
    both = [replace(process(rank, calls), group_events=events, uses=uses) for rank, calls in enumerate(of_ranks)]
    recording = Recording(tuple(both))
    steps = steps_of(recording)
    job = Job(recording, steps, [], script_of(recording, steps), 2)
    assert bool(list(CAUSES["blocking_collectives"].suspect(job))) is found


@pytest.mark.parametrize("more", [0, 1])
def test_groups_that_are_made_in_each_step(more: int) -> None:
    """They are made again in the replay, one after another in one place; without the cause the first one stays.

    The script may be ended where one rank is through with `more` of them than the other.
    """
    new, members = place(20, "new_group", "new_group", None), (0, 1)
    of_ranks: list[list[Call]] = [[], []]
    now = 1.0
    for number in range(60):
        now += 5e-3
        mine = Group(members, f"group {number}", "gloo")
        for calls in of_ranks:
            calls.append(replace(call(new, number, now, 4e-3), returned=now + 4e-3, wait_began=now + 4e-3))
            calls.append(call(place(21, group=mine), 0, now + 6e-3, 1e-3))  # 2 ms later: the group before was freed
        now += 5e-3
    of_ranks[0] += [replace(call(new, 60, now, 4e-3), returned=now + 4e-3, wait_began=now + 4e-3)] * more
    events = {number: Group(members, f"group {number}") for number in range(60 + more)}
    unknown = dict.fromkeys(events, Group(()))
    both = [replace(process(rank, calls), group_events=[events, unknown][rank]) for rank, calls in enumerate(of_ranks)]
    recording = Recording(tuple(both))
    steps = steps_of(recording)
    assert steps.period == 1, "whichever group it is"
    (found,) = CAUSES["too_many_groups"].suspect(Job(recording, steps, [], script_of(recording, steps), 2))
    assert found.changed is not None
    assert found.guess == pytest.approx(0.6 * steps.seconds, rel=0.05)
    assert "none is destroyed" in found.seen
    script = script_of(recording, steps)
    assert script is not None
    for rank in (0, 1):
        acts = [one.act for one in script.played[rank]]
        assert [act.call for act in acts[:4]] == ["allreduce", MAKE_GROUP, "allreduce", MAKE_GROUP]
        assert len({act.group for act in acts[1:]}) == 1
        once = [one.act for one in found.changed.played[rank]]
        assert {act.call for act in once[:-1]} == {"allreduce"}
        assert once[-1].call == REST
        assert sum(act.computes for act in once) == pytest.approx(sum(act.computes for act in acts))
    assert len([ranks for ranks in script.program.groups if ranks]) == 2, "the first one was there before"

    def replay(programs: dict[str, Program]) -> Replayed:
        """With few groups, making one takes 2 ms."""
        takes = {name: steps.seconds - (2e-3 if name != "as written" else 0.0) for name in programs}
        return Replayed({name: (seconds * script.covers,) * 5 for name, seconds in takes.items()}, {})

    (said,) = examined(recording, 2, replay, lambda line: None).findings
    assert said.seconds == pytest.approx(0.4 * steps.seconds, rel=0.05), "as long as the script stands in new_group"
    assert said.high is not None
    assert said.high >= said.seconds
    assert "ms at least" in said.text


def test_what_a_rank_computes_before_it_makes_a_group_is_known() -> None:
    """Else most of a short gap would count as sleep, from which a rank wakes late."""
    new, calls, now, cpu = place(20, "new_group", "new_group", None), [], 1.0, 1.0
    for number in range(60):
        now, cpu = now + 5e-3, cpu + 3e-3
        made = replace(
            call(new, number, now, 4e-3), returned=now, wait_began=now, cpu_returned=cpu, cpu_waited=cpu + 1e-3
        )
        now, cpu = now + 4e-3, cpu + 1e-3
        mine = place(21, group=Group((0, 1), f"group {number}", "gloo"))
        calls += [made, replace(call(mine, 0, now, 1e-3), cpu_returned=cpu)]
        now += 1e-3
    events = {number: Group((0, 1), f"group {number}") for number in range(60)}
    recording = Recording(tuple(replace(process(rank, calls), group_events=events) for rank in (0, 1)))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    of_making = [one.act for one in script.played[0] if one.act.call == MAKE_GROUP][1:]
    assert of_making
    for act in of_making:
        assert act.computes == pytest.approx(3e-3)
        assert act.sleeps == pytest.approx(2e-3)


def test_a_group_is_destroyed_when_its_successor_is_there() -> None:
    """As by `new = new_group(…); destroy_process_group(old)`: the replay destroyed the new one, and failed."""
    new, old = (place(20 + line, name, name, None) for line, name in enumerate(("new_group", "destroy_process_group")))
    calls, now = [], 1.0
    for number in range(60):
        for what, event in [(new, 2 * number)] + [(old, 2 * number + 1)] * (number > 0):
            calls.append(replace(call(what, event, now, 1e-3), returned=now + 1e-3, wait_began=now + 1e-3))
            now += 2e-3
        calls.append(call(place(22, group=Group((0, 1), f"group {number}", "gloo")), 0, now, 1e-3))
        now += 5e-3
    events = {2 * number + later: Group((0, 1), f"group {number - later}") for number in range(60) for later in (0, 1)}
    recording = Recording(tuple(replace(process(rank, calls), group_events=events) for rank in (0, 1)))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    acts = [(act.call, act.made_since) for act in script.program.acts[0]]
    assert (MAKE_GROUP, 0) in acts
    assert {act for act in acts if act[0] == DESTROY_GROUP} == {(DESTROY_GROUP, 1)}
    (found,) = CAUSES["too_many_groups"].suspect(Job(recording, steps_of(recording), [], script, 2))
    assert "none is destroyed" not in found.seen


def test_groups_that_are_made_at_the_start_are_no_reason() -> None:
    """Three groups for the same ranks, as a mesh and a group for metrics have them, and a short recording."""
    new, starts = place(20, "new_group", "new_group", None), [*enumerate((0.5, 0.6, 0.7))]
    ranks = []
    for one in loop(60).processes:
        made = [replace(call(new, n, at, 0.1), returned=at + 0.1, wait_began=at + 0.1) for n, at in starts]
        groups = [Group((0, 1), str(n), "gloo") for n in range(3)]
        calls = [
            replace(c, place=replace(c.place, group=groups[n % 3]), number=n // 3) for n, c in enumerate(one.calls)
        ]
        ranks.append(process(one.rank, [*made, *calls]))
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    job = Job(recording, steps, [], script_of(recording, steps), 2)
    assert list(CAUSES["too_many_groups"].suspect(job)) == []


def test_the_line_that_makes_groups_again_and_again_is_told() -> None:
    """Not the one that has made a group at the start, which is a part of a recording of few steps."""
    start, again = (place(line, "new_group", "new_group", None) for line in (5, 20))
    calls = [replace(call(start, 0, 1.0, 1e-3), returned=1.001, wait_began=1.001)]
    for number in range(10):
        now = 2.0 + 2 * number
        calls.append(replace(call(again, 1 + number, now, 0.5), returned=now + 0.5, wait_began=now + 0.5))
        calls.append(call(place(21, group=Group((0, 1), f"group {number}", "gloo")), 0, now + 0.6, 0.1))
    recording = Recording(tuple(process(rank, calls) for rank in (0, 1)))
    (found,) = CAUSES["too_many_groups"].suspect(Job(recording, steps_of(recording), [], None, 2))
    assert found.lines == ("train.py:20",)
    assert "backend" in found.fix, "a group of its own may have another one than the default group"


@pytest.mark.parametrize(("sets", "several"), [([(0, 1)], False), ([(0, 1), (2, 3)], True)])
def test_each_set_of_ranks_keeps_a_group_of_its_own(sets: list[tuple[int, int]], several: bool) -> None:
    """If all ranks had the group of the first half only, they would train something else."""
    ranks = []
    for rank in (rank for members in sets for rank in members):
        calls, mine = [], sets[rank // 2]
        for number in range(20):
            now = 2.0 + 1e-2 * number
            made = call(place(20, "new_group", "new_group", None), number, now, 5e-3)
            calls.append(replace(made, returned=made.ended, wait_began=made.ended))
            calls.append(call(place(21, group=Group(mine, f"group {number}", "gloo")), 0, now + 6e-3, 1e-3))
        ranks.append(replace(process(rank, calls), ranks=2 * len(sets)))
    recording = Recording(tuple(ranks))
    (found,) = CAUSES["too_many_groups"].suspect(Job(recording, steps_of(recording), [], None, 2))
    assert ("for each other set of ranks" in found.fix) is several


def test_fewer_threads_are_tried_where_there_are_more_than_cores() -> None:
    assert planned(loop(60), 2, now=1.0) is None
    one, two = loop(60).processes
    trial = planned(Recording((replace(one, threads=2), replace(two, threads=2))), 2, now=1.0)
    assert trial is not None
    assert (trial.threads, trial.turns) == (1, 24)
    assert [trial.has_fewer(turn) for turn in range(5)] == [False, True, True, False, False]
    # A step takes 20 ms as written, and 5 with one thread; the first two of each turn are left out.
    tried: list[Call] = []
    at = trial.begins
    while at < trial.ends:
        tried.append(call(place(10), 0, at, 1e-3))
        at += 5e-3 if trial.has_fewer(trial.turn_at(at)) else 20e-3
    turns = found(Recording((replace(one, tried=tried), two), trial))
    assert turns is not None
    assert [len(of_it) for of_it in turns] == [12, 12]
    assert turns[0] == pytest.approx([20e-3] * 12)
    assert turns[1] == pytest.approx([5e-3] * 12)
    assert found(Recording((replace(one, tried=tried[:40]), two), trial)) is None, "too few turns"


@pytest.mark.parametrize(
    ("interface", "rates", "is_found"),
    [
        ("eth0", {"eth0": 0.1, "eth1": 1.0}, True),
        ("eth1", {"eth0": 0.1, "eth1": 1.0}, False),  # the fast one
        ("eth0", {"eth0": 0.8, "eth1": 1.0}, False),  # about as fast
        ("", {"eth0": 0.1, "eth1": 1.0}, False),  # told none
        ("eth0", {}, False),  # not measured
    ],
)
def test_an_interface_that_is_not_the_fastest(interface: str, rates: dict[str, float], is_found: bool) -> None:
    """Rank 0 alone is on this host. Its calls take 1 ms each: as long as 10 kB on 0.1 Gbit/s, with a little more."""
    one = loop(30, late=0.0).processes[0]
    sizes = {where: replace(sums, bytes=sums.count * 10_000) for where, sums in one.sums.items()}
    recording = Recording((replace(one, interface=interface, sums=sizes),))
    steps = steps_of(recording)
    job = Job(recording, steps, [], script_of(recording, steps), 2, rates)
    suspected = list(CAUSES["wrong_interface"].suspect(job))
    assert bool(suspected) is is_found
    if is_found:
        assert suspected[0].guess == pytest.approx(3 * 0.8e-3 * 0.9, rel=0.1)
        assert "GLOO_SOCKET_IFNAME=eth1" in suspected[0].fix
    here = Recording(tuple(replace(process, interface=interface) for process in loop(30).processes))
    assert not list(CAUSES["wrong_interface"].suspect(Job(here, steps, [], None, 2, rates))), "all on one host"


@pytest.mark.parametrize("here", [0, 1])
def test_a_cause_is_suspected_where_other_ranks_are_on_another_host(here: int) -> None:
    """Nothing can be done again, and who is late cannot be seen: but small calls in a row are seen by each rank."""
    one = loop(60, late=6e-3).processes[here]
    tried: list[dict[str, Program]] = []

    def replay(programs: dict[str, Program]) -> str:
        tried.append(programs)
        return "not tried"

    said = examined(Recording((one,)), 2, replay, lambda line: None)
    (found,) = said.findings
    assert (found.cause, found.status, found.lines) == (
        "small_collectives",
        "suspected",
        ("train.py:10", "train.py:11", "train.py:12"),
    )
    assert "not all ranks were recorded on this host" in found.text
    assert said.verdict[0].startswith("Suspected: small_collectives, up to ")
    assert any(line.startswith(f"rank {1 - here}: not on this host") for line in said.not_measured)
    single = loop(60, late=6e-3, where=(10,)).processes[here]
    said = examined(Recording((single,)), 2, replay, lambda line: None)
    assert (said.findings, said.verdict[0].startswith("Nothing is known of what the calls cost")) == ([], True)
    assert not tried


def answered(changed: tuple[float, ...]) -> CommunicationDiagnosis:
    """The diagnosis of a loop in which rank 1 is late; whatever is changed takes so many seconds in each round."""
    recording = loop(60, late=6e-3)

    def replay(programs: dict[str, Program]) -> Replayed:
        assert "waiting_for_rank" in programs
        script = script_of(recording, steps_of(recording))
        assert script is not None
        as_written = (script.seconds, script.seconds * 1.01, script.seconds * 0.99, script.seconds)
        return Replayed({name: as_written if name == "as written" else changed for name in programs}, {})

    return examined(recording, 2, replay, lambda line: None)


def test_an_answer_on_a_terminal_of_80_columns() -> None:
    """The answer comes first, and what to change for it; then the table, then how it was found."""
    said = answered((0.25, 0.251, 0.249, 0.25))
    lines = text_of(communication_text.for_stdout(said), 80).splitlines()
    assert lines[0].startswith("Mending ")
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40, lines
    (first, *_) = said.findings
    assert " ".join(" ".join(lines).split()).count(first.fix[:40]) == 1, "it is told once"
    plain = said.document()
    assert plain["findings"][0] == first.plain()
    assert plain["communication"]["step_ms"] == pytest.approx(said.steps.seconds * 1e3)


def test_where_steps_are_long_only_the_dearest_changes_are_tried() -> None:
    """Each is done three times at least, and nobody waits for minutes."""
    recording = loop(60)
    script = script_of(recording, steps_of(recording))
    assert script is not None
    suspected = [
        Suspicion(name, "", "", guess=guess, changed=script, beside=(("otherwise", script),))
        for name, guess in (("a", 1.0), ("b", 3.0), ("c", 2.0))
    ]
    tried = {seconds: [*_programs_in_time(suspected, replace(script, seconds=seconds))] for seconds in (0.4, 3.0, 20.0)}
    assert tried[3.0] == ["as written", "b", "c", "a"]
    assert tried[20.0] == ["as written", "b"]
    assert len(tried[0.4]) == 7


@pytest.mark.parametrize(
    ("by", "module"),
    [
        ("", ""),
        ("distributed/optim/zero_redundancy_optimizer.py", "torch.distributed.optim.zero_redundancy_optimizer"),
        ("distributed/fsdp/_fully_shard/_fsdp_collectives.py", "torch.distributed.fsdp"),
    ],
)
def test_calls_that_torch_makes_are_not_to_be_changed_in_the_script(by: str, module: str) -> None:
    """`optimizer.step()` has no call that could be made one with others: an option of the optimizer does that."""
    ranks = []
    for one in loop(60).processes:
        calls = [replace(made, place=replace(made.place, by=by)) for made in one.calls]
        ranks.append(process(one.rank, calls))
    said = examined(Recording(tuple(ranks)), 2, lambda programs: "not tried here", lambda line: None)
    (found,) = [one for one in said.findings if one.cause == "small_collectives"]
    assert ("torch.cat(" in found.fix) is (not by)
    assert not by or f"they are made in {module}, and only options there change them" in found.fix


def test_calls_through_which_gradients_pass_are_not_replaced() -> None:
    """A contrastive loss trains something else where `dist.all_gather` takes the place of torch.distributed.nn's."""
    ranks = []
    for one in loop(60).processes:
        calls = [replace(made, place=replace(made.place, by="distributed/nn/functional.py")) for made in one.calls]
        ranks.append(process(one.rank, calls))
    said = examined(Recording(tuple(ranks)), 2, lambda programs: "not tried here", lambda line: None)
    (found,) = [one for one in said.findings if one.cause == "small_collectives"]
    assert "call its functions fewer times, with one tensor of all (torch.cat)" in found.fix
    assert "detach" not in found.fix


@pytest.mark.parametrize("where", [(10, 10, 10, 20, 20), (20, 20, 20, 10, 10)], ids=["fewer", "more"])
def test_a_further_line_whose_calls_torch_makes_is_told_as_that(where: tuple[int, ...]) -> None:
    """Gradients are reduced by a line of the script, and its optimizer broadcasts the weights in the same way.

    What the script can change comes first, also where torch makes more of the calls.
    """
    by = "distributed/optim/zero_redundancy_optimizer.py"
    ways = {10: place(10), 20: replace(place(20, "broadcast", "broadcast"), by=by)}
    ranks = []
    for one in loop(60, where=where).processes:
        ranks.append(process(one.rank, [replace(made, place=ways[made.place.line]) for made in one.calls]))
    said = examined(Recording(tuple(ranks)), 2, lambda programs: "not tried here", lambda line: None)
    (found,) = [one for one in said.findings if one.cause == "small_collectives"]
    assert found.fix.startswith("train.py:10: make one call of them")
    assert f"train.py:10 calls all_reduce {where.count(10)} times in a row" in found.text
    leads = (
        "train.py:20 only leads to these calls: they are made in torch.distributed.optim.zero_redundancy_optimizer, and"
    )
    assert f"But {leads}" in found.fix
    assert "do the same at" not in found.fix
    assert "of those of" not in found.fix


def test_a_line_of_an_installed_package_is_told_as_that() -> None:
    """All calls of a job may come from one line of DeepSpeed's, and "torch.py:10" is none of the script's files."""
    ranks = []
    for one in loop(60).processes:
        file = "/venv/lib/python3.11/site-packages/deepspeed/comm/torch.py"
        ranks.append(process(one.rank, [replace(made, place=replace(made.place, file=file)) for made in one.calls]))
    said = examined(Recording(tuple(ranks)), 2, lambda programs: "not tried here", lambda line: None)
    (found,) = [one for one in said.findings if one.cause == "small_collectives"]
    assert found.fix.startswith("torch.py:10 is in deepspeed.comm.torch, which is installed: look for an option")
    assert "change torch.py:10: make one call of them" in found.fix


def test_an_interval_around_zero_is_no_finding() -> None:
    said = answered((0.1, 0.6, 0.1, 0.6))
    assert said.findings == []
    (told,) = [line for line in said.not_measured if line.startswith("whether waiting_for_rank costs anything")]
    assert "ms per step, because the rounds differed too much (" in told
    assert said.verdict[0].startswith("Nothing found for sure: it could not be told what small_collectives and ")


def test_rounds_that_differ_much_refute_nothing() -> None:
    """On a busy machine some rounds take three times as long: their mean may gain nothing by chance."""
    said = answered((0.1, 0.9, 0.1, 0.9))
    assert said.findings == []
    assert any(line.startswith("whether waiting_for_rank costs anything") for line in said.not_measured)
    said = answered((0.63, 0.62, 0.64, 0.63))
    assert not any(line.startswith("whether waiting_for_rank costs anything") for line in said.not_measured)


def test_no_more_is_saved_than_each_rank_stands_in_calls() -> None:
    """Rank 0 waits 4 ms of a step for calls, rank 1 three: its gaps are as long without them."""
    recording = loop(60, late=1e-3)
    script = script_of(recording, steps_of(recording))
    assert script is not None
    saved = 3.5e-3 * script.covers

    def replay(programs: dict[str, Program]) -> Replayed:
        as_written = (script.seconds, script.seconds * 1.001, script.seconds * 0.999, script.seconds)
        changed = tuple(seconds - saved for seconds in as_written)
        return Replayed({name: as_written if name == "as written" else changed for name in programs}, {})

    said = examined(recording, 2, replay, lambda line: None)
    (found,) = [one for one in said.findings if one.cause == "small_collectives"]
    assert found.seconds == pytest.approx(3e-3, rel=0.05)
    assert found.status == "suspected"


def test_fewer_calls_have_fewer_gaps() -> None:
    """Each call of a run has a gap before it, 0.4 ms here; one call in place of three has one."""
    recording = loop(60, gap=4e-4)
    steps = steps_of(recording)
    script = script_of(recording, steps)
    assert script is not None
    one_call = script.changed(lambda played: [one for one in played if one.call.place.line == 10])
    saved = _saved_in_gaps(script, one_call)
    assert saved == pytest.approx({0: 0.8e-3, 1: 0.8e-3}, rel=0.1)
    assert set(_saved_in_gaps(script, None).values()) == {0.0}
    job = Job(recording, steps, [], script, 2)
    assert _least_in_calls(job, saved) == pytest.approx(3.8e-3, rel=0.05)


@pytest.mark.parametrize(("longer", "saves"), [(1.0, 1.5), (1.5, 1.875), (0.8, 1.35), (2.2, 1.5)])
def test_what_is_saved_of_calls_is_saved_in_proportion(longer: float, saves: float) -> None:
    """In the script all ranks stand 3 ms of a step in calls; when they are done again, `longer` times that.

    Half of them is saved, at a pace between the two; where they differ by more than a quarter, at that of the script.
    """
    recording = loop(60)
    script = script_of(recording, steps_of(recording))
    assert script is not None
    calls = 3e-3 * script.covers

    def replay(programs: dict[str, Program]) -> Replayed:
        took = script.seconds + (longer - 1) * calls
        rounds = {name: [took * noise for noise in (1.0, 1.001, 0.999, 1.0)] for name in programs}
        for name in programs:
            if name == "small_collectives":
                rounds[name] = [seconds - longer * calls / 2 for seconds in rounds[name]]
        return Replayed(
            {name: tuple(of_it) for name, of_it in rounds.items()}, {"as written": (longer * calls, longer * calls)}
        )

    said = examined(recording, 2, replay, lambda line: None)
    (found,) = [one for one in said.findings if one.cause == "small_collectives"]
    assert found.seconds == pytest.approx(saves * 1e-3, rel=0.05)
    assert found.status == ("proved" if longer < 2 else "suspected")
    assert ("of that difference counts" in found.text) is (longer != 1.0)


def answer_of(recording: Recording, in_calls: tuple[float, ...]) -> CommunicationDiagnosis:
    """The diagnosis where steps take as long as in the script when they are done again, and without small calls less.

    They save 1.5 ms of a step. `in_calls`: milliseconds of a step for which each rank stands in calls then.
    """
    script = script_of(recording, steps_of(recording))
    assert script is not None

    def replay(programs: dict[str, Program]) -> Replayed:
        rounds = {name: [script.seconds * noise for noise in (1.0, 1.001, 0.999, 1.0)] for name in programs}
        for name in programs:
            if name == "small_collectives":
                rounds[name] = [seconds - 1.5e-3 * script.covers for seconds in rounds[name]]
        stood = tuple(one * 1e-3 * script.covers for one in in_calls)
        return Replayed({name: tuple(of_it) for name, of_it in rounds.items()}, {"as written": stood})

    return examined(recording, 2, replay, lambda line: None)


def with_calls(rank: Process, more: list[Call]) -> Process:
    both = sorted([*rank.calls, *more], key=lambda one: one.began)
    return replace(process(rank.rank, both), ranks=rank.ranks)


def test_calls_that_are_not_done_again_are_no_part_of_the_proportion() -> None:
    """A stage of a pipeline waits 4 ms of each step for what the one before sends; the all-reduces take 3 ms."""
    sends = place(20, "recv", "recv")
    ranks = [
        with_calls(one, [call(sends, -1, made.began - 4.5e-3, 4e-3) for made in one.calls if made.place.line == 10])
        for one in loop(60).processes
    ]
    said = answer_of(Recording(tuple(ranks)), (3.0, 3.0))
    (found,) = [one for one in said.findings if one.cause == "small_collectives"]
    assert found.seconds == pytest.approx(1.5e-3, rel=0.05)
    assert "of that difference counts" not in found.text


def test_a_pause_of_the_script_is_no_part_of_the_proportion() -> None:
    """An evaluation of 0.2 s behind 20 steps: the steps that are done again, later ones, take what they took."""

    def earlier(made: Call) -> Call:
        times = {name: getattr(made, name) - 0.2 for name in ("began", "returned", "wait_began", "wait_ended")}
        return replace(made, **times)

    ranks = [process(one.rank, [*map(earlier, one.calls[:60]), *one.calls[60:]]) for one in loop(60).processes]
    said = answer_of(Recording(tuple(ranks)), (3.0, 3.0))
    (found,) = [one for one in said.findings if one.cause == "small_collectives"]
    assert found.seconds == pytest.approx(1.5e-3, rel=0.05)
    assert "of that difference counts" not in found.text


def test_a_rank_that_calls_nothing_in_the_steps_is_no_part_of_the_proportion() -> None:
    """Rank 2 evaluates, and meets the others now and then: it waits for them in between."""
    everyone = Group((0, 1, 2), "everyone", "gloo")
    meets = place(40, "barrier", "barrier", everyone)
    two = loop(300).processes
    at = [two[0].calls[nth].began - 2e-3 for nth in (90, 180, 270)]
    ranks = [with_calls(one, [call(meets, nth, began, 1e-3) for nth, began in enumerate(at)]) for one in two]
    begins = [1.0, *(one + 2e-3 for one in at[:-1])]
    waits = [
        call(meets, nth, began, until + 1e-3 - began) for nth, (began, until) in enumerate(zip(begins, at, strict=True))
    ]
    recording = Recording((*(replace(one, ranks=3) for one in ranks), replace(process(2, waits), ranks=3)))
    said = answer_of(recording, (3.0, 3.0, 1e-4))
    (found,) = [one for one in said.findings if one.cause == "small_collectives"]
    assert found.seconds == pytest.approx(1.5e-3, rel=0.05)


def test_a_rank_without_a_world_does_not_break_the_diagnosis() -> None:
    """Rank 2 was launched, trains by itself, and makes no group: it is no rank of what is done again."""
    step = place(30, "step of SGD", "step of SGD", None)
    alone = process(2, [call(step, -1, 1.0 + nth * 1e-2, 0.0) for nth in range(30)])
    recording = Recording((*loop(60).processes, replace(alone, ranks=1)))
    said = answer_of(recording, (3.0, 3.0))
    assert [one.cause for one in said.findings] == ["small_collectives"]


@pytest.mark.parametrize(("longer", "least"), [(3.0, 0.5), (1.2, 0.9)])
def test_no_price_is_above_the_step(longer: float, least: float) -> None:
    """Eight ranks on two cores, whose steps take longer when they are done again."""
    look = Look(seconds=10.0, cpu_of_thread=2.0, cpu_of_process=2.5, waited_of_thread=4.0)
    ranks = []
    for pair in range(4):
        group = Group((2 * pair, 2 * pair + 1), f"pair {pair}", "gloo")
        calls = [call(place(10, group=group), number, 1.0 + number * 2e-3, 1.9e-3) for number in range(500)]
        ranks += [replace(process(rank, calls, look=look), ranks=8) for rank in group.ranks]
    recording = Recording(tuple(ranks))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    took = longer * script.seconds

    def replay(programs: dict[str, Program]) -> Replayed:
        slow, quick = (took, 1.01 * took, 0.99 * took), (0.04 * took, 0.041 * took, 0.039 * took)
        return Replayed({name: slow if name == "as written" else quick for name in programs}, {})

    said = examined(recording, 2, replay, lambda line: None)
    (found,) = [one for one in said.findings if one.cause == "oversubscribed_cores"]
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.seconds <= found.high
    assert least * said.steps.seconds < found.seconds <= said.steps.seconds


def test_groups_that_never_meet_are_done_again_for_equally_many_of_their_steps() -> None:
    """Where cores are short one pair stands still while another one makes hundreds of calls."""
    ranks = []
    for pair, (late, quick) in enumerate(((2e-3, 0.5e-3), (0.5e-3, 2e-3))):
        group = Group((2 * pair, 2 * pair + 1), f"pair {pair}", "gloo")
        calls, now = [], 1.0
        for number in range(2000):
            apart = late if now < 1.5 else quick  # the same calls in all, in another order
            calls.append(call(place(10, group=group), number, now, 0.9 * apart))
            now += apart
        ranks += [replace(process(rank, calls), ranks=4) for rank in group.ranks]
    recording = Recording(tuple(ranks))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    often = {sum(one.act.call != REST for one in of_rank) for of_rank in script.played.values()}
    paces = {one.rank: one.seconds / len(one.calls) for one in recording.processes}
    assert max(often) - min(often) <= 1
    assert max(often) == pytest.approx(script.seconds / statistics.fmean(paces.values()), rel=0.05)
    assert script.seconds == pytest.approx(1.2, rel=0.05)
    assert script.program.of_each


@pytest.mark.parametrize(("lines", "larger"), [(1, 1), (0, 1000)])
def test_groups_that_never_meet_and_do_something_else_keep_their_own_paces(lines: int, larger: int) -> None:
    """In other lines, or with larger models, as where each pair tries another size."""
    ranks = []
    for pair, apart in enumerate((2e-3, 0.5e-3)):
        group = Group((2 * pair, 2 * pair + 1), f"pair {pair}", "gloo")
        where, size = place(10 + lines * pair, group=group), 400 if pair else 400 * larger
        calls = [call(where, n, 1.0 + n * apart, 0.9 * apart, size) for n in range(2000)]
        ranks += [replace(process(rank, calls), ranks=4) for rank in group.ranks]
    recording = Recording(tuple(ranks))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    often = {rank: sum(one.act.call != REST for one in of_rank) for rank, of_rank in script.played.items()}
    assert often[0] * 2e-3 == pytest.approx(0.4, rel=0.05)
    assert often[3] * 0.5e-3 == pytest.approx(0.4, rel=0.05)
    assert not script.program.of_each


def test_groups_that_never_meet_and_call_in_some_steps_alone_are_done_again_for_whole_steps() -> None:
    """What fits into a round are stretches from call to call: 20 steps each, and not one."""
    ranks = []
    for pair, step in enumerate((4e-3, 6e-3)):
        group = Group((2 * pair, 2 * pair + 1), f"pair {pair}", "gloo")
        steps = [call(place(30, "step of SGD", "step of SGD", None), -1, 1.0 + n * step, 0.0) for n in range(2000)]
        calls = [call(place(10, group=group), n, one.began + 1e-3, 1e-3) for n, one in enumerate(steps[::20])]
        both = sorted([*steps, *calls], key=lambda one: one.began)
        ranks += [replace(process(rank, both), ranks=4) for rank in group.ranks]
    recording = Recording(tuple(ranks))
    script = script_of(recording, steps_of(recording))
    assert script is not None
    assert script.covers == 240
    assert script.seconds == pytest.approx(1.2, rel=0.01)
    assert script.program.of_each


def test_of_groups_of_unequal_size_each_rank_counts_once() -> None:
    """As in the replay, which tells the mean of all ranks."""
    ranks = []
    for of_group, apart in (((0, 1, 2), 2e-3), ((3, 4), 4.5e-3)):
        group = Group(of_group, f"group {of_group}", "gloo")
        calls = [call(place(10, group=group), n, 1.0 + n * apart, 0.9 * apart) for n in range(1000)]
        ranks += [replace(process(rank, calls), ranks=5) for rank in of_group]
    steps = steps_of(Recording(tuple(ranks)))
    assert steps.of_each
    assert steps.seconds == pytest.approx(3e-3, rel=0.01)


def test_what_sparse_tensors_cost_is_told_to_be_unknown() -> None:
    """They were done again as if they were empty, and told to cost nothing."""
    sparse = place(50, "sparse all_reduce", "allreduce_sparse")
    calls = [call(sparse, 2 * n, 1.0 + n * 1e-2, 6e-3, 0) for n in range(60)]
    calls += [call(place(10), 2 * n + 1, 1.0 + n * 1e-2 + 7e-3, 1e-5) for n in range(60)]
    calls.sort(key=lambda one: one.began)
    recording = Recording(tuple(process(rank, calls) for rank in (0, 1)))
    said = examined(recording, 2, lambda programs: "not tried here", lambda line: None)
    assert said.verdict[0].startswith("Nothing is known of what sparse all_reduce cost")
    script = script_of(recording, steps_of(recording))
    assert script is not None
    assert {one.call.place.line for one in script.played[0] if one.act.call != REST} == {10}
    (row, _) = said.rows
    assert " - " in text_of([communication_text.rows([row])], 120).splitlines()[2], "no KiB are told"


def test_nothing_is_said_of_what_comes_too_seldom() -> None:
    """Weights that are averaged in every 500th step may take longer than all steps; twelve seconds may have none."""
    step, ranks = place(30, "step of SGD", "step of SGD", None), []
    for one in loop(1).processes:
        steps = [call(step, -1, 1.1 + nth * 1e-2, 0.0) for nth in range(100)]
        ranks.append(process(one.rank, [call(place(5, "broadcast", "broadcast"), 0, 1.0, 1e-3), *steps]))
    said = examined(Recording(tuple(ranks)), 2, lambda programs: "not tried here", lambda line: None)
    assert said.findings == []
    assert said.verdict[0] == "Nothing is known: in the 1 s that were recorded no collective was called more than twice"
    assert said.verdict[-1].endswith("ms (100 steps of SGD (train.py:30))")
    ranks = [replace(one, calls=one.calls[:1], sums=dict([*one.sums.items()][:1])) for one in ranks]
    last = examined(Recording(tuple(ranks)), 2, lambda programs: "not tried here", lambda line: None).verdict[-1]
    assert last.endswith("is communication (no optimizer steps, and the calls do not repeat)"), (
        "a second takes a second"
    )


def test_what_ranks_send_to_each_other_is_not_told_to_cost_nothing() -> None:
    """A pipeline, or a ring, may take most of its time in sends, which are not done again."""
    of_ranks = [
        [call(place(50 + rank, word, word), -1, 1.0 + n * 1e-2, 6e-3) for n in range(60)]
        for rank, word in enumerate(("send", "recv"))
    ]
    recording = Recording(tuple(process(rank, calls) for rank, calls in enumerate(of_ranks)))
    said = examined(recording, 2, lambda programs: "not tried here", lambda line: None)
    (told,) = said.not_measured
    assert told == "what recv and send cost, up to 60 % of the time of a rank: such calls are not done again"
    shared = [call(place(10), n, 1.0 + n * 1e-2 + 7e-3, 1e-5) for n in range(60)]  # else no step could be done again
    recording = Recording(tuple(with_calls(one, shared) for one in recording.processes))
    said = examined(recording, 2, lambda programs: "not tried here", lambda line: None)
    assert said.verdict[0] == "Nothing is known of what recv and send cost, and nothing found in the other calls"


def test_the_share_of_communication_is_that_of_one_rank() -> None:
    """Of three ranks in a pipeline the one in the middle calls in the lines of the first and of the last one, too."""
    takes = ({50: 8e-3}, {50: 1e-3, 51: 1e-3}, {51: 8e-3})
    of_ranks = [
        [call(place(line, "recv", "recv"), -1, 1.0 + n * 1e-2, s) for n in range(60) for line, s in lines.items()]
        for lines in takes
    ]
    recording = Recording(tuple(process(rank, calls) for rank, calls in enumerate(of_ranks)))
    said = examined(recording, 2, lambda programs: "not tried here", lambda line: None)
    assert said.verdict[-1].startswith("up to 80 % of the time of a rank is communication;")
    assert said.not_measured[-1].startswith("what recv cost, up to 80 % of the time of a rank")


@pytest.mark.parametrize("by_turns", [False, True])
def test_a_rank_that_is_late_in_a_few_steps_is_not_the_late_one(by_turns: bool) -> None:
    """Other programs slow one rank for a while, and then the other: those steps are done again, or these."""
    one, two = loop(400, late=6e-3, where=(10,)).processes
    swapped = slice(0, 200 if by_turns else 0)
    calls = [list(one.calls), list(two.calls)]
    for nth in range(len(one.calls))[swapped]:
        calls[0][nth], calls[1][nth] = two.calls[nth], one.calls[nth]
    recording = Recording(tuple(process(rank, of_rank) for rank, of_rank in enumerate(calls)))
    said = examined(recording, 2, lambda programs: "not tried here", lambda line: None)
    assert ("waiting_for_rank" in {found.cause for found in said.findings}) is not by_turns
    assert ("% waiting for ranks that come later" in said.verdict[-1]) is by_turns


@pytest.mark.parametrize(
    ("at", "usually", "is_found"),
    [
        (range(20, 400, 30), 0.0, True),
        (range(20, 400, 30), 8e-4, True),
        ((20, 21, 22, 200, 201, 390), 0.0, False),
        ((37, 150, 230, 382), 0.0, False),
        ((37, 67, 97, 157, 187, 194, 217, 247, 277, 307), 0.0, True),  # it was short in one, and lost its core in one
        (range(200, 208), 0.0, False),
    ],
)
@pytest.mark.parametrize("sends", [False, True])
def test_a_rank_that_evaluates_in_some_steps_is_told_to_be_late(
    at: Iterable[int], usually: float, is_found: bool, sends: bool
) -> None:
    """Rank 0 alone, for 0.3 s in every 30th step. Steps at random are those in which another program has its core.

    A rank that stands in sends then is late because others are. It may be a little late in all other steps, too.
    """
    of_ranks: list[list[Call]] = [[], []]
    now = 1.0
    for number in range(400):
        late = 0.3 if number in at else usually
        if number in at and sends:
            of_ranks[0].append(call(place(20, "recv", "recv"), -1, now, late + 0.011))
        for rank, began in enumerate((now + 0.012 + late, now + 0.012)):
            of_ranks[rank].append(call(place(10), number, began, now + 0.013 + late - began))
        now += 0.013 + late
    recording = Recording(tuple(process(rank, calls) for rank, calls in enumerate(of_ranks)))
    said = examined(recording, 2, lambda programs: "not tried here", lambda line: None)
    found = [one for one in said.findings if one.cause == "waiting_for_rank"]
    assert bool(found) is (is_found and not sends)
    for one in found:
        assert (one.ranks, one.status, one.lines) == ((0,), "suspected", ("train.py:10",))
        assert one.seconds == pytest.approx(len([*at]) * 0.3 / 400, rel=0.02)
        assert one.text.startswith(f"{len([*at])} times in ")
        assert " the ranks wait 300 ms for rank 0, which is late between two calls" in one.text


@pytest.mark.parametrize("by_turns", [False, True])
def test_a_barrier_at_which_one_rank_is_late_each_time_is_told_on_a_busy_machine(by_turns: bool) -> None:
    """Other programs hold up one rank and then the other in other calls, and so they may at a barrier, too."""
    of_ranks: list[list[Call]] = [[], []]
    now, busy, numbers = 1.0, {20: 0, 21: 1, 22: 1, 23: 0, 200: 1, 201: 0, 390: 1, 391: 0}, count()
    for number in range(400):
        kinds = [(10, "allreduce", 0.1 if number in busy else 0.0, busy.get(number, 0))]
        if number % 60 == 59:
            kinds.append((20, "barrier", 0.12, number // 60 % 2 * by_turns))
        for line, what, late, rank in kinds:
            made = next(numbers)
            for one in (0, 1):
                began = now + 0.012 + (late if one == rank else 0.0)
                of_ranks[one].append(call(place(line, what, what), made, began, now + 0.013 + late - began))
            now += 0.013 + late
        for one in (0, 1):
            of_ranks[one].append(call(place(30, "step of SGD", "step of SGD", None), -1, now, 0.0))
    recording = Recording(tuple(process(rank, calls) for rank, calls in enumerate(of_ranks)))
    said = examined(recording, 2, lambda programs: "not tried here", lambda line: None)
    found = [one for one in said.findings if one.cause == "waiting_for_rank"]
    assert [(one.ranks, one.lines) for one in found] == [((0,), ("train.py:10", "train.py:20"))] * (not by_turns)


def test_who_is_late_because_of_another_rank_is_not_the_late_one() -> None:
    """A learner gathers what two actors have seen, of which one is slow, and sends its weights to both."""
    of_ranks: list[list[Call]] = [[], [], []]
    group, now = Group((0, 1, 2), "all", "gloo"), 1.0
    for number in range(60):
        came = [now, now + 0.02, now + 0.06]
        ends = [came[2] + 1e-3, came[1] + 1e-3, came[2] + 1e-3]
        sent = ends[0] + 1e-3
        for rank in range(3):
            gathers, sends = place(10, "gather", "gather", group), place(11, "broadcast", "broadcast", group)
            came_back = sent if rank == 0 else ends[rank] + 1e-5
            of_ranks[rank] += [
                replace(call(gathers, 2 * number, came[rank], ends[rank] - came[rank]), root=0),
                replace(call(sends, 2 * number + 1, came_back, sent + 1e-3 - came_back), root=0),
            ]
        now = sent + 2e-3
    recording = Recording(tuple(replace(process(rank, calls), ranks=3) for rank, calls in enumerate(of_ranks)))
    said = examined(recording, 4, lambda programs: "not tried here", lambda line: None)
    (found,) = [one for one in said.findings if one.cause == "waiting_for_rank"]
    assert (found.ranks, found.lines) == ((2,), ("train.py:10",))
    assert "from train.py:11 to train.py:10 it takes 61.0 ms, the others 21.0 ms" in found.text
    assert found.seconds == pytest.approx(0.04, rel=0.1)


def test_a_replay_unlike_the_script_refutes_nothing() -> None:
    recording = loop(60, late=6e-3)

    def replay(programs: dict[str, Program]) -> Replayed:
        return Replayed(dict.fromkeys(programs, (0.1, 0.1, 0.1)), {})  # a quarter of what the script took

    said = examined(recording, 2, replay, lambda line: None)
    assert said.findings == []
    (told,) = [line for line in said.not_measured if line.startswith("whether waiting_for_rank costs anything")]
    assert "anything: up to 6.00 ms per step, because steps took another time when they were done again (" in told
    sends = [call(place(50, "send", "send"), -1, one.ended + 1e-3, 1e-3) for one in recording.processes[0].calls[2::3]]
    sending = Recording(tuple(with_calls(one, sends) for one in recording.processes))
    said = examined(sending, 2, replay, lambda line: None)
    assert said.verdict[0] == "Nothing is known of what send cost, and nothing found for sure in the other calls"


@pytest.mark.parametrize("every", [1, 20])
def test_barriers_in_each_step_are_left_out(every: int) -> None:
    """Those around an evaluation are not: they come in some steps only."""
    barrier, step = place(11, "barrier", "barrier"), place(30, "step of SGD", "step of SGD", None)
    ranks = []
    for one in loop(97, gap=1e-3).processes:
        calls = [replace(made, place=barrier, bytes=0) if made.place.line == 11 else made for made in one.calls]
        kept = [made for n, made in enumerate(calls) if made.place is not barrier or n // 3 % every == 0]
        numbered = [replace(made, number=n) for n, made in enumerate(kept)]
        ends = [call(step, -1, made.ended, 0.0) for made in numbered if made.place.line == 12]
        ranks.append(process(one.rank, sorted([*numbered, *ends], key=lambda made: made.began)))
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    script = script_of(recording, steps)
    assert script is not None
    found = list(CAUSES["needless_barriers"].suspect(Job(recording, steps, [], script, 2)))
    assert bool(found) is (every == 1)
    for one in found:
        assert "past the collectives (files, shared memory, a store), it stays" in one.fix
        assert one.changed is not None
        before, after = ([played.act for played in of.played[0]] for of in (script, one.changed))
        assert "barrier" in {act.call for act in before}
        assert "barrier" not in {act.call for act in after}
        assert sum(act.computes for act in after) == pytest.approx(sum(act.computes for act in before))


def test_a_barrier_costs_what_the_first_rank_waits_there() -> None:
    """The ranks take turns in being first, so each of them waits for half as long in all."""
    barrier = place(11, "barrier", "barrier")

    def with_turns(rank: int, made: Call) -> Call:
        if made.place.line != 11:
            return made
        came = 0.0 if made.number // 3 % 2 == rank else 0.8e-3
        return call(barrier, made.number, made.began + came, made.ended - made.began - came)

    ranks = [process(one.rank, [with_turns(one.rank, made) for made in one.calls]) for one in loop(97).processes]
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    (found,) = CAUSES["needless_barriers"].suspect(Job(recording, steps, [], script_of(recording, steps), 2))
    assert found.guess == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize("beside", ["", "send"])
def test_barriers_are_not_needless_where_ranks_meet_by_nothing_else(beside: str) -> None:
    """They may share memory, such as numpy's arrays in /dev/shm, and would read old numbers without the barrier."""
    ranks = []
    for one in loop(97).processes:
        calls = [replace(made, place=place(11, "barrier", "barrier"), bytes=0) for made in one.calls]
        sends = [call(place(50, beside, beside), -1, made.ended + 1e-4, 1e-4) for made in calls[2::3] if beside]
        ranks.append(with_calls(process(one.rank, calls), sends))
    recording = Recording(tuple(ranks))
    steps = steps_of(recording)
    found = list(CAUSES["needless_barriers"].suspect(Job(recording, steps, [], script_of(recording, steps), 2)))
    assert bool(found) is bool(beside)


@pytest.mark.parametrize("cause", ["needless_barriers", "scalar_collectives"])
@pytest.mark.parametrize(
    ("unit", "told"), [("step", "times in each step"), ("second", "times in each second"), ("call", "of all calls")]
)
def test_how_often_calls_are_made_is_told_in_the_unit_that_was_found(cause: str, unit: str, told: str) -> None:
    """Where nothing repeats, or a single call, nobody knows what a step is."""
    barrier, ranks = place(11, "barrier", "barrier"), []
    for one in loop(97).processes:
        calls = [
            replace(made, place=barrier) if made.place.line == 11 else replace(made, bytes=8) for made in one.calls
        ]
        ranks.append(process(one.rank, calls))
    recording = Recording(tuple(ranks))
    steps = replace(steps_of(recording), unit=unit, **({"seconds": 1.0, "period": 0} if unit == "second" else {}))
    (found,) = CAUSES[cause].suspect(Job(recording, steps, [], script_of(recording, steps), 2))
    assert told in found.seen
    assert (" step" in f"{found.seen} {found.tried}") is (unit == "step")


def test_where_ranks_stand_that_hang() -> None:
    """Only the last call of each has no end; it is none for whose end the script has not waited."""
    ranks = list(loop(60).processes)
    last = call(place(50, "barrier", "barrier"), 180, ranks[0].calls[-1].ended + 1.0, 1.0, blocking=False)
    ranks[0] = process(0, [*ranks[0].calls, replace(last, wait_ended=0.0)])
    recording = Recording(tuple(ranks))
    said = examined(recording, 2, lambda programs: "not tried", lambda line: None, still=26.0)
    where = "rank 0 stands in barrier (train.py:50), rank 1 came back from all_reduce (train.py:12)"
    assert said.verdict[0] == f"In the last 26 s no rank called anything: {where}"
    assert not any("Work.wait()" in line for line in said.not_measured)
    only_starts = [replace(one, is_blocking=False) for one in ranks[0].calls]
    started = call(place(12), 181, last.began, 1.0, blocking=False)
    ranks[0] = process(0, [*only_starts[:-1], replace(started, wait_ended=0.0)])
    assert where_ranks_stand(Recording(tuple(ranks))).startswith("rank 0 has started all_reduce (train.py:12), rank 1")
    assert len(examined(recording, 2, lambda programs: "not tried", lambda line: None).verdict) == len(said.verdict) - 1


def test_ranks_that_have_called_nothing_are_named_where_the_others_stand() -> None:
    """One that never comes to its first call has no recording; one that only steps by itself has one without groups."""
    waits = process(0, [replace(call(place(12), 0, 1.0, 1.0), wait_ended=0.0)])
    steps = process(1, [call(place(30, "step of SGD", "step of SGD", None), -1, 1.0, 0.0)])
    silent = "rank 0 stands in all_reduce (train.py:12), rank 1 has called nothing, or runs on another host"
    assert where_ranks_stand(Recording((waits,))) == silent
    assert where_ranks_stand(Recording((waits, steps))) == silent
    assert where_ranks_stand(Recording((steps,))) == "", "nobody waits for it"


@pytest.mark.parametrize(("waited", "told"), [(range(58), []), (range(1, 60, 2), ["30"]), ((), ["59"])])
def test_calls_that_go_on_at_the_end_may_still_be_waited_for(waited: Iterable[int], told: list[str]) -> None:
    """A stage of a pipeline sends several activations, and waits for all of them later."""
    send = place(50, "isend", "send")
    calls = [replace(call(send, -1, 1.0 + n * 1e-2, 6e-3, blocking=False), wait_began=0.0) for n in range(60)]
    calls = [one if n in waited else replace(one, wait_ended=0.0) for n, one in enumerate(calls)]
    said = examined(Recording((process(0, calls),)), 2, lambda programs: "not tried here", lambda line: None)
    counted = [line.split()[3] for line in said.not_measured if "Work.wait()" in line]
    assert counted == told


def test_what_was_not_done_again_is_not_told_to_cost_nothing() -> None:
    """Most causes are found in what can be done again: where nothing can, that none was found says nothing."""
    recording = Recording(tuple(replace(one, in_threads=True) for one in loop(60).processes))
    said = examined(recording, 2, lambda programs: "not tried here", lambda line: None)
    assert said.verdict[0] == "Nothing is known of what the calls cost: see what was not measured"
    assert "threads of ranks 0, 1" in said.not_measured[0]


def test_what_was_not_seen_is_not_told_to_be_little() -> None:
    recording = Recording(tuple(replace(one, hidden=frozenset({"DTensor"})) for one in loop(60).processes))
    said = examined(recording, 2, lambda programs: "not tried here", lambda line: None)
    assert any(line.startswith("what DTensor may communicate: ") for line in said.not_measured)
    assert "is communication that was seen;" in said.verdict[-1]
    recording = Recording(tuple(replace(one, hidden=frozenset({"DTensor"})) for one in loop(60, where=(10,)).processes))
    said = examined(recording, 2, lambda programs: "not tried here", lambda line: None)
    assert said.verdict[0].startswith("Nothing found in the communication that was seen whose mending")


@pytest.mark.parametrize("method", ["allgather", "broadcast"])
def test_calls_do_not_follow_at_once_because_a_rank_waits_long_in_them(method: str) -> None:
    """Rank 1 decodes for 30 ms and rank 0 for 8, and then they meet: no two of these calls can be one."""
    of_ranks: list[list[Call]] = [[], []]
    where = place(14, "all_gather" if method == "allgather" else method, method)
    late = 0 if method == "broadcast" else 1
    for number in range(60):
        met = 1.0 + 0.031 * (number + 1)
        for rank in (0, 1):
            began = met if rank == late else met - 0.022
            of_ranks[rank].append(
                replace(call(where, number, began, met + 1e-3 - began), root=late * (method != "allgather"))
            )
    recording = Recording(tuple(process(rank, calls) for rank, calls in enumerate(of_ranks)))
    steps = steps_of(recording)
    script = script_of(recording, steps)
    assert script is not None
    assert not script.follows_at_once
    assert [*suspected_late(recording)]


def test_calls_that_only_set_up_the_training_cost_a_step_nothing() -> None:
    """`parallelize_module` scatters each parameter from rank 0, before the first step."""
    set_up, step = loop(20, late=4e-3), place(30, "step of SGD", "step of SGD", None)
    ended = max(one.calls[-1].ended for one in set_up.processes)
    steps = [call(step, -1, ended + 0.1 * n, 0.0, 0) for n in range(1, 50)]
    recording = Recording(tuple(process(one.rank, [*one.calls, *steps]) for one in set_up.processes))
    said = examined(recording, 2, lambda programs: "not tried here", lambda line: None)
    assert not said.findings
    assert said.verdict[0] == "No call was seen in the steps: all were made before the first of them"
    parallel = Recording(tuple(replace(one, hidden=frozenset({"DTensor"})) for one in recording.processes))
    said = examined(parallel, 2, lambda programs: "not tried here", lambda line: None)
    assert said.verdict[0].endswith("before the first of them; what DTensor may communicate is not seen")
    # One call in the steps is enough; also where it is none that can be done again.
    late = call(place(40, "send", "send"), -1, ended + 1.0, 1e-3)
    in_steps = [process(one.rank, sorted([*one.calls, late], key=lambda it: it.began)) for one in recording.processes]
    told = examined(Recording(tuple(in_steps)), 2, lambda programs: "not tried here", lambda line: None)
    assert not told.findings
    assert "before the first of them" not in told.verdict[0]


def test_a_dear_collective_beside_ddp_is_named() -> None:
    """First, where it takes more than what was found: "nothing found" would hide it."""
    rows, nothing = table(loop(60))[:1], "Nothing found that costs 3 % of a step of 9 ms"
    line = "eside DDP, train.py:10 all_reduce takes 13 % of the time of a rank"
    first, *others = beside_ddp([nothing], 0.0, rows, 9e-3)
    assert first.startswith(f"B{line}")
    assert others == ["Nothing else found that costs 3 % of a step of 9 ms"]
    assert beside_ddp(["Mending straggler saves 3 of 9 ms"], 0.3, rows, 9e-3)[1].startswith(f"b{line}")
    assert beside_ddp([nothing], 0.0, [replace(one, share=0.05) for one in rows], 9e-3) == [nothing]


def test_lines_with_one_collective_beside_ddp_are_added_up() -> None:
    """Three barriers in a step: each of them takes little. Those of other ranks take none of these ranks' time."""
    row = replace(table(loop(60))[0], share=0.06, waiting=None, bytes_per_call=0.0)
    shares = {7: 0.06, 8: 0.08, 9: 0.05}
    lines = [replace(row, where=f"train.py:{line}", line=line, share=share) for line, share in shares.items()]
    (said,) = beside_ddp([], 0.0, lines, 0.01)
    assert said == "Beside DDP, train.py:8 all_reduce and 2 other lines with that call take 19 % of the time of a rank"
    assert beside_ddp([], 0.0, [replace(one, ranks=(one.line,)) for one in lines], 0.01) == []


def test_why_a_collective_beside_ddp_is_dear_is_told_where_its_row_tells_it() -> None:
    """Calls in each step that are small, or ranks that come late. Of few calls, or large ones, nothing is suspected."""
    row = replace(table(loop(60))[0], share=0.5, waiting=0.1, calls_per_second=7500.0, bytes_per_call=4.0)

    def told(**changed: object) -> str:
        return beside_ddp([], 0.0, [replace(row, **changed)], 0.01)[0].partition(" of the time of a rank")[2]

    assert told().startswith(", in 75 calls of 4 B in each step. Suspected: ")
    assert "(by an option, where a library makes them)" in told()
    assert told(waiting=0.4, last=1) == ", most of it waiting for rank 1: look at what is done there before that line"
    assert told(waiting=0.4, last=None).startswith(", most of it waiting for ranks that come later: ")
    assert told(bytes_per_call=2**20) == told(calls_per_second=120.0) == told(bytes_per_call=0.0) == ""
    assert told(collective="all_gather_object", calls_per_second=100.0).startswith(". Suspected: it pickles what it ")


def test_each_cause_says_what_it_is() -> None:
    """The names are promised by --json."""
    assert {"small_collectives", "scalar_collectives", "object_collectives", "waiting_for_rank"} <= CAUSES.keys()
    assert {"too_many_groups", "oversubscribed_cores", "blocking_collectives", "wrong_interface"} <= CAUSES.keys()
    assert all(cause.in_words and cause.name == name for name, cause in CAUSES.items())
