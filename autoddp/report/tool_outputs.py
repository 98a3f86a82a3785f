"""What was read of another machine's outputs, in lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def show_outputs(read: Mapping[str, Mapping[str, Any]]) -> None:
    """Each output under its name: one line for each fact that is known."""
    for name, facts in read.items():
        print(f"{name.replace('_', ' ')}:")
        for line in _lines(facts):
            print(f"  {line}")


def _lines(facts: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in facts.items():
        label = name.replace("_", " ")
        if isinstance(value, Mapping) and value:
            found += [f"{label} {key}: {_short(part)}" for key, part in value.items()]
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
            found += [", ".join(f"{k} {_short(v)}" for k, v in row.items() if v not in (None, "", [])) for row in value]
        elif value not in (None, "", [], (), {}):
            found.append(f"{label}: {_short(value)}")
    return found


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(str(part) for part in value)
    return {True: "yes", False: "no", None: "not known"}.get(value, str(value)) if _is_switch(value) else str(value)


def _is_switch(value: Any) -> bool:
    return value is None or isinstance(value, bool)
