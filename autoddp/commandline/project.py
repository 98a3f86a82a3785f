"""Options of the project: `[tool.autoddp]` of the nearest pyproject.toml that has it, from the current folder up.

    [tool.autoddp]
    allow = "exact"
    budget = "10m"

The command line and the environment overrule it. The project may be somebody else's, who must not decide what is
trained or where files go: it can only narrow what may be launched, and it names no files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from autoddp.commandline.options import Options
from autoddp.commandline.parsers import option_names, own_parser
from autoddp.commandline.words import of_words
from autoddp.errors import UsageError, did_you_mean, first_line
from autoddp.files import read_at_most
from autoddp.knobs import Rung
from autoddp.log import printable
from autoddp.recipe import from_toml

_LARGEST = 2**20  # bytes
_MAY_SET = frozenset("all-trials allow budget diagnose-budget lossy-limit near-limit seed trace trials verbose".split())
_NARROWS = ("near-limit", "lossy-limit")


def from_project(options: Options) -> tuple[dict[str, Any], str]:
    """Fields of the options that the project adds, and a line that says which of them the command line does not give.

    UsageError for a table that cannot be understood, or that sets what only the user may. Under `--trials 0` nothing
    is read.
    """
    if options.trials == 0:
        return {}, ""
    project, file = _nearest()
    given = options.given | set(options.variables)
    added = {name: value for name, value in _converted(project, file).items() if name not in given}
    theirs = [_words(name, str(project[name.replace("_", "-")]), value) for name, value in added.items()]
    variables = {name: variable for name, variable in options.variables.items() if name not in options.given}
    ours = [_words(name, os.environ.get(one, ""), getattr(options, name)) for name, one in variables.items()]
    sources = {file: theirs, "the environment": ours}
    told = [f"{' '.join(filter(None, words))} (from {source})" for source, words in sources.items() if any(words)]
    if "trials" in added:  # as an option it would also say: tune again, though there is a recipe
        added["usual_trials"] = added.pop("trials")
    return added, ", ".join(told)


def _words(name: str, text: str, value: Any) -> str:
    """The option as it would stand on the command line; "" for one that changes only how much is shown."""
    if name == "verbose":
        return ""
    option = f"--{name.replace('_', '-')}"
    return printable(option if value is True else f"{option} {text}")


def _nearest() -> tuple[dict[str, Any], str]:
    """The table, and the file as messages call it; empty where no folder has one."""
    for place in _files():
        try:
            content = read_at_most(place, _LARGEST) if place.is_file() else b""
        except OSError:
            continue
        if b"autoddp" not in content:
            continue
        name = printable(os.path.relpath(place))
        try:
            found = from_toml(content.decode()).get("tool", {}).get("autoddp")
        except (ValueError, RecursionError, AttributeError) as problem:
            raise UsageError(f"{name}: not TOML: {first_line(problem)}; correct it there") from None
        if isinstance(found, dict):
            return found, name
        if found is not None:
            raise UsageError(f"{name}: tool.autoddp must be a table, e.g. [tool.autoddp]")
    return {}, ""


def _files() -> Iterator[Path]:
    try:
        here = Path.cwd()
    except OSError:  # the folder was removed
        return
    yield from (folder / "pyproject.toml" for folder in (here, *here.parents))


def _converted(table: dict[str, Any], file: str) -> dict[str, Any]:
    """Field of the options → value."""
    known = [option[2:] for option in option_names(own_parser()) if option.startswith("--")]
    found: dict[str, Any] = {}
    for key, value in table.items():
        place = f"{file}: [tool.autoddp] {printable(key)}"
        if key not in known:
            raise UsageError(f"{place}: no option of autoddp{did_you_mean(key, sorted(_MAY_SET))}")
        if key not in _MAY_SET:
            raise UsageError(f"{place}: not for a project to set; give --{key} on the command line")
        found |= _one(key, value, place)
    return found


def _one(key: str, value: Any, place: str) -> dict[str, Any]:
    field = key.replace("-", "_")
    declared = next(one for one in fields(Options) if one.name == field)
    is_switch = "type" not in declared.metadata
    if is_switch or isinstance(value, bool) or not isinstance(value, (str, int, float)):
        if is_switch and isinstance(value, bool):
            return {field: True} if value else {}
        rule = "must be true or false" if is_switch else f"must be a value as of --{key} on the command line"
        raise UsageError(f"{place} = {printable(repr(value))}: {rule}")
    try:
        found = of_words([f"--{key}={value}"])[field]
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None
    widens = "a project can only narrow what may be launched; give it on the command line"
    if key in _NARROWS and found > declared.default:
        raise UsageError(f"{place} = {value}: more than {declared.default:g}; {widens}")
    if key == "allow":
        if found.order > Rung.NEAR.order:
            raise UsageError(f'{place} = "{value}": {widens}')
        if found is Rung.NEAR:  # what is allowed anyway; given, it would launch more of a recipe made for exact
            return {}
    if key == "trials" and not found:
        raise UsageError(f"{place} = 0: must be 1 or more; --trials 0 on the command line is torchrun")
    return {field: found}
