"""Single numbers, such as the mean of a loss, travel in each step, and every rank waits for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from autoddp.diagnose.collectives.cause import Cause, Job, Suspicion
from autoddp.diagnose.collectives.merging import (
    OF_ONE_PIECE,
    calls_at,
    kind_of,
    merged,
    places_of,
    runs,
    seconds_in,
    without,
)
from autoddp.diagnose.collectives.program import Script
from autoddp.diagnose.collectives.recording import Call, Group, Place, Recording

_SIZES = range(1, 65)  # bytes
_EVERY = 10  # steps
_RARELY = 0.2  # times in each step: a script that logs in every fifth step needs no advice to log less often
_SUMS = ("SUM", "AVG")  # a maximum of sums is not the maximum of the numbers
_SEVERAL = 4  # sizes: a helper that calls for a loss, and then for gradients, may be called for two or three things


class ScalarCollectives(Cause):
    in_words = "single numbers in calls of their own"

    def suspect(self, job: Job) -> Iterator[Suspicion]:
        script = job.script
        if script is None:
            return
        keys = script.agreed(lambda one: one.act.bytes in _SIZES and one.act.call in OF_ONE_PIECE and one.act.waits)
        sizes = _before_what_varies(job.recording)
        keys -= {key for key in keys if any(one.call.place in sizes for one in script.of_key[key].values())}
        keys -= _among_tensors(script, keys)
        if not keys:
            return
        # What one rank tells the others is not sent to be logged.
        logged = keys - script.agreed(lambda one: one.act.call == "broadcast") or keys
        into = {key: first for key, first in runs(script, _SIZES).items() if {key, first} <= keys}
        if several := len(into) * 2 >= len(logged):
            alike, others = _alike(script, keys, {*into, *into.values()})
            lines = (*alike, *others)
        else:
            keys, lines = logged, places_of(script, logged)
        calls = len(keys) / max(1.0, script.covers) / max(1, len({group for group, _ in keys}))
        if not several and calls <= _RARELY:
            return
        first = calls_at(script, keys, lines[0])[0]
        what = first.call.place.as_function
        one = "s" if len(lines) == 1 else ""
        seen = f"{' and '.join(lines[:2])} send{one} single numbers, {job.times(calls)}, and wait{one} for the answer"
        if several:
            left_out, changed, tried = keys, merged(script, into), "one call for all of them"
            fix = (
                f"{lines[0]}: put the numbers of a step{_also(alike[1:])}{',' if alike[1:] else ''} into one tensor, "
                "one for each dtype and operation: numbers = torch.stack([loss.detach(), correct, count]); "
                f"{_one_call(what)}. A number that is computed from the answer to another one cannot be one of them"
            )
            if others:
                differ = "have another dtype, operation, sender or group, and need calls of their own"
                fix += f". Those of {' and '.join(others)} {differ}"
        else:
            # What counts is the number among these calls: others of the group lie between them. Of a few, about a
            # tenth: none of five, one of six.
            kept = {key for group in {group for group, _ in keys} for key in _every_tenth(keys, group)}
            left_out, tried = keys - kept, "a tenth of these calls"
            changed = without(script, left_out)
            adds = "reduce" in what and all(place.reduction.endswith(_SUMS) for place in _places(script, keys))
            added_up = "add them up on each rank, and " if adds else ""
            which = f"numbers that are only logged{_also(lines[1:])}: {added_up}send them when you log them"
            if what == "broadcast":
                which = (
                    f"what one rank tells the others{_also(lines[1:])}: send it rarely, if older numbers do for a while"
                )
            fix = (
                f"{lines[0]}: {which}: if step % {_EVERY} == 0: dist.{what}(…). What the training reads, such as a "
                "norm by which gradients are clipped, the size of what is sent next, or a sign to stop, has to travel "
                "in every step"
            )
        took = seconds_in(script, left_out)
        yield Suspicion(self.name, seen, fix, guess=took, changed=changed, tried=tried, lines=lines)


def _also(lines: Sequence[str]) -> str:
    return f", also those of {' and '.join(lines)}" if lines else ""


def _alike(
    script: Script, keys: set[tuple[int, int]], in_runs: set[tuple[int, int]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The lines whose numbers one call can send, as it may be most of those in runs; and the other lines.

    A maximum can be in no call of sums, nor what rank 0 sends, nor what another group adds up.
    """
    kinds = {key: (key[0], one.act.call, *kind_of(one)) for key in keys for one in script.of_key[key].values()}
    usual = Counter(kinds[key] for key in in_runs).most_common(1)[0][0]
    alike = places_of(script, {key for key, kind in kinds.items() if kind == usual})
    return alike, tuple(line for line in places_of(script, keys) if line not in alike)


def _places(script: Script, keys: set[tuple[int, int]]) -> set[Place]:
    return {one.call.place for key in keys for one in script.of_key[key].values()}


def _one_call(what: str) -> str:
    """The call of all numbers: an all-reduce would add up what one rank sends to the others."""
    if "gather" in what:
        return (
            "everyone = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]; "
            "dist.all_gather(everyone, numbers, group=group)"
        )
    return f"dist.{what}(numbers, …) with the other arguments that it has now"


def _among_tensors(script: Script, keys: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Find the calls that a loop over tensors makes: without the bias of an output, the ranks would train other models.

    Their line sends tensors of several sizes, as a hook of gradients does, or a larger one right before or behind them.
    """
    line = {key: next(iter(of_ranks.values())).call.place.where for key, of_ranks in script.of_key.items()}
    size = {key: max(one.act.bytes for one in of_ranks.values()) for key, of_ranks in script.of_key.items()}
    sizes: dict[str, set[int]] = {}
    for key, where in line.items():
        sizes.setdefault(where, set()).add(size[key])

    def is_larger(near: tuple[int, int], of: tuple[int, int], later: tuple[int, int]) -> bool:
        return later in script.follows_at_once and line.get(near) == line[of] and size[near] not in _SIZES

    found = set()
    for group, number in keys:
        key, before, behind = (group, number), (group, number - 1), (group, number + 1)
        if len(sizes[line[key]]) >= _SEVERAL or is_larger(before, key, key) or is_larger(behind, key, behind):
            found.add(key)
    return found


def _before_what_varies(recording: Recording) -> set[Place]:
    """The places behind which another line sends now more and now less: they may tell its size, which cannot wait.

    The first gradient behind the mean of a loss always has one size, though the gradients have several.
    """
    behind: dict[tuple[Place, Place], set[int]] = {}
    for process in recording.of_rank.values():
        of_groups: dict[Group, Call] = {}
        for call in process.calls:
            if (group := call.place.group) is None or call.number < 0:
                continue
            before = of_groups.get(group)
            if before is not None and before.place != call.place and call.bytes not in _SIZES:
                behind.setdefault((before.place, call.place), set()).add(call.bytes)
            of_groups[group] = call
    return {before for (before, _), sizes in behind.items() if len(sizes) >= _SEVERAL}


CAUSE = ScalarCollectives()


def _every_tenth(keys: set[tuple[int, int]], group: int) -> list[tuple[int, int]]:
    """Every tenth of these calls of a group, the same on all ranks."""
    return sorted(key for key in keys if key[0] == group)[_EVERY // 2 :: _EVERY]
