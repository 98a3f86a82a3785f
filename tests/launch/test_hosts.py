"""The launchers of several hosts keep in step: a real store of torch's, one thread a host."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
from launchers import free_port
from one_starts import one_start
from torch.distributed import PrefixStore, TCPStore

from autoddp.attempts.job.machine import NO_DDP
from autoddp.attempts.tune import Tuned, Tuning
from autoddp.commandline.words import parse
from autoddp.errors import HostLost
from autoddp.hosts import presence
from autoddp.hosts import together as module
from autoddp.hosts.together import Hosts, Next
from autoddp.isolation import Level
from autoddp.network.gathering import Endpoint
from autoddp.processes.polling import polls
from autoddp.processes.signals import Interrupted
from autoddp.runs.rank_logs import LogKeeper
from autoddp.torchrun.options import node_range


def connected(number: int, fewest: int = 0) -> list[Hosts]:
    port = int(free_port())
    stores: list[Any] = [TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False) for rank in range(number)]
    place = Endpoint("--rdzv-endpoint", "127.0.0.1", port)
    hosts = [
        Hosts(PrefixStore("plan", store), rank, number, fewest=fewest, name=f"host{rank}", endpoint=place)
        for rank, store in enumerate(stores)
    ]
    _to_close.extend(hosts)
    return hosts


_to_close: list[Hosts] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """A thread that is in torch when Python ends would end the tests with an abort."""
    yield
    while _to_close:
        _to_close.pop().close()


@pytest.fixture
def two() -> list[Hosts]:
    return connected(2)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds become shorter."""
    monkeypatch.setattr(presence, "_BEAT", 0.05)
    monkeypatch.setattr(presence, "_MISSING", 2.0)
    monkeypatch.setattr(module, "_RETURN", 1.0)


def together(*calls: Any) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [call.result(60) for call in [pool.submit(*call) for call in calls]]


def quiet(text: str) -> None:
    raise AssertionError(text)


def test_one_host_asks_nobody() -> None:
    alone = Hosts()
    assert not alone.several
    assert alone.worst(Level.OVERLAY, quiet) is Level.OVERLAY
    assert alone.ended_elsewhere(0) is None
    assert alone.agree(0, Next(True), quiet) == Next(True)
    alone.tell("key", "value")
    assert alone.one_answer("x", True, quiet, True) == ("x", True)


def test_all_take_the_worst_level(two: list[Hosts]) -> None:
    found = together((two[0].worst, Level.OVERLAY, quiet), (two[1].worst, Level.GUARD, quiet))
    assert found == [Level.GUARD] * 2


@pytest.mark.parametrize(
    ("wanted", "all_do"),
    [
        ([Next(True), Next(True)], Next(True)),
        ([Next(True), Next(False, "it crashed")], Next(False, "it crashed")),
        ([Next(False, "node 1: it crashed"), Next(False, "it crashed")], Next(False, "node 1: it crashed")),
        ([Next(False), Next(False)], Next(False)),
        ([Next(True), Next(True, level=Level.GUARD)], Next(True, level=Level.GUARD)),
    ],
)
def test_another_attempt_only_if_all_want_it(two: list[Hosts], wanted: list[Next], all_do: Next) -> None:
    found = together(*((host.agree, 3, one, quiet) for host, one in zip(two, wanted, strict=True)))
    assert found == [all_do] * 2


def test_an_attempt_that_ends_on_one_host_ends_on_the_other_after_a_while(
    two: list[Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GRACE", 1.0)
    assert two[1].ended_elsewhere(5) is None
    began = time.monotonic()
    two[0].attempt_ended(5, "rank 0 killed by SIGABRT")
    while (found := two[1].ended_elsewhere(5)) is None:
        assert time.monotonic() - began < 30
        time.sleep(0.05)
    assert found == "host0: rank 0 killed by SIGABRT"
    two[1].attempt_ended(5, "rank 1 has lost rank 0")
    assert two[1].ended_elsewhere(5) == found  # a third host must hear of the cause
    assert time.monotonic() - began > 1.0  # it may end by itself
    assert two[1].ended_elsewhere(6) is None


def test_a_host_that_says_nothing_ends_the_tuning_and_not_the_job(
    two: list[Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 1.0)
    monkeypatch.setattr(module, "_SILENT", 0.2)
    monkeypatch.setattr(module, "_READING", 0.2)
    said: list[str] = []
    found = two[0].agree(0, Next(True), said.append)
    assert found.more is False
    assert "waited 1 s for the launchers of 2 hosts" in found.why
    assert said == ["waiting for the launchers of the other hosts (up to 1 s)"]
    assert two[0].one_answer("x", True, said.append, True) == ("", True)


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_host_whose_ranks_end_first_waits_for_those_of_the_other(
    two: list[Hosts], ends_well: bool, tmp_path: Path
) -> None:
    """They may go on for longer than the launchers wait for each other's word, after which tuning would be over."""
    first, second = (one_start(tmp_path, hosts=hosts) for hosts in two)
    first.is_enough()
    waits = ThreadPoolExecutor(1).submit(first.await_the_others)
    assert not wait([waits], timeout=1.0).done
    if ends_well:
        second.is_enough()
    else:
        two[1].attempt_ended(0, "rank 1 was killed by SIGKILL")
    assert waits.result(60) == ""
    two[1].end("there is no memory")
    other = replace(first, number=1)
    assert "there is no memory" in other.await_the_others()


@pytest.mark.parametrize("leads", [0, 1])
def test_the_launcher_that_leads_tells_the_others(two: list[Hosts], leads: int) -> None:
    leader, other = two[leads], two[1 - leads]
    told = ThreadPoolExecutor(1).submit(other.await_told, "key", dict[str, int], lambda: False)
    leader.tell("key", {"value": 1})
    assert told.result(60) == {"value": 1}
    assert other.await_told("another", str, lambda: True) is None
    variables = {"NCCL_ALGO": "Tree"}
    wants = [Next(True, variables=variables if host is leader else {}) for host in two]
    found = together(*((host.agree, 3, one, quiet) for host, one in zip(two, wants, strict=True)))
    assert found == [Next(True, variables=variables)] * 2


@pytest.mark.parametrize("leads", [0, 1])
def test_all_take_the_answer_of_the_launcher_that_leads(two: list[Hosts], leads: int) -> None:
    """However long it is: the store refuses a value of more than 8 MiB."""
    answers = ["x" * 2**24 if rank == leads else "not asked" for rank in range(2)]
    calls = [(host.one_answer, answers[rank], rank == 0, quiet, rank == leads) for rank, host in enumerate(two)]
    assert together(*calls) == [(answers[leads], True)] * 2


def test_where_nobody_leads_there_is_no_answer(two: list[Hosts]) -> None:
    assert together(*((host.one_answer, "x", False, quiet, False) for host in two)) == [("", False)] * 2


def test_a_store_that_is_gone_ends_the_attempt() -> None:
    port = int(free_port())
    host: Any = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    hosts = Hosts(TCPStore("127.0.0.1", port, None, False), 1, 2)
    _to_close.append(hosts)
    assert hosts.ended_elsewhere(0) is None
    del host
    ended = threading.Event()

    def ask() -> None:
        while hosts.ended_elsewhere(0) is None:
            time.sleep(0.05)
        ended.set()

    threading.Thread(target=ask, daemon=True).start()
    assert ended.wait(30)


def until(condition: Any) -> Any:
    began = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - began < 60
        time.sleep(0.02)
    return found


def lost_hosts(hosts: Hosts) -> str:
    """The error in place of a recipe."""
    with pytest.raises(HostLost) as lost:
        hosts.one_answer("x", False, lambda _: None, True)
    return str(lost.value)


def gone(hosts: Hosts) -> None:
    """As if the launcher had been killed: it says nothing more, and its store stays."""
    hosts._presence.stop()


@pytest.mark.usefixtures("hasty")
def test_a_host_that_is_not_heard_of_is_named_by_all_and_ends_tuning() -> None:
    three = connected(3)
    together(*((host.worst, Level.OFF, quiet) for host in three))
    assert [host.why_over for host in three] == ["", "", ""]
    gone(three[1])
    assert until(lambda: three[0].why_over).startswith("host1 has not been heard of for ")
    assert until(lambda: three[2].why_over).startswith("host1 has not been heard of for ")
    found = together((three[0].agree, 0, Next(True), quiet), (three[2].agree, 0, Next(True), quiet))
    assert [one.more for one in found] == [False, False]
    for lost in together((lost_hosts, three[0]), (lost_hosts, three[2])):
        assert lost.startswith("host1 has not been heard of for ")
        assert lost.endswith("; the job needs 3 hosts, and no job is started")


@pytest.mark.usefixtures("hasty")
def test_a_host_that_the_job_can_spare_costs_the_recipe_and_may_not_come_back() -> None:
    three = connected(3, fewest=2)
    together(*((host.worst, Level.OFF, quiet) for host in three))
    gone(three[1])
    said: list[str] = []
    found = together(
        (three[0].one_answer, "x", False, said.append, True), (three[2].one_answer, "", True, said.append, False)
    )
    assert found == [("", True)] * 2
    assert sum("the recipe is not used: host1 has not been heard of" in line for line in said) == 2
    assert [three[0].left, three[2].left] == [2, 2]  # a host that comes later reads how many take part
    del three[1].__dict__["_presence"]  # it goes on, and knows nothing of this
    assert "the other hosts had not heard of this one for too long" in lost_hosts(three[1])


@pytest.mark.usefixtures("hasty")
def test_a_host_that_comes_back_in_time_launches_with_the_others(
    two: list[Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETURN", 60.0)
    together(*((host.worst, Level.OFF, quiet) for host in two))
    gone(two[1])
    until(lambda: two[0].why_over)
    del two[1].__dict__["_presence"]
    found = together((two[0].one_answer, "x", False, quiet, True), (two[1].one_answer, "", True, quiet, False))
    assert found == [("x", True)] * 2
    assert until(lambda: two[1].why_over) == two[0].why_over


class Link:
    """A store behind a link that may be down: then a question waits, and arrives once the link is up again."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.up = threading.Event()
        self.up.set()

    def __getattr__(self, name: str) -> Any:
        def ask(*words: Any) -> Any:
            self.up.wait(60)
            return getattr(self._store, name)(*words)

        return ask


@pytest.mark.usefixtures("hasty")
def test_a_host_whose_link_was_down_launches_with_the_others(two: list[Hosts], monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the others as long as they wait for it."""
    monkeypatch.setattr(module, "_RETURN", 60.0)
    two[1].store = link = Link(two[1].store)
    together(*((host.worst, Level.OFF, quiet) for host in two))
    link.up.clear()
    until(lambda: two[0].why_over)
    assert "the hosts meet, has not answered for " in until(lambda: two[1].why_over)
    assert [host.agree(0, Next(True), quiet).more for host in two] == [False, False]
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        link.up.set()

    found = together((two[0].one_answer, "x", False, quiet, True), (two[1].one_answer, "", True, say, False))
    assert found == [("x", True)] * 2
    assert [line.partition(": waiting")[2] for line in said] == [" for it (up to 60 s)"]


@pytest.mark.usefixtures("hasty")
def test_where_the_first_host_was_stopped_it_hears_that_tuning_is_over(two: list[Hosts]) -> None:
    """Else it would start the script once more, and wait for the others in vain."""
    two[1].store = link = Link(two[1].store)
    together(*((host.worst, Level.OFF, quiet) for host in two))
    gone(two[0])
    link.up.clear()
    assert "the hosts meet, has not answered for " in until(lambda: two[1].why_over)
    del two[0].__dict__["_presence"]  # it goes on, and so does its store
    link.up.set()
    assert until(lambda: two[0].why_over) == two[1].why_over
    found = together((two[0].one_answer, "x", False, quiet, True), (two[1].one_answer, "", True, quiet, False))
    assert found == [("x", True)] * 2


def launched(hosts: Hosts, prepares: Any = lambda: None, waits: Any = lambda _: None) -> str:
    """What comes of it once all have decided what to launch; `waits` is called while it waits for the others."""
    try:
        with hosts.launching(waits):
            prepares()
    except (HostLost, Interrupted) as error:
        return str(error)
    return ""  # it launches the job


def interrupted() -> None:
    raise Interrupted(signal.SIGINT)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("fewest", "ends", "others"),
    [
        (3, interrupted, "host1 has left: SIGINT; the job needs 3 hosts, and no job is started"),
        (2, interrupted, ""),  # it has been decided what to launch, and elastic finds out who comes
        (3, None, "host1 has not been heard of for 2 s; the job needs 3 hosts, and no job is started"),
        (3, lambda: None, ""),
    ],
)
def test_all_hosts_launch_the_job_or_none_does(fewest: int, ends: Any, others: str) -> None:
    """The others waited in silence, as long as torchrun does, for one that had been ended while it wrote its report."""
    three, said = connected(3, fewest=fewest), list[str]()
    asked = [(host.one_answer, "x", True, quiet, host is three[0]) for host in three]
    assert together(*asked) == [("x", True)] * 3
    stay = [(launched, host, lambda: None, said.append) for host in (three[0], three[2])]
    if ends is None:
        gone(three[1])
        found = together(*stay)
    else:
        found = together(*stay, (launched, three[1], ends))[:2]
    assert [re.sub(r"for \d+ s", "for 2 s", one) for one in found] == [others] * 2
    spared = "warning: host1 has left: SIGINT; the job starts with the hosts that come"
    assert [line for line in said if "warning" in line] == [spared] * (2 if fewest == 2 else 0)


@pytest.mark.usefixtures("hasty")
def test_a_host_that_is_ended_while_it_waits_to_launch_is_missed_at_once(
    two: list[Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one launched the job: it had not heard of it yet, as launchers hear of each other once a second."""
    monkeypatch.setattr(module, "_SILENT", 0.1)
    together(*[(host.one_answer, "x", True, lambda _: None, host is two[0]) for host in two])
    monkeypatch.setattr(presence, "_BEAT", 60.0)
    assert launched(two[1], waits=lambda _: interrupted()) == "130"
    assert launched(two[0]) == "host1 has left: SIGINT; the job needs 2 hosts, and no job is started"


@pytest.mark.parametrize("leaves", [0, 1])
def test_a_host_that_leaves_is_missed_at_once(two: list[Hosts], leaves: int) -> None:
    stays = two[1 - leaves]
    together(*((host.worst, Level.OFF, quiet) for host in two))
    began = time.monotonic()
    leaver = threading.Thread(target=two[leaves].leave, args=("SIGINT",))
    leaver.start()
    assert stays.agree(0, Next(True), quiet) == Next(False, f"host{leaves} has left: SIGINT")
    assert lost_hosts(stays) == f"host{leaves} has left: SIGINT; the job needs 2 hosts, and no job is started"
    leaver.join()
    assert time.monotonic() - began < 20  # nobody has waited for the half minute of a silent one


def test_hosts_that_all_leave_at_once_wait_for_nobody(two: list[Hosts]) -> None:
    together(*((host.worst, Level.OFF, quiet) for host in two))
    together(*((host.leave, "SIGINT") for host in two))


def test_a_launcher_that_has_left_waits_for_no_answer(two: list[Hosts]) -> None:
    """A signal has come while the study's thread is at work: whatever that asks must not hold up the end."""
    together(*((host.worst, Level.OFF, quiet) for host in two))
    together(*((host.leave, "SIGTERM") for host in two))
    began = time.monotonic()
    two[0].tell("screening/2", "the next setting")
    assert two[0].await_told("screening/3", str, lambda: False) is None
    assert time.monotonic() - began < 10  # and not the half minute of a store that is silent


def test_a_launcher_that_was_stopped_itself_blames_nobody(two: list[Hosts], monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks of a launcher that was stopped show a long time in which it has looked at nothing."""
    together(*((host.worst, Level.OFF, quiet) for host in two))
    real = time.monotonic
    monkeypatch.setattr(presence.time, "monotonic", lambda: real() + 1000)
    assert two[0].why_over == ""
    assert together(*((host.agree, 0, Next(True), quiet) for host in two)) == [Next(True)] * 2


@pytest.mark.usefixtures("hasty")
def test_a_store_that_does_not_answer_holds_up_nobody() -> None:
    """As on a host that was switched off: the question has been sent, and nothing comes back."""

    class Silent:
        def set_timeout(self, _: object) -> None:
            pass

        def set(self, *_: object) -> None:
            threading.Event().wait(30)

    hosts = Hosts(Silent(), 1, 2)
    answer = hosts.agree(0, Next(True), quiet)
    assert not answer.more
    assert "the launcher where the hosts meet, has not answered for " in answer.why
    assert lost_hosts(hosts).endswith("; no job is started")


def test_a_store_that_is_gone_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """torch's own client would say it in twenty."""
    port = int(free_port())
    host: Any = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    hosts = Hosts(
        TCPStore("127.0.0.1", port, None, False), 1, 2, endpoint=Endpoint("--rdzv-endpoint", "127.0.0.1", port)
    )
    _to_close.append(hosts)
    until(lambda: hosts._presence._number)
    assert hosts.ended_elsewhere(0) is None  # the thread has come to this question: the next beat is a second away
    assert hosts.why_over == ""
    del host
    assert until(lambda: hosts.why_over) == (
        f"the launcher at 127.0.0.1:{port}, where the hosts meet, is gone (nobody listens there any more)"
    )
    assert lost_hosts(hosts).endswith("; no job is started")
    assert "frame #" not in capfd.readouterr().err


@pytest.mark.parametrize("number", [1, 2])
def test_a_start_for_tuning_waits_for_no_further_hosts(number: int, tmp_path: Path) -> None:
    """Where --nnodes is a range, its first number has come, and torch would give the others half a minute."""
    (tmp_path / "train.py").touch()
    words = ["--nnodes", "1:3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29400", "--nproc-per-node", "2"]
    options = parse([*words, str(tmp_path / "train.py")])
    made: Any = SimpleNamespace(folder=SimpleNamespace(path=tmp_path), keeper=None, isolation=None)
    tuning = Tuning(options, made, Hosts() if number == 1 else connected(number)[0], cast(Any, None))
    assert node_range(tuning._torchrun) == (number, number)
    assert node_range(options.torchrun) == (1, 3)  # of the job itself


def test_hosts_tell_each_other_for_how_long_all_their_ranks_have_waited(two: list[Hosts], hasty: None) -> None:
    first, second = two
    assert Hosts().waited() == float("inf")
    assert first.waited() == 0.0  # nothing was heard yet
    assert second.waited() == 0.0
    second.waits(21.0)
    for _ in polls(60):
        if first.waited() == 21.0:
            break
    assert first.waited() == 21.0
    assert first.at_work == []
    assert second.at_work == ["host0"]
    second.waits(0.0)
    for _ in polls(60):
        if first.at_work:
            break
    assert first.at_work == ["host1"]


def test_a_host_that_cannot_start_the_script_is_not_waited_for(two: list[Hosts], tmp_path: Path) -> None:
    """Under guard all wait for each other before a start, to agree on the folder for what the script writes."""
    (tmp_path / "train.py").touch()
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29400", "--nproc-per-node", "2"]
    isolation = SimpleNamespace(why_not_started=lambda _: "the disk has no locks")
    made: Any = SimpleNamespace(folder=SimpleNamespace(path=tmp_path), keeper=None, isolation=isolation)
    tuning = Tuning(parse([*words, str(tmp_path / "train.py")]), made, two[0], cast(Any, None))
    said: list[str] = []
    job: Any = SimpleNamespace(give_up=said.append)
    calls = (tuning._make_attempt, 0, job, {}), (two[1].of_the_first, "attempt0/written", "its own", quiet)
    assert together(*calls) == ["", ""]
    assert said == [two[1].why_over] == ["the disk has no locks"]


@pytest.mark.usefixtures("hasty")
def test_what_was_found_without_ddp_is_shown_where_another_host_is_gone(two: list[Hosts], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29400", "--nproc-per-node", "2"]
    made: Any = SimpleNamespace(folder=SimpleNamespace(path=tmp_path), keeper=None, isolation=None)
    said: list[str] = []
    reporter: Any = SimpleNamespace(say=said.append, warn=said.append)
    tuning = Tuning(parse([*words, str(tmp_path / "train.py")]), made, two[0], reporter)
    tuning.communication = cast(Any, "what was recorded")
    together(*((host.worst, Level.OFF, quiet) for host in two))
    gone(two[1])
    tuned = Tuned(why=NO_DDP)
    assert tuning._agreed(tuned, leads=False) is tuned
    assert said[-1].startswith("the diagnosis ended early: host1 has not been heard of for ")


def test_a_fault_of_autoddps_own_costs_tuning_and_not_the_job(
    two: list[Hosts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where this user may have no more threads. The other host hears of it, and both start the job as written."""

    def fails(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(LogKeeper, "__enter__", fails)
    (tmp_path / "train.py").touch()
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29400", "--nproc-per-node", "2"]
    folder = SimpleNamespace(path=tmp_path, socket=str(tmp_path / "s"), journal=tmp_path / "journal.jsonl")
    made: Any = SimpleNamespace(folder=folder, keeper=None, isolation=None)
    tuning = Tuning(parse([*words, str(tmp_path / "train.py")]), made, two[0], cast(Any, SimpleNamespace(say=quiet)))
    tuned, theirs = together((tuning.run,), (two[1].one_answer, "", True, quiet, False))
    assert tuned.why == 'tuning itself failed: RuntimeError("can\'t start new thread")'
    assert until(lambda: two[1].why_over) == tuned.why
    assert tuned.recipe == ""
    assert tuned.built_ddp
    assert theirs == ("", True)
