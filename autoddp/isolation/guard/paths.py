"""A function of Python that takes paths, with a body that follows the overlay."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

Path = Any
"""What the functions of `os` accept: str, bytes, os.PathLike, and some an open descriptor."""


class MalformedPathError(Exception):
    """Not a path at all: the original function says so in its own words."""


def text(path: Path) -> str:
    """The path as a string."""
    if type(path) is not str:
        try:
            path = os.fspath(path)
        except TypeError:
            raise MalformedPathError from None
        if isinstance(path, bytes):
            path = os.fsdecode(path)
    if "\0" in path:
        raise MalformedPathError
    return str(path)


def like(path: Path, value: str) -> Any:
    """A result in the type of the path that was given."""
    return os.fsencode(value) if isinstance(_plain(path), bytes) else value


def _plain(path: Path) -> Any:
    return os.fspath(path) if hasattr(path, "__fspath__") else path


def _named(number: int, message: str, first: Any = None, second: Any = None) -> OSError:
    if second is not None:
        return OSError(number, message, first, None, second)
    return OSError(number, message) if first is None else OSError(number, message, first)


class PathFunction:
    """Stands in for a builtin function. Like one, and unlike a Python function, it binds to no class that holds it."""

    def __init__(self, original: Any, body: Callable[..., Any], names: tuple[str, ...]) -> None:
        self.__wrapped__ = original
        self.__name__ = self.__qualname__ = original.__name__
        self.__module__ = original.__module__
        self.__doc__ = original.__doc__
        self.__self__ = getattr(original, "__self__", None)
        self.body = body
        self.names = names
        """The parameters that an OSError shows as filename and filename2."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.body(*args, **kwargs)
        except MalformedPathError:
            return self.__wrapped__(*args, **kwargs)
        except OSError as error:
            given = [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(self.names)]
            if error.errno is None or error.strerror is None:
                raise
            # Without the folders of the scratch, which the error of an inner step may name.
            raise _named(error.errno, error.strerror, *map(_plain, given)).with_traceback(error.__traceback__) from None

    def __reduce__(self) -> str:
        return str(self.__name__)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)
