"""What each cause of a slow job is for a diagnosis: when it is suspected, how it is proved, and what it is called.

class Moon(Cause):
    in_words = "the moon"

    def suspect(self, evidence, around):
        if (seconds := evidence.mean(evidence.stage("other")[0])) > 0:
            yield Suspicion(self.name, (0,), seconds, "the moon is full", None, "it is far", fix="wait for a week")

CAUSE = Moon()

Such a file in `causes/` is a cause; nothing else has to know it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.experiments import Dose, Events, Mend, Probe, Repeat
from autoddp.diagnose.findings import Finding
from autoddp.knobs.ddp_arguments import SMALLEST_MIB
from autoddp.units import MIB, data_size
from autoddp.wire import JobFacts

_CUT = 8  # parts into which the gradients are cut where one bucket holds them all
_SLOWEST_GBPS = 1.0  # of a network between hosts that train together, where no device says its rate

Explained = Literal["nothing", "part", "beside", "all"]


@dataclass(frozen=True)
class Suspicion:
    """A cause that may be at work."""

    cause: str
    ranks: tuple[int, ...]
    guess: float
    """Seconds that a step might gain; infinite where that is not known."""
    seen: str
    """What was seen, as a sentence without a period."""
    proof: Mend | Probe | Dose | Repeat | Events | None
    why_not: str = ""
    """Why there is no proof for it."""
    fix: str = ""
    """What to change."""
    otherwise: str = ""
    """What to change where `fix` was tried and gives nothing. Where `fix` was not tried, both are told."""
    fixed: Mend | None = None
    """What the fix itself gives, where `proof` takes the cause away more thoroughly than any fix can."""
    most: str = ""
    """What `proof` does then: "with …"."""
    tried: str = ""
    """What `fixed` does, as a plural: "2 workers"."""

    def advice(self, worthwhile: bool | None) -> str:
        """What to change. `worthwhile`: whether `fix` was found to be; None where it was not tried."""
        ways = {True: [self.fix], False: [self.otherwise], None: [self.fix, self.otherwise]}[worthwhile]
        return "; or ".join(filter(None, ways))


@dataclass(frozen=True)
class Surroundings:
    """What is known of the job and its hosts beside its steps."""

    job: JobFacts
    is_tuned: bool = False
    """Whether the same run tries settings, so that nobody has to be told to tune the job."""

    @property
    def due(self) -> tuple[float, str]:
        """Bytes per second that the network should carry, and why as the end of a sentence."""
        if self.job.network_gbps:
            rate = self.job.network_gbps * 1e9 / 8
            return rate, f"the hosts' network devices say that they carry {data_size(int(rate))}/s"
        rate = _SLOWEST_GBPS * 1e9 / 8
        return rate, f"any Ethernet of a machine room carries {data_size(int(rate))}/s"

    @property
    def smaller_cap(self) -> float:
        """MiB of buckets with which most of the gradients travel during the backward pass."""
        return max(SMALLEST_MIB, round(2 * self.gradient_mib / _CUT) / 2)

    def travels(self, size: float) -> float:
        """Bytes that each rank sends and receives to add up `size` bytes over the ranks of DDP's process group."""
        ranks = self.job.ranks_per_group or self.job.world_size
        return 2 * (ranks - 1) / ranks * size

    @property
    def cores_per_rank(self) -> int:
        """CPU cores for each rank; at least one."""
        return max(1, self.job.cores // self.job.ranks_per_host)

    @property
    def gradient_mib(self) -> float:
        """MiB of all gradients, each reduced once."""
        return self.job.gradient_bytes / MIB


class Cause(ABC):
    """One cause. Its name is that of its file."""

    in_words: str
    """The cause for people who do not know our names, such as "waiting for data"."""
    in_some_steps = False
    """Whether it is at work in some steps only."""
    tells_of_cores = False
    """Whether its text says for how long threads wait for a core."""
    explains: Explained = "nothing"
    """What it explains of `exposed_communication`.

    - part: some of it; several such causes may explain the same part
    - beside: what steps without reduction save in addition to the transfer of gradients
    - all: the whole of it
    """

    @property
    def name(self) -> str:
        """The cause in findings and in JSON."""
        return type(self).__module__.rpartition(".")[2]

    @abstractmethod
    def suspect(self, evidence: Evidence, around: Surroundings) -> Iterator[Suspicion]:
        """What the steps make suspicious, if anything, with the experiment that could prove it.

        A guess says by arithmetic how much a step would gain. Guesses below `WORTHWHILE` of a step are left out later.
        """

    def not_measured(self, finding: Finding) -> str:
        """What the diagnosis cannot say where this cause was found, as a sentence without a period; "" for nothing."""
        return ""
