"""Several handlers of what happens to DDP objects, as one: in a tuning job and in a job under a recipe."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.worker.ddp.objects import DdpEvents, Wrapped


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

    def unknown_trains(self) -> None:
        """See `DdpEvents`."""
        for one in tuple(self.handlers):
            one.unknown_trains()

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
