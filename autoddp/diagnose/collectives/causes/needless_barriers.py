"""Ranks meet at barriers in each step, though their collectives wait for each other anyway."""

from __future__ import annotations

from collections.abc import Iterator

from autoddp.diagnose.collectives.cause import Cause, Job, Suspicion
from autoddp.diagnose.collectives.merging import places_of, without
from autoddp.diagnose.collectives.program import Script

_OFTEN = 0.5  # of the steps: barriers around an evaluation or a checkpoint come less often
_BARRIERS = ("barrier", "monitored_barrier")


class NeedlessBarriers(Cause):
    in_words = "barriers in each step"

    def suspect(self, job: Job) -> Iterator[Suspicion]:
        script = job.script
        often = {place.method for place in job.recording.often if place.group is not None}
        if script is None or often <= {*_BARRIERS}:  # nothing else keeps ranks together that share memory or files
            return
        keys = script.agreed(lambda one: one.act.call in _BARRIERS and one.act.waits)
        calls = len(keys) / max(1.0, script.covers) / max(1, len({group for group, _ in keys}))
        if not keys or calls < _OFTEN:
            return
        lines = places_of(script, keys)
        others = f", and those of {' and '.join(lines[1:])}" if lines[1:] else ""
        fix = (
            f"{lines[0]}: leave the barrier out{others}: a collective waits for all ranks that it needs. Where it is "
            "for clean times, call it in the steps that need them; where it is for what other ranks write past the "
            "collectives (files, shared memory, a store), it stays"
        )
        yield Suspicion(
            self.name,
            f"{' and '.join(lines)}: the ranks meet at barriers, {job.times(calls)}",
            fix,
            guess=_at_most(script, keys),
            changed=without(script, keys),
            tried="no barrier",
            lines=lines,
        )


def _at_most(script: Script, keys: set[tuple[int, int]]) -> float:
    """Seconds of a step by which ranks get on sooner without these barriers: at each, what the first one waits there.

    Which of them comes first differs from step to step. So it may be more than any rank stands in barriers.
    """
    waits = {key: max(one.call.seconds for one in script.of_key[key].values()) for key in keys}
    most = max(sum(waits.get(one.key, 0.0) for one in of_rank) for of_rank in script.played.values())
    return most / script.covers * script.pace


CAUSE = NeedlessBarriers()
