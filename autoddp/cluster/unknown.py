"""A platform that is not known here, and that has started one process of several."""

from __future__ import annotations

from autoddp.cluster.base import Platform

_COUNTS = (("MASTER_ADDR", "RANK", "WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
"""Variables that count the processes of a job, the last one all of them: torch's own, and those of PMI."""


class Unknown(Platform):
    """A process of several, which would train by itself without a word.

    It tells nothing, because nobody knows whether its variables count nodes or ranks. torchrun's own ranks have
    LOCAL_RANK.
    """

    name = "a platform that autoddp does not know"

    @property
    def detected(self) -> bool:
        return bool(self._counts()) and not self._text("LOCAL_RANK")

    @property
    def why(self) -> str:
        return self._seen(*self._counts())

    def _counts(self) -> tuple[str, ...]:
        """The variables that are set and tell of several processes; none if there are none."""
        for names in _COUNTS:
            everywhere = self._text(names[-1])
            if all(map(self._text, names)) and everywhere is not None and everywhere.value != "1":
                return names
        return ()
