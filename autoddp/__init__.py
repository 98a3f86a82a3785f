"""autoddp: a drop-in torchrun that finds out, on the live script, which DDP settings make it fastest.

The command line is the product; this module is what a training script may ask for, and what reads a run's results:

    import autoddp
    if not autoddp.is_tuning():
        tracker.init(...)

    autoddp.load_run(".autoddp/20261126-033334-host0-14540").trials

It imports neither torch nor anything else of this package, so a script pays nothing for the question.
"""

import os
from importlib import import_module
from typing import Any

from autoddp.version import __version__

__all__ = ["__version__", "is_tuning", "load_run"]


def is_tuning() -> bool:
    """Whether this process belongs to a tuning job, whose results are thrown away.

    False in the real job, under torchrun and in plain Python.
    """
    return os.environ.get("AUTODDP_TUNING") == "1"


def load_run(path: str | os.PathLike[str]) -> Any:
    """Read the results of a run: `path` is its folder, or its summary.json. Returns a `report.run.Run`.

    NothingReadable where that is no summary of this version's schema, OSError where it cannot be read.
    """
    return import_module("autoddp.report.run").load_run(path)  # imported by no script that does not ask
