"""Records, for some steps of this rank, when each gradient became ready and when each bucket was reduced.

recording = Recording(patch.alive)
hook = recording.around(hook, group)  # before it is registered: those of configurations are timed as they are
recording.prepare()                 # at a step boundary; then a step that is not recorded
recording.begin(device, zero)
…                                   # some steps, recording.step() at the end of each
recording.end()
timeline = recording.taken(ends, spans)

The arithmetic stays as it is. A DDP object without a hook gets one that makes the same mean with the same collectives,
and a new reducer without a hook when the recording ends.
"""

# DDP reads a hook's annotations and wants its own types there: no `from __future__ import annotations`.
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autoddp.timing.arithmetic import HookArithmetic
from autoddp.timing.timeline import Bucket, Gradient, Span, Timeline
from autoddp.wire.started_with import started_with
from autoddp.worker.ddp.private import is_joining
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.gradients.access import parameters_of
from autoddp.worker.hooks import Hook
from autoddp.worker.hooks.bucket import GradBucket
from autoddp.worker.process.device import is_gpu, seconds_between, stamp, synchronize

_MOST = 50_000  # gradients of all ranks in one recording: they travel in one message, and take about 40 bytes each


@dataclass
class _Reduction:
    index: int
    bytes: int
    launched: Any
    ended: Any = None


class Recording:
    """Records one rank. `wrapped()` gives the script's DDP objects; call `end` also where the steps were cut off."""

    def __init__(self, wrapped: Callable[[], Sequence[Wrapped]]) -> None:
        self._wrapped = wrapped
        self._device = torch.device("cpu")
        self._on = False
        self._began = 0.0
        self._zero: Any = None
        self._handles: list[Any] = []
        self._with_exact_hook: list[Wrapped] = []
        self._no_buckets = ""
        self._parameter_bytes: tuple[int, ...] = ()
        self._steps = 0
        self._gradients: list[tuple[int, Any]] = []
        self._reductions: list[_Reduction] = []

    def around(self, hook: Hook, group: dist.ProcessGroup) -> Hook:
        """A hook that calls `hook`; while steps are recorded, it stamps its launch and its end."""

        def timed(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            if not self._on:
                return hook(state, bucket)
            buffer = bucket.buffer()
            one = _Reduction(bucket.index(), buffer.numel() * buffer.element_size(), stamp(self._device))
            self._reductions.append(one)

            def ended(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
                one.ended = stamp(self._device)
                return done.value()

            return hook(state, bucket).then(ended)

        return timed

    def prepare(self) -> None:
        """Put the hooks on; every rank calls this at the same step boundary. Nothing is recorded yet."""
        self.end()
        wrapped = self._wrapped()
        self._no_buckets = next((why for one in wrapped if (why := self._why_not_timed(one))), "")
        parameters = parameters_of(wrapped)
        self._parameter_bytes = tuple(p.numel() * p.element_size() for p in parameters)
        asking = [(number, p) for number, p in enumerate(parameters) if p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(self._ready(number)) for number, p in asking]

    def _why_not_timed(self, wrapped: Wrapped) -> str:
        """Why the object's reductions cannot be stamped; "" where they will be. It gets a hook here if it has none."""
        ddp = wrapped.ddp
        if ddp is None:
            return ""
        if wrapped.script_hook is not None:
            return "the script registers a communication hook of its own"
        if not wrapped.takes or wrapped.why_untouchable():
            return wrapped.why_untouchable() or "a model is not one that is tuned"
        if wrapped.is_sparse:
            return "gradients are sparse"
        if is_joining(ddp):
            return "the script trains inside join()"
        if wrapped.register_exact_hook(self.around):
            self._with_exact_hook.append(wrapped)
        return ""

    def _ready(self, parameter: int) -> Callable[[torch.Tensor], None]:
        def note(_parameter: torch.Tensor) -> None:
            if self._on:
                self._gradients.append((parameter, stamp(self._device)))

        return note

    def begin(self, device: torch.device, zero: Any = None) -> None:
        """Record from here on, at a step boundary. `device`: that the model is on.

        `zero` is a mark that was made just now, if the stages are recorded too: all times count from it.
        """
        self._device = device
        synchronize(device)
        self._zero = stamp(self._device) if zero is None else zero
        # On a CPU a mark is that time itself, and the device has nothing else to do before it reaches the mark.
        self._began = time.perf_counter() if is_gpu(device) else self._zero
        self._on = True

    def step(self) -> None:
        """A step has ended. Where there is no room for another one, the recording ends with this one."""
        if self._on:
            self._steps += 1
            of_step = len(self._gradients) / self._steps
            room = _MOST / int(started_with("WORLD_SIZE", "1"))
            self._on = len(self._gradients) + of_step <= room

    def end(self) -> bool:
        """Take all hooks off. Returns whether an object got a new reducer for that, whose first steps take longer."""
        self._on = False
        for handle in self._handles:
            handle.remove()
        timed, self._with_exact_hook, self._handles = self._with_exact_hook, [], []
        for wrapped in timed:
            wrapped.rebuild_as_it_is()
        return bool(timed)

    def taken(self, ends: Sequence[float], spans: Sequence[Span], arithmetic: HookArithmetic | None = None) -> Timeline:
        """What was recorded since `begin`, with the ends of its steps and their stages; comes after `end`.

        `began` is on this rank's own clock.
        """
        synchronize(self._device)
        steps = tuple(map(_rounded, ends[: self._steps]))
        gradients, reductions = self._gradients, self._reductions
        self._steps, self._gradients, self._reductions = 0, [], []
        buckets = tuple(
            Bucket(one.index, one.bytes, self._seconds(one.launched), self._seconds(one.ended))
            for one in reductions
            if one.ended is not None
        )
        stages = (Span(span.name, _rounded(span.begin), _rounded(span.end)) for span in spans)
        return Timeline(
            rank=int(started_with("RANK", "0")),
            host=socket.gethostname(),
            began=self._began,
            error=0.0,
            steps=steps,
            spans=tuple(span for span in stages if span.end <= max(steps, default=0.0)),
            gradients=tuple(Gradient(parameter, self._seconds(ready)) for parameter, ready in gradients),
            buckets=buckets,
            parameter_bytes=self._parameter_bytes,
            no_buckets=self._no_buckets or ("" if buckets else "no gradients were reduced"),
            arithmetic=arithmetic,
        )

    def _seconds(self, mark: Any) -> float:
        """Seconds from the begin of the recording to the mark."""
        return _rounded(seconds_between(self._device, self._zero, mark))


def _rounded(seconds: float) -> float:
    """`seconds` to a tenth of a microsecond: what is finer is no news, and takes room in messages."""
    return round(float(seconds), 7)
