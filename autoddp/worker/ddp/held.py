"""What objects of the script hold already, read without calling any code of theirs.

A class of the script's may compute, read or draw a field when it is asked for it, or not have it yet. Whoever asks in
the script's place changes what it trains on.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import ItemsView, Iterable
from types import MemberDescriptorType
from typing import Any


def field_of(value: object, name: str) -> Any:
    """The attribute of this name, as it is stored; None where it is not, or not yet."""
    try:
        inside = object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has slots
        inside = {}
    if name in inside:
        return inside[name]
    of_class = next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), None)
    if isinstance(of_class, MemberDescriptorType):
        try:
            return of_class.__get__(value)
        except AttributeError:
            return None
    return None if hasattr(type(of_class), "__get__") else of_class  # a property is the script's code


def entries_of(value: object) -> ItemsView[Any, Any] | None:
    """Keys and values of a dict, or of a UserDict; None for anything else."""
    held = field_of(value, "data") if isinstance(value, UserDict) else value
    return dict.items(held) if isinstance(held, dict) else None


def parts_of(value: object) -> Iterable[Any]:
    """What lies in a list, a tuple, a dict, or an object of a dataclass; of anything else nothing."""
    if isinstance(value, list):
        return list.__iter__(value)
    if isinstance(value, tuple):
        return tuple.__iter__(value)
    if isinstance(value, dict):
        return dict.values(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (field_of(value, field.name) for field in dataclasses.fields(value))
    return ()
