"""Hooks into Python: after an import, before what Python reports as an audit event, and in place of an object that
modules keep under names of their own."""

from __future__ import annotations

import builtins
import io
import os
import posix
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import wrapt

_HEAP_TYPE = 1 << 9  # of a class's __flags__: its attributes can be set
_KEEP = ("autoddp.isolation.guard", "autoddp.isolation.real")  # these modules keep the originals


def when_imported(module: str, patch: Callable[[ModuleType], None]) -> None:
    """Call `patch(module)` right after its import, before the script takes functions from it.

    At once if it is imported already.
    """
    wrapt.register_post_import_hook(patch, module)


def check_events(checks: Mapping[str, Callable[..., None]]) -> None:
    """Call `checks[event]` with the event's arguments before each of these audit events.

    This is for good: an audit hook cannot be removed. All checks share one, because Python calls each hook at each
    event, and even `id` and `sys._getframe` are events. What nobody checks costs one look-up.
    """
    if not _checks:
        sys.addaudithook(_before_event)
    for event, check in checks.items():
        _checks[event] = (*_checks.get(event, ()), check)


_checks: dict[str, tuple[Callable[..., None], ...]] = {}


def _before_event(event: str, arguments: tuple[Any, ...]) -> None:
    for check in _checks.get(event, ()):
        check(*arguments)


def replace_everywhere(original: Any, make: Callable[[Any], Any]) -> None:
    """Replace an object in all modules that are loaded by `make(original)`; None is no object."""
    if original is not None:
        rebind({id(original): (original, make(original))})


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
    """Each module's names, and each of its classes'."""
    for module in (builtins, posix, os, io, *list(sys.modules.values())):
        space = getattr(module, "__dict__", None)
        if type(space) is not dict or str(getattr(module, "__name__", "")).startswith(_KEEP):
            continue
        yield space, module
        for value in list(space.values()) if classes else ():
            if _can_be_changed(value) and value.__module__ == module.__name__:
                yield dict(vars(value)), value


def _can_be_changed(value: Any) -> bool:
    """Whether it is a class of Python. `isinstance` would make some modules' lazy objects load their content."""
    return issubclass(type(value), type) and bool(value.__flags__ & _HEAP_TYPE)
