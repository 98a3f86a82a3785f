"""Seconds per step: wall clock on a CPU, events on a CUDA device with one synchronisation per block."""

from __future__ import annotations

import time
from itertools import pairwise

import torch

from autoddp.worker.process.device import current_stream, is_gpu, mark, synchronize


class WallStopwatch:
    """For a CPU job: the step is over when Python says so."""

    def start(self) -> None:
        """The block begins now."""
        self._marks = [time.perf_counter()]

    def lap(self) -> None:
        """A step has ended."""
        self._marks.append(time.perf_counter())

    def stop(self) -> list[float]:
        """Seconds of each step since `start`."""
        return [after - before for before, after in pairwise(self._marks)]


class CudaStopwatch:
    """For a CUDA job: Python runs ahead of the device, so the device itself marks the steps.

    `device` is the one that the model is on: the process's current device may be another, which stands idle.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """The block begins when the device has finished what is queued."""
        synchronize(self._device)
        self._marks = [mark(current_stream(self._device))]

    def lap(self) -> None:
        """A step has been queued."""
        self._marks.append(mark(current_stream(self._device)))

    def stop(self) -> list[float]:
        """Seconds of each step since `start`, after one synchronisation."""
        synchronize(self._device)
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._marks)]


Stopwatch = WallStopwatch | CudaStopwatch


def stopwatch_for(device: torch.device) -> Stopwatch:
    """The stopwatch for a model on that device."""
    return CudaStopwatch(device) if is_gpu(device) else WallStopwatch()
