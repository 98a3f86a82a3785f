"""A configuration that needs another start of the script gets one, and only one that does."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_worker import FakeWorker

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.launch import starts
from autoddp.launch.journal import Journal
from autoddp.launch.live_job import LiveJob
from autoddp.launch.server import WorkerServer
from autoddp.study import TrialFailed
from autoddp.wire import Finish

BOTH = Configuration({"interfaces": "eth0,eth1", "bucket_cap_mb": 8.0})
VARIABLES = {"GLOO_SOCKET_IFNAME": "eth0,eth1"}


class Passes:
    """The main thread of a launcher: one fake worker a pass, as long as the job wants another."""

    def __init__(self, job: LiveJob, path: str, folder: Path) -> None:
        self.variables: list[dict[str, str]] = []
        self.workers: list[FakeWorker] = []
        self._job, self._path, self._folder = job, path, folder
        self.thread = threading.Thread(target=self._run, daemon=True)

    def workers_of(self, passes: int) -> list[FakeWorker]:
        """The workers once so many passes have one: a worker may have answered before it is in the list."""
        until = time.monotonic() + 30
        while len(self.workers) < passes and time.monotonic() < until:
            time.sleep(0.01)
        return self.workers

    def _run(self) -> None:
        more = True
        while more:
            self.variables.append(self._job.attempt_begins(self._folder))
            worker = FakeWorker(self._path)
            self.workers.append(worker)
            worker.hung_up.wait(30)
            with contextlib.suppress(OSError):  # sent away before
                worker.end("")
            more = self._job.attempt_ended("")


@pytest.fixture
def passes(tmp_path: Path) -> Iterator[tuple[LiveJob, Passes]]:
    server = WorkerServer(str(tmp_path / "s"))
    job = LiveJob(server, Journal(tmp_path / "journal"))
    found = Passes(job, server.path, tmp_path)
    found.thread.start()
    yield job, found
    job.give_up("the test is over")
    for worker in found.workers:
        worker.process.kill()
        worker.process.wait()
    found.thread.join(30)
    server.close()
    assert not found.thread.is_alive()


def let_go_when_told(passes: Passes) -> threading.Thread:
    """A fake worker does not leave by itself when it hears that this start is over."""

    def watch() -> None:
        seen = 0
        while passes.thread.is_alive():
            for worker in passes.workers[seen:]:
                if any(isinstance(order, Finish) and order.again for order in worker.heard):
                    worker.hung_up.set()
                    seen += 1
            threading.Event().wait(0.01)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_one_start_for_each_change(passes: tuple[LiveJob, Passes]) -> None:
    job, main = passes
    let_go_when_told(main)
    asked = [AS_WRITTEN, Configuration({"bucket_cap_mb": 8.0}), BOTH, BOTH, AS_WRITTEN]
    blocks = [job(configuration, 1, 3) for configuration in asked]
    assert [len(block.seconds) for block in blocks] == [3] * 5
    assert main.variables == [{}, VARIABLES, {}]
    heard = [[o for o in worker.heard if not isinstance(o, Finish)] for worker in main.workers_of(passes=3)]
    configurations = [[order.configuration for order in orders] for orders in heard]
    assert configurations == [[{}, {"bucket_cap_mb": 8.0}], [BOTH.plain()] * 2, [{}]]


def test_a_start_that_fails_fails_its_configuration(tmp_path: Path) -> None:
    """The variables are to blame where a start with them fails before its first measurement, and only they."""
    server = WorkerServer(str(tmp_path / "s"))
    job = LiveJob(server, Journal(tmp_path / "journal"))
    job.attempt_begins(tmp_path)
    worker = FakeWorker(server.path)
    job(AS_WRITTEN, 1, 3)

    def next_attempts() -> None:
        while not any(isinstance(order, Finish) for order in worker.heard):
            threading.Event().wait(0.01)
        worker.end("")
        assert job.attempt_ended("")
        assert job.attempt_begins(tmp_path) == VARIABLES
        assert job.attempt_ended("rank 1 ended with exit code 1")

    main = threading.Thread(target=next_attempts)
    main.start()
    with pytest.raises(TrialFailed, match="rank 1 ended with exit code 1"):
        job(BOTH, 1, 3)
    main.join()
    assert job.attempt_begins(tmp_path) == {}
    job.give_up("the test is over")
    server.close()


def test_nothing_is_in_effect_after_a_start(passes: tuple[LiveJob, Passes]) -> None:
    job, main = passes
    let_go_when_told(main)
    job(AS_WRITTEN, 1, 3)
    job(BOTH, 0, 3, turn=False)
    orders = [order for order in main.workers_of(passes=2)[1].heard if not isinstance(order, Finish)]
    assert orders[0].turn
    assert orders[0].warmup == 2


def test_a_start_that_hangs_fails_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker says hello in the second pass: after some patience the configuration is to blame."""
    monkeypatch.setattr(starts, "_START_PATIENCE", 0.5)
    server = WorkerServer(str(tmp_path / "s"))
    job = LiveJob(server, Journal(tmp_path / "journal"))
    job.attempt_begins(tmp_path)
    worker = FakeWorker(server.path)
    job(AS_WRITTEN, 1, 3)

    def next_pass() -> None:
        while not any(isinstance(order, Finish) for order in worker.heard):
            threading.Event().wait(0.01)
        worker.end("")
        assert job.attempt_ended("")
        assert job.attempt_begins(tmp_path) == VARIABLES

    main = threading.Thread(target=next_pass)
    main.start()
    with pytest.raises(TrialFailed, match="did not get going with GLOO_SOCKET_IFNAME=eth0,eth1"):
        job(BOTH, 1, 3)
    main.join()
    assert job.wants_another_attempt.is_set()
    assert job.attempt_ended("the attempt's launcher was killed by SIGKILL")
    assert job.attempt_begins(tmp_path) == {}
    assert not job.wants_another_attempt.is_set()
    job.give_up("the test is over")
    worker.process.wait()
    server.close()
