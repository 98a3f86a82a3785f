"""Buckets hold nearly all gradients, so that they travel only after the backward pass."""

from __future__ import annotations

from collections.abc import Iterator

from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.experiments import Condition, Mend
from autoddp.knobs import Configuration
from autoddp.knobs.ddp_arguments import BUCKET_CAP_MB

_DEFAULT_CAP = 25.0  # MiB, of DDP's buckets where the script sets none


class NoOverlap(Cause):
    in_words = "gradients travel only after the backward pass"
    explains = "part"

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        exposed = evidence.mean(evidence.transfer)
        if len(evidence.ranks) < 2:
            return
        everyone = tuple(range(len(evidence.ranks)))
        cap = around.job.ddp_arguments.get(BUCKET_CAP_MB.name)
        present = float(cap) if cap and cap.replace(".", "", 1).isdigit() else _DEFAULT_CAP
        smaller = around.smaller_cap
        if present > 2 * smaller and around.gradient_mib > 2 * smaller and BUCKET_CAP_MB.name in around.job.knobs:
            seen = (
                f"the buckets take up to {present:g} MiB, and all gradients have {around.gradient_mib:.3g} MiB: "
                "most of them begin to travel when the backward pass is over"
            )
            cut = Condition(Configuration({BUCKET_CAP_MB.name: smaller}))
            # Smaller buckets hide at most as much as the backward pass lasts.
            hidden = min(exposed, max(evidence.means(evidence.stage("backward"))))
            fix = (
                f"DistributedDataParallel(bucket_cap_mb={smaller:g}): smaller buckets begin to travel while the "
                "backward pass goes on"
            )
            yield Suspicion(self.name, everyone, hidden, seen, Mend(cut), fix=fix)


CAUSE = NoOverlap()
