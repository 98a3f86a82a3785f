"""Errors a user can cause. Each is one line that says what, where, the rule and the fix.

AutoddpError            exit code 2, printed as `autoddp: error: …`, never with a traceback
├── UsageError          the command line asks for something that cannot be
├── RecipeError         a recipe that cannot be read, or says something not allowed
├── UnfitRecipe         a sound recipe made for another job or machine
├── NothingReadable     an input file of which nothing could be understood
└── JobFailed           a job of autoddp's own ended early; exit code 1

Faults of our own are `assert`s and ordinary exceptions: they show a traceback on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class AutoddpError(Exception):
    """A line for the user; `exit_code` is what the process ends with."""

    exit_code = 2


class UsageError(AutoddpError):
    """The command line asks for something that cannot be."""


class RecipeError(AutoddpError):
    """A recipe that cannot be read, or that says something not allowed."""


class UnfitRecipe(AutoddpError):
    """A sound recipe that was made for another job or machine."""


class NothingReadable(AutoddpError):
    """An input of which nothing could be understood."""


class JobFailed(AutoddpError):
    """A job that autoddp started for itself ended early; its processes have said more on stderr."""

    exit_code = 1


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the nearest known word, or nothing.

    >>> did_you_mean("buket_cap_mb", ["bucket_cap_mb", "hook"])
    " (did you mean 'bucket_cap_mb'?)"
    >>> did_you_mean("zzz", ["hook"])
    ''
    """
    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
