"""What is known of one start of the script while it is tuned: its ranks, what they were told, how they have ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoddp.attempts.job.events import AttemptEnded, Worker
from autoddp.wire import AS_IT_IS, Measure


def changed_by(order: Measure) -> str:
    """What an order changes, in words; "" for the script as written."""
    if not order.reduce:
        return "steps without reduction"
    if order.experiment != AS_IT_IS:
        return "an experiment for the diagnosis"
    return str(order.configuration) if order.configuration else ""


@dataclass
class AttemptRecord:
    """What is known of one start of the script."""

    number: int
    began: float = 0.0
    """When the attempt began, on the machine's clock."""
    entries_before: int = 0
    """Length of the journal when it began."""
    workers: list[Worker] = field(default_factory=list)
    """Workers that were told to go."""
    leader: Worker | None = None
    """Rank 0, if it is on this host, once it is ready."""
    was_ready: bool = False
    ready_at: float = 0.0
    """When the attempt was ready, on the machine's clock."""
    steps_before: int = 0
    """Steps that the script had made when it was ready."""
    order: Measure | None = None
    """What rank 0 was told, as long as it has not answered."""
    unanswered: Measure | None = None
    """What rank 0 had been told when all ranks left without a reason."""
    ordered_at: float = 0.0
    """When the order was given, by the clock of the hang timeout."""
    failures: list[str | Worker] = field(default_factory=list)
    """Failures in the order in which they came: a rank's reason, or a rank that has gone without one."""
    complaints: dict[str, float] = field(default_factory=dict)
    """What ranks gave as the reason of their end, and when they ended, see `Goodbye`."""
    hung: str = ""
    tried: str = ""
    """What the last order that was not the script as written has changed."""
    is_trying: bool = False
    """Whether the last order has changed anything, see `tried`, and was not answered."""
    steps: int = 0
    """Steps that the script has made, where a rank has said so at its end."""
    parted: bool = False
    """Whether it has made steps without reduction. What optimizers have kept of them differs between ranks since."""
    told_to_leave: bool = False
    another_follows: bool = False
    """It was ended so that another one can be made."""
    limit: float = 0.0
    """When LOST or JUDGING ends at the latest, on the machine's clock."""
    must_end_at: float | None = None
    ended: AttemptEnded | None = None
    failure: str = ""
    """Why the attempt has failed, once it has ended; "" if it has not."""
    start_failed: str = ""
    """Why, if its variables are to blame and no measurement has failed for it yet."""

    @property
    def usable(self) -> int | None:
        """The steps of this attempt that could be measured; None where their number is not known."""
        return self.steps - self.steps_before if self.was_ready and self.steps else None

    @property
    def how_ended(self) -> str:
        """The end of a script that no rank has failed in. It may be the usual one, or come from what was tried."""
        after = f" after {self.steps} steps" if self.steps else ""
        when = "while autoddp tried" if self.is_trying else "after autoddp had tried"
        return f"the script ended with exit code 0{after}{f', {when} {self.tried}' if self.tried else ''}"

    @property
    def cause(self) -> str:
        """Why the ranks are gone. One that was killed cannot say so, and its peers may complain before it is missed.

        "" if nothing has failed. A script that ends by `os._exit(0)`, or becomes another program, says no goodbye.
        """
        for worker in self.workers:
            # SIGTERM is elastic's, for those that are left.
            killed = worker.end.startswith("killed by") and not worker.end.endswith("SIGTERM")
            if killed and not worker.said_goodbye and not self.hung:
                return f"rank {worker.hello.rank} {worker.end}"
        # Of a script without DDP only those that complain are known here; elastic knows all of them.
        by_elastic = "" if self.ended is None else self.ended.failure
        killed = by_elastic.startswith("rank ") and " killed by " in by_elastic
        if killed and not self.hung and not by_elastic.endswith(("SIGTERM", "SIGABRT")):
            return by_elastic
        failures, complaints = [*self.failures], {**self.complaints}  # another thread may ask
        if all(isinstance(one, Worker) for one in failures):  # none of them has complained
            all_well = self.ended is not None and not self.ended.failure
            failures = [one for one in failures if not (isinstance(one, Worker) and one.has_ended_well(all_well))]
        first = next(iter(failures), "")
        if first in complaints:
            first = min(complaints, key=complaints.__getitem__)
        return f"rank {first.hello.rank} {first.end or 'vanished'}" if isinstance(first, Worker) else first
