"""Floor 1. Samples of step times and the statistics on them; does not import torch."""

from autoddp.timing.anatomy import STAGES, RankAnatomy, RankSteps, anatomy
from autoddp.timing.difference import Difference, difference
from autoddp.timing.headroom import Headroom, headroom
from autoddp.timing.samples import Block, median, median_interval
from autoddp.timing.sequential import LOOKS, bound, likely
from autoddp.timing.speedup import Speedup, speedup, unpaired_speedup

__all__ = [
    "LOOKS",
    "STAGES",
    "Block",
    "Difference",
    "Headroom",
    "RankAnatomy",
    "RankSteps",
    "Speedup",
    "anatomy",
    "bound",
    "difference",
    "headroom",
    "likely",
    "median",
    "median_interval",
    "speedup",
    "unpaired_speedup",
]
