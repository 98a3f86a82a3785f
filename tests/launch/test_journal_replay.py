"""A study whose launcher or job is lost goes on elsewhere: the journal is replayed, then the running model asked again.

The launcher's side is real (server, socket, live job, journal, study), the workers are fake_worker.py's.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest
from fake_worker import FakeWorker, cost

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.launch.journal import Entry, Journal
from autoddp.launch.live_job import LiveJob
from autoddp.launch.server import WorkerServer
from autoddp.study import Outcome, Plan, Silent, Study, TrialFailed, TuningOver
from autoddp.wire import VERSION, BlockDone, Finish, Goodbye, Hello, Measure, Welcome, encode

PLAN = Plan(trials=6)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WorkerServer]:
    found = WorkerServer(str(tmp_path / "s"))
    yield found
    found.close()


@pytest.fixture
def workers() -> Iterator[list[FakeWorker]]:
    found: list[FakeWorker] = []
    yield found
    for worker in found:
        with contextlib.suppress(OSError):
            worker.end()
        worker.process.wait()


def job_of(server: WorkerServer, journal: Journal, folder: Path) -> LiveJob:
    job = LiveJob(server, journal)
    job.attempt_begins(folder)
    return job


def study(job: LiveJob) -> Outcome:
    return Study(job, job.facts(), PLAN, Silent()).run()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[Measure]]:
    """The study as it runs when nothing happens, and all that was asked."""
    folder = tmp_path_factory.mktemp("undisturbed")
    server = WorkerServer(str(folder / "s"))
    worker = FakeWorker(server.path)
    outcome = study(job_of(server, Journal(folder / "journal.jsonl"), folder))
    worker.end()
    worker.process.wait()
    server.close()
    return outcome, [order for order in worker.heard if isinstance(order, Measure)]


def same(one: Outcome, other: Outcome) -> bool:
    return (one.trials, one.ladder, one.decision) == (other.trials, other.ladder, other.decision)


def test_every_measurement_is_in_the_journal(
    server: WorkerServer, workers: list[FakeWorker], tmp_path: Path, undisturbed: tuple[Outcome, list[Measure]]
) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    workers.append(FakeWorker(server.path))
    assert same(study(job_of(server, journal, tmp_path)), undisturbed[0])
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [line["asked"]["index"] for line in lines] == list(range(len(workers[0].heard)))
    assert [line["done"]["seconds"] for line in lines] == [list(e.done.seconds) for e in journal.entries if e.done]
    assert undisturbed[0].decision.configuration != AS_WRITTEN


@pytest.mark.parametrize("before", [1, 9, 20])
def test_a_second_study_continues_where_the_first_stopped(
    tmp_path: Path, workers: list[FakeWorker], undisturbed: tuple[Outcome, list[Measure]], before: int
) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    first = WorkerServer(str(tmp_path / "first"))
    job = job_of(first, journal, tmp_path)

    def lost_in_time(*asked: Any, **more: Any) -> BlockDone:
        if len(journal.entries) == before:
            raise TuningOver("the launcher is lost")
        return job(*asked, **more)

    workers.append(FakeWorker(first.path))
    with pytest.raises(TuningOver, match="lost"):
        Study(lost_in_time, job.facts(), PLAN, Silent()).run()
    first.close()

    second = WorkerServer(str(tmp_path / "second"))
    workers.append(FakeWorker(second.path))
    outcome = study(job_of(second, journal, tmp_path))
    second.close()
    assert same(outcome, undisturbed[0])
    asked = [order for order in workers[1].heard if isinstance(order, Measure)]
    assert [order.index for order in asked] == list(range(before, len(undisturbed[1])))
    # The new model has nothing in effect yet, so the first order turns and warms up whatever the study asked.
    assert (asked[0].turn, asked[0].warmup >= 1) == (True, True)
    assert [order.configuration for order in asked] == [o.configuration for o in undisturbed[1][before:]]


def test_a_follower_takes_over_the_lead(
    server: WorkerServer, workers: list[FakeWorker], tmp_path: Path, undisturbed: tuple[Outcome, list[Measure]]
) -> None:
    """Another node leads at first: this one's rank 1 passes on each block. After a restart rank 0 is here."""
    job = job_of(server, Journal(tmp_path / "journal.jsonl"), tmp_path)
    workers.append(FakeWorker(server.path, rank=1, nodes=2))
    passed_on = undisturbed[1][:12]
    for order in passed_on:
        workers[0].say(cost(order))
    workers[0].end("DistBackendError: a peer is gone")
    workers.append(FakeWorker(server.path, rank=0, nodes=2, restart=1))
    assert same(study(job), undisturbed[0])
    asked = [order.index for order in workers[1].heard if isinstance(order, Measure)]
    assert asked == list(range(len(passed_on), len(undisturbed[1])))


def test_a_block_that_a_follower_did_not_live_to_hear_of(
    server: WorkerServer, workers: list[FakeWorker], tmp_path: Path, undisturbed: tuple[Outcome, list[Measure]]
) -> None:
    """Rank 0 dies of an order right after a block: the other node's rank is gone before it can pass that block on."""
    last_heard, dies_at = 7, 9

    def answer(order: Measure) -> BlockDone | None:
        return None if order.index == dies_at else cost(order)

    leads = job_of(server, Journal(tmp_path / "leads.jsonl"), tmp_path)
    workers.append(FakeWorker(server.path, answer, nodes=2))
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(study(leads)))
    thread.start()
    workers[0].hung_up.wait(timeout=60)
    workers.append(FakeWorker(server.path, answer, nodes=2, restart=1))
    thread.join(timeout=60)

    other = WorkerServer(str(tmp_path / "other"))
    follows = job_of(other, Journal(tmp_path / "follows.jsonl"), tmp_path)
    workers.append(FakeWorker(other.path, rank=1, nodes=2))
    for order in (*workers[0].heard[: last_heard + 1], *workers[1].heard):
        assert isinstance(order, Measure)
        workers[2].say(cost(order))
    assert same(study(follows), outcomes[0])
    other.close()


def test_a_follower_learns_of_failures(server: WorkerServer, workers: list[FakeWorker], tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    job = job_of(server, journal, tmp_path)
    failed = Entry(Measure(0, {"hook": "fp16"}, 1, 2), None, "rank 0 killed by SIGABRT")
    workers.append(FakeWorker(server.path, rank=1, nodes=2))
    workers[0].say(cost(Measure(1, {}, 1, 2, missed=(failed.plain(),))))
    with pytest.raises(TrialFailed, match="rank 0 killed by SIGABRT"):
        job(Configuration({"hook": "fp16"}), 1, 2)
    assert job(AS_WRITTEN, 1, 2).seconds == (0.05, 0.05)
    assert [entry.failure for entry in journal.entries] == ["rank 0 killed by SIGABRT", ""]


@pytest.mark.parametrize(
    ("reason", "said"), [("ValueError: fp16", "rank 0: ValueError: fp16"), (None, "rank 0 killed by SIGKILL")]
)
def test_a_worker_that_dies_fails_its_trial_only(
    server: WorkerServer, workers: list[FakeWorker], tmp_path: Path, reason: str | None, said: str
) -> None:
    def answer(order: Measure) -> BlockDone | None:
        if order.configuration.get("hook") != "fp16":
            return cost(order)
        if reason is not None:
            workers[-1].say(Goodbye(0, reason))
        return None

    job = job_of(server, Journal(tmp_path / "journal.jsonl"), tmp_path)
    workers.append(FakeWorker(server.path, answer, told=server.process_ended))
    assert job(AS_WRITTEN, 1, 2).seconds == (0.05, 0.05)
    with pytest.raises(TrialFailed, match=f"^{said}$"):
        job(Configuration({"hook": "fp16"}), 1, 2)
    workers.append(FakeWorker(server.path, answer, restart=1))
    assert job(AS_WRITTEN, 0, 4, turn=False).seconds == (0.05,) * 4
    after = workers[1].heard[0]
    assert isinstance(after, Measure)
    assert (after.turn, after.warmup) == (True, 2)  # nothing is in effect in a new process
    assert [entry["failure"] for entry in after.missed] == ["", said]


def test_a_script_that_ends_is_asked_again_for_less(
    server: WorkerServer, workers: list[FakeWorker], tmp_path: Path
) -> None:
    def end(_order: Measure) -> None:
        workers[0].say(Goodbye(0, ""))

    job = job_of(server, Journal(tmp_path / "journal.jsonl"), tmp_path)
    workers.append(FakeWorker(server.path, end))
    done: list[BlockDone] = []
    thread = threading.Thread(target=lambda: done.append(job(AS_WRITTEN, 1, 40)))
    thread.start()
    workers[0].process.wait(timeout=60)
    assert job.attempt_ended("")  # another pass
    job.attempt_begins(tmp_path)
    workers.append(FakeWorker(server.path))
    thread.join(timeout=60)
    assert [len(block.seconds) for block in done] == [20]


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_end_is_told(server: WorkerServer, workers: list[FakeWorker], tmp_path: Path, nodes: int) -> None:
    job = job_of(server, Journal(tmp_path / "journal.jsonl"), tmp_path)
    workers.append(FakeWorker(server.path, nodes=nodes))
    job.facts()
    job.finish("the recipe")
    assert job.finished == Finish("the recipe")
    assert workers[0].hung_up.wait(timeout=60)
    assert workers[0].heard == ([Finish("the recipe")] if nodes > 1 else [])  # other nodes write it too
    assert job.attempt_ended("") is False
    workers.append(FakeWorker(server.path, restart=1))
    assert [worker.welcome for worker in workers] == [Welcome(True), Welcome(False)]


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1", encode(Hello(VERSION + 1, 0, 0, 1, 0)), encode(Welcome(True))])
def test_a_stranger_is_hung_up_on(server: WorkerServer, data: bytes) -> None:
    stranger = Client(server.path, family="AF_UNIX")
    stranger.send_bytes(data)
    with pytest.raises(EOFError):
        stranger.recv_bytes()
    assert server.heard.empty()
