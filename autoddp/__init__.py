"""autoddp: a drop-in torchrun that finds out, on the live script, which DDP settings make it fastest.

The command line is the product; this module is what a training script may ask for:

    import autoddp
    if not autoddp.is_tuning():
        tracker.init(...)

It imports neither torch nor anything else of this package, so a script pays nothing for the question.
"""

import os

from autoddp.version import __version__

__all__ = ["__version__", "is_tuning"]


def is_tuning() -> bool:
    """Whether this process belongs to a tuning job, whose results are thrown away.

    False in the real job, under torchrun and in plain Python.
    """
    return os.environ.get("AUTODDP_TUNING") == "1"
