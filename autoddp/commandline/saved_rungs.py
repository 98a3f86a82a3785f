"""What of a saved recipe is launched under --allow and --accumulate-up-to."""

from __future__ import annotations

import math
from dataclasses import replace

from autoddp.knobs import AS_WRITTEN, Configuration, Rung
from autoddp.recipe import LadderEntry, Recipe, best_allowed


def of_ladder(recipe: Recipe, rung: Rung, accumulate_up_to: int) -> Configuration:
    """What a study would have launched for a user who allows this; what was written by hand stays, if it is allowed."""
    stays = recipe.configuration.allowed_by(rung, accumulate_up_to)
    launched = next((entry for entry in recipe.ladder if _launches(recipe, entry)), None)
    if stays and recipe.configuration and launched is None:
        return recipe.configuration
    ladder = [_with_its_decision(entry, recipe) if entry is launched else entry for entry in recipe.ladder]
    best = best_allowed(ladder, rung, accumulate_up_to)
    return best.configuration if best else AS_WRITTEN


def _launches(recipe: Recipe, entry: LadderEntry) -> bool:
    """Whether this entry is what the recipe launches. Variables stand in [env], and not under [configuration]."""
    variables = entry.configuration.variables.items()
    return entry.configuration.without_variables == recipe.configuration and variables <= recipe.env.items()


def _with_its_decision(launched: LadderEntry, recipe: Recipe) -> LadderEntry:
    """The entry with `speedup_low_over` for milder rungs, which recipes of older versions leave out.

    The study has found what is launched worth it over those milder rungs that it must have allowed: they change no
    more than what is launched.
    """
    rung, steps = launched.configuration.gradient_rung, launched.configuration.steps_per_update
    others = [entry.configuration for entry in recipe.ladder if entry is not launched]
    beaten = {c.rung: math.inf for c in others if c.allowed_by(rung, steps) and c.rung.order < launched.rung.order}
    return replace(launched, speedup_low_over=beaten | launched.speedup_low_over)
