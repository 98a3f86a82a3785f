"""Blocks of steps of the running job under several conditions, in turns, within a budget.

    rounds = Rounds(measure, job, budget=30.0)
    as_written, mended = rounds.in_turns(Condition(), Condition(reduce=False))

What is asked of the job depends only on what was measured, so every host of a job asks the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from autoddp.diagnose.evidence import Evidence, joined
from autoddp.diagnose.experiments import Condition
from autoddp.knobs import Configuration
from autoddp.wire import PREFETCHED, BlockDone, Experiment, JobFacts

ROUNDS_OF_SLOW = 4
"""Pairs of blocks where steps are so long that the link decides their time: Student's t for 99 % reaches 2.9 times
their spread to either side."""
MOST_RECORDED = 20_000
"""Steps of all ranks together in one block: they travel in one message."""
_ROUNDS = 6  # 1.6 times
_SLOW = 0.3  # seconds
_BLOCK = 0.25  # seconds of a block, at least
_FEWEST, _MOST = 3, 40  # steps of a block
_WARMUP = 2  # steps after a change; DDP sorts its buckets anew in the first one after a rebuild
_LEAST_BEHIND = 0.25  # of a step, for which a loader is waited for: if it is less, its queue lasts too long to wait for
_KEPT = 40  # batches that are kept for experiments, if there is time to see so many
_FEWEST_KEPT = 6
_LONGEST_TURN = 2.0  # times as long as steps as written
_BEFORE_A_TURN = 2.0  # seconds: ranks do not come to a block at the same moment
_NO_TIME = "too little of the time for diagnosing was left for it (--diagnose-budget)"


class MeasureAnatomy(Protocol):
    """Times steps of the running model and records their stages. TrialFailed and TuningOver as for `study.Measure`."""

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
        """Measure a block, as `study.Measure` does with `anatomy`."""


class CannotRun(Exception):
    """An experiment is not possible in this job; the text says why."""


class Rounds:
    """Measures blocks of one running job. `budget`: seconds of steps that all blocks together may take."""

    def __init__(self, measure: MeasureAnatomy, job: JobFacts, budget: float) -> None:
        self.budget = budget
        self.spent = 0.0
        self.step = math.nan
        """Seconds of a step as written."""
        self._measure = measure
        self._world_size = job.world_size
        self._present: Condition | None = None
        self._queued = 0
        self._late = self._alone_takes = 1.0
        self._stored: list[tuple[int, ...]] = []
        self._kept = 0
        self._recorded: list[Evidence] = []
        self._recorded_at_once = 0

    def learn(self, as_written: Evidence, seconds: float) -> None:
        """What steps as written say of the time that blocks will take. `seconds`: of a step on average."""
        self.step = seconds
        self._late = max(as_written.means(as_written.stage("data"))) / as_written.seconds
        self._alone_takes = 1.0 - as_written.mean(as_written.transfer) / as_written.seconds

    def block(self, condition: Condition, steps: int, warmup: int | None = None) -> Evidence:
        """Measure under `condition`. Steps after a change of it are not counted."""
        changes = condition != self._present
        if warmup is None:
            warmup = self._settling(self._present, condition) if changes else 0
        before, self._present = self._present, None  # not known, if it fails
        same = before is not None and before.configuration == condition.configuration
        done = self._measure(
            condition.configuration,
            warmup,
            steps,
            reduce=condition.reduce,
            apply=not same,
            experiment=condition.experiment,
        )
        self._present = condition
        self.spent += sum(done.seconds) + done.warmup_seconds + done.apply_seconds
        evidence = Evidence(done.ranks)
        self._queued = max(self._queued, *(one.prefetched for one in done.ranks))
        self._stored = [one.stored for one in done.ranks]  # none, if the script was started again
        if not all(one.alone for one in done.ranks):
            raise CannotRun("a rank alone does not come to the end of its steps: the ranks need each other in each one")
        if not all(one.given for one in done.ranks):
            raise CannotRun("none of the script's DDP objects can be given other arguments")
        kept = [done.ranks[rank].kept for rank in condition.experiment.kept_batches]
        if kept and not any(self._stored):
            raise CannotRun("the script ended while batches were kept")
        if not all(kept):
            raise CannotRun(_why_none_kept(condition.experiment))
        return evidence

    def _settling(self, before: Condition | None, after: Condition) -> int:
        """Steps after a change that are not counted.

        Batches that have waited in a loader's queues, while another one was read, must be used up. Meanwhile the
        loader's workers go on, so a queue lasts the longer, the less they are behind.
        """
        if before is not None and before.without_additions == after.without_additions:
            return 1
        used_kept = before is not None and before.experiment.kept_batches and not after.experiment.kept_batches
        workers = after.experiment.loader_workers
        had_them = before is not None and before.experiment.loader_workers == workers
        queued = (self._queued if used_kept else 0) + (0 if had_them else PREFETCHED * workers)
        return _WARMUP + math.ceil(queued / max(_LEAST_BEHIND, self._late))

    @property
    def steps(self) -> int:
        """Number of steps of a block."""
        if self.step >= _SLOW:
            return 3
        most = min(_MOST, MOST_RECORDED // self._world_size)
        return max(_FEWEST, min(most, math.ceil(_BLOCK / self.step)))

    @property
    def _rounds(self) -> int:
        return ROUNDS_OF_SLOW if self.step >= _SLOW else _ROUNDS

    def affords(self, steps: float) -> bool:
        """Whether there is time for so many steps as written."""
        return self.spent + steps * self.step <= self.budget

    def record_steps(self, count: int = 0) -> Evidence:
        """`count` more steps as written, with all that were recorded before; 0 for as many as the last time."""
        self._recorded_at_once = count or self._recorded_at_once
        self._recorded.append(self.block(Condition(), self._recorded_at_once))
        return joined(self._recorded)

    @property
    def recording_takes(self) -> float:
        """Seconds of another `record_steps()`."""
        return self._recorded_at_once * self.step

    def plans(self, *conditions: Condition) -> list[tuple[int, int]]:
        """Rounds and steps of their blocks for which there is time, the most first."""
        plans = [(self._rounds, self.steps), (ROUNDS_OF_SLOW, self.steps), (ROUNDS_OF_SLOW, _FEWEST)]
        if any(len(condition.experiment.sizes) > 1 for condition in conditions):
            # Blocks of the same batches: all of them, once or several times.
            whole = self._kept * max(1, round(self.steps / self._kept))
            plans = [(self._rounds, whole), (ROUNDS_OF_SLOW, whole), (ROUNDS_OF_SLOW, self._kept)]
        return [plan for plan in plans if self.affords(self.cost(conditions, *plan))]

    def cost(self, conditions: Sequence[Condition], rounds: int, steps: int) -> float:
        """Steps as written that take as long as so many rounds of blocks."""
        # Blocks of one condition that follow each other need no steps to settle.
        settling = sum(max(self._settling(a, b), self._settling(b, a)) for a, b in pairwise(conditions))
        each = sum(self._takes(condition) for condition in conditions)
        return rounds * (each * steps + settling)

    def _takes(self, condition: Condition) -> float:
        """Steps as written that one step under this condition takes."""
        at_once = self._world_size if condition.experiment.by_turns else 1
        return at_once * (1.0 if condition.reduce else self._alone_takes)

    @property
    def one_at_a_time(self) -> Condition:
        """The ranks make their steps by turns. A rank waits twice as long as those before it should take."""
        limit = _LONGEST_TURN * self._world_size * self.steps * self.step + _BEFORE_A_TURN
        return Condition(experiment=Experiment(by_turns=limit), reduce=False)

    def in_turns(self, *conditions: Condition) -> list[list[Evidence]]:
        """Equally many blocks of each condition. Every second round goes backwards, so that a drift hits all alike."""
        plans = self.plans(*conditions)
        if not plans:
            raise CannotRun(_NO_TIME)
        rounds, steps = plans[0]
        found: list[list[Evidence]] = [[] for _ in conditions]
        for number in range(rounds):
            order = list(enumerate(conditions))
            for place, condition in order if number % 2 == 0 else reversed(order):
                found[place].append(self.block(condition, steps))
        return found

    def keep(self, ranks: Sequence[int]) -> None:
        """Let all ranks keep batches, of which these will be asked for."""
        if not any(self._stored):
            self._let_keep()
        self._kept = min(len(self._stored[rank]) for rank in ranks)
        if self._kept < 2:
            raise CannotRun("the loader's batches could not be kept")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of batches, smallest first: as many as one rank keeps, picked evenly from those of all ranks."""
        pooled = sorted(size for of_rank in self._stored for size in of_rank)
        return tuple(pooled[(2 * place + 1) * len(pooled) // (2 * self._kept)] for place in range(self._kept))

    def _let_keep(self) -> None:
        count = max(_FEWEST_KEPT, min(_KEPT, int(0.2 * self.budget / self.step)))
        if not self.affords(count):
            raise CannotRun(_NO_TIME)
        # None of these steps is a warm-up: a script that ends among them must not count as one that is too short.
        self.block(Condition(experiment=Experiment(keep=True)), count, warmup=0)


def _why_none_kept(experiment: Experiment) -> str:
    if experiment.loader_workers:
        return "worker processes could not read the data set, or there is too little memory for them"
    return "there was no memory for the batches" if experiment.memory else "the loader gave no kept batches"
