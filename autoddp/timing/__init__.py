"""Floor 1. Step samples and what may be concluded from them; no torch."""

from autoddp.timing.headroom import Headroom, headroom
from autoddp.timing.samples import Block, median, median_interval
from autoddp.timing.speedup import Speedup, speedup

__all__ = ["Block", "Headroom", "Speedup", "headroom", "median", "median_interval", "speedup"]
