"""What a prediction needs to know of a job: the computing of a usual step, its gradients, and its link."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from autoddp.bench import LinkModel
from autoddp.bench.model import Segment
from autoddp.codec import Struct, field
from autoddp.predict.coefficients import Coefficients, first_coefficients
from autoddp.predict.plan import Gradient
from autoddp.timing import median
from autoddp.timing.timeline import Span, Timeline

_FIRST_LATENCY = {"nccl": 2e-5, "gloo": 1e-4}
"""Backend → seconds of one of the 2 (n - 1) steps of a ring, until measurements tell."""
_FIRST_BYTES_PER_SECOND = 1e9  # of a rank's link, until measurements tell
AT_ONCE = {"gloo": 2}
"""Backend → reductions that it moves at once; one for others."""
_BYTE_ON_A_CPU = 1e-9  # seconds of a core to send, receive and add a byte; loopback takes 1.2 to 1.6 ns for all of it
_USUAL = 0.75  # of the recorded steps, at least, must have as many backward passes: an epoch's last one may have fewer


class Unpredictable(ValueError):
    """The steps of a job cannot be predicted. The text says why, and what would mend that, in one line."""


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """A job as it was measured. Seconds are those of a step in which gradients travel in no time.

    A step has one backward pass, or several that accumulate gradients: one for each micro-batch. All of them are taken
    to be alike, and those that do not reduce (under `no_sync`) to come first.

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
    """Seconds of data and forward pass before each backward pass."""
    backward: float
    """Seconds of each backward pass."""
    ready: tuple[float, ...]
    """Seconds after the begin of a backward pass at which each gradient is ready."""
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
    passes: int = 1
    """Backward passes of a step."""
    reductions: int = 1
    """How many of these passes reduce all gradients, in the script as written."""
    buffer_bytes: int = 0
    """Bytes of the buffers that DDP broadcasts before the first forward pass after a reduction; 0 if there are none."""

    @property
    def computing(self) -> float:
        """Seconds of a step in which gradients travel in no time."""
        return (self.fixed + self.passes * (self.before + self.backward)) * self.coefficients.pace

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
    reducing: float = 1.0,
    buffer_bytes: int = 0,
) -> Profile:
    """The profile of a job whose steps were recorded on each rank; Unpredictable where the records do not tell enough.

    `computing` is the seconds of a step without reductions, of the slowest rank in each: the recorded steps are scaled
    to it, because computing may be slower while gradients travel. Steps in which a gradient did not become ready
    exactly once in each backward pass are left out. `cores_per_rank`: of the host that has the fewest for each of its
    ranks. `reducing`: forward passes of a step that reduce, which tells the reductions where no bucket was timed.
    `buffer_bytes`: see `Profile`.
    """
    if not timelines or not shapes or any(len(one.parameter_bytes) != len(shapes) for one in timelines):
        raise Unpredictable("no steps were recorded on all ranks; tune again")
    passes = _usual("backward passes", [len(found) for one in timelines for _, _, found in _steps(one)])
    reductions = _reductions(timelines, passes, reducing)
    steps = [ranks for ranks in zip(*(_known(one, passes) for one in timelines), strict=False) if all(ranks)]
    virtual = [_last_of([one for one in ranks if one is not None], passes, reductions) for ranks in steps]
    if not virtual:
        raise Unpredictable(
            "in no recorded step did each backward pass give every gradient exactly once on every rank; let each pass "
            "use all parameters, and tune again"
        )
    fixed, before, backward = (median(parts) for parts in zip(*(one[:3] for one in virtual), strict=True))
    ready = [median(list(times)) for times in zip(*(one[3] for one in virtual), strict=True)]
    recorded = _seconds((fixed, before, backward, ready), passes)
    if recorded <= 0:
        raise Unpredictable("its recorded steps took no time; tune again")
    scale = computing / recorded
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
        passes=passes,
        reductions=reductions,
        buffer_bytes=buffer_bytes,
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
"""Seconds of the parts of a step that do not depend on the batch; of a usual one of its passes those before backward,
those of backward, and those of backward after which each gradient is ready."""
_FIXED, _WAITING = ("optimizer", "other"), ("exposed", "buffers")


def _seconds(step: _Step, passes: int) -> float:
    fixed, before, backward, _ = step
    return fixed + passes * (before + backward)


def _steps(timeline: Timeline) -> list[tuple[float, float, list[Span]]]:
    """The begin and the end of each step of a rank, and its backward passes."""
    backwards = _backward_passes(timeline.spans)
    return [
        (begin, end, [span for span in backwards if begin <= (span.begin + span.end) / 2 < end])
        for begin, end in pairwise((0.0, *timeline.steps))
    ]


def _backward_passes(spans: Sequence[Span]) -> list[Span]:
    """The backward passes, each as one span.

    A gradient may become ready when DDP waits for its reductions already. Then a pass has several spans, and nothing
    but waiting lies between them.
    """
    found: list[Span] = []
    goes_on = False
    for span in spans:
        if span.name == "backward":
            found.append(Span("backward", found.pop().begin, span.end) if goes_on else span)
        goes_on = span.name == "backward" or (goes_on and span.name == "exposed")
    return found


def _usual(what: str, counts: Sequence[int]) -> int:
    """The number that nearly all steps have; Unpredictable where they differ, because then no step is a usual one."""
    ((usual, times),) = Counter(counts).most_common(1) or [(0, 0)]
    if not usual:
        raise Unpredictable(f"its recorded steps have no {what}; tune again")
    if times < _USUAL * len(counts):
        differ = ", ".join(map(str, sorted(set(counts))))
        raise Unpredictable(
            f"its recorded steps have different numbers of {what} ({differ}), and only steps with the same number can "
            "be predicted; give each step as many micro-batches, and tune again"
        )
    return usual


def _reductions(timelines: Sequence[Timeline], passes: int, reducing: float) -> int:
    """How many of the backward passes of a usual step reduce."""
    timed = [one for one in timelines if one.buckets]
    if timed:
        steps = [(one, *step) for one in timed for step in _steps(one) if len(step[2]) == passes]
        return _usual("reductions", [_reducing_passes(*step) for step in steps])
    found = 1 if passes == 1 else round(reducing)
    if not 1 <= found <= passes or (passes > 1 and found != reducing):
        raise Unpredictable(
            f"its steps have {passes} backward passes, and how many of them reduce was not recorded "
            f"({timelines[0].no_buckets or 'no bucket was timed'}); tune it where it is to run"
        )
    return found


def _reducing_passes(timeline: Timeline, begin: float, end: float, backwards: Sequence[Span]) -> int:
    """The number of backward passes of a step in which a bucket was launched."""
    launched = [bucket.launched for bucket in timeline.buckets if begin <= bucket.launched < end]
    return sum(any(since <= one < until for one in launched) for since, until in _windows(end, backwards))


def _windows(end: float, backwards: Sequence[Span]) -> list[tuple[float, float]]:
    """From the begin of each backward pass to that of the next one, or to the end of the step."""
    return list(pairwise([*(span.begin for span in backwards), end]))


def _known(timeline: Timeline, passes: int) -> list[_Step | None]:
    """The steps of a rank; None for one that tells nothing, or has another number of backward passes."""
    return [
        _step(timeline, begin, end, backwards) if len(backwards) == passes else None
        for begin, end, backwards in _steps(timeline)
    ]


def _step(timeline: Timeline, begin: float, end: float, backwards: Sequence[Span]) -> _Step | None:
    gradients = [one for one in timeline.gradients if begin <= one.ready < end]
    ready = [0.0] * len(timeline.parameter_bytes)
    for since, until in _windows(end, backwards):
        of_pass = {one.parameter: one.ready - since for one in gradients if since <= one.ready < until}
        if len(of_pass) < len(ready):
            return None
        ready = [sofar + of_pass[parameter] for parameter, sofar in enumerate(ready)]
    passes = len(backwards)
    if len(gradients) != passes * len(ready):  # some became ready twice in a pass, or outside of all
        return None
    spans = [span for span in timeline.spans if begin <= (span.begin + span.end) / 2 < end]
    waiting = sum(span.end - span.begin for span in spans if span.name in _WAITING)
    fixed = sum(span.end - span.begin for span in spans if span.name in _FIXED)
    backward = sum(span.end - span.begin for span in backwards)
    before = max(0.0, end - begin - waiting - fixed - backward)
    return fixed, before / passes, backward / passes, [one / passes for one in ready]


def _last_of(ranks: Sequence[_Step], passes: int, reductions: int) -> _Step:
    """One step in the place of those of all ranks, which have left the previous reduction together."""
    slowest = max(ranks, key=lambda step: _seconds(step, passes))

    def begin(step: _Step) -> float:
        """The seconds from a reduction to the begin of the backward pass with the next one, on average."""
        return _seconds(step, passes) / reductions - step[2]

    ready = [
        max(0.0, max(begin(rank) + times for rank, times in zip(ranks, of_one, strict=True)) - begin(slowest))
        for of_one in zip(*(rank[3] for rank in ranks), strict=True)
    ]
    return slowest[0], slowest[1], slowest[2], ready
