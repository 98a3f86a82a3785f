"""Batches are copied to the device while nothing else runs there."""

from __future__ import annotations

from collections.abc import Iterator

from autoddp.codec import replace
from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.experiments import Condition, Mend
from autoddp.diagnose.signs import share
from autoddp.wire import ON_DEVICE, PINNED, Experiment

_PINNED = "DataLoader(pin_memory=True) with one worker or more, and batch.to(device, non_blocking=True)"
_AHEAD = "copy the next batch in a CUDA stream of its own while this one is computed (torch.cuda.Stream)"


class HostDeviceCopy(Cause):
    in_words = "copies to the device"

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        copies = evidence.stage("copy")
        guess = evidence.gain(lambda r, n: evidence.own[r][n] - copies[r][n])
        everyone = tuple(range(len(evidence.ranks)))
        seen = f"batches are copied to the device while nothing else runs there: {share(guess, evidence)}"
        readers = evidence.readers
        if not readers:
            why = "the batches come from no torch DataLoader, so none could be kept"
            yield Suspicion(self.name, everyone, guess, seen, None, why, fix=_PINNED, otherwise=_AHEAD)
            return
        kept = Experiment(kept_batches=readers)
        there, pinned = (Condition(experiment=replace(kept, memory=memory)) for memory in (ON_DEVICE, PINNED))
        as_they_come = Condition(experiment=kept)
        yield Suspicion(
            self.name,
            everyone,
            guess,
            seen,
            Mend(there, as_they_come),
            fix=_PINNED,
            otherwise=_AHEAD,
            fixed=Mend(pinned, as_they_come),
            most="with all batches on the device",
            tried="pinned batches",
        )


CAUSE = HostDeviceCopy()
