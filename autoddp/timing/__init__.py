"""Floor 1. Samples of step times and the statistics on them; does not import torch."""

from autoddp.timing.headroom import Headroom, headroom
from autoddp.timing.samples import Block, median, median_interval
from autoddp.timing.speedup import Speedup, speedup

__all__ = ["Block", "Headroom", "Speedup", "headroom", "median", "median_interval", "speedup"]
