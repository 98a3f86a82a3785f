"""Writes a recipe as TOML with a comment for each value that needs one; the file is written whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoddp.errors import PlaceTaken, RecipeError
from autoddp.files import write_whole
from autoddp.knobs import BY_NAME, Configuration
from autoddp.log import printable
from autoddp.recipe.read import parse
from autoddp.recipe.schema import SCHEMA, LadderEntry, Recipe, table
from autoddp.units import data_size, percent

_HEAD = """\
# A recipe of autoddp: the DistributedDataParallel settings that were fastest on the job described under [fits].
#     autoddp SCRIPT --recipe FILE      launches SCRIPT with the recipe in FILE
#     autoddp recipe show FILE          shows it as a table
"""

_A_RECIPE = re.compile(rb"# A recipe of autoddp|^\s*schema\s*=|^\[made_by\]", re.MULTILINE)
_BEGINNING = 4096  # bytes in which a recipe shows what it is

_SAYS = {
    "date": "UTC",
    "arguments": "digest of the script's arguments: of several recipes of a script, the one with the same goes first",
    "world_size": "processes in all",
    "ranks_of_nodes": "processes of each node",
    "backend": "what carries the gradients",
    "devices": "each kind once",
    "parameters_digest": "over every parameter's shape and type",
    "links": "between the GPUs of a node: NV18 is 18 NVLinks, SYS crosses the sockets",
    "networks": "between nodes",
    "script": "from this file's folder; */ where it stands elsewhere",
    "inputs": "of the models' forward passes while tuning; * is whatever did not stay the same",
    "find_unused_parameters": "the script sets it",
    "digest": "over the lines above, so that an edit by hand is noticed",
    "baseline_ms_per_step": "the script as written",
    "trials": "configurations measured",
    "final_rounds": "turns that each finalist took, side by side with the baseline",
    "steps": "training steps measured in all",
    "run": "folder with every measurement, below --output; starts from this folder keep it",
    "objective": "what was made better, as --objective says it",
    "baseline_value": "the number that the script as written prints",
    "value": "the number that the script prints",
    "headroom_low": "99 % interval, from",
    "headroom_high": "to",
    "speedup_low": "99 % interval, from",
    "speedup_high": "to",
    "speedup_low_over": "the lower end against the best of each milder rung, from the rounds that both ran",
    "gradient_error": "of one step, relative to the exact mean of the same gradients",
    "gradient_error_of_sum": "of the sum of some steps: smaller where what was left out is sent later",
}


def dump(recipe: Recipe) -> str:
    """The recipe as TOML with a comment beside each value that needs one; `parse(dump(recipe), "") == recipe`."""
    plain = recipe.plain()
    fits_says = {"gradient_bytes": f"{data_size(recipe.fits.gradient_bytes)} in each reduction of the whole model"}
    share = percent(recipe.evidence.headroom or 0.0, ".1f")
    headroom = f"{share} of a step would go if gradients travelled for nothing"
    is_known = (recipe.evidence.headroom_low, recipe.evidence.headroom_high) != (0.0, 1.0)
    evidence_says = {"headroom": headroom if is_known else "not known: the script fails in steps without reduction"}
    env_says = {knob.variable: knob.says for knob in BY_NAME.values() if knob.variable}
    parts = [
        _HEAD,
        f"schema = {SCHEMA}\n",
        "[made_by]\n" + _lines(plain["made_by"]),
        "# Elsewhere the recipe is refused, since other settings may be faster there; --force overrules that.\n"
        "[fits]\n" + _lines(plain["fits"], fits_says),
        _launched(recipe.configuration),
        *(["# Set for the training processes alone.\n[env]\n" + _lines(plain["env"], env_says)] if recipe.env else []),
        "[evidence]\n" + _lines(plain["evidence"], evidence_says),
        *(_rung(entry) for entry in recipe.ladder),
    ]
    return "\n".join(parts)


def save(recipe: Recipe | str, path: str | os.PathLike[str], previous: Path | None = None) -> Path | None:
    """Write `recipe`, or its text, to `path` in one atomic step, keeping another file that stood there.

        kept = save(recipe, Path("train.autoddp.toml"), previous=Path(".autoddp/run/previous.autoddp.toml"))

    Answers where the older file is kept, None if there was none or it said the same. If `previous` is taken too, the
    next free `previous.2`, `.3`, … is used. RecipeError, with `path` untouched, when it cannot be written, when `load`
    would refuse it, or when another file is there and no `previous` was given. PlaceTaken where nothing was there, and
    another job or host was quicker.
    """
    text = recipe if isinstance(recipe, str) else dump(recipe)
    parse(text, path)
    whole = text.encode()
    try:
        target = Path(os.path.realpath(path))  # a linked recipe stays a link
        require_replaceable(target)
        old = target.read_bytes() if os.path.lexists(target) else None
        if old == whole:
            return None
        kept = _keep(old, str(path), previous) if old is not None else None
        _write(target, whole, new=old is None)
        return kept
    except OSError as problem:
        place = printable(str(path))
        raise RecipeError(f"{place}: cannot be written: {_reason(problem)}; name a file you may write to") from None


def _write(target: Path, content: bytes, *, new: bool) -> None:
    try:
        write_whole(target, content, new=new)
    except FileExistsError:
        name = printable(str(target))
        raise PlaceTaken(f"{name}: another file has come there meanwhile; move it away, or name another file") from None


def require_replaceable(path: Path) -> None:
    """RecipeError if anything but a recipe stands at `path`, or an empty file: a checkpoint may be named by mistake.

    So it is if the file is read-only, for root too: its owner wants to keep it, or it belongs to another user. A recipe
    that was damaged, or is of another version, is one all the same. OSError if the file cannot be read.
    """
    if not os.path.lexists(path):
        return
    name = printable(str(path))
    if not path.is_file():
        raise RecipeError(f"{name}: no regular file, so no recipe is written there; name another file")
    with open(path, "rb") as file:
        begins = file.read(_BEGINNING)
    if begins and not _A_RECIPE.search(begins):
        raise RecipeError(f"{name}: this file is not a recipe, so it is not replaced; name another file")
    if not os.access(path, os.W_OK) or not path.stat().st_mode & 0o222:
        raise RecipeError(f"{name}: this recipe is read-only, so it is not replaced; name another file")


def _keep(old: bytes, path: str, previous: Path | None) -> Path:
    """A copy of `old`, not a move: `path` is never absent, and whole if what follows fails."""
    if previous is None:
        raise RecipeError(f"{printable(path)}: another file is there already; move it away, or name another file")
    place, number = previous, 2
    while os.path.lexists(place):
        place, number = previous.with_name(f"{previous.name}.{number}"), number + 1
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, old, private=True)  # as all files of a run
    return place


def _reason(problem: OSError) -> str:
    # the folder, not the scratch file's name: it tells whether `path` or `previous` is the trouble
    where = f" (in {printable(os.path.dirname(problem.filename) or '.')})" if problem.filename else ""
    return f"{problem.strerror or problem}{where}"


def _launched(configuration: Configuration) -> str:
    if not configuration:
        return "[configuration]\n# Empty: the script's own settings stay.\n"
    lines = [f"# {BY_NAME[name].says}\n{name} = {_toml(value)}\n" for name, value in configuration.plain().items()]
    changes = f"({configuration.rung.value} rung): {configuration.changes}"
    return f"# What is launched. It changes in training {changes}.\n[configuration]\n" + "".join(lines)


def _rung(entry: LadderEntry) -> str:
    changes = entry.configuration.changes
    title = f"# The best of the {entry.rung.value} rung, which changes in training: {changes}.\n[[ladder]]\n"
    return title + _lines(table(entry))


def _lines(values: Mapping[str, Any], says: Mapping[str, str] | None = None) -> str:
    comments = {**_SAYS, **(says or {})}
    lines = ((f"{name} = {_toml(value)}", comments.get(name)) for name, value in values.items())
    return "".join(f"{line}  # {comment}\n" if comment else f"{line}\n" for line, comment in lines)


def _toml(value: Any) -> str:
    # Imported here so that whoever only reads recipes does not pay for the writer.
    import tomlkit

    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(part)}" for name, part in value.items()) + "}"
    text: str = tomlkit.item(value).as_string()
    return text
