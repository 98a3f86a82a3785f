"""Lines of the script wait for the device, which has nothing to do afterwards."""

from __future__ import annotations

from collections.abc import Iterator

from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.experiments import Condition, Mend
from autoddp.diagnose.signs import waited_for_device
from autoddp.units import milliseconds
from autoddp.wire import Experiment

_LINES = 3  # of the script that are named
_FIX = (
    "keep values on the device (total += loss.detach()) and read them at these lines only every hundredth step, "
    "or copy them with non_blocking=True and read them one step later; leave torch.cuda.synchronize() out"
)


class SyncPoints(Cause):
    in_words = "waiting for the device"

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        waited = waited_for_device(evidence)
        if not waited:
            return
        # While the script waits the device works on. What it costs is that the device has nothing to do afterwards,
        # until the script has launched something: at most as long as the script needs for all that it launches.
        guess = min(waited, max(0.0, evidence.seconds - waited))
        lines: dict[str, float] = {}
        for one in evidence.ranks:
            for line, seconds in one.waits.items():
                lines[line] = max(lines.get(line, 0.0), seconds / evidence.count)
        longest = sorted(lines, key=lambda line: -lines[line])
        told = ", ".join(f"{line} ({milliseconds(lines[line])} ms)" for line in longest[:_LINES])
        seen = f"the script waits for the device, on average of all steps at {told}"
        late = Mend(Condition(experiment=Experiment(late_values=True)))
        yield Suspicion(self.name, tuple(range(len(evidence.ranks))), guess, seen, late, fix=_FIX)


CAUSE = SyncPoints()
