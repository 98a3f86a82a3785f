"""Floor 3. The recipe: what was found fastest, on which job, and the evidence, as a TOML file people can read.

recipe = load("train.autoddp.toml")
require_fit(recipe, "train.autoddp.toml", world_size=8, nodes=2)
kept = save(recipe, Path("train.autoddp.toml"), previous=Path(".autoddp/previous.toml"))
"""

from autoddp.recipe.decision import WORTH_A_CHANGE, OnALadder, best_allowed
from autoddp.recipe.env import ENV_ALLOWED
from autoddp.recipe.inputs import input_differences, merged, of_model, with_model
from autoddp.recipe.match import compare, differences, require_fit
from autoddp.recipe.read import from_toml, load, parse
from autoddp.recipe.schema import SCHEMA, Evidence, Fits, LadderEntry, MadeBy, Recipe
from autoddp.recipe.write import dump, require_replaceable, save

__all__ = [
    "ENV_ALLOWED",
    "SCHEMA",
    "WORTH_A_CHANGE",
    "Evidence",
    "Fits",
    "LadderEntry",
    "MadeBy",
    "OnALadder",
    "Recipe",
    "best_allowed",
    "compare",
    "differences",
    "dump",
    "from_toml",
    "input_differences",
    "load",
    "merged",
    "of_model",
    "parse",
    "require_fit",
    "require_replaceable",
    "save",
    "with_model",
]
