"""The check of the format finds each kind of fault in an otherwise good trace."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from test_trace import read, two_ranks

from autoddp.trace import check

SLICE = {"ph": "X", "name": "a", "ts": 0, "dur": 10, "pid": 1, "tid": 1}
FLOW = {"name": "go", "cat": "c", "id": 1, "pid": 1, "tid": 1}


def faults(*events: Any) -> list[str]:
    return check({"traceEvents": list(events)})


def test_good_ones_pass() -> None:
    assert faults() == []
    assert faults(SLICE, SLICE | {"ts": 10}, SLICE | {"ts": 2, "dur": 3}, SLICE | {"ts": 5, "tid": 2}) == []
    assert faults(*(SLICE | {"ph": phase, "ts": ts} for phase, ts in [("B", 0), ("B", 1), ("E", 2), ("E", 3)])) == []
    assert faults(SLICE, FLOW | {"ph": "s", "ts": 1}, FLOW | {"ph": "t", "ts": 2}, FLOW | {"ph": "f", "ts": 3}) == []
    assert faults({"ph": "C", "name": "n", "ts": 1, "pid": 1, "args": {"n": 1}}) == []
    assert faults(SLICE | {"ph": "i", "s": "t"}) == []


@pytest.mark.parametrize("trace", [None, [], {}, {"traceEvents": {}}, "{}"])
def test_no_trace_at_all(trace: object) -> None:
    assert check(trace) == ["a trace is an object with a list 'traceEvents'"]


@pytest.mark.parametrize("key", ["name", "ts", "dur", "pid", "tid"])
def test_a_slice_needs_its_keys(key: str) -> None:
    assert faults({k: v for k, v in SLICE.items() if k != key}) == [f"event 0: phase X needs {key!r}"]


@pytest.mark.parametrize(
    ("event", "word"),
    [
        (7, "no object"),
        (SLICE | {"ph": "Q"}, "phase 'Q' is unknown"),
        (SLICE | {"ph": 1}, "phase 1 is unknown"),
        (SLICE | {"ts": -1}, "less than 0"),
        (SLICE | {"dur": -0.001}, "less than 0"),
        (SLICE | {"ts": float("nan")}, "not finite"),
        (SLICE | {"ts": "0"}, "wrong type"),
        (SLICE | {"ts": True}, "wrong type"),
        (SLICE | {"pid": 1.5}, "wrong type"),
        (SLICE | {"name": None}, "wrong type"),
        (SLICE | {"ph": "i", "s": "x"}, "a moment is"),
        ({"ph": "C", "name": "n", "ts": 1, "pid": 1, "args": {"n": "1"}}, "values are numbers"),
        ({"ph": "M", "name": "process_colour", "pid": 1, "args": {}}, "is unknown"),
        ({"ph": "M", "name": "process_name", "pid": 1, "args": {}}, "needs 'name'"),
        ({"ph": "M", "name": "process_sort_index", "pid": 1, "args": {"sort_index": "1"}}, "needs 'sort_index'"),
        ({"ph": "M", "name": "thread_name", "pid": 1, "args": {"name": "a"}}, "needs 'tid'"),
    ],
)
def test_an_event_by_itself(event: Any, word: str) -> None:
    (fault,) = faults(event)
    assert fault.startswith("event 0: ")
    assert word in fault


@pytest.mark.parametrize(
    ("events", "word"),
    [
        ([SLICE, SLICE | {"ts": 5}], "overlaps"),
        ([SLICE, SLICE | {"ts": 9.998}], "overlaps"),
        ([SLICE | {"ph": "B"}], "never end"),
        ([SLICE | {"ph": "E"}], "has not begun"),
        ([SLICE | {"ph": "B"}, SLICE | {"ph": "E", "ts": 5}, SLICE | {"ts": 4}], "overlaps"),
        ([SLICE, FLOW | {"ph": "s", "ts": 1}], "1 begins and 0 ends"),
        ([SLICE, FLOW | {"ph": "f", "ts": 1}], "0 begins and 1 ends"),
        ([SLICE, FLOW | {"ph": "s", "ts": 2}, FLOW | {"ph": "f", "ts": 1}], "not between"),
        ([SLICE, FLOW | {"ph": "s", "ts": 2}, FLOW | {"ph": "f", "ts": 10}], "no slice of its thread"),
        ([SLICE, FLOW | {"ph": "s", "ts": 2}, FLOW | {"ph": "f", "ts": 3, "tid": 2}], "no slice of its thread"),
        ([{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": n}} for n in "ab"], "there twice"),
    ],
)
def test_events_together(events: list[Any], word: str) -> None:
    (fault,) = faults(*events)
    assert word in fault


def test_the_unit_of_the_display() -> None:
    assert check({"traceEvents": [], "displayTimeUnit": "s"}) == ["'displayTimeUnit' is neither 'ms' nor 'ns'"]


def test_any_damage_to_a_real_trace_is_seen() -> None:
    """Each required key of each event is taken away in turn."""
    trace = read(two_ranks())
    for number, event in enumerate(trace["traceEvents"]):
        for key in set(event) - {"args", "cat", "bp"} | ({"args"} if event["ph"] == "M" else set()):
            damaged = copy.deepcopy(trace)
            del damaged["traceEvents"][number][key]
            assert check(json.loads(json.dumps(damaged))), (event, key)
