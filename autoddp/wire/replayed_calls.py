"""What processes of autoddp's own do again to try a change: calls of groups, with gaps between them, on their own data.

The launcher writes a `Replay` to a file and starts `worker.bench.replay`; each program takes its turn in every round.
"""

from __future__ import annotations

from autoddp.codec import Struct

WAIT = "wait"
"""`Act.call` of an act that makes no call: it waits for the end of one call, or of all, see `Act.after`."""
REST = "rest"
"""`Act.call` of an act that makes no call: only its gap is done."""
MAKE_GROUP = "new_group"
"""`Act.call` for making a group, by all ranks together. It is used from then on in place of the one before."""
DESTROY_GROUP = "destroy_process_group"
"""`Act.call` for destroying a group that was made so, by each of its ranks."""


CALLS = frozenset(
    "allreduce allreduce_coalesced reduce broadcast allgather _allgather_base all_gather_single reduce_scatter "
    "_reduce_scatter_base reduce_scatter_single alltoall alltoall_base all_to_all_single gather scatter barrier "
    "monitored_barrier".split()
)
"""Methods of a group that can be done again. What a script does by others counts as time between two calls."""
OBJECTS = frozenset("all_gather_object gather_object broadcast_object_list scatter_object_list".split())
"""Functions for objects that can be done again."""


class Act(Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that a rank does, after a gap."""

    call: str
    """A method of a group such as `allreduce`, a function for objects such as `all_gather_object`, or see above."""
    group: int = 0
    """Place in `Program.groups`."""
    bytes: int = 0
    """What this rank gives."""
    computes: float = 0.0
    """Seconds of CPU time before the call."""
    sleeps: float = 0.0
    """Seconds before the call in which the rank does nothing."""
    waits: bool = True
    """Whether it waits for the end at once."""
    tensors: int = 1
    """From how many tensors the data are gathered into one before the call, and put back after it."""
    after: int = 0
    """How many acts before a wait its call was started; 0 where it waits for all calls that are not over."""
    made_since: int = 0
    """How many groups have been made in the place of one that is destroyed, since it was made itself."""
    root: int = -1
    """The rank in the group that sends to the others, or collects; -1 where all do the same."""
    dtype: str = ""
    """The type of the tensor, such as "int64"; "" where it is not known. Backends cut data between two elements."""
    device: str = ""
    """The kind of device that has the tensor, such as "cuda"; "" where it is not known."""
    left_out: int = 0
    """Calls that a change has taken out of the gap. What comes with each call beside the backend's work goes too."""


class Program(Struct, frozen=True, forbid_unknown_fields=True):
    """What each rank does."""

    groups: tuple[tuple[int, ...], ...]
    """The ranks of each group."""
    acts: tuple[tuple[Act, ...], ...]
    """What each rank does."""
    pauses: tuple[float, ...] = ()
    """Seconds that each rank sleeps at a time, and computes in between; 0 or none: all of a gap's sleep at once."""
    of_each: bool = False
    """Whether its ranks that never meet do the same. Then a round takes as long as ranks take on average: which of them
    are slow in it is chance. Else it takes as long as the slowest rank."""
    backends: tuple[str, ...] = ()
    """The backend of each group as torch calls it, such as "gloo" or "cpu:gloo,cuda:nccl"; that of the replay where it
    is not known, or not a part of torch."""


class Replay(Struct, frozen=True, forbid_unknown_fields=True):
    """Programs for the same ranks, to be compared."""

    programs: dict[str, Program]
    ranks: int
    threads: int
    """Threads of torch's operators in each process."""
    backend: str
    seconds: float
    """For all rounds together, and for starting the ranks; up to twice as many, or 16, where a gain may be none."""


class Replayed(Struct, frozen=True, forbid_unknown_fields=True):
    """How long each program took."""

    seconds: dict[str, tuple[float, ...]]
    """Seconds of each round, see `Program.of_each`."""
    in_calls: dict[str, tuple[float, ...]]
    """Mean seconds of a round for which each rank stood in calls."""
