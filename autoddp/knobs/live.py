"""What the trial runner needs from a running model; the worker implements it on DistributedDataParallel."""

from __future__ import annotations

from typing import Protocol

from autoddp.knobs.configuration import Configuration
from autoddp.knobs.fidelity import GradientError


class LiveModel(Protocol):
    """A training job whose knobs can be turned between two steps.

    Not promised: that parameters stay equal on all ranks while `reduce(False)` holds.
    """

    def turn(self, configuration: Configuration) -> None:
        """Bring `configuration` into effect from the next forward on; every rank calls it at the same step boundary."""

    def reduce(self, on: bool) -> None:
        """Switch gradient reduction off, as under `no_sync`, or on again, re-broadcasting the parameters of rank 0."""

    def compare(self, on: bool) -> None:
        """From the next step on, gradients travel through the hook and whole; or through the hook alone again."""

    def step_compared(self) -> None:
        """A step has ended in between."""

    def gradient_error(self) -> GradientError | None:
        """Of the steps compared since the last call; None where no hook of ours is in effect."""

    @property
    def compilations(self) -> int:
        """How often something was compiled in this process so far: a step in which that happens is no measure."""

    def synchronize(self) -> None:
        """Wait until the device has done all work queued so far; nothing to do on a CPU."""
