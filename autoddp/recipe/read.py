"""Reads a recipe from TOML. What is not understood is refused: a default in its place would be launched silently."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from autoddp.codec import convert
from autoddp.errors import RecipeError, did_you_mean, shown
from autoddp.files import read_at_most
from autoddp.knobs import BY_NAME, Configuration, Rung
from autoddp.log import printable
from autoddp.recipe.env import ENV_ALLOWED
from autoddp.recipe.inputs import is_input
from autoddp.recipe.schema import (
    LARGEST_WHOLE,
    SCHEMA,
    Evidence,
    Fits,
    LadderEntry,
    MadeBy,
    OneOrMore,
    Positive,
    Recipe,
    Text,
    defaults,
)

_LARGEST = 2**16  # bytes; a recipe has some 2,000
_DOTS = 64  # between two of `,=[]{}` in a line: Python's parser takes time by the square of a dotted key's parts


def load(path: str | os.PathLike[str]) -> Recipe:
    """The recipe in that file.

        recipe = load("train.autoddp.toml")

    RecipeError, one line with the file, the dotted key, the rule and the fix, for anything else than a sound recipe.
    """
    return parse(_read(Path(path)), path)


def parse(text: str, file: str | os.PathLike[str]) -> Recipe:
    """The recipe in `text`; errors call it `file`."""
    name = printable(os.fspath(file))
    try:
        return _recipe(_values(text, name), _Place(name))
    except RecursionError:
        raise RecipeError(f"{name}: nested too deep for a recipe; tune again with --trials 20") from None


def _values(text: str, name: str) -> dict[str, Any]:
    if len(text) > _LARGEST:
        raise RecipeError(f"{name}: too long for a recipe; tune again with --trials 20")
    if any(part.count(".") > _DOTS for part in re.split(r"[,=\[\]{}\n]", text)):
        raise RecursionError
    try:
        values = from_toml(text)
    except ValueError as problem:  # TOMLDecodeError is one, and so is a number with too many digits
        line = printable(str(problem))
        raise RecipeError(f"{name}: not TOML: {line}; correct it there, or tune again with --trials 20") from None
    return values


def from_toml(text: str) -> dict[str, Any]:
    """The tables and values of a TOML document; ValueError, or RecursionError, where it is none."""
    # Not imported above: a rank imports this module, and there the name may stand for a file of the user's.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    values: dict[str, Any] = tomllib.loads(text)
    return values


def _read(path: Path) -> str:
    name = printable(str(path))
    try:
        return _content(path, name).decode("utf-8-sig")
    except FileNotFoundError:
        near = did_you_mean(path.name, _recipes_beside(path))
        raise RecipeError(f"{name}: no such file{near}; autoddp SCRIPT --trials 20 writes a recipe") from None
    except IsADirectoryError:
        raise RecipeError(f"{name}: a folder, not a recipe; name a file such as proj.train.autoddp.toml") from None
    except UnicodeDecodeError as problem:
        raise RecipeError(f"{name}: not UTF-8 text (byte {problem.start}); save it as UTF-8") from None
    except (OSError, ValueError) as problem:  # ValueError: a NUL in the path
        reason = getattr(problem, "strerror", None) or problem
        raise RecipeError(f"{name}: cannot be read: {reason}; name a file that you may read") from None


def _content(path: Path, name: str) -> bytes:
    """OSError if it cannot be read. Never waits for a writer, and opens no device."""
    kind = os.stat(path).st_mode
    if stat.S_ISDIR(kind):
        raise IsADirectoryError
    if not stat.S_ISREG(kind):
        raise RecipeError(f"{name}: no regular file, so not a recipe; name a file such as proj.train.autoddp.toml")
    content = read_at_most(path, _LARGEST + 1)
    if len(content) > _LARGEST:
        raise RecipeError(f"{name}: larger than {_LARGEST >> 10} KiB, so not a recipe; tune again with --trials 20")
    return content


def _recipes_beside(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.parent.glob("*.autoddp.toml"))
    except OSError:
        return []


@dataclass(frozen=True)
class _Place:
    """A key of the file. What is wrong there ends as one line with the file, the dotted key, the rule and the fix."""

    file: str
    key: str = ""

    def at(self, key: str) -> _Place:
        """`fits.nodes` for "nodes" in [fits]; a key that is not a plain word is quoted."""
        word = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else shown(key)
        return _Place(self.file, f"{self.key}.{word}" if self.key else word)

    def error(self, problem: str, *value: Any) -> RecipeError:
        """The error to raise, which shows the value where one is given."""
        return RecipeError(f"{self.file}: {self.key}{''.join(f' = {shown(one)}' for one in value)}: {problem}")


def _recipe(values: dict[str, Any], place: _Place) -> Recipe:
    # First of all, since a newer schema explains every other surprise.
    schema = place.at("schema")
    if "schema" not in values:
        raise schema.error(f"missing; a recipe begins with schema = {SCHEMA}, is this one?")
    if _value(OneOrMore, values["schema"], schema) > SCHEMA:
        newer = "written by a newer autoddp; upgrade it from its checkout: git pull, then pip install -e ."
        raise schema.error(newer, values["schema"])
    known = _known(Recipe, values, place, schema=OneOrMore)
    del known["schema"]
    return Recipe(**known)


def _known(kind: type, value: Any, place: _Place, **beside: Any) -> dict[str, Any]:
    """The fields of the dataclass `kind` that the table has, and the keys in `beside`, each as its type says."""
    hints = {**get_type_hints(kind, include_extras=True), **beside}
    values, optional = _table(value, place, hints), defaults(kind)
    known = dict(optional)
    for name, hint in hints.items():
        if name in values:
            known[name] = _value(hint, values[name], place.at(name))
        elif name not in optional:
            raise place.at(name).error("missing; put it back, or tune again with --trials 20")
    return known


def _table(value: Any, place: _Place, keys: Iterable[str]) -> dict[str, Any]:
    """The table that `value` must be, with no other keys than these."""
    if not isinstance(value, dict):
        raise place.error(f"must be a table; write [{place.key}] above its keys", value)
    names = list(keys)
    for key in value:
        if key not in names:
            raise place.at(key).error(f"unknown key{did_you_mean(key, names)}; correct or remove it")
    return value


def _value(hint: Any, value: Any, place: _Place) -> Any:
    """The value as the type of its field; `schema` has the types, and the rule that the error names."""
    hint = get_args(hint)[0] if type(None) in get_args(hint) else hint
    if hint in _READERS:
        return _READERS[hint](value, place)
    rule: str = hint.__metadata__[0].description
    try:
        found = convert(value, hint)
    except ValueError:
        too_large = hint.__origin__ is int and type(value) is int and value > LARGEST_WHOLE
        raise place.error("too large for a whole number of 64 bits" if too_large else rule, value) from None
    parts = found if isinstance(found, tuple) else (found,)
    if not all(text.isprintable() and text.strip() for text in parts if isinstance(text, str)):
        raise place.error(rule, value)
    return found


def _fits(value: Any, place: _Place) -> Fits:
    known = _known(Fits, value, place, digest=Text)
    digest = known.pop("digest")
    fits = Fits(**known)
    if fits.nodes > fits.world_size:
        raise place.at("nodes").error(f"must not exceed world_size, {fits.world_size}", fits.nodes)
    each = fits.ranks_of_nodes
    if each and (len(each), sum(each)) != (fits.nodes, fits.world_size):
        problem = f"must have nodes, {fits.nodes}, numbers, of which the sum is world_size, {fits.world_size}"
        raise place.at("ranks_of_nodes").error(problem, value["ranks_of_nodes"])
    if not all(map(is_input, fits.inputs)):
        raise place.at("inputs").error('must be inputs, as ["0: float32[64, *]"]', value["inputs"])
    if digest != fits.digest:
        raise place.at("digest").error("[fits] was edited by hand; put it back, or tune again with --trials 20", digest)
    return fits


def _configuration(value: Any, place: _Place) -> Configuration:
    try:
        return Configuration(_table(value, place, BY_NAME))
    except ValueError as problem:  # it begins with the knob's name
        raise RecipeError(f"{place.file}: {place.key}.{problem}") from None


def _env(value: Any, place: _Place) -> dict[str, str]:
    for name, text in _table(value, place, value).items():
        here = place.at(name)
        if name not in ENV_ALLOWED:
            near = did_you_mean(name, ENV_ALLOWED)
            raise here.error(f"not a variable that a recipe may set{near}; if the job needs it, export it")
        if not isinstance(text, str) or not text.isprintable():
            raise here.error("must be one line of text in quotes", text)
        problem = ENV_ALLOWED[name](text)
        if problem:
            raise here.error(problem, text)
    return dict(value)


def _evidence(value: Any, place: _Place) -> Evidence:
    evidence = Evidence(**_known(Evidence, value, place))
    required = [] if evidence.objective else ["headroom"]
    required += ["baseline_ms_per_step"] if evidence.baseline_value is None else []
    _require(required, evidence, place)
    return evidence


def _require(names: Iterable[str], part: Any, place: _Place) -> None:
    """An error for one of these fields that the file must have, and has not."""
    for name in names:
        if getattr(part, name) is None:
            raise place.at(name).error("missing; put it back, or tune again with --trials 20")


def _ladder(value: Any, place: _Place) -> tuple[LadderEntry, ...]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise place.error(f"must be tables; write [[{place.key}]] above the keys of each", value)
    entries: list[LadderEntry] = []
    for number, one in enumerate(value):
        here = _Place(place.file, f"{place.key}[{number}]")
        entry = _ladder_entry(one, here)
        if any(entry.rung is other.rung for other in entries):
            raise here.at("rung").error("stands on the ladder twice; keep the better one", entry.rung)
        entries.append(entry)
    return tuple(entries)


def _ladder_entry(value: Any, place: _Place) -> LadderEntry:
    entry = LadderEntry(**_known(LadderEntry, value, place))
    _require(["ms_per_step"] if entry.value is None else [], entry, place)
    low, high, rung = entry.speedup_low, entry.speedup_high, entry.configuration.rung
    if not low <= entry.speedup <= high:
        problem = f"must lie between speedup_low, {low:g}, and speedup_high, {high:g}"
        raise place.at("speedup").error(problem, value["speedup"])
    if entry.rung is not rung:
        problem = f'its configuration stands on another rung; write rung = "{rung.value}"'
        raise place.at("rung").error(problem, entry.rung)
    milder = [other.value for other in Rung if other.order < rung.order]
    _table(value.get("speedup_low_over", {}), place.at("speedup_low_over"), milder)
    return entry


def _low_over(value: Any, place: _Place) -> dict[Rung, float]:
    names = [rung.value for rung in Rung]
    return {Rung(name): _value(Positive, low, place.at(name)) for name, low in _table(value, place, names).items()}


_READERS: Mapping[Any, Callable[[Any, _Place], Any]] = {
    MadeBy: lambda value, place: MadeBy(**_known(MadeBy, value, place)),
    Fits: _fits,
    Configuration: _configuration,
    dict[str, str]: _env,
    Evidence: _evidence,
    tuple[LadderEntry, ...]: _ladder,
    dict[Rung, Positive]: _low_over,
}
"""Types of fields that are more than one value."""
