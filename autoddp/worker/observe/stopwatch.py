"""Seconds per step: wall clock on a CPU, events on a GPU with one synchronisation per block."""

from __future__ import annotations

from itertools import pairwise

import torch

from autoddp.worker.process.device import seconds_between, stamp, synchronize


class Stopwatch:
    """Times steps of a model on that device. Python runs ahead of a GPU, so there the device itself marks the steps.

    The process's current device may be another one, which stands idle.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """The block begins when the device has finished what is queued."""
        synchronize(self._device)
        self._marks = [stamp(self._device)]

    def lap(self) -> None:
        """A step has ended, or been queued."""
        self._marks.append(stamp(self._device))

    def stop(self) -> list[float]:
        """Seconds of each step since `start`, after one synchronisation."""
        synchronize(self._device)
        return [seconds_between(self._device, before, after) for before, after in pairwise(self._marks)]
