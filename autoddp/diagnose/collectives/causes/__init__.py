"""Every cause of slow communication that is known, one file each. To add one, add a file with its `CAUSE`."""

from __future__ import annotations

import importlib
import pkgutil

from autoddp.diagnose.collectives.cause import Cause, Job, Suspicion

CAUSES: dict[str, Cause] = {
    found.name: importlib.import_module(f"{__name__}.{found.name}").CAUSE for found in pkgutil.iter_modules(__path__)
}
"""Each cause by its name. The names are part of what `autoddp diagnose --json` promises."""


def suspicions(job: Job) -> list[Suspicion]:
    """All that is suspected, the largest guess first."""
    found = [one for cause in CAUSES.values() for one in cause.suspect(job)]
    return sorted(found, key=lambda one: -one.guess)
