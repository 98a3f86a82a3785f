"""A job in arithmetic with planted causes, as an `Examination` measures it: seconds of each stage on each rank.

job = SlowJob(data=[0.02, 0.0])
Examination(job, Surroundings(job.facts), 60.0, Failed, Over).run()
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulated import facts

from autoddp.knobs import Configuration
from autoddp.timing import STAGES, RankSteps
from autoddp.wire import BlockDone, Experiment, JobFacts

MS = 1e-3


class Failed(Exception):
    """A block cannot run."""


class Over(Exception):
    """The job has ended."""


@dataclass
class SlowJob:
    """Milliseconds, one number for each rank, or one for all. `sizes(rank, step)`: elements of a batch."""

    forward: Any = 5.0
    backward: Any = 10.0
    data: Any = 0.0
    other: Any = 0.5
    optimizer: Any = 1.0
    transfer: float = 0.1
    link: float = 1.0
    """Times of `transfer` that all gradients travel; the rest of it overlaps with computing."""
    buffers: float = 0.0
    ranks: int = 2
    noise: float = 0.01
    sizes: Callable[[int, int], int] = lambda rank, step: 1000
    """Computing takes longer in proportion to a batch's elements over 1000."""
    event: Callable[[int, int], dict[str, float]] = lambda rank, step: {}
    """Milliseconds that a stage takes longer in that step."""
    collects: bool = False
    """Whether Python's garbage collector runs while a rank does other work."""
    epochs: Callable[[int], bool] = lambda step: False
    unused: float = 0.0
    """Of the search for unused parameters, in each backward pass."""
    hidden: Callable[[int, int], float] = lambda rank, batch: 0.0
    """Milliseconds of the forward pass that depend on what is in a batch, which its size does not tell."""
    overlaps: float = 1.0
    """The part of `transfer` that is left where buckets are cut."""
    oversubscribed: float = 1.0
    """Times that computing takes longer with too many threads."""
    threads: Any = 1
    waited: Any = 0.0
    """For which a rank's threads wait for a core in each step."""
    helpers: list[float] = field(default_factory=list)
    """Milliseconds for which threads that move gradients wait for a core in each step."""
    helpers_ran: list[float] = field(default_factory=list)
    """Milliseconds for which such threads, and others beside the one that trains, had a core in each step."""
    meets: float = 0.0
    """Milliseconds of each step in collectives of the script's own."""
    anew: list[float] = field(default_factory=list)
    """Milliseconds of page faults of each rank in each step."""
    mhz: list[tuple[int, int]] = field(default_factory=list)
    """The clock of each rank's GPU, and the fastest that it can have."""
    held_back: str = ""
    from_workers: float = 0.1
    """Of waiting for a batch that worker processes load."""
    copy: Any = 0.0
    pinned: float = 0.3
    """Of `copy`, where batches lie in pinned memory."""
    launches: float = 0.0
    """For which the device waits for kernels in each step, where none are replayed."""
    queued: float | None = None
    """That the device is behind the host; None on a CPU."""
    reads: float = 0.0
    """For which a line of the script waits for the device in each step, and the device then waits for the script."""
    prefetched: int = 0
    workers: int = 0
    stream: bool = False
    """Whether the data set is a stream, which is not read by indices."""
    persistent: bool = False
    ready: bool = False
    """Whether workers have each batch ready, and what `data` takes is to take it over."""
    absorbs: bool = False
    """Whether a delay is time in which a thread of the script loads batches, for which the rank waits in `other`."""
    readers: tuple[int, ...] | None = None
    """Ranks that read a loader of torch's; None for all."""
    no_room: tuple[str, ...] = ()
    """Kinds of memory that are full."""
    untouchable: bool = False
    """Whether no DDP object can be given other arguments."""
    fails: Callable[[Experiment], bool] = lambda experiment: False
    ends_after: float = math.inf
    more: dict[str, Any] = field(default_factory=dict)
    """Of the job's facts."""

    def __post_init__(self) -> None:
        self._random = random.Random(0)
        self._step = 0
        self._kept: list[int] = []
        self._served = [0] * self.ranks
        self.asked: list[Experiment] = []

    @property
    def facts(self) -> JobFacts:
        usual = {"world_size": self.ranks, "uses_all": True, "cores": 8, "ranks_per_host": self.ranks}
        mine = facts()
        known = {name: getattr(mine, name) for name in mine.__struct_fields__}
        return JobFacts(**(known | usual | self.more))

    def __call__(
        self,
        configuration: Configuration,
        warmup: int,
        steps: int,
        *,
        reduce: bool,
        apply: bool,
        experiment: Experiment,
    ) -> BlockDone:
        self.asked.append(experiment)
        if self.fails(experiment):
            raise Failed("it cannot")
        warm = [self._one(configuration, reduce, experiment)[0][0] for _ in range(warmup)]
        warmed = sum(sum(stages.values()) for stages in warm)
        each = [self._one(configuration, reduce, experiment) for _ in range(steps)]
        found = []
        crowded = self.oversubscribed > 1 and not experiment.threads
        for rank in range(self.ranks):
            mine = [of_step[rank] for of_step in each]
            found.append(
                RankSteps(
                    rank=rank,
                    host=f"host{rank}",
                    seconds=tuple(sum(stages.values()) for stages, _, _ in mine),
                    stages=tuple(tuple(stages[name] for name in STAGES) for stages, _, _ in mine),
                    samples=(8 if self._reads(rank) else 0,) * steps,
                    elements=tuple(size for _, size, _ in mine),
                    begun=tuple(int(begun) for _, _, begun in mine),
                    collecting=tuple(stages["other"] * self.collects for stages, _, _ in mine),
                    waited_for_cpu=steps * MS * (5 * crowded + (self._of(self.waited, rank) if self.waited else 0)),
                    helpers_waited_for_cpu=steps * MS * (self._of(self.helpers, rank) if self.helpers else 0),
                    helpers_ran=steps * MS * (self._of(self.helpers_ran, rank) if self.helpers_ran else 0),
                    meeting=(self.meets * MS,) * steps if self.meets else (),
                    in_page_faults=steps * MS * (self._of(self.anew, rank) if self.anew else 0),
                    page_faults=int(steps * 500 * (self.anew[rank] if self.anew else 0)),
                    mhz=self.mhz[rank] if self.mhz else (),
                    held_back=self.held_back,
                    threads=experiment.threads
                    or (self.threads[rank] if isinstance(self.threads, list) else self.threads),
                    prefetched=self.prefetched,
                    loader_workers=self.workers,
                    indexed=not self.stream,
                    persistent=self.persistent,
                    late=tuple(int(not self.ready or begun) for _, _, begun in mine),
                    stored=tuple(self.sizes(rank, n) for n in range(20)),
                    kept=steps if rank in experiment.kept_batches and experiment.memory not in self.no_room else 0,
                    given=not (self.untouchable and experiment.ddp_arguments),
                    queued=() if self.queued is None else (self.queued * MS,) * steps,
                    waits={"train.py:41 .item()": self.reads * MS * steps} if self.reads else {},
                )
            )
        seconds = tuple(sum(one.seconds[n] for one in found) / self.ranks for n in range(steps))
        return BlockDone(0, seconds, warmed, 0.0, ranks=tuple(found))

    def _reads(self, rank: int) -> bool:
        return self.readers is None or rank in self.readers

    def _of(self, values: Any, rank: int) -> float:
        value = values[rank] if isinstance(values, list) else values
        return float(value) * math.exp(self._random.gauss(0, self.noise))

    def _one(
        self, configuration: Configuration, reduce: bool, experiment: Experiment
    ) -> list[tuple[dict[str, float], int, bool]]:
        step, self._step = self._step, self._step + 1
        if self._step > self.ends_after:
            raise Over("the script has ended")
        begun = self.epochs(step)
        found = []
        for rank in range(self.ranks):
            served = rank in experiment.kept_batches
            size = self.sizes(rank, step)
            if served and experiment.sizes:
                wanted = experiment.sizes[step % len(experiment.sizes)]
                size = min((self.sizes(rank, n) for n in range(20)), key=lambda one: abs(one - wanted))
            work = size / 1000 * (self.oversubscribed if not experiment.threads else 1.0)
            stages = dict.fromkeys(STAGES, 0.0)
            stages["data"] = self._of(self.data, rank)
            if served:
                stages["data"] = self.from_workers if experiment.loader_workers else 0.01
            stages["copy"] = self._of(self.copy, rank) * {"device": 0.0, "pinned": self.pinned}.get(
                experiment.memory, 1
            )
            batch = step if not served else 0 if len(experiment.sizes) == 1 else step % 20
            stages["forward"] = self._of(self.forward, rank) * work + self.hidden(rank, batch)
            if "cuda_graphs" not in configuration:
                stages["forward"] += self.launches
            stages["backward"] = self._of(self.backward, rank) * work
            if self.unused and experiment.ddp_arguments.get("find_unused_parameters") is not False:
                stages["backward"] += self.unused
            stages["optimizer"] = self._of(self.optimizer, rank)
            stages["other"] = self._of(self.other, rank) + (0.0 if experiment.late_values else self.reads)
            for stage, more in self.event(rank, step).items():
                if not (served and stage == "data"):
                    stages[stage] += more
            if experiment.delay is not None and experiment.delay.rank == rank:
                stages[experiment.delay.stage] += experiment.delay.seconds / MS
                if self.absorbs:
                    stages["other"] = max(0.1, stages["other"] - experiment.delay.seconds / MS)
            found.append(stages)
        if reduce:  # otherwise DDP broadcasts no buffers either
            latest = max(sum(stages.values()) for stages in found)
            travels = self.transfer * (self.overlaps if "bucket_cap_mb" in configuration else 1.0)
            travels /= configuration.get("defer_reductions", 1)
            travels += self.link * self.transfer * experiment.added_bytes / self.facts.gradient_bytes
            mended = experiment.ddp_arguments.get("broadcast_buffers") is False and not self.untouchable
            broadcast = 0.0 if mended else self.buffers
            for stages in found:
                stages["exposed"] = latest - sum(stages.values()) + self._of(travels, 0)
                stages["buffers"] = broadcast
        return [
            ({name: ms * MS for name, ms in stages.items()}, self.sizes(rank, step), begun)
            for rank, stages in enumerate(found)
        ]
