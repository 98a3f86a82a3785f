"""Handlers of what happens to the script's DDP objects: their interface, and several of them as one.

A tuning job and a job under a recipe have one list of handlers each.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.worker.ddp.wrapped import Wrapped

UNPICKLED = "the script trains a DDP object that it has unpickled or copied"
"""See `DdpEvents.unknown_trains`."""

IN_PYTHON = "torch.compile's python_reducer reduces the gradients of a DDP object"
"""See `DdpEvents.python_reduces`."""

PASSES_BY = "the script prepares the reducer of a DDP object itself, where no forward pass of the object does"
"""See `ReductionSwitch.script_prepares`."""

CAPTURES = "the script captures passes of DDP in a CUDA graph of its own"
"""See `DdpEvents.script_captures`."""


class DdpEvents:
    """Handles what happens to the script's DDP objects, in the order of a training step.

    The methods do nothing here; subclasses override those that they need.
    """

    def takes(self, module: nn.Module) -> bool:
        """Whether the object that is about to be built around `module` is built with `Patch.configuration`.

        If not, it is built as the script wrote it.
        """
        return True

    def built(self, wrapped: Wrapped) -> None:
        """An object has been built."""

    def script_registered(self, wrapped: Wrapped) -> None:
        """The script has registered a communication hook of its own."""

    def forget(self, wrapped: Wrapped) -> None:
        """The object is about to be as the script wrote it again, and stays so."""

    def unknown_trains(self) -> None:
        """An object that its constructor has not built, but pickle or `copy`, begins a forward pass of training.

        It stays as the script has it, and there are no other events of it.
        """

    def python_reduces(self) -> None:
        """An object was built whose passes torch.compile traces whole, and would trace whatever is called in them too.

        It stays as the script has it, and there are no other events of it.
        """

    def script_captures(self, ddp: DDP) -> None:
        """A forward pass begins that the script captures in a CUDA graph. There are no other events of this pass.

        Later the graph repeats what DDP does in it, with no Python. Whoever waits for the device now spoils the graph.
        """

    def forward_begins(self, ddp: DDP) -> None:
        """A forward pass begins; DDP has not yet prepared it."""

    def called(self, ddp: DDP, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is about to be called with these arguments."""

    def returned(self, ddp: DDP, what: Any) -> Any:
        """The module has returned `what`; the script gets the return value of this method."""
        return what


class DdpHandlers(DdpEvents):
    """Passes each event on to all handlers, in the order of the list.

    patch.events = DdpHandlers([clock, stages])

    Where a handler changes what the script gets, the next one is given that. `takes` is not passed on: whether an
    object gets the configuration is one decision. A handler may come or go at an event, and is told of the next one.
    """

    def __init__(self, handlers: list[DdpEvents]) -> None:
        self.handlers = handlers

    def built(self, wrapped: Wrapped) -> None:
        """See `DdpEvents`."""
        for one in tuple(self.handlers):
            one.built(wrapped)

    def script_registered(self, wrapped: Wrapped) -> None:
        """See `DdpEvents`."""
        for one in tuple(self.handlers):
            one.script_registered(wrapped)

    def forget(self, wrapped: Wrapped) -> None:
        """See `DdpEvents`."""
        for one in tuple(self.handlers):
            one.forget(wrapped)

    def unknown_trains(self) -> None:
        """See `DdpEvents`."""
        for one in tuple(self.handlers):
            one.unknown_trains()

    def python_reduces(self) -> None:
        """See `DdpEvents`."""
        for one in tuple(self.handlers):
            one.python_reduces()

    def script_captures(self, ddp: DDP) -> None:
        """See `DdpEvents`."""
        for one in tuple(self.handlers):
            one.script_captures(ddp)

    def forward_begins(self, ddp: DDP) -> None:
        """See `DdpEvents`."""
        for one in tuple(self.handlers):
            one.forward_begins(ddp)

    def called(self, ddp: DDP, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `DdpEvents`."""
        for one in tuple(self.handlers):
            one.called(ddp, args, kwargs)

    def returned(self, ddp: DDP, what: Any) -> Any:
        """See `DdpEvents`."""
        for one in tuple(self.handlers):
            what = one.returned(ddp, what)
        return what
