"""An experiment: what a running job is made to do differently for one block of steps, to learn what a cause costs."""

from __future__ import annotations

from autoddp.codec import Struct, field

PREFETCHED = 2
"""Batches that each worker of `Experiment.loader_workers` loads ahead: torch's own number."""
PINNED, ON_DEVICE = "pinned", "device"
"""Places for kept batches: in memory of the host that the device reads by itself, or on the device."""


class Delay(Struct, frozen=True, forbid_unknown_fields=True):
    """One rank sleeps once in each step, at the beginning of one stage."""

    rank: int
    stage: str
    """A name of `timing.anatomy.STAGES`."""
    seconds: float


class Experiment(Struct, frozen=True, forbid_unknown_fields=True):
    """What is different from the script as written. Without any of it the job runs as written.

    It is undone before the next block that does not ask for it. Nothing of it is ever part of a recipe.
    """

    keep: bool = False
    """Copies are made of the batches that loaders give, for a later block."""
    kept_batches: tuple[int, ...] = ()
    """Ranks whose loaders give these copies, again and again, in place of new batches."""
    loader_workers: int = 0
    """Worker processes of each rank in `kept_batches` that load the same samples, in place of the copies."""
    sizes: tuple[int, ...] = ()
    """Numbers of elements: in each step each rank is given the kept batch that is nearest to the next of them."""
    ddp_arguments: dict[str, bool] = field(default_factory=dict)
    """Arguments of DDP's constructor, for objects that autoddp may change."""
    added_bytes: int = 0
    """Bytes of a tensor of autoddp's own that all ranks also add up in each step, before the optimizer's step."""
    memory: str = ""
    """Place of the copies for `kept_batches`: `PINNED`, `ON_DEVICE`, or "": as the script's own loader gives them."""
    late_values: bool = False
    """Lines of the script that ask the device for a value are given the one that they asked for the last time."""
    threads: int = 0
    """Number of threads of torch's operators on each rank; 0: as written."""
    delay: Delay | None = None
    by_turns: float = 0.0
    """One rank at a time makes its steps; seconds for which a rank waits at most for those before it. 0.0: as written.

    Only for steps without reduction. Whoever has waited so long goes on, because a rank before it may need it.
    """


AS_IT_IS = Experiment()
"""No experiment."""
