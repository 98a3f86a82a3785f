"""A running model in arithmetic: what a step costs under each configuration, with seeded noise.

    job = SimulatedJob(link_mib_per_second=100.0)
    Study(job, facts(), StudySettings(trials=20), Observer()).run()

Backward is a row of buckets whose gradients become ready one after another; each bucket's reduction costs a latency
and its bytes over the link, and what has not ended when backward ends is exposed. Copies cost time, a switch saves it.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from autoddp.attempts.job.deadline import Deadline
from autoddp.knobs import BY_NAME, Configuration, GradientError, Rung
from autoddp.study import TuningOver
from autoddp.study.space import Space
from autoddp.timing.timeline import Gradient, Span, Timeline
from autoddp.wire import BlockDone, JobFacts, Measure, Start

MIB = 24.0
FORWARD, BACKWARD = 0.010, 0.020  # seconds
WATCHED = 6  # steps that the worker watches before anything is measured
NOT_EVERYWHERE = (
    "numa_binding",
    "optimize_ddp",
    "cuda_graphs",
    "defer_reductions",
    "accumulate_steps",
    "broadcast_buffers",
)


def facts(
    knobs: tuple[str, ...] = tuple(name for name in BY_NAME if name not in NOT_EVERYWHERE),
    nodes: int = 1,
    thread_counts: tuple[int, ...] = (),
    start_settings: tuple[dict[str, Any], ...] = (),
    **more: Any,
) -> JobFacts:
    return JobFacts(
        world_size=2,
        nodes=nodes,
        backend="gloo",
        devices=("cpu",),
        torch="2.13.0",
        cores=8,
        gradient_bytes=int(MIB * 2**20),
        gradient_shapes=((512, 512),) * int(MIB),
        parameters_digest="0123456789abcdef",
        ddp_arguments=more.pop("ddp_arguments", {}),
        knobs=(*knobs, *(name for name in ("cuda_graphs",) if more.get(name))),
        thread_counts=thread_counts,
        start_settings=start_settings,
        **more,
    )


def error_of(relative: float, finite: bool = True) -> GradientError:
    return GradientError(4, relative, 1 - relative**2 / 2, relative, "0.weight", relative, finite, relative, "0.weight")


class SimulatedJob:
    """A `study.Measure`. `cost` is the true seconds per step; `asked` all that was measured.

    `spoil(index, configuration)` is called before each measurement and may raise what a real job would. `clock` is the
    seconds that it has run, of `time` in which tuning must be over. `cold`: times as long for the n-th step after
    a switch takes. `length`: steps of the script in its n-th start, if it is short; another start then takes `restart`
    seconds. `by_length`: it is then no longer tuned than it takes, by the real deadline.
    `blocks` has what was measured, `starts` the number of the start that each block is from.
    """

    def __init__(
        self,
        link_mib_per_second: float = 500.0,
        latency: float = 0.0005,
        noise: float = 0.01,
        seed: int = 0,
        copies: float = 1.0,
        interruption: float = 0.0,
        links: Callable[[str], float] = lambda interfaces: 1.0,
        computing: Callable[[Configuration], float] = lambda configuration: 1.0,
        spoil: Callable[[int, Configuration], None] = lambda index, configuration: None,
        error: Callable[[Configuration], GradientError] = lambda configuration: error_of(0.001),
        time: float = math.inf,
        cold: Callable[[int], float] = lambda number: 1.0,
        length: Callable[[int], int] | None = None,
        restart: float = 5.0,
        by_length: bool = False,
    ) -> None:
        self._link = link_mib_per_second
        self._latency = latency
        self._noise = noise
        self._copies = copies
        self._interruption = interruption
        self._computing = computing
        self._links = links
        self._steps = 0
        self._cold = cold
        self._since = 0
        self._random = random.Random(seed)
        self._spoil = spoil
        self._error = error
        self._now = Configuration()
        self.asked: list[Measure] = []
        self.time, self.clock = time, 0.0
        self._length, self._restart = length, restart
        self._deadline = Deadline(clock=lambda: self.clock) if by_length else None
        if self._deadline:
            self._deadline.stepped()
        self._made, self._ended = WATCHED, list[int]()
        self.starts: list[int] = []
        self.blocks: list[BlockDone] = []

    def __call__(
        self,
        configuration: Configuration,
        warmup: int,
        steps: int,
        *,
        reduce: bool = True,
        apply: bool = True,
        compare: int = 0,
        timeline: int = 0,
    ) -> BlockDone:
        at_once = configuration.steps_per_update
        order = Measure(len(self.asked), configuration, warmup, steps, reduce, apply, compare, at_once)
        self.asked.append(order)
        assert apply or configuration == self._now, "what is measured without a turn must be in effect"
        self._since = 0 if apply else self._since
        self._now = configuration
        self._spoil(order.index, configuration)
        true = self.cost(configuration) if reduce else self._alone(configuration)
        if self._length is not None:
            warmup, steps = self._fit(warmup, steps, at_once, compare + (timeline + 3 if timeline else 0), true)
        self.starts.append(len(self._ended))
        left, start = self._left(), self._start
        self._steps += warmup
        self._since += warmup
        seconds = tuple(self._step(true) * self._cold(self._since + number) for number in range(steps))
        self._since += steps
        error = self._error(configuration) if compare and configuration.hook else None
        self.clock += (sum(seconds) + warmup * true) * at_once + compare * true + 0.001
        lines = tuple(self._timeline(rank, true, timeline) for rank in range(2)) if timeline else ()
        done = BlockDone(
            order.index,
            seconds,
            warmup * true * at_once,
            0.001,
            error=error,
            left=left,
            timelines=lines,
            start=start,
            made=self._made if self._length is not None else 0,
        )
        self.blocks.append(done)
        return done

    def _left(self) -> float:
        if self._deadline is None:
            return self.time - self.clock
        if self._deadline.why_over:
            raise TuningOver(self._deadline.why_over)
        return self._deadline.left or 0.0

    @property
    def _start(self) -> Start:
        known = self._deadline
        spent, limits = (known.spent, known.is_open) if known is not None else (self.clock, False)
        return Start(len(self._ended), self._restart, WATCHED, min(self._ended, default=None), spent, limits)

    def _fit(self, warmup: int, steps: int, at_once: int, more: int, true: float) -> tuple[int, int]:
        """Start the script again as often as it ends in these steps; they become fewer as in `attempts.job.machine`."""
        assert self._length is not None
        for _ in range(3):
            length, needed = self._length(len(self._ended)), (warmup + steps) * at_once + more
            if self._made + needed < length:
                self._made += needed
                return warmup, steps
            self.clock += (length - self._made) * true
            if self._deadline is not None:
                self._deadline.script_took(length * self.cost(Configuration()), length, "the script ended")
            self.clock += self._restart
            if self.clock > self.time or (self._deadline is not None and self._deadline.why_over):
                raise TuningOver("the time is over")
            self._ended.append(length)
            self._made = WATCHED
            steps, warmup = min(steps, max(2, (length - WATCHED) // 3)), max(2, warmup)
        raise TuningOver("the script ended with exit code 0; 3 starts have ended before that was measured")

    def _timeline(self, rank: int, seconds: float, steps: int) -> Timeline:
        """As the worker records it: gradients become ready evenly, the last first; what is not computing is exposed."""
        spans, gradients = [], []
        for begin in (number * seconds for number in range(steps)):
            ends = (begin + FORWARD, begin + FORWARD + BACKWARD, begin + seconds)
            for name, start, end in zip(("forward", "backward", "exposed"), (begin, *ends), ends, strict=False):
                spans.append(Span(name, start, end))
            count = int(MIB)
            gradients += [Gradient(n, ends[0] + BACKWARD * (count - n) / count) for n in range(count)]
        ends_of_steps = tuple((number + 1) * seconds for number in range(steps))
        sizes = (2**20,) * int(MIB)
        return Timeline(rank, "host", 0.0, 0.0, ends_of_steps, tuple(spans), tuple(gradients), parameter_bytes=sizes)

    def _step(self, true: float) -> float:
        """One noisy step; every 25th step the script saves a checkpoint."""
        self._steps += 1
        return true * math.exp(self._random.gauss(0, self._noise)) + self._interruption * (self._steps % 25 == 0)

    def _alone(self, configuration: Configuration) -> float:
        return (FORWARD + BACKWARD) * self._computing(configuration)

    def cost(self, configuration: Configuration) -> float:
        """Seconds per step of the script, without noise."""
        kept = configuration.steps_per_update - 1
        return (self._reducing(configuration) + kept * self._alone(configuration)) / (1 + kept)

    def _reducing(self, configuration: Configuration) -> float:
        link = self._link * self._links(str(configuration.get("interfaces", "")))
        free, slower = 0.0, self._computing(configuration)
        for ready, mib in _buckets(configuration):
            travel, work = _wire(configuration, mib, link, self._latency)
            free = max(free, (FORWARD + ready * BACKWARD) * slower + work) + travel
        return max(free, (FORWARD + BACKWARD) * slower) + _copies(configuration) * self._copies

    def best(self, rung: Rung) -> float:
        """The true seconds of the best configuration that a study can try on that rung."""
        return min(map(self.cost, _all_of(rung)))


@functools.cache
def _all_of(rung: Rung) -> tuple[Configuration, ...]:
    return tuple(every(Space(rung, facts())))


def every(space: Space) -> Iterator[Configuration]:
    """All configurations of a space."""
    names = list(space.choices)
    for values in itertools.product(*space.choices.values()):
        yield space.configuration(dict(zip(names, values, strict=True)))


def _buckets(configuration: Configuration) -> Iterator[tuple[float, float]]:
    """For each bucket the share of backward that is over when its gradients are ready, and its MiB."""
    plan = configuration.plain().get("bucket_cap_mb_list") or []
    last = plan[-1] if plan else float(configuration.get("bucket_cap_mb", 25.0))
    done = 0.0
    for size in itertools.chain(plan, itertools.repeat(last)):
        size = min(size, MIB - done)
        done += size
        yield done / MIB, size
        if done >= MIB:
            return


def _wire(configuration: Configuration, mib: float, link: float, latency: float) -> tuple[float, float]:
    """Seconds on the link and of computing for one bucket."""
    hook = configuration.get("hook")
    if hook == "powersgd":
        rank = int(configuration["powersgd_rank"])
        return 2 * latency + mib / link * rank / 50, 0.0004 + 0.00005 * mib * rank
    return latency + mib / link * (0.5 if hook else 1.0), 0.0001 * mib if hook else 0.0


def _copies(configuration: Configuration) -> float:
    if configuration.get("gradient_as_bucket_view"):
        return 0.0002
    return 0.0008 if configuration.get("batched_grad_copy") else 0.0015
