"""What of a saved recipe is launched under --allow and --accumulate-up-to."""

from __future__ import annotations

from autoddp.knobs import AS_WRITTEN, Configuration, Rung
from autoddp.recipe import LadderEntry, Recipe, best_allowed


def of_ladder(recipe: Recipe, rung: Rung, accumulate_up_to: int) -> Configuration:
    """What a study would have launched for a user who allows this; what was written by hand stays, if it is allowed."""
    stays = recipe.configuration.allowed_by(rung, accumulate_up_to)
    launched = next((entry for entry in recipe.ladder if _launches(recipe, entry)), None)
    if stays and recipe.configuration and launched is None:
        return recipe.configuration
    best = best_allowed(recipe.ladder, rung, accumulate_up_to)
    return best.configuration if best else AS_WRITTEN


def _launches(recipe: Recipe, entry: LadderEntry) -> bool:
    """Whether this entry is what the recipe launches. Variables stand in [env], and not under [configuration]."""
    variables = entry.configuration.variables.items()
    return entry.configuration.without_variables == recipe.configuration and variables <= recipe.env.items()
