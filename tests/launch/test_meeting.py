"""Hosts that cannot meet: one line, exit code 2, nothing started."""

import itertools
import queue
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
from launchers import AUTODDP, ROOT, SCRIPTS, TORCHRUN, free_port, start, wait_for, whole
from torch.distributed import HashStore, TCPStore

from autoddp.errors import UsageError
from autoddp.hosts import agreement
from autoddp.network import gathering
from autoddp.network.gathering import Arrivals, Endpoint, wait_for_answer
from autoddp.torchrun import options
from autoddp.torchrun.meetings import FRESH_STORE, Unheard, end_in_silence, meet, meeting_point


def test_an_unknown_rendezvous_is_one_line(tmp_path):
    words = ["--nnodes", "2", "--rdzv-backend", "bogus", "--rdzv-endpoint", "127.0.0.1:29777", "--trials", "3"]
    launch = start(AUTODDP, tmp_path / "run", [*words, str(SCRIPTS / "plain.py")]).wait()
    assert launch.returncode == 2
    errors = [line for line in launch.stderr.splitlines() if line.startswith("autoddp: error: no job can start with")]
    assert len(errors) == 1
    assert "--rdzv-backend bogus" in errors[0]
    assert "Traceback" not in launch.stderr
    assert not list(launch.folder.glob("*.toml"))


def test_a_signal_while_hosts_gather_for_a_recipe_is_one_line(tmp_path):
    recipe = ROOT / "tests" / "recipe" / "sound.autoddp.toml"
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:{port}", "--rdzv-conf"]
    words += ["is_host=0", "--recipe", str(recipe), "--force", str(SCRIPTS / "plain.py")]
    launch = start(AUTODDP, tmp_path / "run", words)
    wait_for(lambda: "waiting at --rdzv-endpoint" in launch.stderr, "the line about the endpoint")
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait().returncode == 130
    assert launch.stderr.splitlines()[-1] == "autoddp: SIGINT: no job is started"
    assert "Traceback" not in launch.stderr


def test_what_a_link_has_lost_is_sent_again_soon():
    """After a minute without a link the kernel would wait for as long again, and the host be given up meanwhile."""
    option, place = (socket.IPPROTO_TCP, 44), Endpoint("--rdzv-endpoint", "127.0.0.1", int(free_port()))
    with (
        socket.create_server((place.host, place.port)) as store,
        socket.create_connection((place.host, place.port)) as one,
    ):
        try:
            one.getsockopt(*option)
        except OSError:
            pytest.skip("this kernel cannot be told so")
        end_in_silence(place)
        with store.accept()[0], socket.create_connection((place.host, place.port)), store.accept()[0] as later:
            assert [end.getsockopt(*option) for end in (store, one, later)] == [10_000] * 3
            ends_after = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert [end.getsockopt(*ends_after) for end in (one, later)] == [120_000] * 2


def test_an_endpoint_that_answers_no_more_is_told_while_hosts_gather(monkeypatch):
    """As where the link breaks: the question has been sent, and nothing comes back."""
    monkeypatch.setattr(gathering, "_ARRIVED", 0.1)
    monkeypatch.setattr(gathering, "_GATHERING", 0.1)
    over, told, said = threading.Event(), threading.Event(), []

    class Silent:
        def __init__(self):
            self._store = HashStore()

        def set(self, *words):
            self._store.set(*words)

        def add(self, *words):
            return self._store.add(*words) if words[1] else over.wait(60)

    def say(text):
        said.append(text)
        told.set()

    place = Endpoint("--rdzv-endpoint", "10.0.0.1", 29500)
    with Arrivals(Silent(), place, "job", (2, 2), 30.0, 600.0, HashStore).told(say):
        assert told.wait(60)
    over.set()
    assert said[0] == "waiting: 10.0.0.1:29500 does not answer: the link to it may be down"


def test_who_has_come_of_a_range_of_hosts_and_how_long_others_may():
    board, place = HashStore(), Endpoint("--rdzv-endpoint", "10.0.0.1", 29500)
    here, said = socket.gethostname(), []
    for _ in range(3):
        said.append(Arrivals(board, place, "job", (2, 3), 30.0, 600.0, lambda: board, is_here=True).so_far())
    assert said == [
        f"1 of 2 to 3 hosts have arrived at 10.0.0.1:29500 ({here})",
        f"2 of 2 to 3 hosts have arrived at 10.0.0.1:29500 ({here}, {here}); others may come for 30 s",
        f"3 of 2 to 3 hosts have arrived at 10.0.0.1:29500 ({here}, {here}, {here})",
    ]


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (["--rdzv-backend", "c10d"], "10 min 0 s"),
        (["--rdzv-backend", "c10d", "--rdzv-conf", "join_timeout=7"], "7 s"),
        ([], "15 min 0 s"),
        (["--rdzv-conf", "timeout=20"], "20 s"),
    ],
)
def test_a_host_that_waits_for_others_says_until_when(words, limit, monkeypatch):
    monkeypatch.setattr(gathering, "_ARRIVED", 0.1)
    torchrun = options.torchrun_parser().parse_args(["--nnodes", "2", *words, "train.py"])
    board, place, said = HashStore(), Endpoint("--rdzv-endpoint", "10.0.0.1", 29500), queue.Queue()
    limits = (options.last_call(torchrun), options.patience_with_hosts(torchrun))
    with Arrivals(board, place, "job", (2, 2), *limits, lambda: board, is_here=True).told(said.put):
        here = f"1 of 2 hosts have arrived at 10.0.0.1:29500 ({socket.gethostname()})"
        assert said.get(timeout=60) == f"waiting: {here}; the wait ends after {limit}"


def test_hosts_that_have_not_come_are_the_reason():
    """torch's error for that has no text, and the line had its type."""
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-conf"]
    torchrun = options.torchrun_parser().parse_args(["--nnodes", "2", *words, "is_host=1,join_timeout=1", "train.py"])
    handler = meeting_point(torchrun, "plan")
    with pytest.raises(UsageError) as ended, options.rendezvous_errors(torchrun):
        handler.next_rendezvous()
    assert str(ended.value).endswith("): not all of them came in time; check these options on every host")


def test_a_host_that_stops_while_they_meet_is_the_reason():
    """Once elastic has counted it as the first one, the others wait for its address: they ended by a traceback."""
    torchrun = options.torchrun_parser().parse_args(["--nnodes", "2", "--rdzv-backend", "c10d", "train.py"])
    store = TCPStore("127.0.0.1", int(free_port()), is_master=True, timeout=timedelta(seconds=0.1))
    handler = SimpleNamespace(next_rendezvous=lambda: store.get("MASTER_ADDR"))
    with pytest.raises(Unheard, match=r"^node 0 does not answer \(wait timeout after 100ms"):
        meet(handler, torchrun, None)


def test_a_host_that_is_started_again_while_the_others_wait(monkeypatch):
    """Elastic counts the launcher that has ended for some seconds more: all hosts ended for want of its answer."""
    monkeypatch.setattr(agreement, "_ANSWER", 1.0)
    for name, value in FRESH_STORE.items():  # both threads set it for a while, and each would put back what it found
        monkeypatch.setenv(name, value)
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "train.py"]
    torchrun = options.torchrun_parser().parse_args(words)
    said = queue.Queue()
    monkeypatch.setattr(agreement, "tell", said.put)

    def came() -> agreement._Place:
        return agreement._Place(meeting_point(torchrun, "plan"), None, False, False)

    with ThreadPoolExecutor() as hosts:
        stays = hosts.submit(agreement._met, torchrun, came())
        ended = meeting_point(torchrun, "plan")
        ended.next_rendezvous()
        ended._stop_heartbeats()  # as if it had been killed
        assert "does not answer, for 1 s" in said.get(timeout=60)
        again = hosts.submit(agreement._met, torchrun, came())
        found = [one.result(120) for one in (stays, again)]
    assert sorted(info.rank for info, _ in found) == [0, 1]
    assert [meeting.called for _, meeting in found] == [[f"node {n} ({socket.gethostname()})" for n in (0, 1)]] * 2


@pytest.mark.parametrize("node", [0, whole(1)], ids=["with the endpoint", "the other"])
@pytest.mark.parametrize("rendezvous", ["static", whole("c10d")])
def test_a_host_that_comes_with_torchrun_is_told(rendezvous, node, tmp_path):
    """Under a static rendezvous it was waited for a quarter of an hour, with the words that it has not arrived."""
    port = free_port()
    launches = []
    for number in range(2):
        words = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", port]
        if rendezvous == "c10d":
            conf = f"is_host={int(number == 0)}"
            words = [
                "--nnodes",
                "2",
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                f"127.0.0.1:{port}",
                "--rdzv-conf",
                conf,
            ]
        command = TORCHRUN if number == node else AUTODDP
        launches.append(start(command, tmp_path / f"host{number}", [*words, str(SCRIPTS / "plain.py")]))
    try:
        told = r"waiting: 1 of 2 hosts have arrived .*; a host has come with torchrun, or with --trials 0: start the"
        wait_for(lambda: re.search(told, launches[1 - node].stderr), "the line about torchrun")
    finally:
        for launch in launches:
            launch.kill()


@pytest.fixture
def silent():
    """A port of this host that answers nobody: its queue of connections is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        place = server.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(place)
        yield place[1]
        for one in waiting:
            one.close()


UNREACHED = {
    "an address that does not answer": ("127.0.0.1", "does not answer (a firewall, or a wrong address)"),
    "a port where nothing listens": ("127.0.0.1", "connection refused"),
    "a name that does not resolve": ("no-such-host.invalid", "the name no-such-host.invalid does not resolve"),
}


@pytest.mark.parametrize("what", UNREACHED)
def test_a_master_that_nobody_reaches_is_told_within_five_seconds(what, silent, monkeypatch):
    """Where it comes from, its value, why and what to do. Hosts may come late, so the wait goes on to its own limit."""
    assert gathering._SOON + gathering._CONNECTING + gathering._PAUSE < 5
    monkeypatch.setattr(gathering, "_SOON", 1.0)  # a busy machine has the rest of the limit
    host, why = UNREACHED[what]
    port = silent if "answer" in what else int(free_port())
    said = []
    option = "--master-addr (from SLURM_STEP_NODELIST)"
    with pytest.raises(UsageError) as ended:
        wait_for_answer(Endpoint(option, host, port), 4.5, said.append, lambda: pytest.fail("nobody is there"))
    line = said[0]
    here = f"{option} {host}:{port} from this host ({socket.gethostname()}): "
    assert line.startswith(f"waiting at {here}")
    assert str(ended.value).startswith(f"the hosts cannot meet at {here}")
    for text in (line, str(ended.value)):
        assert why in text
        assert text.endswith("or correct the option on this host")
        assert "\n" not in text


def test_reasons_that_take_turns_are_each_told_once(monkeypatch):
    """On a host's own network an address that nobody has is silent, then unreachable, then silent again."""
    monkeypatch.setattr(gathering, "_SOON", 0.0)
    monkeypatch.setattr(gathering, "_PAUSE", 0.01)
    turns, said = itertools.cycle(("it does not answer", "no route to host")), []
    asked = []

    def unreachable(_):
        asked.append(next(turns))
        return asked[-1] if len(asked) < 10 else ""

    monkeypatch.setattr(gathering, "_unreachable", unreachable)
    assert wait_for_answer(Endpoint("--rdzv-endpoint", "10.0.0.9", 29400), 60.0, said.append, lambda: "a store")
    assert len(said) == 2, said
    assert "it does not answer; trying for" in said[0]
    assert "no route to host; trying for" in said[1]
