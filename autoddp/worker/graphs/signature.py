"""How a module is called: everything about its arguments that a captured graph takes for granted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree  # what torch.cuda.graphs itself takes arguments apart with

CONSTANTS = (bool, int, float, str, type(None), torch.dtype)
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Names of the attributes that torch gives each module."""
_FIELDS = 256  # of an object, a dictionary or a list with settings; one with more is a table, such as a vocabulary


class Unfit(Exception):
    """No graph can stand for this; its text says why in a few words."""


@dataclass(frozen=True)
class TensorLike:
    """What is known of a tensor, but for its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True)
class Signature:
    """Equal for calls that one graph can serve."""

    structure: pytree.TreeSpec
    leaves: tuple[object, ...]
    """What is known of each tensor; of anything else its type and value."""

    @property
    def tensors(self) -> list[TensorLike]:
        """What is known of the tensors among the arguments, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorLike)]

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments again, with these tensors."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, TensorLike) else leaf[1] for leaf in self.leaves]  # type: ignore[index]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs


def signature_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Signature, list[torch.Tensor]]:
    """A call's signature and its tensors in order. Raises Unfit for arguments that may hide other tensors."""
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return Signature(structure, tuple(map(_known_of, leaves))), [x for x in leaves if isinstance(x, torch.Tensor)]


def _known_of(leaf: object) -> object:
    if type(leaf) is torch.Tensor:
        return TensorLike(leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
    if isinstance(leaf, CONSTANTS):
        return type(leaf), leaf
    raise Unfit(f"an argument is of type {type(leaf).__name__}")


def surroundings(device: str) -> tuple[object, ...]:
    """What the kernels of a call on a device of this type depend on besides its arguments, parameters and buffers.

    A script may switch each of them around a part of its model.
    """
    return (
        # Of a disabled autocast too torch remembers what a script has named: it has no effect.
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        torch.get_default_dtype(),
        *_float32_arithmetic(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )


def settings_of(modules: Sequence[nn.Module]) -> list[tuple[dict[Any, Any], Any, Any]]:
    """The modules' own numbers, words, switches and objects, and what such objects hold: where, which name, what.

    A script may cool a temperature in a configuration that all its layers share. Lists and tuples of numbers, as of the
    weights of several losses, are settings too.
    """
    own = [(vars(module), name, value) for module in modules for name, value in vars(module).items()]
    objects = [one for one in own if one[1] not in OF_EVERY_MODULE and _fields_of(one[2]) is not None]
    inside = {id(fields): fields for *_, value in objects if (fields := _fields_of(value)) is not None}
    held = [(fields, name, value) for fields in inside.values() for name, value in fields.items()]
    return objects + [one for one in (*own, *held) if _is_setting(one[2])]


def _is_setting(value: object) -> bool:
    """Whether it is a number, a word or a switch, or some of these in a row."""
    if isinstance(value, (list, tuple)):
        return len(value) <= _FIELDS and all(isinstance(one, CONSTANTS) for one in value)
    return isinstance(value, CONSTANTS)


def _fields_of(value: object) -> dict[Any, Any] | None:
    """A dictionary of the script's, or the fields of a plain object; None for what holds no settings."""
    if isinstance(value, (nn.Module, torch.Tensor)):
        return None
    try:
        fields = value if type(value) is dict else object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return fields if type(fields) is dict and len(fields) <= _FIELDS else None


def _float32_arithmetic() -> tuple[object, ...]:
    """How a GPU computes with float32: with all of its bits, or with fewer (TF32).

    From torch 2.9 on each kind of operation has a setting of its own. Once a script has set one of these, torch raises
    an error where the older settings are read.
    """
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    if not hasattr(cudnn, "conv"):
        return torch.get_float32_matmul_precision(), cudnn.allow_tf32
    return tuple(one.fp32_precision for one in (cuda.matmul, cudnn.conv, cudnn.rnn))


def tensors_of(returned: Any) -> tuple[list[torch.Tensor], pytree.TreeSpec]:
    """What a module returns, taken apart. Raises Unfit if it is not made of tensors."""
    leaves, structure = pytree.tree_flatten(returned)
    for leaf in leaves:
        if type(leaf) is not torch.Tensor:
            raise Unfit(f"it returns something of type {type(leaf).__name__}")
    return leaves, structure


def copied(returned: Any) -> Any:
    """What a module returned, with a copy of each tensor; backward goes through the copy to what was copied."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, returned)


def put_together(tensors: Sequence[torch.Tensor], structure: pytree.TreeSpec) -> Any:
    """The inverse of `tensors_of`."""
    return pytree.tree_unflatten(list(tensors), structure)
