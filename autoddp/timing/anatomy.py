"""The anatomy of a step: on each rank, the seconds of each stage, and how long the rank waited for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoddp.codec import Struct
from autoddp.timing.samples import median

STAGES = ("data", "copy", "buffers", "forward", "backward", "exposed", "optimizer", "other")
"""The stages of a step. Their seconds add up to the step's.

- data: the script waits for a batch of its loader
- copy: a batch is copied from the host to the device
- buffers: DDP broadcasts the model's buffers before a forward pass
- forward: the model, and the loss, until the backward pass begins
- backward: until all gradients have been computed; reductions that run meanwhile cost nothing here
- exposed: from there until all gradients are reduced
- optimizer: the optimizer's step
- other: all else, such as logging, evaluating and clearing gradients
"""


class RankSteps(Struct, frozen=True, forbid_unknown_fields=True):
    """The steps of one block on one rank."""

    rank: int
    host: str
    seconds: tuple[float, ...]
    """Of each step."""
    stages: tuple[tuple[float, ...], ...] = ()
    """Seconds of each of `STAGES` in each step; empty where stages were not asked for."""
    samples: tuple[int, ...] = ()
    """Samples of the batches that the loader gave in each step; 0 where it is not torch's."""


@dataclass(frozen=True)
class RankAnatomy:
    """A usual step of one rank: seconds of each stage, as the means over the steps of a block."""

    rank: int
    host: str
    step: float
    stages: dict[str, float]
    """By the names in `STAGES`."""
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


def anatomy(ranks: Sequence[RankSteps]) -> list[RankAnatomy]:
    """A usual step of each rank. Ranks leave an all-reduce together, so the shortest `exposed` of a step is transfer.

    Steps in which the script has saved or evaluated are left out: those longer than three medians.
    """
    if not ranks or not ranks[0].stages:
        return []
    usual = [min(of_step) for of_step in zip(*(one.seconds for one in ranks), strict=True)]
    limit = _INTERRUPTED * median(usual)
    kept = [number for number, seconds in enumerate(usual) if seconds <= limit]
    exposed = STAGES.index("exposed")
    transfer = {number: min(one.stages[number][exposed] for one in ranks) for number in kept}
    found = []
    for one in ranks:
        stages = {name: _mean([one.stages[n][place] for n in kept]) for place, name in enumerate(STAGES)}
        waiting = _mean([one.stages[n][exposed] - transfer[n] for n in kept])
        found.append(RankAnatomy(one.rank, one.host, _mean([one.seconds[n] for n in kept]), stages, waiting))
    return found


_INTERRUPTED = 3.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
