"""The stages of the script's steps: stamps at places where autoddp stands in the running script anyway.

    stages.start()
    …                       # some steps, stages.lap() at the end of each
    recorded = stages.stop()
    recorded.stages         # for each step the seconds of each of `timing.anatomy.STAGES`

At any moment the step is in exactly one stage, so the stages add up to the step. On a CUDA device a stamp is an event
on the device that the model is on, and nothing waits for the device before `stop`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from autoddp.timing.anatomy import STAGES
from autoddp.timing.timeline import Span
from autoddp.wire.experiment import Delay
from autoddp.wire.started_with import started_with
from autoddp.worker.ddp.backward import (
    after_backward_computed,
    after_this_backward,
    when_backward_begins,
    when_gradients_come,
)
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.gradients.access import GradientHandler
from autoddp.worker.observe.host_device import CopiesToDevice, DeviceWaits
from autoddp.worker.observe.kernel_accounts import PageFaultCount, PageFaults, WaitedForCpu, waited_for_cpu
from autoddp.worker.observe.loader import LoaderEvents
from autoddp.worker.process.device import current_stream, is_gpu, keep_busy, mark, seconds_between, synchronize

_END_OF_STEP = "end of step"
_COUNTS = 6
"""Counts of a step: samples, elements, iterators, seconds of the collector, those in the script's collectives, and
batches that were not ready."""
_DIGITS = 8  # of seconds: further ones only make messages longer


@dataclass(frozen=True)
class Recorded:
    """What was recorded of some steps. All times in seconds."""

    stages: tuple[tuple[float, ...], ...]
    """Seconds of each of `STAGES`, for each step."""
    spans: tuple[Span, ...]
    """The stages in their order, since the recording began."""
    ends: tuple[float, ...]
    """Ends of the steps, since the recording began."""
    samples: tuple[int, ...]
    elements: tuple[int, ...]
    begun: tuple[int, ...]
    """Iterators that the script has asked its loaders for, in each step."""
    collecting: tuple[float, ...]
    """Seconds of each step that Python's garbage collector took."""
    meeting: tuple[float, ...]
    """Seconds of each step in collectives of the script's own: a part of `exposed`."""
    waited_for_cpu: float
    """Seconds of all steps together for which threads of this process could have run and had no core."""
    helpers_waited_for_cpu: float
    """The part of `waited_for_cpu` that threads beside the one that trains have waited."""
    helpers_ran: float
    """Seconds for which these had a core."""
    page_faults: PageFaults
    """Page faults of all steps together."""
    late: tuple[int, ...] = ()
    """Batches of each step that no worker process had ready when the script asked."""
    queued: tuple[float, ...] = ()
    """Seconds that the device was behind the host at most, in each step; empty on a CPU."""
    waits: dict[str, float] = field(default_factory=dict)
    """Seconds of all steps together for which lines of the script have waited for the device: some of the longest."""


class Stages(DdpEvents, GradientHandler, LoaderEvents):
    """The stages of the steps: by the events of DDP, of loaders and of optimizers."""

    def __init__(self) -> None:
        self.on = False
        """Whether stamps are taken. Until then each of them costs one function call."""
        self.delay: Delay | None = None
        """Makes this rank late in one stage of each step, whether stamps are taken or not."""
        self.delays_on = torch.device("cpu")
        """The device of the model, for `delay`."""
        self.added: Callable[[Optimizer], bool] | None = None
        """Called before optimizers step, in each recorded step until it returns True: a part of the stage `exposed`."""
        self.rank = int(started_with("RANK", "0"))
        self._device = torch.device("cpu")
        self._stream: Any = None
        self._stage = "other"
        self._in_optimizer = self._in_backward = False
        self.trains_in_eval_mode = False
        """Whether a backward pass has followed a forward pass in eval mode."""
        self._on_parameters: list[RemovableHandle] = []
        self._delayed = self._has_added = False
        self._marks: list[tuple[str, Any]] = []
        self._counts: list[list[float]] = []
        self._page_faults = PageFaultCount()
        self._waited_for_cpu = WaitedForCpu()
        self._collecting_since = self._meeting_since = 0.0
        self._launched: list[float] = []
        self.copies = CopiesToDevice(self._copy_begins, self.enter)
        self.waits = DeviceWaits()

    # Recording

    def start(self, device: torch.device) -> None:
        """Take stamps from now on, at a step boundary. `device`: that the model is on."""
        self._device = device
        # All stamps are on one stream. On that of a copy beside the step, a stamp would come before those around it.
        self._stream = current_stream(device) if is_gpu(device) else None
        self._in_optimizer = self._in_backward = False
        self._stage = "other"
        self._delayed = self._has_added = False
        self._counts = [[0.0] * _COUNTS]
        synchronize(device)
        self._marks, self._launched = [], []
        self._put("other")
        self._waited_for_cpu = waited_for_cpu()
        self._page_faults = PageFaultCount()
        gc.callbacks.append(self._collects)
        if is_gpu(device):
            self.copies.watch()
            self.waits.watch(True)
        self.on = True

    @property
    def zero(self) -> Any:
        """The mark at which the recording began, from which its times count."""
        return self._marks[0][1]

    def lap(self) -> None:
        """A step has ended."""
        self._delayed = self._has_added = False
        if self.on:
            self._put(_END_OF_STEP)
            self._counts.append([0.0] * _COUNTS)

    def stop(self) -> Recorded:
        """Take no more stamps. What was recorded of the steps that have ended."""
        self.on = False
        self.waits.watch(False)  # in the opposite order, since both replace the same method
        self.copies.stop()
        gc.callbacks.remove(self._collects)
        waited = waited_for_cpu() - self._waited_for_cpu
        page_faults = self._page_faults.taken()
        synchronize(self._device)
        marks, self._marks = self._marks, []
        seconds = [seconds_between(self._device, marks[0][1], mark) for _, mark in marks]
        found = _recorded(marks, seconds, self._counts[:-1], waited, page_faults)
        if not is_gpu(self._device):
            return found
        return replace(found, queued=_queued(marks, seconds, self._launched), waits=self.waits.longest)

    def enter(self, stage: str) -> None:
        """Let the step be in that stage from now on."""
        if self.on:
            self._stage = stage
            self._put(stage)
        if self.delay is not None:
            self._sleep(stage)

    def _sleep(self, stage: str) -> None:
        delay = self.delay
        assert delay is not None
        if delay.rank == self.rank and delay.stage == stage and not self._delayed:
            self._delayed = True
            # Both at once: a host that runs ahead of its device makes up for a sleep, and a device that waits for its
            # host makes up for a pause. Whichever of them the step waits for is later by this.
            keep_busy(self.delays_on, delay.seconds)
            time.sleep(delay.seconds)

    @property
    def is_awake(self) -> bool:
        """Whether it has to hear of the stages: stamps are taken, or this rank is made late in one."""
        return self.on or self.delay is not None

    def _put(self, stage: str) -> None:
        if self._stream is None:
            self._marks.append((stage, time.perf_counter()))
            return
        self._marks.append((stage, mark(self._stream)))
        self._launched.append(time.perf_counter())

    def _collects(self, phase: str, _info: Any) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._collecting_since = now
        elif self._counts:
            self._counts[-1][3] += now - self._collecting_since

    @property
    def _between(self) -> str:
        """The stage outside of all others. An optimizer may run the forward and backward pass itself."""
        return "optimizer" if self._in_optimizer else "other"

    # DDP's events

    def forward_begins(self, ddp: DDP) -> None:
        """A forward pass begins; the buffers are about to be broadcast. Only passes of training are stages."""
        self._in_backward = False  # also where the one before it was broken off by an exception
        if self._trains(ddp):
            self.enter("buffers")

    def called(self, ddp: DDP, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is about to be called."""
        if self._trains(ddp):
            self.enter("forward")

    def returned(self, ddp: DDP, what: Any) -> Any:
        """The module has returned `what`: its gradient is the first sign of the backward pass.

        Where the module returns an object in which no tensors are found, the first gradient of a parameter is.
        """
        if not (self.is_awake and torch.is_grad_enabled()):
            return what
        in_eval_mode = not ddp.training

        def begins() -> None:
            self.trains_in_eval_mode |= in_eval_mode
            self._backward_begins()

        if not when_backward_begins(what, begins):
            self._watch_no_parameters()
            self._on_parameters = when_gradients_come(ddp.parameters(), begins)
        return what

    def _trains(self, ddp: DDP) -> bool:
        """Whether a forward pass that begins now is one of training.

        In eval mode it may be an evaluation; it is one until a backward pass has followed. Some scripts train in this
        mode, because dropout and BatchNorm are to stand still.
        """
        return self.is_awake and torch.is_grad_enabled() and (ddp.training or self.trains_in_eval_mode)

    def _backward_begins(self) -> None:
        """A gradient of an output has come, which may not be the first one of this backward pass.

        A forward pass may have several of them: a gradient penalty runs `autograd.grad` before the backward pass.
        """
        if not self.is_awake or self._in_backward:
            return
        self._in_backward = True
        self.enter("backward")
        after_backward_computed(lambda: self.enter("exposed"))
        after_this_backward(self._backward_ends)

    def _backward_ends(self) -> None:
        self._in_backward = False
        self._watch_no_parameters()
        self.enter(self._between)

    def _watch_no_parameters(self) -> None:
        for handle in self._on_parameters:
            handle.remove()
        self._on_parameters = []

    def collective_begins(self) -> str:
        """The script calls a collective of its own; the stage that it interrupts."""
        before = self._stage
        if self.is_awake:
            self._meeting_since = time.perf_counter()
            self.enter("exposed")
        return before

    def collective_ends(self, before: str) -> None:
        """The collective has ended; the stage `before` goes on."""
        if self.is_awake:
            self.enter(before)
        if self.on:
            self._counts[-1][4] += time.perf_counter() - self._meeting_since

    def _copy_begins(self) -> str:
        before = self._stage
        self.enter("copy")
        return before

    # Those of optimizers

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """See `GradientHandler`."""
        if self.added is not None and self.on and not self._has_added:
            self.enter("exposed")
            self._has_added = self.added(optimizer)
            self.enter(self._between)
        if self.is_awake:
            self._in_optimizer = True
            self.enter("optimizer")

    def after_step(self, optimizer: Optimizer) -> None:
        """See `GradientHandler`."""
        self.optimizer_steps += 1
        if self.is_awake:
            self._in_optimizer = False
            self.enter("other")

    # Those of loaders

    def wait_begins(self) -> None:
        """See `LoaderEvents`."""
        if self.is_awake:
            self.enter("data")

    def wait_ends(self) -> None:
        """See `LoaderEvents`."""
        if self.is_awake:
            self.enter(self._between)

    def gave(self, samples: int, elements: int, was_ready: bool = False) -> None:
        """See `LoaderEvents`."""
        if self.on:
            self._counts[-1][0] += samples
            self._counts[-1][1] += elements
            self._counts[-1][5] += not was_ready

    def iterator_made(self) -> None:
        """See `LoaderEvents`."""
        if self.on:
            self._counts[-1][2] += 1


def _recorded(
    marks: Sequence[tuple[str, Any]],
    seconds: Sequence[float],
    counts: Sequence[Sequence[float]],
    waited: WaitedForCpu,
    page_faults: PageFaults,
) -> Recorded:
    spans: list[Span] = []
    ends: list[float] = []
    steps: list[dict[str, float]] = [dict.fromkeys(STAGES, 0.0)]
    stage = marks[0][0]
    for (began, ended), (following, _) in zip(pairwise(seconds), marks[1:], strict=True):
        steps[-1][stage] += ended - began
        spans.append(Span(stage, began, ended))
        if following == _END_OF_STEP:
            ends.append(ended)
            steps.append(dict.fromkeys(STAGES, 0.0))
        else:
            stage = following
    samples, elements, begun, collecting, meeting, late = zip(*counts, strict=True) if counts else ((),) * _COUNTS
    return Recorded(
        stages=tuple(tuple(round(s, _DIGITS) for s in of_step.values()) for of_step in steps[: len(ends)]),
        spans=tuple(span for span in spans if span.end > span.begin and span.end <= (ends or [0.0])[-1]),
        ends=tuple(ends),
        samples=tuple(map(int, samples)),
        elements=tuple(map(int, elements)),
        begun=tuple(map(int, begun)),
        collecting=tuple(collecting),
        meeting=tuple(meeting),
        late=tuple(map(int, late)),
        waited_for_cpu=waited.trains + waited.helpers,
        helpers_waited_for_cpu=waited.helpers,
        helpers_ran=waited.helpers_ran,
        page_faults=page_faults,
    )


def _queued(marks: Sequence[tuple[str, Any]], seconds: Sequence[float], launched: Sequence[float]) -> tuple[float, ...]:
    """The most seconds that the device has come to a mark later than the host, for each step.

    The first mark was put on a device without work, so there the two clocks agree.
    """
    found, most = [], 0.0
    for (name, _), on_device, on_host in zip(marks, seconds, launched, strict=True):
        most = max(most, on_device - (on_host - launched[0]))
        if name == _END_OF_STEP:
            found.append(round(most, _DIGITS))
            most = 0.0
    return tuple(found)
