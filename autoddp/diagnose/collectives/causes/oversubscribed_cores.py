"""The ranks of a host, or their threads, are more than its cores."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoddp.diagnose.collectives.cause import Cause, Job, Suspicion
from autoddp.diagnose.collectives.fewer_threads import found
from autoddp.diagnose.collectives.program import Played, Script, rest, with_
from autoddp.units import percent
from autoddp.wire.replayed_calls import REST, WAIT

_MUCH = 0.1  # of their time ranks wait for a core
_BUSY = 0.6  # of the cores that they keep busy: where it is less, it is other programs that they wait for


class OversubscribedCores(Cause):
    in_words = "more ranks or threads than cores"

    def suspect(self, job: Job) -> Iterator[Suspicion]:
        processes = list(job.recording.of_rank.values())
        ranks, threads = len(processes), max(one.threads for one in processes)
        if ranks * threads <= job.cores:
            return
        seconds = sum(one.look.seconds for one in processes)
        if not seconds:
            return
        waited = sum(one.look.waited_of_thread for one in processes) / seconds
        helpers = sum(one.look.waited_of_helpers for one in processes) / seconds
        if waited + helpers < _MUCH:
            return
        busy = sum(one.look.cpu_of_process for one in processes) / max(one.look.seconds for one in processes)
        if busy < _BUSY * min(job.cores, ranks * threads):
            return
        seen = (
            f"{ranks} ranks with {threads} thread{'s' if threads > 1 else ''} each share {job.cores} cores, and keep "
            f"{busy:.1f} of them busy: for {percent(min(1.0, waited))} of the time a rank could go on and has no core"
        )
        guess = min(1.0, waited + helpers) * job.step
        alone = _as_many_as_cores(job.script, job.cores) if job.script is not None else None
        fewer = max(1, job.cores // ranks)
        fix = f"start at most {job.cores} ranks on this host, or give it {ranks} cores"
        if threads > fewer:
            of_threads = f"OMP_NUM_THREADS={fewer} in the command, or torch.set_num_threads({fewer}) in the script"
            fix = of_threads if job.cores >= ranks else f"{of_threads}; then {fix}"
        measured = _measured(job) if threads > fewer else None
        if threads > fewer:
            alone = None
            why_not = "the script ended before it had run with fewer threads for long enough"
        else:
            why_not = "" if alone else "all ranks are in one group, which cannot be tried with fewer of them"
        yield Suspicion(
            self.name,
            seen,
            fix,
            ranks=tuple(sorted(job.recording.of_rank)),
            guess=guess,
            is_bounded=False,
            changed=alone,
            measured=measured,
            tried=f"as many groups at a time as {job.cores} cores have room for" if alone else _threads(fewer),
            why_not=why_not,
        )


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''} for each rank"


def _measured(job: Job) -> tuple[list[float], list[float]] | None:
    """Seconds of a step as written and with fewer threads, in pairs of turns of the running script."""
    turns = found(job.recording)
    if turns is None:
        return None
    before, after = turns
    scale = job.step / statistics.fmean(before)  # a step may have several of the calls that were looked at
    return [one * scale for one in before], [one * scale for one in after]


def _as_many_as_cores(script: Script, cores: int) -> Script | None:
    """Make a script with only so many of the groups that each of their ranks has a core of its own.

    None where all groups fit, or none does.
    """
    kept: set[int] = set()
    for group in script.groups:
        if len(kept | set(group.ranks)) <= cores:
            kept |= set(group.ranks)
    fits = {place for place, group in enumerate(script.groups) if set(group.ranks) <= kept}
    if not kept or len(fits) == len(script.groups):
        return None
    if not any(one.key[0] in fits for of_rank in script.played.values() for one in of_rank):
        return None

    def alone(played: Sequence[Played]) -> Iterator[Played]:
        # Whatever a rank does before what is left out, it still does. A wait is for all that it has started.
        computes = sleeps = 0.0
        for one in played:
            computes, sleeps = computes + one.act.computes, sleeps + one.act.sleeps
            if one.key[0] in fits or one.act.call in (WAIT, REST):
                yield replace(one, act=with_(one.act, computes=computes, sleeps=sleeps))
                computes = sleeps = 0.0
        if played:
            yield from rest(computes, sleeps, played[-1])

    changed = script.changed(alone)
    return replace(changed, played={rank: of_rank for rank, of_rank in changed.played.items() if rank in kept})


CAUSE = OversubscribedCores()
