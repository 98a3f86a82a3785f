"""Floor 0. Typed values to JSON and back, and nothing else than they are: msgspec's types over Python's own JSON.

    text = encode(Point(1024, 1e-4))           # '{"bytes": 1024, "seconds": 0.0001}'
    decode(text, Point) == Point(1024, 1e-4)   # ValueError for anything that is no Point

A type is a dataclass, a `Struct` (which can refuse unknown fields, and be one of a tagged union) or what else msgspec
knows. A class that msgspec does not know needs a method `plain()`, which gives a dictionary of JSON types, and a
constructor that takes it.

Python's own module writes and reads the JSON, because msgspec's writer fails at a file name that is not UTF-8, and
writes null for a float that is not finite.
"""

from __future__ import annotations

import json
import math
import os
import threading
from typing import Any, TypeVar

from msgspec import Meta, MsgspecError, Struct, field
from msgspec import convert as _convert
from msgspec import to_builtins as _to_builtins
from msgspec.structs import replace

__all__ = ["Meta", "Struct", "convert", "decode", "encode", "field", "finite", "plain", "replace"]

T = TypeVar("T")

# msgspec looks through a type when it converts to it for the first time. If a second thread meets a type of which only
# a part is known, the process ends by a segmentation fault (0.22). So would a process that is forked meanwhile.
_one_at_a_time = threading.RLock()
os.register_at_fork(
    before=_one_at_a_time.acquire,
    after_in_parent=_one_at_a_time.release,
    after_in_child=_one_at_a_time.release,
)


def plain(value: Any) -> Any:
    """Dictionaries, lists, texts, numbers, booleans and None only; a tuple may stay one."""
    return _to_builtins(value, enc_hook=lambda other: other.plain())


def finite(value: Any) -> Any:
    """As `plain`, with None for numbers that are not finite: JSON has none, and other programs refuse `Infinity`.

    >>> finite({"seconds": [0.1, float("inf")]})
    {'seconds': [0.1, None]}

    ValueError for what is nested too deep.
    """
    try:
        return _finite(plain(value))
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def convert(value: Any, kind: type[T]) -> T:
    """A value of type `kind` from JSON or TOML types. ValueError where a type, a limit or a field is another one.

    An int is taken for a float; a bool is no number, and 8.0 no int.
    """
    try:
        with _one_at_a_time:
            return _convert(value, kind, dec_hook=_constructed)
    except (MsgspecError, RecursionError) as error:  # before msgspec 0.22 its errors are no ValueErrors
        raise ValueError(str(error)) from error


def _constructed(kind: type[T], found: Any) -> T:
    if not isinstance(found, dict):
        raise ValueError(f"Expected `object`, got {type(found).__name__}")
    return kind(found)  # type: ignore[call-arg]


def encode(value: Any, indent: int | None = None) -> str:
    """One line of JSON, or lines with that many spaces for each level."""
    return json.dumps(plain(value), indent=indent)


def decode(text: str | bytes, kind: type[T]) -> T:
    """The inverse of `encode`. ValueError for anything else."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    return convert(found, kind)
