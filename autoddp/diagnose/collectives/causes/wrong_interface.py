"""The script's calls go over another interface than the fastest one by which the hosts reach each other."""

from __future__ import annotations

from collections.abc import Iterator

from autoddp.diagnose.collectives.cause import Cause, Job, Suspicion
from autoddp.diagnose.collectives.recording import Process
from autoddp.units import figure

_CLEARLY = 1.5  # times as fast
_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


class WrongInterface(Cause):
    in_words = "another interface than the fastest one"

    def suspect(self, job: Job) -> Iterator[Suspicion]:
        own = set(job.recording.of_rank)
        beyond = [group for group in job.recording.groups if not set(group.ranks) <= own]
        if not beyond or not job.rates:
            return
        backend = "nccl" if any("nccl" in group.backend for group in beyond) else "gloo"
        used = {one.interface for one in job.recording.of_rank.values()}
        best = max(job.rates, key=lambda name: job.rates[name])
        slow = [name for name in used if name in job.rates and job.rates[best] >= _CLEARLY * job.rates[name]]
        if len(used) != 1 or not slow:
            return
        (name,), variable = slow, _VARIABLES[backend]
        rate = job.rates[name]
        lost = max(_travelling(one, own, rate) for one in job.recording.of_rank.values()) * (1 - rate / job.rates[best])
        yield Suspicion(
            self.name,
            f"the calls go over {name}, which carries {figure(rate, 2)} Gbit/s to the next host; {best} carries "
            f"{figure(job.rates[best], 2)}",
            f"{variable}={best} on every host, where the command or the script sets {variable}={name} now; left unset, "
            "autoddp sets it",
            ranks=tuple(sorted(own)),
            guess=lost * job.step,
            why_not="calls between several hosts are not done again",
        )


def _travelling(process: Process, own: set[int], rate: float) -> float:
    """Share of its time for which a rank sends to other hosts, at most: its bytes at this rate in Gbit/s."""
    shares = (
        min(sums.seconds, sums.bytes * 8 / (rate * 1e9))
        for place, sums in process.sums.items()
        if place.group is not None and not set(place.group.ranks) <= own
    )
    return sum(shares) / process.seconds if process.seconds else 0.0


CAUSE = WrongInterface()
