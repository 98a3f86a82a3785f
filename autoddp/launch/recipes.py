"""The recipes of one script: where they stand, which of them is launched, and where a new one goes.

    proj.train.autoddp.toml       of proj/train.py, in the folder from which it is launched
    proj.train.2.autoddp.toml     of the same script with another model or other inputs, or of another proj/train.py
    train.autoddp.toml            as earlier versions called it: it is read where it fits, and never written

Where that folder takes no files, new ones go to one of the user's own, see `launch.usual_folders`; both are read.

A recipe that was found, and not named with --recipe, is replaced only by one of the same job; another job's gets the
next number.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from autoddp.errors import RecipeError
from autoddp.launch.options import Request
from autoddp.log import printable
from autoddp.recipe import Fits, Recipe, differences, load, require_replaceable

_SUFFIX = ".autoddp.toml"
_MOST = 100  # recipes of one name: each start reads them


def script_names(request: Request) -> tuple[str, ...]:
    """By what a recipe may know the script, links kept and links followed; the first is what a new recipe says.

    Below the recipe's folder it is the path from there, since a checkout that was moved, or that another host mounts
    elsewhere, is the same job. Elsewhere it is `*/`, the script's folder and its name, for the same reason. A module is
    known by its name, and so is a program that the shell finds.
    """
    script = request.script
    if request.torchrun.module:
        return (f"-m {script}",)
    if request.torchrun.no_python and not os.path.exists(script):
        return (script,)
    folder = Path() if request.recipe is None else request.recipe if request.recipe.is_dir() else request.recipe.parent
    kept = _from(os.path.abspath(folder), os.path.abspath(script))
    followed = _from(os.path.realpath(folder), os.path.realpath(script))
    return tuple(dict.fromkeys(printable(name) for name in (kept, followed)))


def _from(folder: str, script: str) -> str:
    path = os.path.relpath(script, folder)
    if path.split(os.sep)[0] != os.pardir:
        return path
    return os.path.join("*", os.path.basename(os.path.dirname(script)), os.path.basename(script))


def arguments_digest(request: Request) -> str:
    """16 hex digits over the script's arguments. A digest, since an argument may be a secret and a recipe is shared."""
    words = json.dumps(list(request.torchrun.training_script_args))
    return hashlib.sha256(words.encode(errors="surrogatepass")).hexdigest()[:16]


def found_recipes(request: Request) -> list[Path]:
    """The script's recipes that are there, by number; those by the older name come last."""
    folders = list(dict.fromkeys((request.folders.recipes, Path())))
    numbered = [path for folder in folders for path in _numbered(folder / request.recipe_name)]
    older = [path for folder in folders if (path := folder / request.older_recipe_name).is_file()]
    return list(dict.fromkeys([*numbered, *older]))


def recipe_may_be_anothers(request: Request) -> bool:
    """Whether --recipe names only recipes that were not, as far as they say, made for this script."""
    if request.recipe is None or request.trials is not None:
        return False
    others = []
    for path in request.recipe.glob("*.toml") if request.recipe.is_dir() else [request.recipe]:
        with contextlib.suppress(RecipeError):  # said when it is used
            fits = load(path).fits
            others.append(not fits.script or bool(differences(fits, script=script_names(request))))
    return bool(others) and all(others)


def best_of(fitting: Sequence[tuple[Path, Recipe]], request: Request) -> tuple[Path, Recipe]:
    """Of several recipes that fit as far as the launcher can know: same arguments first, then the newest."""
    here = arguments_digest(request)
    return max(fitting, key=lambda one: (one[1].made_by.arguments == here, bool(one[1].fits.script), _date(one[1])))


def place_for(request: Request, recipe: Recipe, say: Callable[[str], None]) -> Path:
    """Where a recipe that was just made goes: over one of the same job, else where nothing stands.

    A recipe that is not sound is replaced too; `save` keeps what stood there. What is no recipe stays.
    """
    if request.recipe is not None:
        return request.recipe
    for place in _places(request.recipe_path):
        if not os.path.lexists(place):
            return place
        try:
            require_replaceable(Path(os.path.realpath(place)))
        except (RecipeError, OSError) as error:
            say(str(error))
            continue
        try:
            stands = load(place)
        except RecipeError:
            return place
        if same_job(stands.fits, recipe.fits):
            return place
        say(f"{place} is another job's recipe and stays")
    return request.recipe_path.with_name(f"{request.recipe_path.name}.{os.getpid()}.toml")


def same_job(one: Fits, other: Fits) -> bool:
    """Whether a recipe of the one is another measurement of the other. Versions of what was measured do not matter."""
    parts = ("script", "world_size", "nodes", "devices", "parameters_digest", "inputs")
    return all(getattr(one, part) == getattr(other, part) for part in parts)


class Note:
    """Says that the job last launched with a recipe was another one, so that the next launch tunes again.

    It stands beside the recipe, `proj.train.autoddp.unfit`, and its last line says what differed. The worker writes it
    on each host; a launcher that has tuned removes it. Beside a recipe in the current folder nothing is written if
    that folder takes no files: the note then goes where new recipes go.
    """

    def __init__(self, recipe: Path, request: Request) -> None:
        folder = request.folders.recipes if recipe.parent == Path() else recipe.parent
        self.path = folder / f"{recipe.name.removesuffix('.toml')}.unfit"
        self._recipe = recipe.name

    def begins(self, request: Request) -> str:
        """All of its text but the last line, which the worker writes."""
        return (
            f"# The job that was launched with {self._recipe} was another one, so the next launch tunes again.\n"
            "# This file goes then; remove it to launch with that recipe all the same.\n"
            "# The digest of the script's arguments, and what differed:\n"
            f"{arguments_digest(request)}\n"
        )

    def why(self, recipe: Recipe, request: Request) -> str:
        """What differed at the last launch; "" where there is no note, or it is of a launch that does not concern this.

        Such a one had other arguments, while the recipe was made with these.
        """
        if not self.path.is_file():  # a pipe would be waited for
            return ""
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        said = [line for line in lines if line.strip() and not line.startswith("#")]
        here = arguments_digest(request)
        if said[:1] != [here] and recipe.made_by.arguments == here:
            return ""
        return printable(said[-1]) if said else "it does not say what differed"

    def remove(self) -> None:
        """The job has been tuned."""
        with contextlib.suppress(OSError):
            self.path.unlink()


def remove_notes(request: Request) -> None:
    """Of all recipes of the script."""
    for path in found_recipes(request):
        Note(path, request).remove()


def _places(first: Path) -> list[Path]:
    stem = first.name.removesuffix(_SUFFIX)
    return [first, *(first.with_name(f"{stem}.{number}{_SUFFIX}") for number in range(2, _MOST))]


def _numbered(first: Path) -> list[Path]:
    return [place for place in _places(first) if place.is_file()]


def _date(recipe: Recipe) -> str:
    return recipe.made_by.date
