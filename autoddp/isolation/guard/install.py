"""Puts the guard's functions where Python and the modules that are loaded already keep the original ones."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import Any

from autoddp.isolation import real
from autoddp.isolation.guard.opening import Opening
from autoddp.isolation.guard.paths import OpenFunction, PathFunction
from autoddp.isolation.guard.reading import Entry, Reading
from autoddp.isolation.guard.view import View
from autoddp.isolation.guard.writing import Writing
from autoddp.isolation.hooks import rebind

_NAMES_IN_ERRORS = {
    **dict.fromkeys(("link", "rename", "replace", "symlink"), ("src", "dst")),
    **dict.fromkeys(("getcwd", "getcwdb", "fchmod", "fchown"), ()),
    "utime": ("path",) if sys.version_info >= (3, 13) else (),
    "fchdir": ("fd",),
}
"""The parameters that a function's OSError shows; `path` where a function is not listed."""


def install(view: View) -> None:
    """From now on Python's path operations follow the view."""
    reading, writing, opening = Reading(view), Writing(view), Opening(view)
    bodies: dict[str, Any] = {"remove": writing.unlink, "replace": writing.rename, "open": opening.os_open}
    new: dict[int, tuple[Any, Any]] = {}
    for name, original in real.functions.items():
        body = bodies.get(name) or getattr(reading, name, None) or getattr(writing, name, None)
        if body is not None:
            new[id(original)] = original, PathFunction(original, body, _NAMES_IN_ERRORS.get(name, ("path",)))
    for original, body in ((io.open, opening.open), (importlib.import_module("_io").open_code, opening.open_code)):
        new[id(original)] = original, OpenFunction(original, body, ())
    new[id(io.FileIO)] = io.FileIO, opening.file_io()
    new[id(os.DirEntry)] = os.DirEntry, Entry
    rebind(new, classes=True)
    for name in ("supports_dir_fd", "supports_fd", "supports_follow_symlinks", "supports_effective_ids"):
        functions: set[Any] = getattr(os, name)
        functions |= {new[id(each)][1] for each in functions if id(each) in new}
