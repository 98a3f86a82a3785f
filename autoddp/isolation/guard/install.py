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
from autoddp.isolation.guard.altering import Altering
from autoddp.isolation.guard.changing import Changing
from autoddp.isolation.guard.opening import Opening
from autoddp.isolation.guard.paths import PathFunction
from autoddp.isolation.guard.reading import Entry, Reading

_NAMES = {
    "link": ("src", "dst"),
    "rename": ("src", "dst"),
    "replace": ("src", "dst"),
    "symlink": ("src", "dst"),
    "utime": (),
    "getcwd": (),
    "getcwdb": (),
    "fchmod": (),
    "fchown": (),
    "fchdir": ("fd",),
}
_BODIES = {"remove": "unlink", "replace": "rename", "open": "os_open"}
_HEAP_TYPE = 1 << 9
_OURS = "autoddp.isolation.guard"  # this package keeps the originals


def install(reading: Reading, changing: Changing, altering: Altering, opening: Opening) -> None:
    """From now on Python's path operations follow the overlay."""
    new: dict[int, tuple[Any, Any]] = {}
    for name, original in real.functions.items():
        body = _body((reading, changing, altering, opening), _BODIES.get(name, name))
        if body is not None:
            new[id(original)] = original, PathFunction(original, body, _NAMES.get(name, ("path",)))
    low_level = importlib.import_module("_io")
    for original, body in ((io.open, opening.open), (low_level.open_code, opening.open_code)):
        new[id(original)] = original, Opener(original, body)
    new[id(io.FileIO)] = io.FileIO, opening.file_io()
    new[id(os.DirEntry)] = os.DirEntry, Entry
    rebind(new, classes=True)
    for name in ("supports_dir_fd", "supports_fd", "supports_follow_symlinks", "supports_effective_ids"):
        functions: set[Any] = getattr(os, name)
        functions |= {new[id(each)][1] for each in functions if id(each) in new}


class Opener(PathFunction):
    """Errors carry the right names already."""

    def __init__(self, original: Any, body: Callable[..., Any]) -> None:
        super().__init__(original, body, ())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)


def _body(owners: tuple[object, ...], name: str) -> Callable[..., Any] | None:
    for owner in owners:
        if callable(found := getattr(owner, name, None)) and not (owner is owners[-1] and name != "os_open"):
            return found  # type: ignore[no-any-return]
    return None


def rebind(new: dict[int, tuple[Any, Any]], classes: bool = False) -> None:
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
    basic = [builtins, posix, os, io]
    for module in [*basic, *list(sys.modules.values())]:
        space = getattr(module, "__dict__", None)
        if type(space) is not dict or str(getattr(module, "__name__", "")).startswith(_OURS):
            continue
        yield space, module
        for value in list(space.values()) if classes else ():
            if _can_be_changed(value) and value.__module__ == module.__name__:
                yield dict(vars(value)), value


def _can_be_changed(value: Any) -> bool:
    """A class of Python; asked without `isinstance`, which would wake what some modules load late."""
    return issubclass(type(value), type) and bool(value.__flags__ & _HEAP_TYPE)
