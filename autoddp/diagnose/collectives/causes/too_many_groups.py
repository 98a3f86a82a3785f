"""The script makes groups of the same ranks again and again, in place of keeping one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from autoddp.diagnose.collectives.cause import Cause, Job, Suspicion
from autoddp.diagnose.collectives.program import Played, Script, rest, with_
from autoddp.diagnose.collectives.recording import Place, Process
from autoddp.units import milliseconds
from autoddp.wire.replayed_calls import DESTROY_GROUP, MAKE_GROUP

_SHARE = 0.03  # of the recording
_FEWEST = 3  # groups of the same ranks


class TooManyGroups(Cause):
    in_words = "groups that are made again and again"

    def suspect(self, job: Job) -> Iterator[Suspicion]:
        made = Counter(group.ranks for group in job.recording.groups)
        ranks, count = made.most_common(1)[0] if made else ((), 0)
        seconds = places = 0.0
        pile_up = False
        in_making: list[float] = []
        for process in job.recording.of_rank.values():
            with_groups = {
                place: one
                for place, one in process.sums.items()
                if place.is_about_groups and place.collective != "init_process_group"
            }
            making = {place: one for place, one in with_groups.items() if place.collective != "destroy_process_group"}
            if not _goes_on(process, making):
                continue
            in_making.append(sum(one.seconds for one in making.values()))
            took = sum(one.seconds for one in with_groups.values()) + _behind(process, making) * process.seconds
            if took > seconds:
                seconds = took
                places = sum(one.count for one in making.values())
                pile_up = making == with_groups
                place = max(making, key=lambda place: making[place].seconds)  # another line may be of the start
                where = place.where
        if not seconds or seconds < _SHARE * job.recording.seconds or count < _FEWEST:
            return
        seen = (
            f"{where} makes process groups {places:.0f} times, which takes {milliseconds(seconds / places)} ms each "
            f"with destroying and freeing them, and {count} of them have the same ranks"
        )
        if pile_up:
            seen += "; none is destroyed, so they pile up, which costs more the longer the job runs"
        once = _made_once(job.script) if job.script is not None else None
        keeps = (
            f"make the group once, before the loop, and keep it: group = dist.new_group({list(ranks)}, …) "
            "with the other arguments that it has now, such as its backend, by all ranks that make it now"
        )
        if sum(times > 1 for times in made.values()) > 1:  # as for the halves of the ranks
            keeps += "; and so one for each other set of ranks for which it makes them"
        if place.by:  # as in a mesh of devices
            keeps = "make once, before the loop, what torch makes these groups for, and keep it"
        yield Suspicion(
            self.name,
            seen,
            f"{where}: {keeps}",
            guess=seconds / job.recording.seconds * job.step,
            # What is done again has few groups. No rank waits in `new_group` for ranks that are later than all others.
            least=min(in_making) / job.recording.seconds * job.step if pile_up else 0.0,
            shortens_gaps=True,  # by the freeing of the groups before
            changed=once,
            tried="one group for the same ranks",
            why_not="" if once else "no group was made between the calls that can be done again",
            lines=(where,),
        )


def _goes_on(process: Process, making: Collection[Place]) -> bool:
    """Whether groups are made in the later half of the calls, too: those of a start cost no step anything."""
    calls = process.calls
    return any(call.place in making for call in calls if 2 * call.began > calls[0].began + calls[-1].ended)


def _behind(process: Process, making: Collection[Place]) -> float:
    """How much of the recording lies between making a group and the next call: Python frees the group before there."""
    calls = process.calls
    gaps = sum(max(0.0, after.began - one.ended) for one, after in pairwise(calls) if one.place in making)
    return gaps / max(calls[-1].ended - calls[0].began, gaps, 1e-9)


def _made_once(script: Script) -> Script | None:
    """The script with its groups as they are at the beginning. None if no groups are made in it."""
    acts = (MAKE_GROUP, DESTROY_GROUP)
    if not any(one.act.call in acts for of_rank in script.played.values() for one in of_rank):
        return None

    def change(played: Sequence[Played]) -> Iterator[Played]:
        computes = sleeps = 0.0
        for one in played:
            # Whatever a rank does before, it still does.
            computes, sleeps = computes + one.act.computes, sleeps + one.act.sleeps
            if one.act.call not in acts:
                yield replace(one, act=with_(one.act, computes=computes, sleeps=sleeps))
                computes = sleeps = 0.0
        if played:
            yield from rest(computes, sleeps, played[-1])

    return script.changed(change)


CAUSE = TooManyGroups()
