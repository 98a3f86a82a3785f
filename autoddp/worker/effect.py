"""What one knob, or a few that belong together, change in this process."""

from __future__ import annotations

import abc

from autoddp.knobs import AS_WRITTEN, Configuration


class Effect(abc.ABC):
    """Brought in and taken back in a trial and in the real job alike. `live_ddp.py` has the list of all.

    threads.apply(Configuration({"threads": 2}))
    threads.undo()
    """

    after_watching = False
    """Whether it can be brought in only after some of the script's steps were watched."""

    @abc.abstractmethod
    def apply(self, configuration: Configuration) -> None:
        """Bring in what `configuration` says of these knobs; as the script wrote it, where it says nothing of them.

        Every rank calls it at the same step boundary, or before the first model is built. RuntimeError where it cannot
        be brought in; the next `apply` or `undo` works all the same.
        """

    def undo(self) -> None:
        """As the script wrote it."""
        self.apply(AS_WRITTEN)
