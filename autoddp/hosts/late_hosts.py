"""A host that comes when the others have met already: it joins their job, as it would under torchrun.

The hosts that have met write into the store at the endpoint what they are about to do, and later what they launch. A
launcher that comes afterwards, because its host started later or was lost and came back, reads both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

from autoddp.codec import Struct, decode, encode
from autoddp.errors import HostLost, UsageError, first_line
from autoddp.knobs import Rung
from autoddp.processes.polling import polls

_EVERY = 0.5  # seconds between two looks at what the job is launched with
_AGAIN = 60.0  # seconds from one line to the next
_LAUNCHING = 30.0  # seconds in which all hosts that have met launch the job once the first one does
_JOINING = 10.0  # seconds, likewise, until the last of them takes part in it
_ANOTHER_JOB = "if this is another job, give it an --rdzv-id, or an endpoint, of its own"


class Plan(Struct, frozen=True):
    """What the hosts that have met are about to do. Another version of autoddp may say less: each has a default."""

    digest: str = ""
    """Equal to that of a late host which has the same plan."""
    reads: str = ""
    """The plan for people."""
    job: bool = False
    """Whether a job follows which further hosts may join."""
    hosts: str = ""
    """The names of those that have met. One may be there twice: its command was started twice."""
    script: str = ""
    """A digest of what the first host's script contains, see `agreement.HostFacts`."""

    @property
    def told(self) -> str:
        """The plan and the hosts in brackets, or nothing where neither is known."""
        parts = [*filter(None, (self.reads, f"on {self.hosts}" if self.hosts else ""))]
        return f" ({'; '.join(parts)})" if parts else ""


class Running(Struct, frozen=True):
    """What the job is launched with, once that is known."""

    digest: str = ""
    """Equal to that of a late host which launches the same."""
    reads: str = ""
    """What is launched, in words for people."""
    recipe: str = ""
    """The text of the recipe; "" where the job is launched as written."""
    chosen: tuple[Rung, int] | None = None
    """See `mode.Mode.chosen`."""
    builds_ddp: bool = True
    """Whether the script builds a DDP model, as far as the hosts know."""
    address: str = ""
    """Address of a host of the job, on the network that the job uses; "" if that is not known."""
    everywhere: tuple[str, ...] | None = None
    """See `own_network.Network.everywhere`: by these the hosts that have met decide what they leave out."""
    is_named: bool = False
    """See `own_network.Network.is_named`."""
    nodes: int = 0
    """Number of hosts that have met for it; 0 if that is not known."""


class Notices:
    """The keys about one job on the `board`, a store of torch's that all hosts share."""

    def __init__(self, board: Any, run_id: str) -> None:
        self._board, self._plan, self._running = board, f"{run_id}/plan", f"{run_id}/running"
        self._launching = f"{run_id}/launching"

    @property
    def has_plan(self) -> bool:
        """Whether the hosts have met already, as far as the store says."""
        with contextlib.suppress(RuntimeError):  # the meeting itself reports what is wrong
            return bool(self._board.check([self._plan]))
        return False

    def plan(self, plan: Plan) -> None:
        """Say what is about to be done. RuntimeError if the store does not answer."""
        self._board.set(self._plan, encode(plan))

    def running(self, running: Running) -> None:
        """Say what the job is launched with, and that this host launches it now."""
        with contextlib.suppress(RuntimeError):  # only late hosts would read it; the job itself reports what is wrong
            self._board.set(self._running, encode(running))
            self._board.add(self._launching, 1)

    def awaited(self, say: Callable[[str], None], most: int, script: str = "") -> tuple[Plan, Running]:
        """What the hosts that have met planned, and what they launch; tuning may take long, and `say` tells so.

        Where they are `most`, as many as the job can have, it returns only once they have had time to take part. That
        they have another `script` is told at once: as under torchrun, a job with their endpoint and run id is taken for
        a further host of theirs, and without --rdzv-id all jobs have one.
        UsageError where no job follows that could be joined, HostLost if there is none any more.
        """
        try:
            plan = decode(self._board.get(self._plan), Plan) if self._board.check([self._plan]) else Plan()
            if not plan.job:
                raise UsageError(_without_this_host(plan))
            if script and plan.script not in ("", script):
                say(f"warning: the script here is not that of the other hosts{plan.told}: {_ANOTHER_JOB}")
            due = 0.0
            for waited in polls(math.inf, _EVERY):
                if self._board.check([self._running]):
                    break
                if waited >= due:
                    due = waited + _AGAIN
                    say(f"the other hosts have begun already{plan.told}: joining them when the job is launched")
            running = decode(self._board.get(self._running), Running)
            if due and running.nodes >= most:  # this host has waited: it would be there before those that write reports
                self._give_way(running.nodes)
            return plan, running
        except (RuntimeError, ValueError) as error:
            raise HostLost(f"the job that this host was about to join has ended ({first_line(error)})") from None

    def _give_way(self, nodes: int) -> None:
        """Wait until as many hosts launch the job, and have taken part; less long if one of them is lost."""
        for _ in polls(_LAUNCHING, _EVERY):
            if self._board.add(self._launching, 0) >= nodes:
                break
        for _ in polls(_JOINING, _EVERY):
            pass


def _without_this_host(plan: Plan) -> str:
    return f"the other hosts have begun already{plan.told}, and no host can join them now: start all hosts together"


def cannot_join(backend: str) -> UsageError:
    """The error for a host that comes late under a static rendezvous, or one whose store it cannot read."""
    return UsageError(
        f"the other hosts have begun already, and under --rdzv-backend {backend} no host can join a job later: start "
        "all hosts together, or use --rdzv-backend c10d"
    )


def joining(running: Running, most: int) -> str:
    """A line for the user of a late host; `most`: the most hosts that the job can have."""
    if running.nodes < most:
        return "the job runs already on other hosts: joining it"
    return (
        f"the job runs already, on as many hosts as --nnodes allows ({most}): this host takes part once one of them is "
        "lost; else it ends when the job ends"
    )


def differs(running: Running, here: str) -> UsageError:
    """The error for a late host whose own plan, `here` for people, is not what the job does."""
    return UsageError(
        f"hosts differ: the job runs already with {running.reads}; this host has {here}; every host needs the same "
        "recipe and the same options: copy the recipe, or name it by --recipe"
    )
