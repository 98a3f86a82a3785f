"""What the study asks of whoever runs the job: measure one configuration on the running model."""

from __future__ import annotations

from typing import Protocol

from autoddp.knobs import Configuration
from autoddp.wire import BlockDone


class TrialFailed(Exception):
    """The configuration cannot run here; its text says why. The job has been started again, the study goes on."""


class TuningOver(Exception):
    """The running model is gone for good; its text says why."""


class Measure(Protocol):
    """Times steps of the running model."""

    def __call__(
        self,
        configuration: Configuration,
        warmup: int,
        steps: int,
        *,
        reduce: bool = True,
        turn: bool = True,
        compare: int = 0,
    ) -> BlockDone:
        """Turn to `configuration`, let `warmup` steps pass, time `steps` steps (fewer if the script is that short).

        Where the configuration makes one step of several of the script's, that many are counted as one, and its seconds
        are those of one of the script's.

        On `compare` more steps its hook is compared with the exact mean.

        Raises TrialFailed or TuningOver. A script that ends meanwhile is started again without a word.
        """
