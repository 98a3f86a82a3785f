"""Typed values as text, for a store that several launchers share.

Strings may hold paths, whose bytes need not be UTF-8: Python's JSON can write them, msgspec's cannot.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def to_text(value: Any) -> str:
    """JSON; `value` may be a msgspec.Struct, a dataclass, or hold any."""
    return json.dumps(msgspec.to_builtins(value))


def from_text(text: str | bytes, kind: type[T]) -> T:
    """The reverse. ValueError for anything that is no `kind`; fields that this version does not know are left out."""
    return msgspec.convert(json.loads(text), kind)
