"""A model is what its parameters are, not the DDP object around them: a script may build a new object every epoch.

What a job learns is kept by the model, so that it holds for the next DDP object. There are two kinds of it:

- What is known of gradients (a hook is not good enough for them, the script keeps them) holds for all models of one
  `description`: the same names, shapes and types of parameters, in the same order, on the same ranks. A model with new
  weights, as in each fold of a cross-validation, has such gradients too.
- What belongs to one training (how many reductions there were, the error that PowerSGD still owes) holds for the same
  tensors alone: `keep`. A model with new weights begins its training anew.

Both are the same on all ranks, because all ranks build the same objects in the same order. Whether an object still
exists is not: each rank's garbage collector frees what the script drops at another time.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from autoddp.worker.ddp.private import ignored_names

Kept = TypeVar("Kept")


class Model:
    """`model.keep(Errors)` is the one object of that class that is kept of this model; it is made at the first call."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], ranks: Sequence[int] = ()) -> None:
        """`parameters` by name, in the order in which DDP reduces them, over the processes `ranks`."""
        named = (f"{name} {tuple(p.shape)} {p.dtype}" for name, p in parameters.items())
        text = ";".join((*map(str, ranks), *named))
        self.description = hashlib.sha256(text.encode()).hexdigest()[:16]
        """Equal for models of the same parameters."""
        self._kept: dict[type, Any] = {}
        kept = self._kept  # not `self`: what is kept may be as large as the model, and must go when its tensors go
        self._names = {id(p): name for name, p in parameters.items()}
        self._parameters = [weakref.ref(p, lambda _: kept.clear()) for p in parameters.values()]

    @property
    def is_there(self) -> bool:
        """Whether all of its tensors still exist."""
        return all(reference() is not None for reference in self._parameters)

    def has(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether these are its tensors."""
        same = (reference() is p for reference, p in zip(self._parameters, parameters, strict=False))
        return len(parameters) == len(self._parameters) and all(same)

    def name(self, identity: int) -> str:
        """The name of the parameter with that identity; "" if it is none of this model."""
        return self._names.get(identity, "")

    def keep(self, kind: type[Kept]) -> Kept:
        """What is kept of that class. It must hold neither the tensors nor a DDP object nor its process group."""
        found: Kept = self._kept.setdefault(kind, kind())
        return found


def parameters_digest(module: nn.Module) -> str:
    """A digest (16 hex digits) of the shapes and types of the parameters that DDP reduces, in order."""
    ignored = ignored_names(module)
    reduced = [p for name, p in module.named_parameters() if name not in ignored and p.requires_grad]
    text = ";".join(f"{tuple(p.shape)}{p.dtype}" for p in reduced)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
