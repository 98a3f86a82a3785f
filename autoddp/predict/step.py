"""The seconds of a step under a configuration: gradients become ready, buckets are launched, hooks compute.

    step_seconds(profile, Configuration({"bucket_cap_mb": 50}))

A step begins when the reductions of the step before it have ended, on all ranks at the same time. So does each pass of
a step with several backward passes, because DDP waits for the reductions at the end of a pass. DDP launches its
buckets in order. On a CPU a hook computes in the thread of the backward pass, which goes on only after that; on a GPU
it computes beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoddp.bench import LinkModel
from autoddp.knobs import BY_NAME, TRIED_FIRST, Configuration, Knob, Reach
from autoddp.knobs.computing import CUDA_GRAPHS, WHOLE_MODEL
from autoddp.knobs.ddp_arguments import BATCHED_GRAD_COPY, BROADCAST_BUFFERS, GRADIENT_AS_BUCKET_VIEW
from autoddp.knobs.hook import POWERSGD_BATCHED, POWERSGD_FACTORS, CommHook, StepModel, hook_of
from autoddp.knobs.micro_batches import DEFER_REDUCTIONS
from autoddp.predict.coefficients import Coefficients
from autoddp.predict.network import Link, Network
from autoddp.predict.plan import Cuts, Gradient, buckets
from autoddp.predict.profile import AT_ONCE, Profile

_OF_EACH_STEP = frozenset({"pace", "latency", "per_byte", "sharing", "burst", "stretch", "copying"})
_OF_A_HOOK: dict[StepModel, frozenset[str]] = {
    "": frozenset(),
    "16 bits": frozenset({"rounding", "call"}),
    "low rank": frozenset({"low_rank", "further_rank", "call", "shape", "further_row", "wake", "crowding"}),
}
"""`CommHook.predicted_as` → the further coefficients on which a step with such a hook depends."""
_BATCHED_SAVES = 0.5  # of the copies' seconds: batched_grad_copy makes one copy of many, in one direction


def predictable(profile: Profile, configuration: Configuration) -> bool:
    """Whether the model knows what the configuration does in this job: all its knobs, and its hook."""
    if BROADCAST_BUFFERS.name in configuration or any(BY_NAME[name].reach is Reach.START for name in configuration):
        return False
    # Deferred over another number of passes, some reductions would come where the optimizer reads the gradients.
    if DEFER_REDUCTIONS.of(configuration) not in (None, profile.reductions):
        return False
    hook = hook_of(configuration)
    return hook is None or bool(hook.predicted_as)


def coefficients_of(configuration: Configuration) -> frozenset[str]:
    """The names of the coefficients on which a step under this configuration depends, apart from `computing`."""
    hook = hook_of(configuration)
    return _OF_EACH_STEP | _OF_A_HOOK[hook.predicted_as if hook else ""]


def computing_key(configuration: Configuration) -> str:
    """The settings of a configuration that change computing itself, as text; "" if there are none."""
    names = {knob.name for knob in TRIED_FIRST}
    return " ".join(f"{name}={value}" for name, value in configuration.items() if name in names)


def step_seconds(
    profile: Profile, configuration: Configuration, coefficients: Coefficients | None = None
) -> float | None:
    """Seconds of a step of the script; None where the model does not know the configuration."""
    return Steps(profile).seconds(configuration, coefficients or profile.coefficients)


class Steps:
    """The steps of one job, for many coefficients: what does not depend on them is worked out once.

    steps = Steps(profile)
    steps.seconds(configuration, coefficients)       # as step_seconds(profile, configuration, coefficients)
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._plans: dict[Configuration, _Plan | None] = {}

    def seconds(self, configuration: Configuration, found: Coefficients) -> float | None:
        """Seconds of a step of the script; None where the model does not know the configuration."""
        profile = self._profile
        if configuration not in self._plans:
            known = predictable(profile, configuration)
            self._plans[configuration] = _plan(profile, configuration) if known else None
        plan = self._plans[configuration]
        if plan is None:
            return None
        slower = found.pace * found.computing.get(plan.computing_key, 1.0)
        fixed, of_pass = profile.fixed * slower, (profile.before + profile.backward) * slower
        reducing = _reducing(profile, plan, found, slower, fixed + (profile.passes - plan.reductions) * of_pass)
        if plan.reductions > 1:  # each further pass begins where the one before it has ended, so they all take as long
            reducing += (plan.reductions - 1) * _reducing(profile, plan, found, slower, 0.0)
        # A deferred reduction has its broadcast all the same: the buffers are to be those of the script as written.
        reducing += profile.reductions * _broadcast(profile, found)
        return (reducing + (plan.together - 1) * (fixed + profile.passes * of_pass)) / plan.together


def computing_seconds(profile: Profile, configuration: Configuration) -> float:
    """Seconds of a step under the configuration in which gradients travel in no time."""
    return profile.computing * profile.coefficients.computing.get(computing_key(configuration), 1.0)


@dataclass(frozen=True)
class _Bucket:
    """One of the buckets into which a configuration cuts the gradients."""

    latest: float
    """Seconds of the backward pass after which it is complete, and all before it: DDP launches buckets in order."""
    bytes: int
    elements: int
    factors: tuple[float, float] = (0, 0)
    """Bytes of the two reductions that PowerSGD makes for it."""
    shapes: int = 0
    """Number of the shapes that its matrices have, under PowerSGD."""
    is_last: bool = False


@dataclass(frozen=True)
class _Plan:
    """What a step does under a configuration, however long that takes."""

    buckets: tuple[_Bucket, ...]
    bytes: int
    copies: float
    """The part of the copies between gradients and buckets that is made, by the configuration or by the script."""
    hook: CommHook | None
    rank: int
    computing_key: str
    reductions: int
    together: int
    """So many steps of the script are one."""


def _plan(profile: Profile, configuration: Configuration) -> _Plan:
    hook = hook_of(configuration)
    rank: Any = configuration[hook.rank_knob] if hook and hook.predicted_as == "low rank" else 0
    batched, width = bool(POWERSGD_BATCHED.of(configuration)), 2 if POWERSGD_FACTORS.of(configuration) else 0
    at_end = CUDA_GRAPHS.of(configuration) == WHOLE_MODEL  # one graph has all gradients ready at its end
    cut = buckets(profile.gradients, profile.order, Cuts.of(profile.ddp_arguments, configuration))
    found: list[_Bucket] = []
    latest = 0.0
    for number, places in enumerate(cut):
        latest = max(latest, profile.backward if at_end else max(profile.ready[place] for place in places))
        gradients = [profile.gradients[place] for place in places]
        sizes = sum(gradient.bytes for gradient in gradients), sum(gradient.elements for gradient in gradients)
        factors: tuple[float, float] = (0, 0)
        shapes = 0
        if rank:
            factors = low_rank_bytes(gradients, rank, batched, width)
            shapes = 1 if batched else len({one.shape for one in gradients if len(one.shape) > 1})
        found.append(_Bucket(latest, *sizes, factors, shapes, number == len(cut) - 1))
    return _Plan(
        buckets=tuple(found),
        bytes=profile.gradient_bytes,
        copies=_copies(profile, configuration),
        hook=hook,
        rank=rank,
        computing_key=computing_key(configuration),
        reductions=1 if DEFER_REDUCTIONS.of(configuration) else profile.reductions,
        together=configuration.steps_per_update,
    )


def _reducing(profile: Profile, plan: _Plan, found: Coefficients, slower: float, ahead: float) -> float:
    """Seconds of a pass that reduces, and of all that is computed `ahead` of it since the reduction before."""
    link = _link(profile.link, found)
    thread = _Thread(Network(link, AT_ONCE.get(profile.backend, 1)), found, profile.backend == "gloo")
    thread.compute(ahead + profile.before * slower)
    done = 0.0
    hook = _hook(plan, found)
    copies = plan.copies * found.copying
    for bucket in plan.buckets:
        thread.compute(max(0.0, bucket.latest - done) * slower)
        done = max(done, bucket.latest)
        thread.work(bucket.bytes * copies / 2)
        hook.launch(thread, bucket)
    thread.compute(max(0.0, profile.backward - done) * slower)
    thread.wait_for_all()
    thread.finish(plan.bytes * copies / 2)
    return thread.now


def _broadcast(profile: Profile, found: Coefficients) -> float:
    """Seconds of a broadcast of the buffers, for which all ranks wait: as long as a reduction of as many bytes."""
    if not profile.buffer_bytes:
        return 0.0
    link = _link(profile.link, found)
    return link.latency + link.transfer(profile.buffer_bytes)


def _copies(profile: Profile, configuration: Configuration) -> float:
    """The part of the copies between gradients and buckets that is made, by the configuration or by the script."""

    def is_on(knob: Knob[bool]) -> bool:
        return bool(knob.of(configuration)) or profile.ddp_arguments.get(knob.name) == "True"

    if is_on(GRADIENT_AS_BUCKET_VIEW):
        return 0.0
    return _BATCHED_SAVES if is_on(BATCHED_GRAD_COPY) else 1.0


def _link(model: LinkModel, found: Coefficients) -> Link:
    latency = model.alpha

    def transfer(size: float) -> float:
        return max(0.0, model.seconds(size) - latency) * found.per_byte

    per_byte = model.segments[-1].seconds_per_byte * found.per_byte
    return Link(latency * found.latency, transfer, max(1.0, found.sharing), found.burst * per_byte)


class _Thread:
    """The thread of the backward pass, and that of a hook, which are one on a CPU."""

    def __init__(self, network: Network, found: Coefficients, is_cpu: bool) -> None:
        self.network = network
        self.now = 0.0
        self._beside = 0.0
        self._stretch = found.stretch
        self._wake = found.wake
        self._is_cpu = is_cpu

    def compute(self, seconds: float) -> None:
        """Compute; slower while a reduction is under way."""
        left = seconds
        while left > 0:
            self.network.advance(self.now)
            if not self.network.busy:
                self.now += left
                return
            pace = 1.0 / (1.0 + self._stretch)
            change = self.network.next_change
            if self.now + left / pace <= change:
                self.now += left / pace
                return
            left -= (change - self.now) * pace
            self.now = change
            self.network.change()

    def work(self, seconds: float) -> None:
        """Compute in the hook."""
        if self._is_cpu:
            self.compute(seconds)
        else:
            self._beside = max(self._beside, self.now) + seconds

    def launch(self, size: float, after: float = 0.0) -> int:
        """Issue a reduction."""
        if self._is_cpu:
            return self.network.launch(self.now, size, after)
        self._beside = max(self._beside, self.now)
        return self.network.launch(self._beside, size, after)

    def wait(self, number: int) -> None:
        """Wait for a reduction, in the hook."""
        ended = self.network.until_done(number)
        if self._is_cpu:
            self.now = self.now if ended <= self.now else ended + self._wake
        else:
            self._beside = max(self._beside, self.now, ended)

    def wait_for_all(self) -> None:
        """Wait for the hook and for all reductions."""
        self.now = max(self.now, self._beside)
        while self.network.busy:
            self.network.change()
            self.now = max(self.now, self.network.now)

    def finish(self, seconds: float) -> None:
        """What DDP does when all reductions have ended."""
        self.now += seconds


class _Hook:
    """No hook: each bucket travels as it is."""

    def launch(self, thread: _Thread, bucket: _Bucket) -> None:
        """A bucket is complete."""
        thread.launch(bucket.bytes)


@dataclass
class _SixteenBits(_Hook):
    rounding: float
    call: float

    def launch(self, thread: _Thread, bucket: _Bucket) -> None:
        """Two bytes of each value travel; the result is converted back before the next reduction begins."""
        seconds = self.rounding * bucket.bytes
        thread.work(seconds + self.call)
        thread.launch(2 * bucket.elements, seconds)


class _LowRank(_Hook):
    """PowerSGD, in the order of `worker.hooks.powersgd`: each call finishes the first half of the bucket before."""

    def __init__(self, rank: int, found: Coefficients) -> None:
        # A pass reads the gradients once, whatever the rank is, and computes a little more for each further rank.
        self._seconds = found.low_rank + found.further_rank * (rank - 1)
        # Factors are made orthogonal row by row.
        self._call = found.call
        self._shape = found.shape + found.further_row * (rank - 1)
        self._crowding = found.crowding
        self._first: list[tuple[int, float, float]] = []
        self._second: list[tuple[int, float]] = []

    def launch(self, thread: _Thread, bucket: _Bucket) -> None:
        """The first factors travel; for the last bucket all that is left is done."""
        first, second = bucket.factors
        seconds = self._seconds * bucket.bytes
        thread.work(seconds)
        self._first.append((thread.launch(first), second, seconds + self._call + bucket.shapes * self._shape))
        if len(self._first) > 1:
            thread.work(self._crowding)
            self._second_half(thread)
        if bucket.is_last:
            self._second_half(thread)
            for number, product in self._second:
                thread.wait(number)
                thread.work(product)

    def _second_half(self, thread: _Thread) -> None:
        number, size, seconds = self._first.pop(0)
        thread.wait(number)
        thread.work(seconds)
        self._second.append((thread.launch(size), seconds))


def _hook(plan: _Plan, found: Coefficients) -> _Hook:
    if plan.hook is None:
        return _Hook()
    if plan.hook.predicted_as == "16 bits":
        return _SixteenBits(found.rounding, found.call)
    return _LowRank(plan.rank, found)


def low_rank_bytes(
    gradients: Sequence[Gradient], rank: int, batched: bool = False, width: int = 0
) -> tuple[float, float]:
    """Bytes of the two reductions of PowerSGD for a bucket: p and what is not compressed, then q.

    `width` is the bytes of a value that travels; 0 for that of the gradients.

    >>> low_rank_bytes([Gradient((100, 50), 20000), Gradient((100,), 400)], rank=2)
    (1200, 400)
    """
    sent = width or (gradients[0].width if gradients else 4)
    elements = sum(gradient.elements for gradient in gradients)
    rows = max(1, math.isqrt(elements))
    shapes = [(rows, elements // rows), (elements % rows,)] if batched else [one.shape for one in gradients]
    first = second = 0
    for shape in shapes:
        count = math.prod(shape)
        height = shape[0] if len(shape) > 1 else 0
        if height and (height + count // height) * rank < count:
            first += height * rank
            second += count // height * rank
        else:
            first += count
    return first * sent, second * sent
