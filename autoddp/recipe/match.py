"""Does a recipe fit this job, and how do two recipes differ? Compared part by part."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from autoddp.errors import UnfitRecipe
from autoddp.log import printable
from autoddp.recipe.schema import Fits, Recipe, defaults
from autoddp.units import data_size


def differences(fits: Fits, **known: Any) -> list[str]:
    """One phrase for each part of `known` that differs; None stands for a part not known yet.

    >>> differences(Fits(8, 2, "nccl", ("NVIDIA H100",), "2.13.0", 4096, "0123456789abcdef"), world_size=2, nodes=2)
    ['world size 8 in the recipe, 2 here']

    Before the launch only the script, the world, the devices and torch are known; the worker compares parameters and
    inputs. `script` is a tuple of the paths by which the script is known here.
    """
    names, optional = [part.name for part in fields(Fits)], defaults(Fits)
    assert set(known) <= set(names), f"not parts of Fits: {set(known) - set(names)}"
    found = []
    for name in names:
        here = known.get(name)
        if here is None or (name in optional and not (here and getattr(fits, name))):
            continue
        if name in _ANY_OF and set(here) <= set(getattr(fits, name)):
            continue  # nodes may differ; this one is of a kind that was there
        if name == "script":
            if fits.script not in here:
                found.append(_phrase(name, fits.script, next(iter(here))))
            continue
        there, here = (_PLAIN.get(name, _same)(value) for value in (getattr(fits, name), here))
        if name in _VERSIONS and here in there.split(AND):
            continue  # hosts may have several; this one has one of them
        if there != here:
            found.append(_phrase(name, there, here))
    return found


def require_fit(recipe: Recipe, path: str | os.PathLike[str], **known: Any) -> None:
    """UnfitRecipe, one line with every differing part and the fix, unless `recipe` fits what is known."""
    found = differences(recipe.fits, **known)
    if found:
        where = printable(os.fspath(path))
        fix = "tune again with --trials 20, or launch it all the same with --force"
        if any(part.startswith(("world size", _LABELS["ranks_of_nodes"])) for part in found):
            fix = f"start as many ranks (--nnodes, --nproc-per-node), {fix}"
        raise UnfitRecipe(f"{where}: made for another job: {'; '.join(found)}: {fix}")


def _same(value: Any) -> Any:
    return value


def _distinct(devices: Any) -> tuple[str, ...]:
    return tuple(sorted(set(devices)))


def _without_build(version: Any) -> str:
    return str(version).partition("+")[0]


_PLAIN: Mapping[str, Callable[[Any], Any]] = {
    "devices": _distinct,
    "torch": _without_build,
    "ranks_of_nodes": _distinct,
}
"""How a part is brought into the form to compare: 2.13.0+cpu → 2.13.0, eight equal devices → one."""

_ANY_OF = ("devices", "links", "networks", "ranks_of_nodes")
_VERSIONS = ("torch", "cuda", "nccl")
AND = " and "
"""Word between the versions of hosts that have different ones."""
_LABELS = {
    "world_size": "world size",
    "ranks_of_nodes": "ranks of a node",
    "parameters_digest": "parameter shapes and types",
    "links": "GPUs joined by",
    "networks": "network",
    "cuda": "CUDA",
    "nccl": "NCCL",
}


def _phrase(name: str, there: Any, here: Any) -> str:
    if name == "gradient_bytes":
        # two sizes that differ by a few bytes must not both read 97.5 MiB
        rough = data_size(there) != data_size(here)
        there, here = (data_size(size) if rough else f"{size} B" for size in (there, here))
        return f"{there} of gradients in the recipe, {here} here"
    if name in _ANY_OF:
        there, here = " and ".join(map(str, there)), " and ".join(map(str, here))
    return f"{_LABELS.get(name, name)} {there} in the recipe, {here} here"


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
