"""The interface of what one knob, or a few related ones, change in a running process."""

from __future__ import annotations

import abc

from autoddp.knobs import AS_WRITTEN, Configuration


class Effect(abc.ABC):
    """One kind of change, which trials and the real job apply and undo. `live_ddp.py` has the list of all.

    threads.apply(Configuration({"threads": 2}))
    threads.undo()
    """

    after_watching = False
    """Whether the effect can be applied only after some of the script's steps were observed."""

    @abc.abstractmethod
    def apply(self, configuration: Configuration) -> None:
        """Apply the values of these knobs in `configuration`; a knob without a value is set as the script wrote it.

        Every rank calls this between the same two steps, or before the first model is built. Raises RuntimeError if the
        values cannot be applied; a later `apply` or `undo` still works.
        """

    def undo(self) -> None:
        """Set the knobs as the script wrote them."""
        self.apply(AS_WRITTEN)
