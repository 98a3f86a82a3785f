"""Leaves out DDP's reduction and its copies in a world of one, where the mean over the ranks is the gradient itself.

A script that is launched with one rank may still train with more: it may start ranks itself, or meet those of other
launchers. So the size of DDP's process group decides, and with more than one rank everything stays as written.

The gain is measured on the job's own steps, alternately with and without the reduction, and printed once.
"""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.log import tell
from autoddp.timing import median, speedup
from autoddp.wire.started_with import started_with
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.patch import Patch
from autoddp.worker.ddp.private import finalizes_by_hand
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.gradients.access import parameters_of
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.observe.step_clock import StepClock
from autoddp.worker.observe.stopwatch import Stopwatch

_WARMUP = 10  # steps of the job before anything is timed
_SETTLE = 3  # steps after each change: DDP rebuilds its buckets at the second
_BLOCK = 5  # steps, of which the median counts: one or two in which the script saves do not change it
_ROUNDS = 6  # each has a block with the reduction and one without


def start_bypassing() -> None:
    """Patch DDP so that it reduces nothing where its process group has one rank."""
    patch = Patch()
    switch = ReductionSwitch(patch.of)
    patch.events = _Bypass(patch, switch)
    patch.install()
    switch.install()


class _Bypass(DdpEvents):
    def __init__(self, patch: Patch, switch: ReductionSwitch) -> None:
        self._patch, self._switch = patch, switch
        self._clock = StepClock(patch.alive, self._on_step, switch.as_written)
        self._stopwatch: Stopwatch | None = None
        self._steps_left = _WARMUP
        self._with: list[float] = []
        self._without: list[float] = []
        self._leaves_as_written = False
        self._switch.on = False

    def built(self, wrapped: Wrapped) -> None:
        """Leave all as written if this model must not be changed."""
        self._clock.built(wrapped)
        if wrapped.why_untouchable():
            self._leave_as_written()

    def script_registered(self, wrapped: Wrapped) -> None:
        """Leave all as written: a communication hook of the script may do anything."""
        self._leave_as_written()

    def script_captures(self, ddp: DDP) -> None:
        """See `DdpEvents`. No step is timed from here on, because that is to wait for the device."""
        self._ask(ddp)
        self._clock.stop()
        self._switch.on = self._leaves_as_written

    def forward_begins(self, ddp: DDP) -> None:
        """See `DdpEvents`."""
        self._ask(ddp)
        self._clock.forward_begins(ddp)

    def _ask(self, ddp: DDP) -> None:
        """Leave all as written from here on if this model needs its reduction.

        It is asked before each pass, because a script may set a static graph, or another process group, at any time.
        """
        if not self._leaves_as_written and _needs_its_reduction(ddp):
            self._leave_as_written()

    def _leave_as_written(self) -> None:
        self._leaves_as_written = True
        self._clock.stop()
        self._switch.on = True

    def _on_step(self) -> None:
        if self._stopwatch is not None:
            self._stopwatch.lap()
        self._steps_left -= 1
        if self._steps_left == 0:
            if self._stopwatch is None:
                self._time()
            else:
                self._turn(self._stopwatch.stop())

    def _turn(self, seconds: list[float]) -> None:
        """A block is over: switch the reduction on or off for the next one."""
        (self._with if self._switch.on else self._without).append(median(seconds))
        self._stopwatch = None
        if len(self._without) == len(self._with) == _ROUNDS:
            self._switch.on = False
            self._clock.stop()
            self._report()
            return
        self._switch.on = not self._switch.on
        if self._switch.on:
            for wrapped in self._patch.alive():
                wrapped.forget_what_was_used()
        self._steps_left = _SETTLE

    def _time(self) -> None:
        self._stopwatch = Stopwatch(parameters_of(self._patch.alive())[0].device)
        self._stopwatch.start()
        self._steps_left = _BLOCK

    def _report(self) -> None:
        gain = speedup(self._with, self._without)
        times = f"{median(self._with) * 1e3:.3g} → {median(self._without) * 1e3:.3g} ms"
        what = f"a step is {gain} as fast, {times}" if gain.sure else f"{times} a step, no sure difference"
        if started_with("RANK", "0") == "0":
            tell(f"without DDP's reduction, of one rank, {what}")


def _needs_its_reduction(ddp: DDP) -> bool:
    """Whether this model needs its reduction: for the mean over several ranks, or for more than the mean.

    With `gradient_as_bucket_view` a gradient lies in its bucket. Where nothing is reduced it would get memory of its
    own beside the bucket's, and a model that just fits would no longer do.
    """
    alone = ddp.process_group.size() == 1
    return bool(not alone or ddp.static_graph or ddp.gradient_as_bucket_view or finalizes_by_hand(ddp))
