"""What a model's forward pass is called with, as texts that stand in a recipe: types, and dimensions that stay equal.

    0: float32[64, 3, 224, 224]         the first positional argument
    input_ids: int64[8, *]              a keyword; its second dimension was not always the same
    0.boxes[]: float32[*, 4]            of each tensor in the list that the first argument has under `boxes`
    autocast: bfloat16                  the type to which autocast is set around the model

A `*` stands for whatever differed between two forward passes or two ranks: there nothing is compared. Where a script
has several models, `model 2.` and so on stands in front, in the order of their digests in the recipe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

ANY = "*"
_TEXT = re.compile(r"(?P<path>.+): (?P<kind>[^\[\]]+)(?P<dims>\[[^\[\]]*\])?")
_ANY_DIMS = "[...]"


def is_input(text: str) -> bool:
    """Whether it is one of the texts above."""
    return _TEXT.fullmatch(text) is not None


def merged(*seen: Iterable[str]) -> tuple[str, ...]:
    """What all forward passes have in common.

    >>> merged(["0: float32[64, 10]", "1: int64[64]"], ["0: float32[48, 10]", "1: int64[48]"])
    ('0: float32[*, 10]', '1: int64[*]')
    >>> merged(["0: float32[64]", "mask: bool[64]"], ["0: float16[64]"])
    ('0: *', 'mask: *')
    """
    parts = [part for part in (dict(map(_split, texts)) for texts in seen) if part]
    paths = dict.fromkeys(path for part in parts for path in part)
    return tuple(f"{path}: {_of_all([part.get(path) for part in parts])}" for path in paths)


def input_differences(fits: Sequence[str], here: Sequence[str]) -> list[str]:
    """One phrase for each input in which `here`, of one forward pass, is not as `fits` says.

    >>> input_differences(["0: float32[*, 10]"], ["0: float32[48, 10]"])
    []
    >>> input_differences(["0: float32[64, 10]"], ["0: float32[48, 10]"])
    ['input 0 float32[64, 10] in the recipe, float32[48, 10] here']
    """
    there, found = dict(map(_split, fits)), dict(map(_split, here))
    paths = [*there, *(path for path in found if path not in there)]
    return [
        f"input {path} {there.get(path, 'absent')} in the recipe, {found.get(path, 'absent')} here"
        for path in paths
        if there.get(path) != ANY and not _fits(there.get(path), found.get(path))
    ]


def of_model(texts: Iterable[str], number: int, models: int) -> list[str]:
    """The inputs of one of a script's models, without its name; `number`: its place in the order of digests, from 0.

    >>> of_model(["model 1.0: float32[64]", "model 2.0: float32[8]"], 1, 2)
    ['0: float32[8]']
    """
    name = _model(number, models)
    return [text.removeprefix(name) for text in texts if text.startswith(name)]


def with_model(texts: Iterable[str], number: int, models: int) -> list[str]:
    """The inverse of `of_model`."""
    return [_model(number, models) + text for text in texts]


def _model(number: int, models: int) -> str:
    return f"model {number + 1}." if models > 1 else ""


def _split(text: str) -> tuple[str, str]:
    path, _, leaf = text.rpartition(": ")
    return path, leaf


def _divide(leaf: str) -> tuple[str, str]:
    kind, bracket, dims = leaf.partition("[")
    return kind, bracket + dims


def _fits(there: str | None, here: str | None) -> bool:
    if there is None or here is None:
        return False
    return _of_all([there, here]) == there


def _of_all(leaves: Sequence[str | None]) -> str:
    """One leaf for all; None where a forward pass had no such input."""
    present = [leaf for leaf in leaves if leaf is not None]
    if len(present) < len(leaves):
        return ANY
    kinds = {_divide(leaf)[0] for leaf in present}
    if len(kinds) > 1 or ANY in kinds:
        return ANY
    (kind,) = kinds
    all_dims = list(dict.fromkeys(_divide(leaf)[1] for leaf in present))
    return kind + (all_dims[0] if len(all_dims) == 1 else _common(all_dims))


def _common(all_dims: Sequence[str]) -> str:
    lists = [dims[1:-1].split(", ") if len(dims) > 2 else [] for dims in all_dims]
    if _ANY_DIMS in all_dims or len({(len(dims), bool(text)) for dims, text in zip(lists, all_dims, strict=True)}) > 1:
        return _ANY_DIMS
    return "[" + ", ".join(column[0] if len(set(column)) == 1 else ANY for column in zip(*lists, strict=True)) + "]"
