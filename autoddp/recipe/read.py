"""From TOML to a recipe, strictly: what is not understood is refused, because a silent default would be launched."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from autoddp.errors import RecipeError, did_you_mean
from autoddp.knobs import BY_NAME, Configuration, Rung
from autoddp.recipe.env import ENV_ALLOWED
from autoddp.recipe.inputs import is_input
from autoddp.recipe.schema import SCHEMA, Evidence, Fits, LadderEntry, MadeBy, Recipe
from autoddp.recipe.table import Table, one_line

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LARGEST = 2**20  # bytes; a recipe has some 2,000


def load(path: str | os.PathLike[str]) -> Recipe:
    """The recipe in that file.

        recipe = load("train.autoddp.toml")

    RecipeError, one line with the file, the dotted key, the rule and the fix, for anything else than a sound recipe.
    """
    return parse(_read(Path(path)), path)


def parse(text: str, file: str | os.PathLike[str]) -> Recipe:
    """The recipe in `text`; `file` is only what errors call it."""
    name = one_line(os.fspath(file))
    try:
        return _recipe(Table(name, "", _values(text, name)))
    except RecursionError:
        raise RecipeError(f"{name}: nested too deep for a recipe; tune again with --trials 20") from None


def _values(text: str, name: str) -> dict[str, Any]:
    try:
        values: dict[str, Any] = tomllib.loads(text)
    except ValueError as problem:  # TOMLDecodeError is one, and so is a number with too many digits
        line = one_line(str(problem))
        raise RecipeError(f"{name}: not TOML: {line}; correct it there, or tune again with --trials 20") from None
    return values


def _read(path: Path) -> str:
    name = one_line(str(path))
    try:
        return _content(path, name).decode("utf-8-sig")
    except FileNotFoundError:
        near = did_you_mean(path.name, _recipes_beside(path))
        raise RecipeError(f"{name}: no such file{near}; autoddp SCRIPT --trials 20 writes a recipe") from None
    except IsADirectoryError:
        raise RecipeError(f"{name}: a folder, not a recipe; name a file such as train.autoddp.toml") from None
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
        raise RecipeError(f"{name}: no regular file, so not a recipe; name a file such as train.autoddp.toml")
    with open(path, "rb", opener=lambda file, flags: os.open(file, flags | os.O_NONBLOCK)) as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise RecipeError(f"{name}: larger than {_LARGEST >> 20} MiB, so not a recipe; tune again with --trials 20")
    return content


def _recipes_beside(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.parent.glob("*.autoddp.toml"))
    except OSError:
        return []


def _recipe(top: Table) -> Recipe:
    _check_schema(top)
    top.only(["schema", *(part.name for part in fields(Recipe))])
    return Recipe(
        made_by=_made_by(top.table("made_by")),
        fits=_fits(top.table("fits")),
        configuration=_configuration(top.table("configuration")),
        evidence=_evidence(top.table("evidence")),
        ladder=_ladder(top.tables("ladder")),
        env=_env(top.table("env", optional=True)),
    )


def _check_schema(top: Table) -> None:
    """First of all, since a newer schema explains every other surprise."""
    if "schema" not in top.values:
        raise top.error("schema", f"missing; a recipe begins with schema = {SCHEMA}, is this one?")
    number = top.whole("schema", low=1)
    if number > SCHEMA:
        raise top.error("schema", "written by a newer autoddp; upgrade it: pip install -U autoddp", show=True)


def _made_by(table: Table) -> MadeBy:
    names = [part.name for part in fields(MadeBy)]
    table.only(names)
    return MadeBy(**{name: table.text(name) for name in names if name != "arguments" or name in table.values})


def _fits(table: Table) -> Fits:
    table.only([*(part.name for part in fields(Fits)), "digest"])
    fits = Fits(
        world_size=table.whole("world_size", low=1),
        nodes=table.whole("nodes", low=1),
        backend=table.text("backend"),
        devices=table.texts("devices"),
        torch=table.text("torch"),
        gradient_bytes=table.whole("gradient_bytes", low=0),
        parameters_digest=table.text("parameters_digest"),
        links=table.texts("links") if "links" in table.values else (),
        networks=table.texts("networks") if "networks" in table.values else (),
        cuda=table.text("cuda") if "cuda" in table.values else "",
        nccl=table.text("nccl") if "nccl" in table.values else "",
        script=table.text("script") if "script" in table.values else "",
        inputs=table.texts("inputs") if "inputs" in table.values else (),
    )
    if fits.nodes > fits.world_size:
        raise table.error("nodes", f"must not exceed world_size, {fits.world_size}", show=True)
    if not all(map(is_input, fits.inputs)):
        raise table.error("inputs", 'must be inputs, as ["0: float32[64, *]"]', show=True)
    if table.text("digest") != fits.digest:
        problem = "[fits] was edited by hand; put it back, or tune again with --trials 20"
        raise table.error("digest", problem, show=True)
    return fits


def _configuration(table: Table) -> Configuration:
    table.only(BY_NAME)
    try:
        return Configuration(table.values)
    except ValueError as problem:  # it begins with the knob's name
        raise RecipeError(f"{table.file}: {table.key}.{problem}") from None


def _env(table: Table) -> dict[str, str]:
    for name, value in table.values.items():
        if name not in ENV_ALLOWED:
            near = did_you_mean(name, ENV_ALLOWED)
            raise table.error(name, f"not a variable that a recipe may set{near}; if the job needs it, export it")
        if not isinstance(value, str) or not value.isprintable():
            raise table.error(name, "must be one line of text in quotes", show=True)
        problem = ENV_ALLOWED[name](value)
        if problem:
            raise table.error(name, problem, show=True)
    return dict(table.values)


def _evidence(table: Table) -> Evidence:
    table.only(part.name for part in fields(Evidence))
    return Evidence(
        baseline_ms_per_step=table.positive("baseline_ms_per_step"),
        headroom=table.share("headroom"),
        trials=table.whole("trials", low=0),
        final_rounds=table.whole("final_rounds", low=0),
        steps=table.whole("steps", low=0),
        why=table.text("why"),
        run=table.text("run") if "run" in table.values else "",
        headroom_low=table.share("headroom_low") if "headroom_low" in table.values else None,
        headroom_high=table.share("headroom_high") if "headroom_high" in table.values else None,
    )


def _ladder(tables: list[Table]) -> tuple[LadderEntry, ...]:
    entries: list[LadderEntry] = []
    for table in tables:
        entry = _ladder_entry(table)
        if any(entry.rung is other.rung for other in entries):
            raise table.error("rung", "stands on the ladder twice; keep the better one", show=True)
        entries.append(entry)
    return tuple(entries)


def _ladder_entry(table: Table) -> LadderEntry:
    table.only(part.name for part in fields(LadderEntry))
    configuration = _configuration(table.table("configuration"))
    speedup, low, high = (table.positive(key) for key in ("speedup", "speedup_low", "speedup_high"))
    if not low <= speedup <= high:
        raise table.error("speedup", f"must lie between speedup_low, {low:g}, and speedup_high, {high:g}", show=True)
    return LadderEntry(
        rung=_rung(table, configuration),
        configuration=configuration,
        ms_per_step=table.positive("ms_per_step"),
        speedup=speedup,
        speedup_low=low,
        speedup_high=high,
        gradient_error=_error(table, "gradient_error"),
        gradient_error_of_sum=_error(table, "gradient_error_of_sum"),
        speedup_low_over=_low_over(table.table("speedup_low_over", optional=True), configuration.rung),
    )


def _error(table: Table, key: str) -> float | None:
    return table.not_negative(key) if key in table.values else None


def _low_over(table: Table, rung: Rung) -> dict[Rung, float]:
    milder = [other for other in Rung if other.order < rung.order]
    table.only(other.value for other in milder)
    return {other: table.positive(other.value) for other in milder if other.value in table.values}


def _rung(table: Table, configuration: Configuration) -> Rung:
    value: Any = table.get("rung")
    words = [rung.value for rung in Rung]
    if value not in words:
        raise table.error("rung", "must be one of " + ", ".join(f'"{word}"' for word in words), show=True)
    if value != configuration.rung.value:
        problem = f'its configuration stands on another rung; write rung = "{configuration.rung.value}"'
        raise table.error("rung", problem, show=True)
    return configuration.rung
