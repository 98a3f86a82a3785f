"""When the real job looks at its hook's gradient error. All hosts must look at the same reductions."""

from __future__ import annotations

import math

from autoddp.commandline.options import Options
from autoddp.knobs import Configuration
from autoddp.knobs.hook import DEFAULT_START_STEP, POWERSGD_RANK, POWERSGD_START_STEP
from autoddp.recipe import Recipe
from autoddp.wire import WatchPlan

_COST = 0.005  # share of the job's time that measuring the gradient error may take
_STEPS_WITH_FEEDBACK = 4  # reductions compared each time, else one: what error feedback sends later shows over several
_SOON = 50  # reductions after the hook begins: the first look is not later, so that an early error is found early


def watch_plan(options: Options, recipe: Recipe, configuration: Configuration) -> WatchPlan | None:
    """When the real job measures its hook's gradient error: as often as half a percent of its time allows.

    None where the hook is exact, or under `--watch off`.
    """
    rung = configuration.gradient_rung
    limit = options.study.limits.get(rung)
    if options.watch == 0 or limit is None or not configuration.hook:
        return None
    compared = _STEPS_WITH_FEEDBACK if rung.has_error_feedback else 1
    # A reduction that is compared costs one exact reduction more: at most what the baseline's step takes.
    entry = next((e for e in recipe.ladder if e.rung is rung), None)
    baseline, launched = recipe.evidence.baseline_ms_per_step, entry.ms_per_step if entry else None
    ratio = baseline / launched if baseline and launched else 1.0
    every = options.watch or math.ceil(compared * max(1.0, ratio) / _COST)
    exact_first = 0
    if POWERSGD_RANK.of(configuration):
        begins = POWERSGD_START_STEP.of(configuration)
        exact_first = DEFAULT_START_STEP if begins is None else begins
    return WatchPlan(rung, limit, exact_first + min(every, _SOON), every, compared)
