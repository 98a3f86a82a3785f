"""What a prediction needs to know of a job: the computing of a usual step, its gradients, and its link."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autoddp.bench import LinkModel
from autoddp.bench.model import Segment
from autoddp.codec import Struct, field
from autoddp.predict.coefficients import Coefficients, first_coefficients
from autoddp.predict.plan import Gradient
from autoddp.timing import median
from autoddp.timing.timeline import Timeline

_FIRST_LATENCY = {"nccl": 2e-5, "gloo": 1e-4}
"""Backend → seconds of one of the 2 (n - 1) steps of a ring, until measurements tell."""
_FIRST_BYTES_PER_SECOND = 1e9  # of a rank's link, until measurements tell
AT_ONCE = {"gloo": 2}
"""Backend → reductions that it moves at once; one for others."""
_BYTE_ON_A_CPU = 1e-9  # seconds of a core to send, receive and add a byte; loopback takes 1.2 to 1.6 ns for all of it


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """A job as it was measured. Seconds are those of a step in which gradients travel in no time.

    The ranks are put together to one: a gradient counts as ready when the last rank has it, because a reduction starts
    when the last rank has launched it.
    """

    world_size: int
    nodes: int
    backend: str
    ddp_arguments: dict[str, str]
    """What the script passes to DDP, as text."""
    gradients: tuple[Gradient, ...]
    fixed: float
    """Seconds of a step that do not depend on the batch: the optimizer, and what the script does between steps."""
    before: float
    """Seconds from then to the begin of the backward pass."""
    backward: float
    """Seconds of the backward pass."""
    ready: tuple[float, ...]
    """Seconds after the begin of the backward pass at which each gradient is ready."""
    link: LinkModel
    """What an all-reduce over all ranks costs, before `coefficients` rescale it."""
    link_is_measured: bool = False
    """Whether the link was measured by itself, or is a guess."""
    hooks_are_measured: bool = False
    """Whether what hooks compute was measured by itself, or is a guess."""
    coefficients: Coefficients = field(default_factory=Coefficients)
    measured: float | None = None
    """Seconds per step of the script as written."""
    typical_error: float | None = None
    """Median relative error of the study's predictions."""
    large_error: float | None = None
    """90th percentile of the relative error of the study's predictions."""

    @property
    def computing(self) -> float:
        """Seconds of a step in which gradients travel in no time."""
        return (self.fixed + self.before + self.backward) * self.coefficients.pace

    @property
    def order(self) -> list[int]:
        """The places of the gradients, the first ready first. DDP has parameters in the order of the forward pass, so
        of gradients that are ready at the same time the last comes first."""
        return sorted(range(len(self.ready)), key=lambda place: (self.ready[place], -place))

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(gradient.bytes for gradient in self.gradients)


def first_link(backend: str, world_size: int, per_byte: float | None = None) -> LinkModel:
    """What a reduction costs, where `autoddp bench` has not measured the link: `per_byte` seconds, or a guess."""
    latency = _FIRST_LATENCY.get(backend, _FIRST_LATENCY["gloo"]) * 2 * (world_size - 1)
    guess = ring_share(world_size) / _FIRST_BYTES_PER_SECOND
    return LinkModel((Segment(0.0, latency, guess if per_byte is None else per_byte),))


def seconds_per_byte(timelines: Sequence[Timeline]) -> float | None:
    """Seconds that the link took for a byte in the recorded steps, a usual one of them; None where no bucket was timed.

    The time in which buckets travel is taken from the rank on which it is shortest: it has launched them last, and has
    waited for no other. So the ranks' clocks need not agree.
    """
    steps = [found for found in zip(*(_travelling(one) for one in timelines), strict=False) if all(found)]
    found = [min(one for one in ranks if one is not None) for ranks in steps]
    return median(found) if found else None


def _travelling(timeline: Timeline) -> list[float | None]:
    """Seconds per byte in each step: of all buckets together, because they may share the link."""
    found: list[float | None] = []
    begin = 0.0
    for end in timeline.steps:
        buckets = sorted((b.launched, b.ended, b.bytes) for b in timeline.buckets if begin <= b.launched < end)
        seconds, until = 0.0, begin
        for launched, ended, _ in buckets:
            seconds += max(0.0, ended - max(launched, until))
            until = max(until, ended)
        sent = sum(size for _, _, size in buckets)
        found.append(seconds / sent if sent and seconds else None)
        begin = end
    return found


def ring_share(ranks: int) -> float:
    """How many times its own bytes each rank sends in an all-reduce by a ring.

    >>> ring_share(2), ring_share(4)
    (1.0, 1.5)
    """
    return 2 * (ranks - 1) / ranks


def profile_of(
    timelines: Sequence[Timeline],
    shapes: Sequence[Sequence[int]],
    backend: str,
    nodes: int,
    ddp_arguments: Mapping[str, str],
    computing: float,
    link: LinkModel | None = None,
    cores_per_rank: float = math.inf,
) -> Profile | None:
    """The profile of a job whose steps were recorded on each rank; None where the records do not tell enough.

    `computing` is the seconds of a step without reductions, of the slowest rank in each: the recorded steps are scaled
    to it, because computing may be slower while gradients travel. Steps in which a gradient did not become ready
    exactly once are left out. `cores_per_rank`: of the host that has the fewest for each of its ranks.
    """
    if not timelines or not shapes or any(len(one.parameter_bytes) != len(shapes) for one in timelines):
        return None
    steps = [found for found in zip(*(_steps(one) for one in timelines), strict=False) if all(found)]
    virtual = [_last_of([one for one in ranks if one is not None]) for ranks in steps]
    if not virtual:
        return None
    fixed, before, backward = (median(parts) for parts in zip(*(one[:3] for one in virtual), strict=True))
    ready = [median(list(times)) for times in zip(*(one[3] for one in virtual), strict=True)]
    if fixed + before + backward <= 0:
        return None
    scale = computing / (fixed + before + backward)
    world_size = len(timelines)
    per_byte = seconds_per_byte(timelines)
    known = link or first_link(backend, world_size, per_byte)
    return Profile(
        world_size=world_size,
        nodes=nodes,
        backend=backend,
        ddp_arguments=dict(ddp_arguments),
        gradients=tuple(
            Gradient(tuple(shape), size) for shape, size in zip(shapes, timelines[0].parameter_bytes, strict=True)
        ),
        fixed=fixed * scale,
        before=before * scale,
        backward=backward * scale,
        ready=tuple(min(one, backward) * scale for one in ready),
        link=known,
        link_is_measured=link is not None or per_byte is not None,
        hooks_are_measured=any(one.arithmetic for one in timelines),
        coefficients=first_coefficients(
            backend, [one.arithmetic for one in timelines], crowding_stretch(backend, known, cores_per_rank)
        ),
    )


def crowding_stretch(backend: str, link: LinkModel, cores_per_rank: float) -> float:
    """The guess of `Coefficients.stretch` where the threads that move gradients have no cores of their own.

    On a fast link, such as a host's loopback, these threads compute all the time. On a slow link they mostly wait for
    it. NCCL moves gradients on the GPU.

    >>> loopback = LinkModel((Segment(0.0, 2e-4, 1e-9),))
    >>> [crowding_stretch("gloo", loopback, cores) for cores in (1, 2, 4)]
    [2.0, 0.5, 0.0]
    """
    if backend != "gloo":
        return 0.0
    per_byte = max(link.segments[-1].seconds_per_byte, _BYTE_ON_A_CPU)
    wanted = 1 + AT_ONCE[backend] * _BYTE_ON_A_CPU / per_byte
    return max(0.0, wanted / cores_per_rank - 1)


_Step = tuple[float, float, float, list[float]]
"""Seconds of the parts of a step that do not depend on the batch, before backward, of backward; gradients' times."""
_FIXED = ("optimizer", "other")


def _steps(timeline: Timeline) -> list[_Step | None]:
    """The steps of a rank; None for one that tells nothing."""
    found: list[_Step | None] = []
    begin = 0.0
    for end in timeline.steps:
        found.append(_step(timeline, begin, end))
        begin = end
    return found


def _step(timeline: Timeline, begin: float, end: float) -> _Step | None:
    spans = [span for span in timeline.spans if begin <= (span.begin + span.end) / 2 < end]
    backwards = [span for span in spans if span.name == "backward"]
    if len(backwards) != 1:
        return None
    (backward,) = backwards
    ready: list[float | None] = [None] * len(timeline.parameter_bytes)
    for gradient in timeline.gradients:
        if begin <= gradient.ready < end:
            if ready[gradient.parameter] is not None:
                return None
            ready[gradient.parameter] = max(0.0, gradient.ready - backward.begin)
    times = [one for one in ready if one is not None]
    if len(times) < len(ready):
        return None
    exposed = sum(span.end - span.begin for span in spans if span.name == "exposed")
    fixed = sum(span.end - span.begin for span in spans if span.name in _FIXED)
    seconds = backward.end - backward.begin
    return fixed, max(0.0, end - begin - exposed - fixed - seconds), seconds, times


def _last_of(ranks: Sequence[_Step]) -> _Step:
    """One step in the place of those of all ranks, which have left the previous reduction together."""
    slowest = max(ranks, key=lambda step: sum(step[:3]))
    begin = slowest[0] + slowest[1]
    ready = [
        max(0.0, max(rank[0] + rank[1] + times for rank, times in zip(ranks, of_one, strict=True)) - begin)
        for of_one in zip(*(rank[3] for rank in ranks), strict=True)
    ]
    return slowest[0], slowest[1], slowest[2], ready
