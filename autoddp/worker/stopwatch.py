"""Seconds per step: wall clock on a CPU, events on a CUDA device with one synchronisation per block."""

from __future__ import annotations

import time

import torch


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
        return [after - before for before, after in zip(self._marks, self._marks[1:], strict=False)]


class CudaStopwatch:
    """For a CUDA job: Python runs ahead of the device, so the device itself marks the steps."""

    def start(self) -> None:
        """The block begins when the device has finished what is queued."""
        torch.cuda.synchronize()
        self._marks = [self._mark()]

    def lap(self) -> None:
        """A step has been queued."""
        self._marks.append(self._mark())

    def stop(self) -> list[float]:
        """Seconds of each step since `start`, after one synchronisation."""
        torch.cuda.synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]

    @staticmethod
    def _mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


Stopwatch = WallStopwatch | CudaStopwatch


def stopwatch_for(device_type: str) -> Stopwatch:
    """The stopwatch for a device type as torch names it."""
    return CudaStopwatch() if device_type == "cuda" else WallStopwatch()
