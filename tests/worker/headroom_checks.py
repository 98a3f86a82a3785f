"""Real DDP on two ranks with planted delays, of which the headroom is measured by the real runner and the real study.

    python headroom_checks.py FOLDER CLOCK CASE=RUNS…      # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set

Rank 0 leaves `CASE.json`: for each run the share, its interval, and the truth. A step takes as long as its delays, and
what the planted reduction takes.

With the clock "wall" the ranks sleep, the reduction in the script's hook, which is not called where DDP's reduction is
off. The truth is how long the reductions took from the moment at which the last rank was ready: on a busy machine they
take longer than planted. With "planted" nobody sleeps, and the stopwatch says what a step would have taken.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "study"))

import torch
import torch.distributed as dist
from simulated import facts
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import Configuration
from autoddp.study import Observer, Study, StudySettings
from autoddp.wire import BlockDone, Finish, Measure, Message
from autoddp.worker.ddp.patch import Patch
from autoddp.worker.effects.compiling import Compiling
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.hooks import arithmetic
from autoddp.worker.hooks.bucket import GradBucket
from autoddp.worker.hooks.exact import exact_mean
from autoddp.worker.observe.stopwatch import Stopwatch
from autoddp.worker.process.rank_store import RankStore
from autoddp.worker.trial.experiments import Experiments
from autoddp.worker.trial.live_ddp import LiveDdp
from autoddp.worker.trial.runner import TrialRunner

FEATURES = 64


@dataclass(frozen=True)
class Planted:
    """Seconds: what a rank waits in its step, and what a reduction takes."""

    delay: Callable[[int, int, random.Random], float]
    reduction: float
    mean_of_slowest: float
    """Of the delays: the mean over steps of the larger of both ranks'."""

    @property
    def truth(self) -> float:
        """The share of a step that the reduction takes."""
        return self.reduction / (self.reduction + self.mean_of_slowest)


PLANTED = {
    "loaders of 80 and 200 ms": Planted(lambda rank, step, luck: (0.080, 0.200)[rank], 0.006, 0.200),
    "the same, and a slow link": Planted(lambda rank, step, luck: (0.080, 0.200)[rank], 0.080, 0.200),
    "a straggler": Planted(lambda rank, step, luck: (0.020, 0.140)[rank], 0.040, 0.140),
    "stragglers in turn": Planted(lambda rank, step, luck: 0.020 + 0.160 * (step % 2 == rank), 0.040, 0.180),
    "ranks alike": Planted(lambda rank, step, luck: 0.120, 0.060, 0.120),
    "stragglers at random": Planted(
        lambda rank, step, luck: 0.020 + 0.160 * (luck.random() < 0.25), 0.040, 0.020 + 0.160 * (1 - 0.75**2)
    ),
}


class PlantedStopwatch:
    """What each step would have taken, if ranks had waited for each other where they reduce."""

    def __init__(self, planted: Planted, rank: int, seed: int, switch: ReductionSwitch) -> None:
        self._planted, self._rank, self._switch = planted, rank, switch
        self._luck = [random.Random(1000 * seed + other) for other in range(2)]
        self._step = 0
        self._laps: list[float] = []

    def start(self) -> None:
        self._laps = []

    def lap(self) -> None:
        delays = [self._planted.delay(rank, self._step, luck) for rank, luck in enumerate(self._luck)]
        self._step += 1
        together = max(delays) + self._planted.reduction
        self._laps.append(together if self._switch.on else delays[self._rank])

    def stop(self) -> list[float]:
        return self._laps


class Over(BaseException):
    """The study is over."""


class StudyDirector:
    """Runs a study in a thread of rank 0 and hands its questions to the runner."""

    def __init__(self, rank: int) -> None:
        self.found: list[Any] = []
        self._orders: queue.Queue[Message] = queue.Queue()
        self._done: queue.Queue[BlockDone] = queue.Queue()
        if rank == 0:
            threading.Thread(target=self._study, daemon=True).start()

    def _study(self) -> None:
        outcome = Study(self._measure, facts(), StudySettings(trials=0), Observer()).run()
        self.found = [outcome.headroom, *outcome.headroom_interval]
        self._orders.put(Finish())

    def _measure(self, configuration: Configuration, warmup: int, steps: int, **more: Any) -> BlockDone:
        self._orders.put(Measure(0, configuration, warmup, steps, **more))
        return self._done.get()

    def next(self, done: BlockDone | None) -> Message:
        if done is not None:
            self._done.put(done)
        return self._orders.get()

    def heard(self, done: BlockDone) -> None:
        pass

    def finish(self, order: Finish) -> None:
        raise Over


def hook_of(seconds: float, entered: list[float]) -> Callable[..., Any]:
    def planted(group: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        entered.append(time.perf_counter())
        time.sleep(seconds)
        return exact_mean(group, bucket)

    planted.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return planted


def one_run(planted: Planted, sleeps: bool, seed: int, patch: Patch, switch: ReductionSwitch, ranks: RankStore) -> Any:
    rank = ranks.rank
    model = DDP(nn.Linear(FEATURES, FEATURES))
    entered: list[float] = []
    reductions: list[tuple[float, float, float]] = []
    model.register_comm_hook(model.process_group, hook_of(planted.reduction * sleeps, entered))
    optimizer, luck = torch.optim.SGD(model.parameters(), lr=0.01), random.Random(1000 * seed + rank)
    director = StudyDirector(rank)
    stopwatch: Any = Stopwatch(torch.device("cpu")) if sleeps else PlantedStopwatch(planted, rank, seed, switch)
    runner = TrialRunner(
        LiveDdp(patch, switch, (), Compiling(patch.alive), Experiments(patch)), ranks, director, stopwatch
    )
    inputs = torch.ones(8, FEATURES)
    try:
        for step in itertools.count():
            began = time.perf_counter()
            time.sleep(planted.delay(rank, step, luck) * sleeps)
            optimizer.zero_grad()
            model(inputs).sum().backward()
            if entered:
                reductions.append((began, entered.pop(), time.perf_counter()))
            optimizer.step()
            runner.begin() if step == 3 else runner.on_step() if step > 3 else None
    except Over:
        truth = taken_by(reductions[1:]) if sleeps else planted.truth
        return [*director.found, truth]
    raise AssertionError("steps do not end")


def taken_by(reductions: list[tuple[float, float, float]]) -> float:
    """The share of the steps' time between the last rank's entry and the end. All ranks read one clock."""
    of_all: list[Any] = [None, None]
    dist.all_gather_object(of_all, reductions)
    steps = [[max(times) for times in zip(*of_ranks, strict=True)] for of_ranks in zip(*of_all, strict=True)]
    reducing = sum(end - entered for _, entered, end in steps)
    return reducing / sum(end - began for began, _, end in steps)


def main() -> None:
    folder, sleeps = Path(sys.argv[1]), sys.argv[2] == "wall"
    torch.set_num_threads(1)
    if not sleeps:
        arithmetic._CACHES = 2**20  # what hooks compute is measured in each run, and of no interest here
    dist.init_process_group("gloo")
    patch = Patch()
    switch = ReductionSwitch(patch.of)
    patch.install()
    switch.install()
    ranks = RankStore()
    for word in sys.argv[3:]:
        name, _, runs = word.partition("=")
        found = [one_run(PLANTED[name], sleeps, seed, patch, switch, ranks) for seed in range(int(runs))]
        if ranks.rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
