"""Floor 3. What a link carries: which sizes and groups of ranks are measured, and the model that is fitted to them.

No torch here: the all-reduces run in `worker.bench`, which hands a callable down to `sweep`.
"""

from autoddp.bench.conventions import algbw, busbw, layouts, sizes
from autoddp.bench.model import LinkModel, Segment, fit
from autoddp.bench.result import BenchResult, HookCost, LinkFacts, Point, Sweep, load_cached, store
from autoddp.bench.sweep import Measure, Settings, measure_size, sweep

__all__ = [
    "BenchResult",
    "HookCost",
    "LinkFacts",
    "LinkModel",
    "Measure",
    "Point",
    "Segment",
    "Settings",
    "Sweep",
    "algbw",
    "busbw",
    "fit",
    "layouts",
    "load_cached",
    "measure_size",
    "sizes",
    "store",
    "sweep",
]
