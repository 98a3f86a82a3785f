"""A study whose launcher or job is lost goes on later: the journal is replayed, then the running model asked again.

The launcher's side is real (socket, live job, journal, study), the workers are fake_worker.py's.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest
from fake_worker import FakeWorker, MainThread, cost

from autoddp.attempts.job import live_job as server_module
from autoddp.attempts.job.events import Closed, Said, StopAsked
from autoddp.attempts.job.journal import Journal
from autoddp.attempts.job.live_job import LiveJob, WorkerServer
from autoddp.attempts.tune import Tuned, _Answer
from autoddp.codec import decode
from autoddp.codec import encode as encode_text
from autoddp.diagnose import Diagnosis, Finding
from autoddp.diagnose.findings import Level, Scaling
from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.study import Observer, Outcome, Screened, Semifinal, Study, StudySettings, TrialFailed, TuningOver
from autoddp.timing import Block
from autoddp.wire import LARGEST, VERSION, BlockDone, Finish, Goodbye, Hello, Measure, Welcome, encode

PLAN = StudySettings(trials=6)


@pytest.fixture
def workers() -> Iterator[list[FakeWorker]]:
    found: list[FakeWorker] = []
    yield found
    for worker in found:
        worker.process.kill()
        worker.process.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[LiveJob]:
    """In its first attempt, with the socket `s` and the journal `journal.jsonl`."""
    found = job_of(tmp_path, "s", Journal(tmp_path / "journal.jsonl"))
    yield found
    found.close()


def job_of(folder: Path, socket: str, journal: Journal) -> LiveJob:
    job = LiveJob(str(folder / socket), journal)
    assert job.attempt_begins(0, folder, {})
    return job


@contextlib.contextmanager
def in_a_thread(call: Callable[[], None]) -> Iterator[None]:
    """The launcher's main thread, while the test is the study's."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(call)
        yield
        done.result(60)


def study(job: LiveJob) -> Outcome:
    return Study(job, job.facts(), PLAN, Observer()).run()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[Measure]]:
    """The study as it runs when nothing happens, and all that was asked."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = job_of(folder, "s", Journal(folder / "journal.jsonl"))
    worker = FakeWorker(str(folder / "s"))
    outcome = study(job)
    worker.end()
    job.close()
    return outcome, [order for order in worker.heard if isinstance(order, Measure)]


def same(one: Outcome, other: Outcome) -> bool:
    return (one.trials, one.ladder, one.decision) == (other.trials, other.ladder, other.decision)


def test_every_measurement_is_in_the_journal(
    job: LiveJob, workers: list[FakeWorker], tmp_path: Path, undisturbed: tuple[Outcome, list[Measure]]
) -> None:
    workers.append(FakeWorker(str(tmp_path / "s")))
    assert same(study(job), undisturbed[0])
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [line["asked"]["index"] for line in lines] == list(range(len(workers[0].heard)))
    expected = [cost(order) for order in undisturbed[1]]
    assert [line["done"]["seconds"] for line in lines] == [list(done.seconds) for done in expected]
    assert undisturbed[0].decision.configuration != AS_WRITTEN


@pytest.mark.parametrize("before", [1, 9, 20])
def test_a_second_study_continues_where_the_first_stopped(
    tmp_path: Path, workers: list[FakeWorker], undisturbed: tuple[Outcome, list[Measure]], before: int
) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    job = job_of(tmp_path, "first", journal)

    def lost_in_time(*asked: Any, **more: Any) -> BlockDone:
        if len(journal.entries) == before:
            raise TuningOver("the launcher is lost")
        return job(*asked, **more)

    workers.append(FakeWorker(str(tmp_path / "first")))
    cut_off = Study(lost_in_time, job.facts(), PLAN, Observer())
    if before == 1:  # the script as written is not known yet
        with pytest.raises(TuningOver, match="lost"):
            cut_off.run()
    else:
        assert cut_off.run().ended == "the launcher is lost"
    job.close()

    second = job_of(tmp_path, "second", journal)
    workers.append(FakeWorker(str(tmp_path / "second")))
    outcome = study(second)
    second.close()
    assert same(outcome, undisturbed[0])
    asked = [order for order in workers[1].heard if isinstance(order, Measure)]
    assert [order.index for order in asked] == list(range(before, len(undisturbed[1])))
    # The new model has nothing in effect yet, so the first order turns and warms up whatever the study asked.
    assert (asked[0].apply, asked[0].warmup >= 1) == (True, True)
    assert [order.configuration for order in asked] == [o.configuration for o in undisturbed[1][before:]]


@pytest.mark.parametrize(
    ("reason", "said"), [("ValueError: fp16", "rank 0: ValueError: fp16"), (None, "rank 0 killed by SIGKILL")]
)
def test_a_worker_that_dies_fails_its_trial_only(tmp_path: Path, reason: str | None, said: str) -> None:
    def answer(order: Measure) -> BlockDone | Goodbye | None:
        if order.configuration.get("hook") != "fp16":
            return cost(order)
        return None if reason is None else Goodbye(0, reason)

    job = LiveJob(str(tmp_path / "s"), Journal(tmp_path / "journal.jsonl"))
    main = MainThread(job, str(tmp_path / "s"), tmp_path, [answer])
    assert job(AS_WRITTEN, 1, 2).seconds == (0.05, 0.05)
    with pytest.raises(TrialFailed, match=f"^{said}$"):
        job(Configuration({"hook": "fp16"}), 1, 2)
    assert job(AS_WRITTEN, 0, 4, apply=False).seconds == (0.05,) * 4
    main.end()
    after = main.workers[1].heard[0]
    assert isinstance(after, Measure)
    assert (after.apply, after.warmup) == (True, 2)  # nothing is in effect in a new process
    assert [entry.failure for entry in after.missed] == ["", said]


def test_a_script_that_ends_is_asked_again_for_less(tmp_path: Path) -> None:
    job = LiveJob(str(tmp_path / "s"), Journal(tmp_path / "journal.jsonl"))
    main = MainThread(job, str(tmp_path / "s"), tmp_path, [lambda order: Goodbye(0, ""), cost])
    job.facts()
    assert len(job(AS_WRITTEN, 1, 40).seconds) == 20
    main.end()


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_end_is_told(job: LiveJob, workers: list[FakeWorker], tmp_path: Path, nodes: int) -> None:
    workers.append(FakeWorker(str(tmp_path / "s"), nodes=nodes))
    job.facts()
    job.finish()
    assert workers[0].left.wait(timeout=60)
    assert workers[0].heard == ([Finish()] if nodes > 1 else [])  # there the ranks of the others are told by it
    workers.append(FakeWorker(str(tmp_path / "s")))
    assert [worker.welcome for worker in workers] == [Welcome(True), Welcome(False)]
    assert job.attempt_ended("") is False
    assert not job.attempt_begins(1, tmp_path, {})


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1",
        encode(Hello(VERSION + 1, 0, 0, 1, 0)),
        encode(Hello(VERSION - 1, 0, 0, 1, 0)),
        encode(Welcome(True)),
        b"\xff",
        b" " * LARGEST + encode(Hello(VERSION, 0, 0, 1, 0)),
    ],
    ids=["not json", "newer", "older", "another message", "not utf-8", "too long"],
)
def test_a_stranger_is_hung_up_on(tmp_path: Path, data: bytes) -> None:
    events: list[object] = []
    server = WorkerServer(str(tmp_path / "s"), 0, events.append)
    stranger = Client(str(tmp_path / "s"), family="AF_UNIX")
    with contextlib.suppress(BrokenPipeError):  # what is too long is not read to its end
        stranger.send_bytes(data)
    assert stranger.poll(30)
    with pytest.raises((EOFError, ConnectionResetError)):
        stranger.recv_bytes()
    server.close()
    assert events == []


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_the_user_learns_of_a_worker_of_another_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    server = WorkerServer(str(tmp_path / "s"), 0, lambda event: None)
    worker = Client(str(tmp_path / "s"), family="AF_UNIX")
    with caplog.at_level("WARNING", logger=server_module.logger.name):
        worker.send_bytes(encode(Hello(version, 3, 0, 1, 0)))
        server.close()
    assert f"rank 3 is sent away: it speaks version {version} of the tuning protocol" in caplog.text


def test_a_rank_that_says_too_much_is_gone(tmp_path: Path) -> None:
    events: list[Said | Closed | StopAsked] = []
    server = WorkerServer(str(tmp_path / "s"), 0, events.append)
    rank = Client(str(tmp_path / "s"), family="AF_UNIX")
    rank.send_bytes(encode(Hello(VERSION, 0, 0, 1, 0)))
    with contextlib.suppress(BrokenPipeError):
        rank.send_bytes(encode(Goodbye(0, "x" * LARGEST)))
    server.close()
    assert [type(event) for event in events] == [Said, Closed]


def test_all_that_was_said_is_an_event_before_the_server_has_closed(tmp_path: Path) -> None:
    """Also of ranks that nobody has got round to serving yet, and of one that lives on and says nothing more."""
    events: list[Said | Closed | StopAsked] = []
    server = WorkerServer(str(tmp_path / "s"), 3, events.append)
    ranks = [Client(str(tmp_path / "s"), family="AF_UNIX") for _ in range(20)]
    for number, rank in enumerate(ranks):
        rank.send_bytes(encode(Hello(VERSION, number, number, 1, 0)))
        rank.send_bytes(encode(Goodbye(number, "RuntimeError")))
    for rank in ranks[1:]:
        rank.close()
    server.close()
    heard: dict[int, list[object]] = {number: [] for number in range(len(ranks))}
    for event in events:
        assert isinstance(event, (Said, Closed))
        assert event.attempt == 3
        heard[event.worker.hello.rank].append(type(event.message) if isinstance(event, Said) else Closed)
    assert all(kinds == [Hello, Goodbye, Closed] for kinds in heard.values())
    assert not (tmp_path / "s").exists()


def test_a_worker_that_reads_nothing_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_PASSING", 1)
    events: queue.Queue[Said | Closed | StopAsked] = queue.Queue()
    server = WorkerServer(str(tmp_path / "s"), 0, events.put)
    stopped = Client(str(tmp_path / "s"), family="AF_UNIX")
    stopped.send_bytes(encode(Hello(VERSION, 0, 0, 1, 0)))
    said = events.get(timeout=60)
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        said.worker.send(Goodbye(0, "x" * (8 << 20)))  # type: ignore[union-attr]
    assert isinstance(events.get(timeout=60), Closed)
    server.close()


def test_a_journal_that_cannot_be_written_costs_the_file_only(tmp_path: Path) -> None:
    job = LiveJob(str(tmp_path / "s"), Journal(tmp_path / "no such folder" / "journal"))
    main = MainThread(job, str(tmp_path / "s"), tmp_path)
    job.facts()
    assert [len(job(AS_WRITTEN, 1, 3).seconds) for _ in range(3)] == [3] * 3
    main.end()


def test_a_fault_of_our_own_ends_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Journal, entry: object) -> None:
        raise ZeroDivisionError("of the test")

    job = LiveJob(str(tmp_path / "s"), Journal(tmp_path / "journal"))
    main = MainThread(job, str(tmp_path / "s"), tmp_path)
    job.facts()
    monkeypatch.setattr(Journal, "add", broken)
    with pytest.raises(TuningOver, match="a fault of autoddp's own: ZeroDivisionError"):
        job(AS_WRITTEN, 1, 3)
    main.thread.join(60)
    assert len(main.workers) == 1
    main.end()


def test_what_came_of_a_study_arrives_whole_on_other_hosts(undisturbed: tuple[Outcome, list[Measure]]) -> None:
    """Each host has the report: numbers that JSON has no word for, and what is known only here, included."""
    outcome = undisturbed[0]
    finding = Finding("straggler", (1,), 0.01, None, 0.02, "suspected", "rank 1 is late", "look at it")
    scaling = Scaling(2, None, None, 0.5, "half")
    diagnosis = Diagnosis(0.1, [], [finding], [Level("as written", 0.1)], scaling, ["all"], ["slow"])
    heat = Semifinal((AS_WRITTEN,), ((Block((0.1, math.inf)),),))
    screened = (Screened({"NCCL_ALGO": "Tree"}, None),)
    outcome = replace(outcome, semifinals=(heat,), screened=screened, diagnosis=diagnosis)
    tuned = Tuned("a recipe", outcome=outcome, why="", built_ddp=True, wall_seconds={"total": 1.0})
    for found in (tuned, Tuned(diagnosis=diagnosis, why="that was all")):
        text = encode_text(_Answer.of(found))
        there = decode(text, _Answer).whole
        assert encode_text(_Answer.of(there)) == text
        assert [type(there.outcome), type(there.diagnosis)] == [type(found.outcome), type(found.diagnosis)]
    assert decode(encode_text(_Answer.of(tuned)), _Answer).whole.outcome.decision == outcome.decision  # type: ignore[union-attr]
