"""Errors that a user can cause. Each text is one line: what is wrong, where, which rule it breaks, and how to fix it.

AutoddpError            exit code 2, printed as `autoddp: error: …`, never with a traceback
├── UsageError          the command line asks for something impossible
├── RecipeError         a recipe cannot be read, or says something that is not allowed
│   └── PlaceTaken      another file has come where a new recipe was to go
├── UnfitRecipe         a sound recipe was made for another job or machine
├── NothingReadable     nothing in an input file could be understood
├── JobFailed           a job that autoddp started for itself ended early; exit code 1
├── HostLost            a host that the job needs disappeared before the job began; exit code 1
└── NotTuned            only a recipe or a diagnosis was asked for, and none was made; exit code 1

`JobStops` is raised in the script, and is none of these: it ends a job that would train something else than is said.

Bugs of autoddp are `assert`s and ordinary exceptions: they show a traceback on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

UNHEARD = 217
"""Exit code of a rank that cannot reach its launcher: this is all that the launcher learns of it."""
_LONGEST_SHOWN = 60  # characters of a bad value in an error line


class AutoddpError(Exception):
    """Base of all errors for the user. The text is one line; `exit_code` is the exit code of the process."""

    exit_code = 2


class JobStops(BaseException):
    """Under its recipe the job would train something else than without it, so it must not go on.

    No `Exception`: many scripts leave out a batch that raises one, and would train on.
    """


class UsageError(AutoddpError):
    """The command line asks for something impossible."""


class RecipeError(AutoddpError):
    """A recipe cannot be read, or says something that is not allowed."""


class PlaceTaken(RecipeError):
    """Another file has come where a new recipe was to go, as of a job that is tuned beside this one."""


class UnfitRecipe(AutoddpError):
    """A sound recipe was made for another job or machine."""


class NothingReadable(AutoddpError):
    """Nothing in an input file could be understood."""


class JobFailed(AutoddpError):
    """A job that autoddp started for itself ended early; its processes have printed more on stderr."""

    exit_code = 1


class HostLost(AutoddpError):
    """A host that the job needs disappeared before the job began."""

    exit_code = 1


class NotTuned(AutoddpError):
    """Only a recipe (`--tune-only`) or a diagnosis was asked for, and none was made."""

    exit_code = 1


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` with the known word that is most like `word`; "" if none is like it.

    >>> did_you_mean("buket_cap_mb", ["bucket_cap_mb", "hook"])
    " (did you mean 'bucket_cap_mb'?)"
    >>> did_you_mean("zzz", ["hook"])
    ''
    """
    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def shown(value: Any) -> str:
    """A bad value as an error line shows it: as JSON, cut after 60 characters.

    >>> shown("bf17"), shown([1] * 100)[-8:]
    ('"bf17"', ', 1, 1,…')
    """
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):  # a hexadecimal number too long for Python to print, or lists in lists
        return "…"
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for a message of one line; its type where it has no text."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
