"""Every cause that a diagnosis knows, one file each.

A file has the cause as `CAUSE`, and the file's name is that of the cause. The package lists its files: to add a cause,
add a file.
"""

from __future__ import annotations

import importlib
import pkgutil
import statistics

from autoddp.diagnose.cause import Cause, Surroundings, Suspicion
from autoddp.diagnose.evidence import Evidence
from autoddp.diagnose.findings import WORTHWHILE

CAUSES: dict[str, Cause] = {
    found.name: importlib.import_module(f"{__name__}.{found.name}").CAUSE for found in pkgutil.iter_modules(__path__)
}
"""Each cause by its name. The names are part of what `autoddp diagnose --json` promises."""


def suspicions(evidence: Evidence, around: Surroundings) -> list[Suspicion]:
    """All that is suspected, the largest guess first; nothing below `WORTHWHILE` of a step.

    What explains a part of `exposed_communication` comes before it: where time is short, that is what can be mended.
    """
    found = [one for cause in CAUSES.values() for one in cause.suspect(evidence, around)]
    least = WORTHWHILE * statistics.fmean(evidence.steps)
    parts = [one.guess for one in found if CAUSES[one.cause].explains == "part" and one.guess >= least]

    def place(one: Suspicion) -> tuple[float, bool]:
        is_whole = one.cause == "exposed_communication"
        return -min([one.guess, *parts] if is_whole else [one.guess]), is_whole

    return sorted((one for one in found if one.guess >= least), key=place)


def in_words(cause: str) -> str:
    """The cause of that name for people who do not know our names; an unknown name as it is."""
    return CAUSES[cause].in_words if cause in CAUSES else cause
