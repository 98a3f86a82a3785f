"""Puts the guard's functions where Python and the modules that are loaded already keep the original ones."""

from __future__ import annotations

import builtins
import importlib
import io
import os
import posix
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from autoddp.isolation.guard import real
from autoddp.isolation.guard.opening import Opening
from autoddp.isolation.guard.paths import OpenFunction, PathFunction
from autoddp.isolation.guard.reading import Entry, Reading
from autoddp.isolation.guard.view import View
from autoddp.isolation.guard.writing import Writing

_NAMES_IN_ERRORS = {
    **dict.fromkeys(("link", "rename", "replace", "symlink"), ("src", "dst")),
    **dict.fromkeys(("utime", "getcwd", "getcwdb", "fchmod", "fchown"), ()),
    "fchdir": ("fd",),
}
"""The parameters that a function's OSError shows; `path` where a function is not listed."""
_HEAP_TYPE = 1 << 9  # of a class's __flags__: its attributes can be set
_GUARD = "autoddp.isolation.guard"  # this package keeps the originals


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
    _rebind(new, classes=True)
    for name in ("supports_dir_fd", "supports_fd", "supports_follow_symlinks", "supports_effective_ids"):
        functions: set[Any] = getattr(os, name)
        functions |= {new[id(each)][1] for each in functions if id(each) in new}


def replace_everywhere(original: Any, make: Callable[[Any], Any]) -> None:
    """Replace an object in all modules that are loaded by `make(original)`; None is no object."""
    if original is not None:
        _rebind({id(original): (original, make(original))})


def _rebind(new: dict[int, tuple[Any, Any]], classes: bool = False) -> None:
    """Replace objects, keyed by `id`, in all modules that are loaded.

    With `classes` also where those modules keep them elsewhere: in their classes, and as defaults of parameters.
    """
    for space, owner in _spaces(classes):
        for name, value in list(space.items()):
            found = new.get(id(value))
            if found is not None and found[0] is value:
                setattr(owner, name, found[1])
            elif classes and type(value) is staticmethod and id(value.__func__) in new:
                setattr(owner, name, staticmethod(new[id(value.__func__)][1]))
            elif classes and type(value) is FunctionType and value.__defaults__:
                value.__defaults__ = tuple(new[id(each)][1] if id(each) in new else each for each in value.__defaults__)


def _spaces(classes: bool) -> Iterator[tuple[dict[str, Any], Any]]:
    """Each module's names, and each of its classes'."""
    for module in (builtins, posix, os, io, *list(sys.modules.values())):
        space = getattr(module, "__dict__", None)
        if type(space) is not dict or str(getattr(module, "__name__", "")).startswith(_GUARD):
            continue
        yield space, module
        for value in list(space.values()) if classes else ():
            if _can_be_changed(value) and value.__module__ == module.__name__:
                yield dict(vars(value)), value


def _can_be_changed(value: Any) -> bool:
    """Whether it is a class of Python. `isinstance` would make some modules' lazy objects load their content."""
    return issubclass(type(value), type) and bool(value.__flags__ & _HEAP_TYPE)
