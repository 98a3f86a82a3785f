"""What a study needs from its caller: a function that measures one configuration on the running model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from autoddp.knobs import Configuration
from autoddp.timing import Difference
from autoddp.wire import AS_IT_IS, BlockDone, Experiment


class TrialFailed(Exception):
    """The configuration cannot run here; the text says why. The job has been started again, and the study goes on."""


INTERRUPTED = "interrupted"
"""Why tuning is over where the user has ended autoddp: nothing is launched then."""


class TuningOver(Exception):
    """The job cannot be measured any more; the text says why."""


class Diagnosis(Protocol):
    """Why the job is slow, see `diagnose.Diagnosis`."""

    @property
    def spent(self) -> float:
        """Seconds of steps that it took."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""


class Diagnose(Protocol):
    """Finds out why the job is slow."""

    def __call__(self, measure: Callable[..., BlockDone], budget: float, reduction: Difference) -> Diagnosis:
        """Ask `measure` for blocks of at most `budget` seconds. `reduction`: what steps without reduction save."""


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
        anatomy: bool = False,
        experiment: Experiment = AS_IT_IS,
        timeline: int = 0,
    ) -> BlockDone:
        """Apply `configuration`, let `warmup` steps pass, and time `steps` steps (fewer if the script is that short).

        Where the configuration accumulates N steps of the script, `warmup` and `steps` count such groups of N steps,
        and the seconds returned are those of one step of the script.

        `reduce=False` switches DDP's reduction off. `apply=False` keeps the configuration that is in effect. On
        `compare` further steps the hook of the configuration is compared with the exact mean.

        With `anatomy` the stages of each step are recorded on each rank. `experiment` is undone before the next block.
        On `timeline` further steps, which come last, each rank records a timeline; the script makes three more for it.

        Raises TrialFailed or TuningOver. A script that ends meanwhile is started again, without an error.
        """
