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
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin

from msgspec import Meta, MsgspecError, Struct, field
from msgspec import convert as _convert
from msgspec import to_builtins as _to_builtins
from msgspec.structs import fields, replace

__all__ = [
    "WHOLE",
    "Meta",
    "Struct",
    "convert",
    "decode",
    "encode",
    "field",
    "finite",
    "plain",
    "replace",
    "sound_parts",
]

T = TypeVar("T")

WHOLE = Meta(extra={"whole": True})
"""Marks a type of lists for `sound_parts`: if one element is wrong, the whole list is left out."""

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
    """`plain(value)` with None for numbers that are not finite: JSON has none, and other programs refuse `Infinity`.

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


def sound_parts(value: Any, kind: Any) -> tuple[Any, dict[tuple[Any, ...], str]]:
    """`value`, of JSON types, without the parts that do not fit the type `kind`, and why each of them is left out.

        sound_parts({"host": 7, "ranks": [{"rank": 0}, {}]}, Hosts)
        ({"ranks": [{"rank": 0}]}, {("host",): "Expected `str`, got `int`", ("ranks", 1): "Object missing required …"})

    A part is a field of a `Struct` that has a default, an entry of a dictionary, or an element of a list. A list of
    numbers is one part, and so is a list that is annotated with `WHOLE`. Fields that the type does not know are not in
    the result if another part is left out. ValueError where `value` is wrong as a whole.
    """
    try:
        convert(value, kind)
    except ValueError as error:
        problem = str(error).split(" - at `$")[0]
    else:
        return value, {}
    kind, whole = _bare(kind)
    found: dict[Any, Any] = {}
    left_out: dict[tuple[Any, ...], str] = {}
    for key, part, inner in _parts(value, kind, whole) or _refuse(problem):
        try:
            found[key], below = sound_parts(part, inner)
        except ValueError as error:
            left_out[(key,)] = str(error)
        else:
            left_out |= {(key, *place): why for place, why in below.items()}
    if isinstance(kind, type) and issubclass(kind, Struct):
        for one in fields(kind):
            if one.required and one.encode_name not in found:
                _refuse(f"{one.encode_name}: {left_out[(one.encode_name,)]}" if one.encode_name in value else problem)
    return (found if isinstance(value, Mapping) else list(found.values())), left_out


def _parts(value: Any, kind: Any, whole: bool) -> list[tuple[Any, Any, Any]]:
    """The key of each part of `value`, the part, and its type; nothing where `value` cannot be without any of them."""
    inner = get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Struct) and isinstance(value, Mapping):
        return [(one.encode_name, value[one.encode_name], one.type) for one in fields(kind) if one.encode_name in value]
    if get_origin(kind) is dict and isinstance(value, Mapping):
        return [(key, part, inner[1]) for key, part in value.items()]
    numbers = inner and _bare(inner[0])[0] in (int, float)
    if inner[1:] == (...,) and isinstance(value, (list, tuple)) and not whole and not numbers:
        return [(number, part, inner[0]) for number, part in enumerate(value)]
    return []


def _bare(kind: Any) -> tuple[Any, bool]:
    """A type without annotations and without None, and whether it is annotated with `WHOLE`."""
    if get_origin(kind) is Annotated:
        kind, *notes = get_args(kind)
        return kind, WHOLE in notes
    if get_origin(kind) in (Union, UnionType):
        kinds = [one for one in get_args(kind) if one is not type(None)]
        return _bare(kinds[0]) if len(kinds) == 1 else (kind, False)
    return kind, False


def _refuse(problem: str) -> NoReturn:
    raise ValueError(problem)


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
