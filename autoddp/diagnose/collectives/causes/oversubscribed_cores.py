"""The ranks of a host, or their threads, are more than its cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoddp.diagnose.collectives.cause import Cause, Job, Suspicion
from autoddp.diagnose.collectives.program import Script
from autoddp.units import percent

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
        if threads > 1 and job.cores >= ranks:
            fewer = max(1, job.cores // ranks)
            fix = f"OMP_NUM_THREADS={fewer} in the command, or torch.set_num_threads({fewer}) in the script"
        else:
            fix = f"start at most {job.cores} ranks on this host, or give it {ranks} cores"
            if threads > 1:
                fix += "; OMP_NUM_THREADS=1 meanwhile"
        if alone:
            why_not = ""
        elif threads > 1:
            why_not = "what a rank computes between its calls is done again by one thread"
        else:
            why_not = "all ranks are in one group, which cannot be tried with fewer of them"
        yield Suspicion(
            self.name,
            seen,
            fix,
            ranks=tuple(sorted(job.recording.of_rank)),
            guess=guess,
            changed=alone,
            tried=f"as many groups at a time as {job.cores} cores have room for",
            why_not=why_not,
        )


def _as_many_as_cores(script: Script, cores: int) -> Script | None:
    """Only so many groups that each of their ranks has a core; None where that leaves none out, or nothing."""
    kept: set[int] = set()
    for group in script.groups:
        if len(kept | set(group.ranks)) <= cores:
            kept |= set(group.ranks)
    fits = {place for place, group in enumerate(script.groups) if set(group.ranks) <= kept}
    if not kept or len(fits) == len(script.groups):
        return None
    played = {
        rank: tuple(one for one in of_rank if one.key[0] in fits)
        for rank, of_rank in script.played.items()
        if rank in kept
    }
    return replace(script, played=played) if any(played.values()) else None


CAUSE = OversubscribedCores()
