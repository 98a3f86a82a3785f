"""Paths as the functions of Python accept them, and what stands in for such a function."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

Path = Any
"""What the functions of `os` accept: str, bytes, os.PathLike, and some of them an open descriptor."""
Descriptor = int | None
"""An open folder to which a path is relative; None: the working directory."""


class MalformedPathError(ValueError):
    """The argument is no path. The original function is called, and raises its own error."""


def text(path: Path) -> str:
    """The path as a string."""
    if type(path) is not str:
        try:
            path = os.fsdecode(path)
        except TypeError:
            raise MalformedPathError from None
    if "\0" in path:
        raise MalformedPathError
    return str(path)


def is_path(value: object) -> bool:
    """Whether a value can be a path; an open descriptor or an open file is none."""
    return isinstance(value, (str, bytes, os.PathLike))


def like(path: Path, value: str) -> Any:
    """A result, in the type of the path that was given."""
    return os.fsencode(value) if isinstance(plain(path), bytes) else value


def plain(path: Path) -> Any:
    """What an os.PathLike stands for; anything else as it is."""
    return os.fspath(path) if hasattr(path, "__fspath__") else path


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
            if error.errno is None or error.strerror is None:
                raise
            given = [plain(args[i] if i < len(args) else kwargs.get(name)) for i, name in enumerate(self.names)]
            # The error of an inner step may name a folder of the scratch, so a new one is raised.
            raise _named(error.errno, error.strerror, *given).with_traceback(error.__traceback__) from None

    def __reduce__(self) -> str:
        return str(self.__name__)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)


def _named(number: int, message: str, first: Any = None, second: Any = None) -> OSError:
    if second is not None:
        return OSError(number, message, first, None, second)
    return OSError(number, message) if first is None else OSError(number, message, first)


class OpenFunction(PathFunction):
    """A `PathFunction` for functions whose body names the right path in its errors."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)
