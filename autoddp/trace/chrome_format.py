"""Checks a trace by the rules of the format, as far as `trace_of` uses it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

_KEYS = {
    "X": ("name", "ts", "dur", "pid", "tid"),  # a complete slice
    "B": ("name", "ts", "pid", "tid"),  # a slice begins
    "E": ("ts", "pid", "tid"),  # the slice that began last ends
    "i": ("name", "ts", "pid", "tid", "s"),  # a moment
    "C": ("name", "ts", "pid", "args"),  # a counter's values
    "M": ("name", "pid", "args"),  # a name or an order of processes or threads
    "s": ("name", "cat", "id", "ts", "pid", "tid"),  # a flow begins
    "t": ("name", "cat", "id", "ts", "pid", "tid"),  # a flow's station
    "f": ("name", "cat", "id", "ts", "pid", "tid"),  # a flow ends
}
_NAMES = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "cat": str,
    "ts": (int, float),
    "dur": (int, float),
    "pid": int,
    "tid": int,
    "id": (int, str),
    "args": dict,
    "s": str,
}

_Slice = tuple[int, int]
"""Begin and end in nanoseconds."""
_Thread = tuple[int, int]
"""Process and thread."""


def check(trace: object) -> list[str]:
    """What breaks the format, one sentence each; empty for a good trace.

    >>> check({"traceEvents": [{"ph": "X", "name": "forward", "ts": 0, "dur": -1, "pid": 1, "tid": 1}]})
    ["event 0: its 'dur' is -1, which is less than 0"]

    Each event has the keys of its phase; times and durations are numbers from 0 on; slices of one thread lie inside
    each other or apart; each flow has one begin and one end, in this order, and both lie in a slice of their thread.
    """
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["a trace is an object with a list 'traceEvents'"]
    events: list[Mapping[str, Any]] = []
    faults: list[str] = []
    for number, event in enumerate(trace["traceEvents"]):
        of_event = list(_faults_of(event))
        faults += [f"event {number}: {fault}" for fault in of_event]
        if not of_event:
            events.append(event)
    if trace.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        faults.append("'displayTimeUnit' is neither 'ms' nor 'ns'")
    slices, unbalanced = _slices(events)
    return [*faults, *unbalanced, *_crossings(slices), *_flows(events, slices), *_named_twice(events)]


def _faults_of(event: object) -> Iterable[str]:
    if not isinstance(event, dict):
        yield "no object"
        return
    phase = event.get("ph")
    if not isinstance(phase, str) or phase not in _KEYS:
        yield f"the phase {phase!r} is unknown"
        return
    for key in _KEYS[phase]:
        if key not in event:
            yield f"phase {phase} needs {key!r}"
    for key, value in event.items():
        kind = _TYPES.get(key)
        if kind is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            yield f"its {key!r} is {value!r}, which has the wrong type"
        elif key in ("ts", "dur") and not math.isfinite(value):
            yield f"its {key!r} is not finite"
        elif key in ("ts", "dur") and value < 0:
            yield f"its {key!r} is {value!r}, which is less than 0"
    if phase == "M":
        yield from _fault_of_name(event)
    if phase == "i" and event.get("s") not in ("g", "p", "t"):
        yield "a moment is global, of a process or of a thread: 's' is 'g', 'p' or 't'"
    if phase == "C" and not all(isinstance(value, (int, float)) for value in dict(event.get("args") or {}).values()):
        yield "a counter's values are numbers"


def _fault_of_name(event: Mapping[str, Any]) -> Iterable[str]:
    name, arguments = event.get("name"), event.get("args")
    if not isinstance(name, str) or name not in _NAMES:
        yield f"the metadata {name!r} is unknown"
        return
    key, kind = _NAMES[name]
    value = arguments.get(key) if isinstance(arguments, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        yield f"{name} needs {key!r} in its 'args'"
    if name.startswith("thread") and "tid" not in event:
        yield f"{name} needs 'tid'"


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def _slices(events: Iterable[Mapping[str, Any]]) -> tuple[dict[_Thread, list[_Slice]], list[str]]:
    """All slices by thread, and what is wrong with those that begin and end in two events."""
    found: dict[_Thread, list[_Slice]] = defaultdict(list)
    open_: dict[_Thread, list[int]] = defaultdict(list)
    faults = []
    for event in sorted((e for e in events if e["ph"] in "XBE"), key=lambda event: event["ts"]):
        thread = event["pid"], event["tid"]
        begin = _ns(event["ts"])
        if event["ph"] == "X":
            found[thread].append((begin, begin + _ns(event["dur"])))
        elif event["ph"] == "B":
            open_[thread].append(begin)
        elif not open_[thread]:
            faults.append(f"thread {thread}: a slice ends at {event['ts']} that has not begun")
        else:
            found[thread].append((open_[thread].pop(), begin))
    faults += [f"thread {thread}: {len(left)} slices never end" for thread, left in open_.items() if left]
    return found, faults


def _crossings(slices: Mapping[_Thread, list[_Slice]]) -> Iterable[str]:
    for thread, of_thread in slices.items():
        around: list[int] = []  # the ends of the slices that are open
        for begin, end in sorted(of_thread, key=lambda one: (one[0], -one[1])):
            while around and around[-1] <= begin:
                around.pop()
            if around and around[-1] < end:
                yield f"thread {thread}: the slice from {begin / 1000} to {end / 1000} us overlaps the one before"
            around.append(end)


def _flows(events: Iterable[Mapping[str, Any]], slices: Mapping[_Thread, list[_Slice]]) -> Iterable[str]:
    flows: dict[tuple[str, str, Any], list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["cat"], event["name"], event["id"]].append(event)
    for key, parts in flows.items():
        begins, ends = ([e["ts"] for e in parts if e["ph"] == phase] for phase in "sf")
        if len(begins) != 1 or len(ends) != 1:
            yield f"flow {key}: it has {len(begins)} begins and {len(ends)} ends"
        elif not begins[0] <= min(e["ts"] for e in parts) <= max(e["ts"] for e in parts) <= ends[0]:
            yield f"flow {key}: its parts are not between its begin and its end"
        for event in parts:
            if not _is_in_one(_ns(event["ts"]), slices.get((event["pid"], event["tid"]), [])):
                yield f"flow {key}: no slice of its thread is there at {event['ts']}"


def _is_in_one(moment: int, slices: Iterable[_Slice]) -> bool:
    return any(begin <= moment < end or begin == moment == end for begin, end in slices)


def _named_twice(events: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    seen = set()
    for event in events:
        if event["ph"] == "M":
            key = event["name"], event["pid"], event.get("tid")
            if key in seen:
                yield f"process {event['pid']}: {event['name']} is there twice"
            seen.add(key)
