"""The anatomy of a step: on each rank, the seconds of each stage, and how long the rank waited for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from autoddp.codec import Struct, field

STAGES = ("data", "copy", "buffers", "forward", "backward", "exposed", "optimizer", "other")
"""The stages of a step. Their seconds add up to the step's.

- data: the script waits for a batch of its loader
- copy: a batch is copied from the host to the device
- buffers: DDP broadcasts the model's buffers before a forward pass
- forward: the model, and the loss, until the backward pass begins
- backward: until all gradients have been computed; reductions that run meanwhile cost nothing here
- exposed: from there until all gradients are reduced; and the script's own collectives, such as a barrier
- optimizer: the optimizer's step
- other: all else, such as logging, evaluating and clearing gradients
"""


class RankSteps(Struct, frozen=True, forbid_unknown_fields=True):
    """The steps of one block on one rank."""

    rank: int
    host: str
    seconds: tuple[float, ...]
    """Seconds of each step."""
    stages: tuple[tuple[float, ...], ...] = ()
    """Seconds of each of `STAGES` in each step; empty where stages were not asked for."""
    samples: tuple[int, ...] = ()
    """Samples of the batches that the loader gave in each step; 0 where it is not torch's."""
    elements: tuple[int, ...] = ()
    """Numbers in the tensors of these batches."""
    begun: tuple[int, ...] = ()
    """Iterators that the script asked its loaders for in each step: where an epoch begins."""
    collecting: tuple[float, ...] = ()
    """Seconds of each step that Python's garbage collector took."""
    meeting: tuple[float, ...] = ()
    """Seconds of each step in collectives of the script's own, such as a barrier: a part of `exposed`."""
    late: tuple[int, ...] = ()
    """Batches of each step that no worker process of a loader had ready when the script asked; empty if not known."""
    waited_for_cpu: float = 0.0
    """Seconds of all steps together for which threads of the rank could have run and had no core."""
    helpers_waited_for_cpu: float = 0.0
    """The part of `waited_for_cpu` of all threads but the one that trains, such as those that move gradients."""
    helpers_ran: float = 0.0
    """Seconds of all steps together for which those threads had a core."""
    page_faults: int = 0
    """Page faults of all steps together: pages of memory that the system gave the rank's process anew."""
    in_page_faults: float = 0.0
    """Seconds of all steps together that the page faults took, at most."""
    threads: int = 0
    """Threads of torch's operators."""
    mhz: tuple[int, ...] = ()
    """The clock of the rank's GPU at the end of the block, and the fastest that it can have; empty if not known."""
    held_back: str = ""
    """Why that clock is not faster, as a sentence without a period; "" if nothing keeps it, or nobody tells."""
    queued: tuple[float, ...] = ()
    """Seconds that the device was behind the host at most, in each step; empty on a CPU."""
    waits: dict[str, float] = field(default_factory=dict)
    """Seconds of all steps together for which lines of the script have waited for the device: some of the longest."""
    prefetched: int = 0
    """Batches that may wait in the queues of the script's loaders."""
    loader_workers: int = 0
    """Worker processes of the script's loaders; of several loaders, of the one with the most."""
    indexed: bool = True
    """Whether all data sets of the script's loaders are read by indices, and none as a stream."""
    persistent: bool = False
    """Whether the worker processes of some loader stay for the next epoch."""
    stored: tuple[int, ...] = ()
    """Numbers of elements of the batches of which copies are kept, of the loader that gave most."""
    kept: int = 0
    """Batches that an experiment gave in place of the loaders' own."""
    alone: bool = True
    """Whether all ranks before this one had ended their steps when it was this one's turn, where ranks take turns."""
    given: bool = True
    """Whether a DDP object was given the arguments of an experiment: it is none where autoddp must change no object."""


@dataclass(frozen=True)
class RankAnatomy:
    """A usual step of one rank: seconds of each stage, as the means over the steps of a block."""

    rank: int
    host: str
    step: float
    stages: dict[str, float]
    """Seconds of each stage, by the names in `STAGES`."""
    waiting: float
    """The part of `exposed` for which the rank waited for later ranks; the rest is transfer, the same on all ranks."""

    @property
    def transfer(self) -> float:
        """Seconds of `exposed` in which gradients travelled."""
        return self.stages["exposed"] - self.waiting

    @property
    def own(self) -> float:
        """Seconds that the rank needs by itself: the step without the exposed part."""
        return self.step - self.stages["exposed"]


def anatomy(ranks: Sequence[RankSteps], steps: Sequence[int] | None = None) -> list[RankAnatomy]:
    """A usual step of each rank: the means over `steps` of the block, or over all of them.

    Ranks leave an all-reduce together, so the shortest `exposed` of a step is the time of transfer. An empty list where
    no stages were recorded.
    """
    if not ranks or not ranks[0].stages:
        return []
    chosen = range(len(ranks[0].stages)) if steps is None else steps
    exposed = STAGES.index("exposed")
    transfer = {number: min(one.stages[number][exposed] for one in ranks) for number in chosen}
    found = []
    for one in ranks:
        stages = {name: fmean(one.stages[n][place] for n in chosen) for place, name in enumerate(STAGES)}
        waiting = fmean(one.stages[n][exposed] - transfer[n] for n in chosen)
        found.append(RankAnatomy(one.rank, one.host, fmean(one.seconds[n] for n in chosen), stages, waiting))
    return found
