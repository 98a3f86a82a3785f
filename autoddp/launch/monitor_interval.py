"""How often the real job looks at its hook: as often as half a percent of its time pays for."""

from __future__ import annotations

import math

from autoddp.knobs import Configuration, Rung
from autoddp.knobs.hook import DEFAULT_START_STEP
from autoddp.launch.options import Request
from autoddp.recipe import Recipe
from autoddp.wire import WatchPlan

_COST = 0.005  # of the job's time
_STEPS = {Rung.NEAR: 1, Rung.LOSSY: 4}
"""Reductions compared at each look: error feedback shows over several only."""
_SOON = 50  # reductions after the hook begins: what is wrong from the start need not wait


def watch_plan(request: Request, recipe: Recipe, configuration: Configuration) -> WatchPlan | None:
    """When the real job looks at its hook; None where there is nothing to watch, or the user wants none."""
    rung = configuration.gradient_rung
    if request.watch == 0 or rung not in _STEPS:
        return None
    # A reduction that is compared costs one exact reduction more: at most what the baseline's step takes.
    entry = next((e for e in recipe.ladder if e.rung is rung), None)
    ratio = recipe.evidence.baseline_ms_per_step / entry.ms_per_step if entry else 1.0
    every = request.watch or math.ceil(_STEPS[rung] * max(1.0, ratio) / _COST)
    start = configuration.get("powersgd_start_step", DEFAULT_START_STEP) if rung is Rung.LOSSY else 0
    limit = request.near_limit if rung is Rung.NEAR else request.lossy_limit
    first = int(str(start)) + min(every, _SOON)
    return WatchPlan(rung, limit, first, every, _STEPS[rung])
