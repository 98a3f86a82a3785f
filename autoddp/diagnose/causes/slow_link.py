"""Gradients travel between the hosts far more slowly than they should."""

from __future__ import annotations

from collections.abc import Iterator

from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.experiments import Dose
from autoddp.diagnose.signs import TINY_MIB
from autoddp.units import MIB, data_size

_ADDED = 0.25  # of a step, which bytes are to cost that an experiment adds
_MOST_ADDED = 64 * MIB
_FIX = (
    "look at the link between the hosts: `autoddp bench` measures it, `autoddp probe` says what it should carry; "
    "choose the fast interface by NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME"
)


class SlowLink(Cause):
    in_words = "a slow link between the hosts"
    explains = "part"

    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        exposed = evidence.mean(evidence.transfer)
        if len(evidence.ranks) < 2 or around.job.nodes < 2:
            return
        everyone = tuple(range(len(evidence.ranks)))
        due, why = around.due
        # A part may have travelled before, so the link is at most as fast as this.
        rate = around.travels(around.job.gradient_bytes) / max(exposed, 1e-9)
        if rate < due:
            seen = f"gradients travel between the hosts at {data_size(int(rate))}/s, and {why}"
            some = around.job.gradient_bytes * min(1.0, _ADDED * evidence.seconds / max(exposed, 1e-9))
            dose = Dose(int(min(max(some, TINY_MIB * MIB), _MOST_ADDED)))
            yield Suspicion(self.name, everyone, exposed * (1 - rate / due), seen, dose, fix=_FIX)


CAUSE = SlowLink()
