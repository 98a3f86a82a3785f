"""The picture of a recording of collectives, on recordings made here."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from test_collectives import call, loop, pipeline, place, process

from autoddp import codec
from autoddp.diagnose.collectives import trace_of_calls
from autoddp.diagnose.collectives.recording import Recording
from autoddp.diagnose.collectives.steps import steps_of
from autoddp.trace import check


def slices(recording: Recording, thread: str) -> dict[int, list[dict[str, Any]]]:
    """The slices of the threads of this name, by rank, in a trace that has the format's form."""
    trace = json.loads(codec.encode(trace_of_calls(recording, steps_of(recording))))
    assert check(trace) == []
    events = trace["traceEvents"]
    threads = {e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"].startswith(thread)}
    drawn = [e for e in events if e["ph"] == "X" and e["tid"] in threads]
    return {rank: [e for e in drawn if e["pid"] == rank + 1] for rank in recording.of_rank}


def test_a_trace_shows_who_waits_for_whom() -> None:
    found = slices(loop(60, late=4e-3), "calls")
    waits = [one for one in found[0] if one["name"].startswith("waits")]
    assert {one["name"] for one in waits} == {"waits for rank 1"}
    assert all(one["dur"] == pytest.approx(4000, abs=1) for one in waits)
    assert [one for one in found[1] if one["name"].startswith("waits")] == []
    assert {one["name"] for one in found[1]} == {f"all_reduce train.py:{line}" for line in (10, 11, 12)}
    steps = slices(loop(60), "steps")
    assert len(steps[0]) > 10
    assert all(one["dur"] == pytest.approx(8030, abs=1) for one in steps[0])


def test_a_trace_shows_what_is_in_flight_until_it_is_waited_for() -> None:
    """Two calls that are open at one time are drawn beside each other."""
    both = []
    for rank in range(2):
        calls = []
        for step in range(40):
            at = 1.0 + step * 0.01
            for nth, line in enumerate((10, 11)):
                sent = replace(
                    call(place(line), 2 * step + nth, at + nth * 1e-4, 0.0, blocking=False), returned=at + 2e-4
                )
                calls.append(replace(sent, wait_began=at + 8e-3, wait_ended=at + 9e-3 + nth * 1e-4))
        both.append(process(rank, calls))
    found = slices(Recording(tuple(both)), "in flight")
    assert len({one["tid"] for one in found[0]}) == 2
    assert all(one["dur"] > 8000 for one in found[0])
    assert any(one["name"].startswith("wait for all_reduce") for one in slices(Recording(tuple(both)), "calls")[1])


@pytest.mark.parametrize("recording", [pipeline(1e-3, 3e-3), loop(3), Recording((loop(60).processes[0],))])
def test_a_trace_of_any_recording_has_calls(recording: Recording) -> None:
    """Also of one with too few steps, and where the other ranks are on another host."""
    assert all(slices(recording, "calls").values())
