"""Whatever happens to a tuning job in whatever order: it ends, and when it is over nothing begins any more.

First the state machine alone, many times, with a study, a main thread and ranks that take turns as a random
generator says; then the live job with real threads and sockets.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from desk import VARIABLES, Desk, Rank
from fake_worker import FakeWorker, cost
from launchers import whole

from autoddp.attempts.job.events import Closed, Said
from autoddp.attempts.job.journal import Journal
from autoddp.attempts.job.live_job import LiveJob
from autoddp.attempts.job.machine import State
from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.study import TrialFailed, TuningOver
from autoddp.wire import BlockDone, Goodbye, Measure, Welcome

SEQUENCES = 800
WILD = 60  # events in any order; then the world is one in which scripts end and time passes
TAME = 400  # events in which the job must then end
ENDINGS = ("", "rank 0 ended with exit code 1", "torch elastic, which starts the ranks, was killed by SIGKILL")


class World:
    """A desk, and what the threads around it would do next."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.desk = Desk(folder / f"{seed}", nodes=self.random.choice((1, 1, 2)))
        self.leading = self.random.randrange(self.desk.nodes)
        """The rank that says that the script is ready: 1 where another host leads."""
        self.study: Future[Any] | None = None
        self.study_has_ended = False
        self.main: Future[Any] | None = None
        self.attempt_runs = self.main_has_ended = False
        self.gone: list[Rank] = []
        self.was_over = False
        self.hung = False
        """No process ends by itself."""

    def steps(self, count: int, wild: bool) -> None:
        for _ in range(count):
            if self.study_has_ended and self.main_has_ended:
                return
            acts = [self.study_acts, self.main_acts, self.time_passes]
            acts += [self.ranks_act, self.ranks_act, self.ranks_act, self.world_acts] if wild else [self.ranks_end]
            over = self.desk.state is State.OVER
            self.random.choice(acts)()
            assert not over or self.desk.state is State.OVER
            assert (self.desk.machine._attempt.order is not None) is (self.desk.state in (State.MEASURING, State.LOST))

    def study_acts(self) -> None:
        """It asks, and goes on or not; it has ended once it is told that tuning is over."""
        if self.study_has_ended or (self.study is not None and not self.study.done()):
            return
        if self.study is None:
            self.study = self.desk.asks_facts()
            return
        error = self.study.exception(0)
        if error is None and self.desk.machine.leads is False:
            self.study_has_ended = self.desk.state is State.OVER  # until then it does what the leader asks for
        elif isinstance(error, TuningOver):
            assert self.desk.state is State.OVER
            self.study_has_ended = True
        elif isinstance(error, TrialFailed) and self.random.random() < 0.1:
            self.desk.gives_up("the script fails as written")
            self.study_has_ended = True
        elif self.desk.asked > 12 and self.random.random() < 0.5:
            finished = self.desk.finishes()
            self.study, self.desk.asked = finished, 0
            finished.add_done_callback(self._study_has_finished)
        else:
            self.study = self.desk.asks(self.random.choice(({}, {}, {}, VARIABLES, {"OTHER": "1"})))

    def _study_has_finished(self, _: Future[Any]) -> None:
        self.study_has_ended = True

    def main_acts(self) -> None:
        """It makes attempts, one after the other, as long as it is told to."""
        if self.main_has_ended or (self.main is not None and not self.main.done()):
            return
        if self.attempt_runs:
            if self.desk.machine.attempt_must_end or (not self.hung and self.random.random() < 0.1):
                self.attempt_runs = False
                self.gone += self.desk.ranks.values()
                # Only an attempt on several hosts may be the overlay's fault.
                self.main = self.desk.ended(self.random.choice(ENDINGS), self.desk.nodes > 1 and self.desk.number == 0)
            return
        more = self.main is None or self.main.result(0)
        if more is False:
            assert self.desk.state is State.OVER
            self.main_has_ended = True
            return
        self.was_over = self.desk.state is State.OVER
        variables = self.desk.begins()
        assert (variables is None) is self.was_over
        if variables is None:
            self.main = self.desk.ended()
        else:
            self.main, self.attempt_runs = None, True

    def time_passes(self) -> None:
        self.desk.passes(self.random.choice((0.0, 0.5, 3.0, 30.0)))

    def ranks_act(self) -> None:
        """Any rank of this attempt says anything; or one of an attempt that has ended."""
        desk, rank = self.desk, self.random.randrange(2)
        if self.gone and self.random.random() < 0.1:
            late = self.random.choice(self.gone)
            again = Rank(late.hello.rank)
            desk.happens(Said(desk.number - 1, again, again.hello))
            desk.happens(Said(desk.number - 1, late, Goodbye(0, "late")))
            desk.happens(Closed(desk.number - 1, late))
            assert again.told == [Welcome(False)]
            return
        if not self.attempt_runs:
            return
        if rank not in desk.ranks or self.random.random() < 0.02:
            over = desk.state is State.OVER
            greeted = desk.hello(rank)
            assert not (over and greeted.may_go)
            return
        orders = desk.ranks[rank].orders
        acts = {
            "ready": lambda: desk.ready(self.leading if self.leading in desk.ranks else rank),
            "answers": lambda: desk.block(orders[-1].index if orders else 0, rank),
            "ends": lambda: desk.goodbye(rank),
            "raises": lambda: desk.goodbye(rank, "RuntimeError"),
            "closes": lambda: desk.closed(rank),
            "is killed": lambda: desk.process_ended(rank, "killed by SIGABRT"),
            "is gone": lambda: setattr(desk.ranks[rank], "is_gone", True),
        }
        acts[self.random.choices(list(acts), [6, 12, 1, 1, 1, 1, 1])[0]]()

    def world_acts(self) -> None:
        desk = self.desk
        acts = {
            "moves": lambda: setattr(desk.hang_timeout, "hangs", False),
            "hangs": lambda: setattr(desk.hang_timeout, "hangs", True),
            "elsewhere": desk.ended_elsewhere,
            "overlay": lambda: desk.stop(overlay_is_to_blame=True),
            "stop": desk.stop,
            "signal": lambda: desk.gives_up("interrupted"),
            "finish": lambda: desk.finish() if desk.nodes > 1 and 1 in desk.ranks else None,
        }
        acts[self.random.choices(list(acts), [20, 4, 4, 2, 1, 1, 1])[0]]()

    def ranks_end(self) -> None:
        """No rank moves any more. Before and between measurements only the main thread has a limit, `Waiting`."""
        self.desk.hang_timeout.hangs = True
        if self.desk.machine.leads is False and self.random.random() < 0.05:
            self.desk.gives_up("the launcher that leads has ended tuning")
        if self.hung and self.attempt_runs and self.desk.state in (State.STARTING, State.READY):
            self.desk.gives_up("no rank has moved")


@pytest.mark.parametrize("begin", [0, whole(SEQUENCES)])
def test_the_state_machine_always_ends(begin: int, tmp_path: Path) -> None:
    states = set()
    for seed in range(begin, begin + SEQUENCES):
        world = World(seed, tmp_path)
        world.steps(WILD, wild=True)
        world.hung = seed % 2 == 0
        states.add(world.desk.state)
        world.steps(TAME, wild=False)
        assert world.study_has_ended, seed
        assert world.main_has_ended, seed
        assert world.desk.state is State.OVER, seed
        late = world.desk.hello(0)
        assert late.told == [Welcome(False)], seed
    assert states == set(State)  # the events in any order lead everywhere


class Threads:
    """A live job with a study's thread, a main thread, and a fake worker in each attempt that may do anything."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.path, self.folder = str(folder / "s"), folder
        self.job = LiveJob(self.path, Journal(folder / "journal"))
        self.over = threading.Event()
        self.faults: list[BaseException] = []
        self.workers: list[FakeWorker] = []
        self.seen_over = False

    def run(self) -> None:
        calls = (self._study, self._main, self._signal)
        threads = [threading.Thread(target=self._guarded, args=(call,), daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        stuck = [call.__name__ for call, thread in zip(calls, threads, strict=True) if thread.is_alive()]
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()
        assert stuck == []
        assert self.faults == []
        self.job.close()

    def _guarded(self, call: Any) -> None:
        try:
            call()
        except BaseException as fault:
            self.faults.append(fault)
            self.job.give_up(repr(fault))

    def _study(self) -> None:
        try:
            self.job.facts()
            for number in range(30):
                interfaces = {"interfaces": "eth0,eth1"} if number % 10 == 9 else {}
                try:
                    self.job(Configuration(interfaces) if interfaces else AS_WRITTEN, 1, 8)
                except TrialFailed:
                    continue
            self.job.finish()
        except TuningOver:
            assert self.job.machine.over

    def _signal(self) -> None:
        """At some block, or never."""
        self.over.wait(60)
        if self.random.random() < 0.5:
            self.job.give_up("interrupted")

    def _answer(self, order: Measure) -> BlockDone | Goodbye | None:
        chance = self.random.random()
        if chance < 0.05:
            self.over.set()
        if chance < 0.1:
            return None
        if chance < 0.2:
            return Goodbye(0, "RuntimeError" if chance < 0.15 else "")
        return cost(order)

    def _main(self) -> None:
        more, number = True, 0
        while more:
            was_over = self.job.machine.over
            begins = self.job.attempt_begins(number, self.folder, self.job.machine.wanted)
            assert not (was_over and begins)
            failure = self._attempt() if begins else ""
            more = self.job.attempt_ended(failure)
            number += 1
        self.over.set()

    def _attempt(self) -> str:
        if self.random.random() < 0.1:
            return "it could not begin"
        was_over = self.job.machine.over
        worker = FakeWorker(self.path, self._answer, told=self.job.rank_ended)
        self.workers.append(worker)
        assert not (was_over and worker.welcome == Welcome(True))
        assert worker.left.wait(60)
        if not worker.connection.closed:
            worker.end()
        return "rank 0 ended with exit code 1" if worker.failed else ""


@pytest.mark.parametrize("seed", [seed if seed < 15 else whole(seed) for seed in range(40)])
def test_real_threads_always_end(seed: int, tmp_path: Path) -> None:
    Threads(seed, tmp_path).run()
