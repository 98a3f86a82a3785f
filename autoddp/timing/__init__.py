"""Floor 1. Step samples and what may be concluded from them; no torch."""

from autoddp.timing.samples import Block, median, median_interval
from autoddp.timing.speedup import Speedup, speedup

__all__ = ["Block", "Speedup", "median", "median_interval", "speedup"]
