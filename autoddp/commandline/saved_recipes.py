"""The recipes of one script: where they stand, whose they are, and where a new one goes.

    proj.train.autoddp.toml       of proj/train.py, in the folder from which it is launched
    proj.train.2.autoddp.toml     of the same script with another model or other inputs, or of another proj/train.py

One is found too where its folder has another name by now, if it says that it is the script's.
Where that folder takes no files, new ones go to one of the user's own, see `runs.usual_folders`; both are read.
A recipe that was found, and not named with --recipe, is replaced only by one of the same job; another job's gets the
next number.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from autoddp.commandline.options import Options
from autoddp.commandline.secret_words import without_secrets
from autoddp.errors import RecipeError
from autoddp.files import write_whole
from autoddp.log import printable
from autoddp.recipe import Recipe, differences, load, require_replaceable

_SUFFIX = ".autoddp.toml"
_MOST = 100  # recipes of one name: each start reads them


def script_names(options: Options) -> tuple[str, ...]:
    """Names by which a recipe may know the script, links kept and links followed; a new recipe says the first.

    Below the recipe's folder it is the path from there, since a checkout that was moved, or that another host mounts
    elsewhere, is the same job. Elsewhere it is `*/`, the script's folder and its name, for the same reason. A module is
    known by its name, and so is a program that the shell finds.
    """
    script, recipe = options.script, options.recipe
    if options.torchrun.module:
        return (f"-m {script}",)
    if options.torchrun.no_python and not os.path.exists(script):
        return (script,)
    folder = Path() if recipe is None else recipe if os.path.isdir(recipe) else recipe.parent
    kept = _from(os.path.abspath(folder), os.path.abspath(script))
    followed = _from(os.path.realpath(folder), os.path.realpath(script))
    return tuple(dict.fromkeys(printable(name) for name in (kept, followed)))


def _from(folder: str, script: str) -> str:
    path = os.path.relpath(script, folder)
    if path.split(os.sep)[0] != os.pardir:
        return path
    return os.path.join("*", os.path.basename(os.path.dirname(script)), os.path.basename(script))


def arguments_digest(options: Options) -> str:
    """16 hex digits over the script's arguments, without what looks like a secret, because a recipe is shared."""
    words = json.dumps(without_secrets(options.torchrun.training_script_args))
    return hashlib.sha256(words.encode(errors="surrogatepass")).hexdigest()[:16]


def found_recipes(options: Options) -> list[Path]:
    """The script's recipes that are there and may be read, by number."""
    return [place for place in _there(options) if os.access(place, os.R_OK)]


def hidden_recipes(options: Options) -> list[Path]:
    """Recipes that others alone may read: whoever shares the folder with this user may have a umask of 077."""
    return [place for place in _there(options) if not os.access(place, os.R_OK)]


def _there(options: Options) -> list[Path]:
    by_name = [place for place in _looked_for(options) if os.path.isfile(place)]
    return by_name + [place for place in _of_another_folder_name(options) if place not in by_name]


def _of_another_folder_name(options: Options) -> list[Path]:
    """Recipes in the current folder that say that they are the script's, and are named after another folder.

    So it is after the folder was renamed or copied, and in a container that mounts it under another name.
    """
    stem = Path(options.script).stem
    if not options.recipe_name.endswith(f".{stem}{_SUFFIX}"):
        return []
    names, found = script_names(options), []
    for place in sorted(Path().glob(f"*.{glob.escape(stem)}.*autoddp.toml"))[:_MOST]:
        with contextlib.suppress(RecipeError):
            if load(place).fits.script in names:
                found.append(place)
    return found


def is_looked_for(recipe: Path, options: Options) -> bool:
    """Whether a start that names no recipe looks for one of this script at that path."""
    return recipe in _looked_for(options)


def _looked_for(options: Options) -> list[Path]:
    folders = (options.folders.recipes, Path())
    return list(dict.fromkeys(place for folder in folders for place in _places(folder / options.recipe_name)))


def recipe_may_be_anothers(options: Options) -> bool:
    """Whether --recipe names only recipes that were not, as far as they say, made for this script."""
    if options.recipe is None or options.trials is not None:
        return False
    others = []
    for path in _named(options.recipe):
        with contextlib.suppress(RecipeError):  # said when it is used
            fits = load(path).fits
            others.append(not fits.script or bool(differences(fits, script=script_names(options))))
    return bool(others) and all(others)


def _named(recipe: Path) -> list[Path]:
    """The recipes that --recipe names: a file, or those of a folder."""
    return sorted(recipe.glob("*.toml")) if os.path.isdir(recipe) else [recipe]


def tuned_for_objective(options: Options) -> bool:
    """Whether this launch is likely that of a recipe made for an objective, so that the script builds no DDP model.

    A script may train in several ways, and by DDP in one of them: the recipe that was made with these arguments tells
    which, or else the newest.
    """
    if options.trials is not None:
        return False
    found = []
    for path in found_recipes(options) if options.recipe is None else _named(options.recipe):
        with contextlib.suppress(RecipeError):  # said when it is used
            found.append(load(path))
    of_script = [one for one in found if not differences(one.fits, script=script_names(options))]
    likely = max(of_script, key=lambda one: preference(one, arguments_digest(options)), default=None)
    return likely is not None and bool(likely.evidence.objective)


def preference(recipe: Recipe, arguments: str) -> tuple[bool, str]:
    """The higher, the likelier it is that of a launch with these arguments: their own comes first, then the newest."""
    return recipe.made_by.arguments == arguments, recipe.made_by.date


def place_for(options: Options, recipe: Recipe, say: Callable[[str], None]) -> Path:
    """The path for a recipe that was just made: over one of the same job, else where nothing stands.

    A recipe that is not sound is replaced too; `save` keeps what stood there. What is no recipe stays.
    """
    if options.recipe is not None:
        return options.recipe
    for place in _places(options.recipe_path):
        if not os.path.lexists(place):
            return place
        try:
            require_replaceable(Path(os.path.realpath(place)))
        except RecipeError as error:
            say(str(error))
            continue
        except OSError as error:
            say(f"{place} cannot be read ({error.strerror}) and stays")
            continue
        try:
            stands = load(place)
        except RecipeError:
            return place
        if same_job(stands, recipe):
            return place
        say(f"{place} is another job's recipe and stays")
    return options.recipe_path.with_name(f"{options.recipe_path.name}.{os.getpid()}.toml")


def same_job(one: Recipe, other: Recipe) -> bool:
    """Whether the one is another measurement of the other. Versions of what was measured do not matter.

    Of a job without DDP neither model nor inputs are known, only what it was started with and tuned for.
    """
    parts = ("script", "world_size", "nodes", "ranks_of_nodes", "devices", "parameters_digest", "inputs")
    if any(getattr(one.fits, part) != getattr(other.fits, part) for part in parts):
        return False
    if one.evidence.objective != other.evidence.objective:
        return False
    return not one.evidence.objective or one.made_by.arguments == other.made_by.arguments


class Note:
    """Says that the job last launched with a recipe was another one, so that the next launch tunes again.

    It stands beside the recipe, `proj.train.autoddp.unfit`, and its last line says what differed. The worker writes it
    on each host; a launcher that has tuned removes it. One that cannot be removed, as another user's, counts only for
    the recipe whose date it says: the file's own time may be by the clock of another machine. Beside a recipe in the
    current folder nothing is written if that folder takes no files: the note then goes where new recipes go.
    """

    def __init__(self, recipe: Path, options: Options) -> None:
        folder = options.folders.recipes if recipe.parent == Path() else recipe.parent
        self.path = folder / f"{recipe.name.removesuffix('.toml')}.unfit"
        # as it is, a name with a line break ends the comment, and one that is not UTF-8 cannot be written
        self._recipe = printable(recipe.name)

    def begins(self, options: Options, recipe: Recipe) -> str:
        """All of its text but the last line, which the worker writes."""
        return (
            f"# The job that was launched with {self._recipe} was another one, so the next launch tunes again.\n"
            "# autoddp removes this file then; remove it yourself to launch with that recipe all the same.\n"
            "# The digest of the script's arguments, the recipe's date, and what differed:\n"
            f"{arguments_digest(options)}\n{recipe.made_by.date}\n"
        )

    def write(self, options: Options, recipe: Recipe, why: str) -> bool:
        """Write it, for what the launcher has seen before the job; whether that could be done."""
        try:
            options.folders.make()
            write_whole(self.path, f"{self.begins(options, recipe)}{why}\n")
        except OSError:
            return False
        return True

    def why(self, recipe: Recipe, options: Options) -> str:
        """What differed at the last launch; "" where there is no note, or it is of a launch that does not concern this.

        Such a one was with another recipe, or had other arguments, while the recipe was made with these.
        """
        if not os.path.isfile(self.path):  # a pipe would be waited for
            return ""
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        said = [line for line in lines if line.strip() and not line.startswith("#")]
        if len(said) > 2 and said[1] != recipe.made_by.date:
            return ""
        here = arguments_digest(options)
        if said[:1] != [here] and recipe.made_by.arguments == here:
            return ""
        return printable(said[-1]) if said else "it does not say what differed"


def remove_notes(options: Options) -> None:
    """Remove the notes beside all recipes of the script: the job has been tuned."""
    for path in found_recipes(options):
        with contextlib.suppress(OSError):
            Note(path, options).path.unlink()


def _places(first: Path) -> list[Path]:
    """Paths at which recipes of one script may stand, by number."""
    stem = first.name.removesuffix(_SUFFIX)
    return [first, *(first.with_name(f"{stem}.{number}{_SUFFIX}") for number in range(2, _MOST))]
