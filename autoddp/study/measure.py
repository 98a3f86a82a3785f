"""What a study needs from its caller: a function that measures one configuration on the running model."""

from __future__ import annotations

from typing import Protocol

from autoddp.knobs import Configuration
from autoddp.wire import BlockDone


class TrialFailed(Exception):
    """The configuration cannot run here; the text says why. The job has been started again, and the study goes on."""


class FailsWithoutReduction(TrialFailed):
    """The script as written cannot make steps without DDP's reduction, so nobody knows what could be won."""


class TuningOver(Exception):
    """The job cannot be measured any more; the text says why."""


class Measure(Protocol):
    """Times steps of the running model."""

    def __call__(
        self,
        configuration: Configuration,
        warmup: int,
        steps: int,
        *,
        reduce: bool = True,
        apply: bool = True,
        compare: int = 0,
    ) -> BlockDone:
        """Apply `configuration`, let `warmup` steps pass, and time `steps` steps (fewer if the script is that short).

        Where the configuration accumulates N steps of the script, `warmup` and `steps` count such groups of N steps,
        and the seconds returned are those of one step of the script.

        `reduce=False` switches DDP's reduction off. `apply=False` keeps the configuration that is in effect. On
        `compare` further steps the hook of the configuration is compared with the exact mean.

        Raises TrialFailed or TuningOver. A script that ends meanwhile is started again, without an error.
        """
