"""A configuration that needs another start of the script gets one, and only one that does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_worker import FakeWorker, MainThread

from autoddp.attempts.job import restarts
from autoddp.attempts.job.journal import Journal
from autoddp.attempts.job.live_job import LiveJob
from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.study import TrialFailed
from autoddp.wire import Finish, Measure

BOTH = Configuration({"interfaces": "eth0,eth1", "bucket_cap_mb": 8.0})
VARIABLES = {"GLOO_SOCKET_IFNAME": "eth0,eth1"}


@pytest.fixture
def job(tmp_path: Path) -> LiveJob:
    return LiveJob(str(tmp_path / "s"), Journal(tmp_path / "journal"))


@pytest.fixture
def main(job: LiveJob, tmp_path: Path) -> Iterator[MainThread]:
    found = MainThread(job, str(tmp_path / "s"), tmp_path)
    yield found
    found.end()


def orders(worker: FakeWorker) -> list[Measure]:
    return [order for order in worker.heard if isinstance(order, Measure)]


def test_one_start_for_each_change(job: LiveJob, main: MainThread) -> None:
    asked = [AS_WRITTEN, Configuration({"bucket_cap_mb": 8.0}), BOTH, BOTH, AS_WRITTEN]
    blocks = [job(configuration, 1, 3) for configuration in asked]
    main.end()
    assert [len(block.seconds) for block in blocks] == [3] * 5
    assert main.variables == [{}, VARIABLES, {}]
    configurations = [[order.configuration for order in orders(worker)] for worker in main.workers]
    assert configurations == [[AS_WRITTEN, asked[1]], [BOTH] * 2, [AS_WRITTEN]]
    assert [worker.heard[-1] for worker in main.workers[:2]] == [Finish(again=True)] * 2


def test_nothing_is_in_effect_after_a_start(job: LiveJob, main: MainThread) -> None:
    job(AS_WRITTEN, 1, 3)
    job(BOTH, 0, 3, apply=False)
    main.end()
    first = orders(main.workers[1])[0]
    assert first.apply
    assert first.warmup == 2


class WithoutWorker(threading.Thread):
    """The launcher's main thread: the second attempt has no worker and ends when told to."""

    def __init__(self, job: LiveJob, folder: Path) -> None:
        super().__init__(daemon=True)
        self._job, self._folder = job, folder
        self.told = threading.Event()
        self.variables: list[dict[str, str]] = []

    def run(self) -> None:
        for number in range(3):
            self.variables.append(self._job.machine.wanted)
            assert self._job.attempt_begins(number, self._folder, self.variables[-1])
            if number == 1:
                assert self.told.wait(60)
                self._job.attempt_ended("rank 1 ended with exit code 1")
                continue
            worker = FakeWorker(str(self._folder / "s"))
            assert worker.left.wait(60)
            worker.end()
            self._job.attempt_ended("")


@pytest.mark.parametrize("hangs", [True, False])
def test_a_start_that_fails_or_hangs_fails_its_configuration(
    job: LiveJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """The variables are to blame where a start with them does not come to a measurement, and only they."""
    if hangs:
        monkeypatch.setattr(restarts, "_START_PATIENCE", 0.5)
    main = WithoutWorker(job, tmp_path)
    main.start()
    job(AS_WRITTEN, 1, 3)
    if not hangs:
        main.told.set()
    why = "did not get going with GLOO_SOCKET_IFNAME=eth0,eth1" if hangs else "rank 1 ended with exit code 1"
    with pytest.raises(TrialFailed, match=why):
        job(BOTH, 1, 3)
    assert job.machine.attempt_must_end is hangs
    main.told.set()
    assert job(AS_WRITTEN, 1, 3).seconds == (0.05,) * 3
    job.give_up("the test is over")
    main.join(60)
    job.close()
    assert main.variables == [{}, VARIABLES, {}]
