"""The files of a recording, read as plain data: see `wire.recorded_calls` for what lies in them.

    recording = recorded(folder)        # while the script runs, or after it

Calls before the first step of a process, and during a trial of fewer threads, are left out.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from autoddp.codec import decode
from autoddp.diagnose.collectives.recording import OFTEN, Call, Group, Look, Place, Process, Recording, Sums, Use
from autoddp.wire.recorded_calls import (
    CALL,
    CALLS,
    CALLS_FROM,
    LOOK,
    OF_A_CALL,
    OF_A_PLACE,
    PLACES_FROM,
    SHORT_GAP,
    SUMS,
    TRIAL,
    BuildsNamed,
    GroupEventNamed,
    GroupNamed,
    Header,
    HiddenNamed,
    Named,
    PlaceNamed,
    ProcessNamed,
    ThreadsTrial,
    UsedNamed,
    WaitsNamed,
    WorldNamed,
    mapped,
    names,
)

_NEARLY = 0.9  # of the calls of a place
_MANY = 20  # calls of a place, from which it is surely no part of the start


def calls_made(folder: Path) -> tuple[int, ...]:
    """How many calls each process has made so far, where the recording is still going on."""
    found = []
    for path in sorted(folder.glob("*.calls")):
        with contextlib.suppress(OSError, ValueError):
            numbers = mapped(str(path))
            found.append(int(numbers[Header.CALLS_MADE]))
    return tuple(found)


def recorded(folder: Path) -> Recording:
    """What lies in the folder. A process whose files cannot be read is left out."""
    trial = None
    with contextlib.suppress(OSError, ValueError):
        trial = decode((folder / TRIAL).read_bytes(), ThreadsTrial)
    processes = []
    for path in sorted(folder.glob("*.calls")):
        with contextlib.suppress(OSError, ValueError):
            found = _process(path)
            if found is not None:
                processes.append(_without_start(found if trial is None else _without_trial(found, trial)))
    return Recording(tuple(processes), trial)


def _without_trial(process: Process, trial: ThreadsTrial) -> Process:
    """The process without the calls made during the trial; earlier calls are moved later, so that no gap is left."""
    moved = trial.ends - trial.begins
    before = [
        replace(
            call,
            began=call.began + moved,
            returned=call.returned + moved,
            wait_began=call.wait_began + moved if call.wait_began else 0.0,
            wait_ended=call.wait_ended + moved if call.wait_ended else 0.0,
        )
        for call in process.calls
        if call.began < trial.begins
    ]
    after = [call for call in process.calls if call.began >= trial.ends]
    calls = [*before, *after]
    first, last = min((call.began for call in calls), default=0.0), max((call.ended for call in calls), default=0.0)
    look = process.look  # its first moment moves as the calls do: what was waited before it was not looked at
    looked = look.began + moved if look.began < trial.begins else max(look.began, trial.ends)
    # Where the ring has lost calls, the sums are of all of them, those of the trial too: so is the time.
    is_whole = process.made <= CALLS
    return replace(
        process,
        calls=calls,
        tried=[call for call in process.calls if trial.begins <= call.began < trial.ends],
        sums=_sums(calls) if is_whole else process.sums,
        seconds=last - first if is_whole else process.seconds,
        look=replace(look, began=looked),
    )


def _without_start(process: Process) -> Process:
    """The process without the calls before its first step: in these, ranks wait for others that start later.

    A step is made of what is called many times, and not only in the first tenth of all calls. It is all of the process
    where nothing is, where no group is called from then on, where the ring has lost calls, or where there were pauses:
    then the recording begins in the middle of the training.
    """
    counts = Counter(call.place.of_any_group for call in process.calls)
    later = {call.place.of_any_group for call in process.calls[len(process.calls) // 10 :]}
    often = {place for place in later if counts[place] >= _MANY and place.repeats_in_steps}
    first = next((n for n, call in enumerate(process.calls) if call.place.of_any_group in often), 0)
    calls = process.calls[first:]
    if not first or process.made > CALLS or process.paused or not any(call.place.group for call in calls):
        return process
    # The looks may have begun earlier: what was waited there lies in no gap between the calls that are left.
    waited = sum(
        max(0.0, min(call.seconds, call.ended - process.look.began))
        for call in process.calls[:first]
        if call.place.group is not None
    )
    return replace(
        process,
        calls=calls,
        sums=_sums(calls),
        seconds=max(call.ended for call in calls) - calls[0].began,
        look=replace(process.look, seconds=max(0.0, process.look.seconds - waited)),
    )


def _sums(calls: Sequence[Call]) -> dict[Place, Sums]:
    sums: dict[Place, Sums] = {}
    for call in calls:
        before = sums.get(call.place, Sums(0, 0, 0.0))
        sums[call.place] = Sums(before.count + 1, before.bytes + call.bytes, before.seconds + call.seconds)
    return sums


@dataclass
class _Named:
    """What a process has said of itself: the names in its file."""

    process: ProcessNamed | None = None
    world: WorldNamed | None = None
    computes_in_waits: float = 0.0
    groups: dict[int, Group] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)
    uses: dict[tuple[Place, int], Use] = field(default_factory=dict)
    events: dict[int, Group] = field(default_factory=dict)
    builds: dict[Place, int] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    threads: dict[int, int] = field(default_factory=dict)
    """Place → see `PlaceNamed.thread`."""

    def hear(self, one: Named) -> None:
        """Take in one line. Those of a place that is not known are left out."""
        match one:
            case ProcessNamed():
                self.process = one
            case WorldNamed():
                self.world = one
            case GroupNamed():
                self.groups[one.group] = Group(one.ranks, one.name, one.backend)
            case WaitsNamed():
                self.computes_in_waits = one.computes
            case GroupEventNamed():
                self.events[one.event] = Group(one.ranks, one.name)
            case HiddenNamed():
                self.hidden.add(one.what)
            case BuildsNamed() if one.place in self.places:
                self.builds[self.places[one.place].of_any_group] = one.back
            case UsedNamed() if one.place in self.places:
                scaled = _where(one.scaled_in, one.scaled) if one.scaled else ""
                use = Use(one.calls, one.share, _where(one.file, one.line), scaled)
                self.uses[self.places[one.place], one.nth] = use
            case PlaceNamed():
                self.threads[one.place] = one.thread
                self.places[one.place] = Place(
                    file=one.file,
                    line=one.line,
                    function=one.function,
                    collective=one.collective,
                    method=one.method,
                    part=one.part,
                    group=self.groups.get(one.group),
                    device=one.device or "cpu",
                    dtype=one.dtype,
                    reduction=one.reduction,
                    by=one.by,
                )


def _where(file: str, line: int) -> str:
    return f"{os.path.basename(file)}:{line}"


def _process(path: Path) -> Process | None:
    numbers, named = mapped(str(path)), _Named()
    for one in names(numbers):
        named.hear(one)
    said, world, places = named.process, named.world, named.places
    if said is None:
        return None
    made = int(numbers[Header.CALLS_MADE])
    calls = [call for number in range(max(0, made - CALLS), made) if (call := _call(numbers, number, places))]
    if renewed := _renewed(calls, places.values()):
        places = {number: renewed.get(place, place) for number, place in places.items()}
        calls = [replace(call, place=renewed[call.place]) if call.place in renewed else call for call in calls]
    calls = with_waits_at_once(calls)
    # If there are not too many, all single calls are there, also those after the last look.
    sums = _sums(calls) if made <= CALLS else {}
    for number, place in places.items() if made > CALLS else ():
        count, size, in_calls, in_waits = numbers[(at := PLACES_FROM + number * OF_A_PLACE) : at + len(SUMS)]
        before = sums.get(place, Sums(0, 0, 0.0))
        sums[place] = Sums(before.count + int(count), before.bytes + int(size), before.seconds + in_calls + in_waits)
    began, last = numbers[Header.BEGAN], max((call.ended for call in calls), default=0.0)
    return Process(
        rank=world.rank if world is not None else said.launched_rank or 0,
        ranks=world.ranks if world is not None else 1,
        pid=said.pid,
        is_launched=said.is_launched,
        host=said.host,
        cores=said.cores,
        threads=world.threads if world is not None else 1,
        hidden=frozenset(named.hidden),
        interface=world.interface if world is not None else "",
        began=began,
        seconds=max(0.0, last - began - numbers[Header.PAUSED]),
        look=_look(numbers),
        calls=calls,
        sums=sums,
        made=made,
        group_events=named.events,
        uses=named.uses,
        builds=named.builds,
        paused=numbers[Header.PAUSED],
        computes_in_waits=named.computes_in_waits,
        waits_in_gaps=numbers[Header.WAITED_IN_GAPS] / max(1e-9, numbers[Header.GAPS]),
        in_threads=stands_in_several(calls) or _several_call(sums, {places[n]: of for n, of in named.threads.items()}),
    )


def with_waits_at_once(calls: Sequence[Call]) -> list[Call]:
    """The calls, with those as blocking that the script starts only to wait for them at once: nothing runs meanwhile.

    A place counts if nearly all of its calls are so. Between some of them the process may have lost its core.
    """
    started = [call for call in calls if call.place.group is not None and not call.is_blocking]
    waits = sorted(call.wait_began for call in started if call.wait_ended)
    following = {id(one): after for one, after in pairwise(calls)}
    gaps: dict[Place, list[float]] = {}
    at_once: set[int] = set()
    for call in started:
        after = following.get(id(call))
        others = bisect_left(waits, call.wait_began) - bisect_right(waits, call.returned)
        if call.wait_ended and not others and (after is None or after.began >= call.wait_ended):
            gaps.setdefault(call.place.of_any_group, []).append(call.wait_began - call.returned)
            at_once.add(id(call))
    counts = Counter(call.place.of_any_group for call in started)
    places = {
        place for place, of_it in gaps.items() if len(of_it) >= _NEARLY * counts[place] and median(of_it) <= SHORT_GAP
    }
    blocks = {id(call) for call in started if id(call) in at_once and call.place.of_any_group in places}
    return [replace(call, is_blocking=True, at_once=True) if id(call) in blocks else call for call in calls]


def stands_in_several(calls: Sequence[Call]) -> bool:
    """Whether calls of a process that could not go on before their ends begin while others of them go on.

    A call that comes once or twice, as where a thread saves a checkpoint, does not count: it is not done again anyway.
    """
    found, until = 0, 0.0
    counts = Counter(call.place.of_any_group for call in calls if call.place.group and call.is_blocking)
    often = (one for one in calls if one.is_blocking and counts[one.place.of_any_group] >= OFTEN)
    for call in sorted(often, key=lambda one: one.began):
        found += call.began < until
        until = max(until, call.ended)
    return found >= OFTEN


def _several_call(sums: Mapping[Place, Sums], threads: Mapping[Place, int]) -> bool:
    """Whether several threads make calls or steps: one may compute while another one waits for the end of a call.

    A thread that is not Python's does not count. It may be that of a backward pass, for which the training waits.
    """
    often = (place for place, one in sums.items() if place.repeats_in_steps and one.count >= OFTEN)
    return len({threads.get(place, -1) for place in often} - {-1}) > 1


def _call(numbers: memoryview, number: int, places: dict[int, Place]) -> Call | None:
    """One call of the ring; None for one that is just being written."""
    at = CALLS_FROM + number % CALLS * OF_A_CALL
    place, count, size, *times, blocking, cpu_returned, cpu_waited, root = numbers[at : at + len(CALL)]
    known, (began, returned, wait_began, wait_ended) = places.get(int(place)), times
    if known is None or not returned >= began > 0:
        return None
    return Call(
        place=known,
        number=int(count),
        bytes=int(size),
        began=began,
        returned=returned,
        wait_began=wait_began,
        wait_ended=wait_ended,
        is_blocking=bool(blocking),
        cpu_returned=cpu_returned,
        cpu_waited=cpu_waited,
        root=int(root),
    )


def _renewed(calls: Sequence[Call], places: Iterable[Place]) -> dict[Place, Place]:
    """Optimizers of one line that step one after another, as where each epoch makes one anew → the first of them.

    Those that step by turns, as of the two networks of a GAN, stay apart: each ends a step.
    """
    of_lines: dict[Place, set[Place]] = {}
    for place in places:
        if place.is_step:
            of_lines.setdefault(replace(place, part=0), set()).add(place)
    renewed: dict[Place, Place] = {}
    for of_line in of_lines.values():
        steps = [call.place for call in calls if call.place in of_line] if len(of_line) > 1 else []
        turns = sum(one is not other for one, other in pairwise(steps))
        if 0 < turns * _MANY <= len(steps):
            renewed |= dict.fromkeys(of_line, steps[0])
    return renewed


def _look(numbers: memoryview) -> Look:
    first = numbers[Header.FIRST_LOOK : Header.FIRST_LOOK + len(LOOK)]
    last = numbers[Header.LAST_LOOK : Header.LAST_LOOK + len(LOOK)]
    seconds, *counts = (max(0.0, after - before) for before, after in zip(first, last, strict=True))
    return Look(seconds, *counts, began=first[0])  # type: ignore[misc]  # it has a field for each of `LOOK`
