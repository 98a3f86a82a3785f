"""Errors a user can cause. Each is one line that says what, where, the rule and the fix.

AutoddpError            exit code 2, printed as `autoddp: error: …`, never with a traceback
├── UsageError          the command line asks for something that cannot be
├── RecipeError         a recipe that cannot be read, or says something not allowed
├── UnfitRecipe         a sound recipe made for another job or machine
├── NothingReadable     an input file of which nothing could be understood
├── JobFailed           a job of autoddp's own ended early; exit code 1
├── HostLost            a host that the job needs is gone before the job has begun; exit code 1
└── NotTuned            --tune-only, and no recipe came of it; exit code 1

Faults of our own are `assert`s and ordinary exceptions: they show a traceback on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

_LONGEST_SHOWN = 60  # characters of a bad value in an error line


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


class HostLost(AutoddpError):
    """A host that the job needs is gone, and the job has not begun."""

    exit_code = 1


class NotTuned(AutoddpError):
    """`--tune-only` was asked for, and no recipe came of it."""

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


def shown(value: Any) -> str:
    """A bad value as an error line shows it: as JSON, cut after 60 characters.

    >>> shown("bf17"), shown([1] * 100)[-8:]
    ('"bf17"', ', 1, 1,…')
    """
    try:
        text = json.dumps(value, default=str)
    except ValueError:  # a hexadecimal number too long for Python to print
        return "…"
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"
