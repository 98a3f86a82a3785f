"""Two recipes side by side: what differs, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autoddp.recipe.schema import Recipe


def compare(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """Dotted key → (value in the one, value in the other), in the order of a recipe; None where a key is absent.

    Rungs stand under their names: `ladder.near.speedup`.
    """
    first, second = (dict(_flat(_by_rung(recipe.plain()))) for recipe in (one, other))
    keys = [*first, *(key for key in second if key not in first)]
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}


def _by_rung(plain: dict[str, Any]) -> dict[str, Any]:
    ladder = {
        entry["rung"]: {name: value for name, value in entry.items() if name != "rung"} for entry in plain["ladder"]
    }
    return {**plain, "ladder": ladder}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
