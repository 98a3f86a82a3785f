"""What a forward pass is called with, in the words of `recipe.inputs`: types and dimensions, never a value."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.recipe import merged, with_model
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.held import entries_of, field_of, parts_of
from autoddp.worker.ddp.private import device_of, is_joining
from autoddp.worker.ddp.wrapped import Wrapped

_MOST = 64  # inputs of one model; a batch of more is described by the first of them
_DEEPEST = 6  # containers inside each other
_NAMED = 32  # entries of a mapping that are told apart by their keys
_LONGEST = 60  # characters of a key


def inputs_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str) -> tuple[str, ...]:
    """One text for each input; the same call gives the same texts. `device` is the model's type of device.

    What is no container of Python's own is described by its type alone: looking into it might have effects. A mapping
    of the script's may read or augment a field when it is asked for it, and the model would train on other numbers.
    """
    named = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
    try:
        found = [f"{path}: {leaf}" for path, leaf in itertools.islice(_leaves(named), _MOST)]
    except Exception:  # a container of the script's own may raise anything, which the model might never have seen
        return ("inputs: unreadable",)
    if torch.is_autocast_enabled(device):
        found.append(f"autocast: {_name(torch.get_autocast_dtype(device))}")
    return tuple(found) or ("inputs: none",)


def _leaves(named: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    for name, value in named.items():
        path = f"{prefix}{name}"
        if isinstance(value, torch.Tensor):
            yield path, _tensor(value)
        elif (inside := _named_parts(value)) is not None and depth < _DEEPEST:
            yield from _leaves(inside, f"{path}.", depth + 1)
        elif (several := _alike_parts(value)) is not None and depth < _DEEPEST:
            yield from _together(several, f"{path}[]", depth + 1)
        else:
            yield path, _plain(type(value).__name__)


def _named_parts(value: Any) -> dict[str, Any] | None:
    """Parts that are told apart by name: of a tuple, a dataclass, a mapping with a few keys that are texts."""
    if isinstance(value, tuple):
        return {str(place): part for place, part in enumerate(parts_of(value))}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: field_of(value, field.name) for field in dataclasses.fields(value)}
    inside = _first_entries(value)
    if inside is not None and len(inside) <= _NAMED and all(isinstance(key, str) for key in inside):
        return {_plain(key): part for key, part in inside.items()}
    return None


def _alike_parts(value: Any) -> list[Any] | None:
    """Parts whose number says nothing of the job: of a list, or of a mapping with other or many keys."""
    if isinstance(value, list):
        return list(itertools.islice(parts_of(value), _MOST))
    inside = _first_entries(value)
    return None if inside is None else list(inside.values())


def _first_entries(value: Any) -> dict[Any, Any] | None:
    """The first entries of a mapping, more than are told apart by name; None for anything else."""
    entries = entries_of(value)
    return None if entries is None else dict(itertools.islice(entries, _MOST))


def _together(parts: list[Any], path: str, depth: int) -> Iterator[tuple[str, str]]:
    """What is true of all parts; of none there is nothing to say but that."""
    texts = [[f"{inner}: {leaf}" for inner, leaf in _leaves({path: part}, depth=depth)] for part in parts]
    for text in merged(*texts):
        inner, _, leaf = text.rpartition(": ")
        yield inner, leaf


def _tensor(value: torch.Tensor) -> str:
    # A dimension of a nested tensor is no number.
    dims = (str(int(size)) if isinstance(size, int) else "*" for size in value.shape)
    return f"{_name(value.dtype)}[{', '.join(dims)}]"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain(text: str) -> str:
    """`text` without what would spoil a line, or how `recipe.inputs` divides it."""
    kept = "".join(letter for letter in text[:_LONGEST] if letter.isprintable() and letter not in ":[]")
    return kept or "?"


class InputsSeen(DdpEvents):
    """What all reducing forward passes of this process had in common, model by model.

    patch.events = seen = InputsSeen(patch.of, switch.as_written)
    seen.texts(["0123…", "89ab…"])              # of the models with these digests, in their order
    """

    def __init__(self, wrapped: Callable[[DDP], Wrapped | None], reduces: Callable[[DDP], bool]) -> None:
        self._wrapped, self._reduces = wrapped, reduces
        self._of: dict[str, tuple[str, ...]] = {}
        self._last: dict[str, tuple[str, ...]] = {}

    def called(self, ddp: DDP, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `DdpEvents`."""
        wrapped = self._wrapped(ddp)
        if wrapped is None or not (compares(ddp) and self._reduces(ddp)):
            return
        digest = wrapped.digest
        now = inputs_of(args, kwargs, device_of(ddp).type)
        if now != self._last.get(digest):  # else nothing is new, and nothing is merged
            self._last[digest] = now
            self._of[digest] = merged(self._of.get(digest, ()), now)

    def texts(self, digests: list[str]) -> tuple[str, ...]:
        """The texts of the models with these digests, in their order."""
        found = [with_model(self._of.get(digest, ()), n, len(digests)) for n, digest in enumerate(digests)]
        return tuple(text for texts in found for text in texts)


def compares(ddp: DDP) -> bool:
    """Whether a forward pass that begins now is one of training: one rank alone may evaluate, with other inputs."""
    return torch.is_grad_enabled() and ddp.training and not is_joining(ddp)
