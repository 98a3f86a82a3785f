"""Hosts as many are found: a docker bridge, a slow and a fast network, and a name that stands for 127.0.1.1."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from launchers import AUTODDP, ROOT, SCRIPTS, TORCHRUN, start

from autoddp.cli.main import _running
from autoddp.commandline import environment
from autoddp.commandline.mode import Mode
from autoddp.commandline.words import parse
from autoddp.hosts.agreement import Agreement
from autoddp.hosts.together import Hosts
from autoddp.network import interface_probe, interface_selection
from autoddp.network.interface_probe import Door, Listener, send_rate, tried
from autoddp.network.interface_selection import Places
from autoddp.network.own_network import Network
from autoddp.recipe import load

PLAIN = str(SCRIPTS / "plain.py")
UNSET = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch):
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)


def on_all(lab, command, parent, *words, endpoint=0):
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "t"]
    meet += ["--rdzv-endpoint", f"{lab.address(0, endpoint)}:29421"]
    variables = {"OMP_NUM_THREADS": "1", "TUNED_TIMES_LONGER": "12"}
    return [
        start(command, parent / f"host{host}", [*meet, *words], variables, popen=functools.partial(lab.fork, host))
        for host in range(2)
    ]


@pytest.mark.lab
@pytest.mark.whole
def test_the_fast_network_is_found_and_used(lab, tmp_path):
    hosts = lab(hosts=2, rate="100mbit", more={"eth1": "1gbit"}, trap=True)
    launches = [
        launch.wait() for launch in on_all(hosts, AUTODDP, tmp_path, "--trials", "1", "--diagnose-budget", "0", PLAIN)
    ]
    assert [launch.returncode for launch in launches] == [0, 0], launches[0].stderr[-2000:]
    for host, launch in enumerate(launches):
        said = next(line for line in launch.stderr.splitlines() if "network:" in line)
        assert f"eth1 {hosts.address(host, 1)} reaches all hosts at 0." in said
        assert "docker0 reaches not all hosts" in said
        assert "this host's name stands for 127.0.1.1" in said
        summary = json.loads(max(launch.folder.glob(".autoddp/2*/summary.json")).read_text())
        assert summary["network"]["interface"] == "eth1"


@pytest.mark.lab
def test_a_diagnosis_names_the_faster_network(lab, tmp_path):
    """The lab sets GLOO_SOCKET_IFNAME to the slow one, as a user may; the rates are measured all the same."""
    hosts = lab(hosts=2, rate="100mbit", more={"eth1": "1gbit"})
    words = [str(SCRIPTS / "small_calls.py"), "--numbers", "25000", "--calls", "60"]
    launches = [launch.wait() for launch in on_all(hosts, [*AUTODDP, "diagnose", "--json"], tmp_path, *words)]
    assert [launch.returncode for launch in launches] == [0, 0], launches[0].stderr[-2000:]
    for launch in launches:
        # A busy machine may give further suspicions.
        (found,) = [one for one in json.loads(launch.stdout)["findings"] if one["cause"] == "wrong_interface"]
        assert found["status"] == "suspected"
        assert "GLOO_SOCKET_IFNAME=eth1" in found["fix"]
        assert found["ms"] > 1


@pytest.mark.lab
@pytest.mark.whole
def test_torchrun_does_not_get_through_there(lab, tmp_path):
    hosts = lab(hosts=2, rate="100mbit", more={"eth1": "1gbit"}, trap=True)
    until = time.monotonic() + 30
    for launch in on_all(hosts, TORCHRUN, tmp_path, PLAIN):
        try:
            assert launch.process.wait(max(0.0, until - time.monotonic())) != 0
        except subprocess.TimeoutExpired:
            continue


@pytest.mark.parametrize(
    ("candidates", "rates", "own", "interface"),
    [
        ({"eth0": "10.0.0.1"}, {"eth0": 9.0}, "10.0.0.1", ""),  # nothing to choose: left to the library
        ({"eth0": "10.0.0.1"}, {"eth0": 9.0}, "127.0.1.1", "eth0"),
        ({"a": "10.0.0.1", "b": "10.1.0.1"}, {"a": 9.0, "b": 9.9}, "10.0.0.1", "a"),  # no clear gain: the name's own
        ({"a": "10.0.0.1", "b": "10.1.0.1"}, {"a": 1.0, "b": 9.9}, "10.0.0.1", "b"),
        ({"a": "10.0.0.1", "b": "10.1.0.1"}, {"a": 1.0}, "10.1.0.1", "a"),  # the name's own reaches not all
    ],
)
def test_what_is_chosen(candidates, rates, own, interface):
    found = interface_selection._chosen(
        Places(candidates, by_name=[own]), {name: candidates[name] for name in rates}, rates
    )
    assert found.interface == interface
    assert found.address == candidates[interface or "eth0"]
    assert set(found.variables) == (set(UNSET) if interface else set())


def test_a_stranger_with_the_same_address_is_not_a_peer():
    with Listener() as one, Listener() as other:
        right, wrong = Door("127.0.0.1", one.port, one.secret), Door("127.0.0.1", one.port, other.secret)
        assert tried([right, wrong]) == ["", "another machine answers there"]
        assert send_rate(right, 0.25) > 1e6
        assert send_rate(wrong, 0.25) == 0.0
    assert tried([right]) == ["connection refused"]


def test_a_listener_says_nothing_to_a_stranger():
    """Neither the secret nor anything else; it hears no more than a greeting, and goes on with those who know it."""
    with Listener(["127.0.0.1"]) as listener:
        for words in (b"", b"x", b"x" * 48, b"x" * 2**20):
            with socket.create_connection(("127.0.0.1", listener.port), timeout=20) as stranger:
                with contextlib.suppress(OSError):
                    stranger.sendall(words)
                    stranger.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        assert tried([Door("127.0.0.1", listener.port, listener.secret)]) == [""]


def test_a_listener_gives_up_a_silent_stranger(monkeypatch):
    monkeypatch.setattr(interface_probe, "_PATIENCE", 0.3)
    monkeypatch.setattr(interface_probe, "_STRANGERS", 2)
    with Listener(["127.0.0.1"]) as listener:
        silent = [socket.create_connection(("127.0.0.1", listener.port), timeout=20) for _ in range(9)]
        for each in silent:
            with each:
                assert each.recv(1) == b""
        monkeypatch.undo()  # one who knows the secret is no stranger, however slow the machine is
        assert tried([Door("127.0.0.1", listener.port, listener.secret)]) == [""]


CROWD = """
import contextlib, resource, socket, time
from autoddp.network.interface_probe import Door, Listener, tried

def open_at_most(files):
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

with Listener(["127.0.0.1"]) as listener, contextlib.ExitStack() as crowd:
    open_at_most(24)
    with contextlib.suppress(OSError):
        while True:
            crowd.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
    time.sleep(0.2)  # the listener, in this process too, can take none of those that wait
    crowd.close()
    open_at_most(64)
    print(set(tried([Door("127.0.0.1", listener.port, listener.secret)] * 100)))
"""


def test_few_open_files_are_no_reason_to_refuse_a_job():
    """A listener that could take no connection goes on, and many addresses are tried under `ulimit -n 64`."""
    run = subprocess.run([sys.executable, "-c", CROWD], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "{''}\n", run.stderr


def test_a_listener_is_on_the_given_addresses_alone():
    with Listener(["127.0.0.1", "127.0.0.2", "::1"]) as listener:
        assert tried([Door(address, listener.port, listener.secret) for address in ("127.0.0.2", "::1")]) == ["", ""]
        assert tried([Door("127.0.0.3", listener.port, listener.secret)]) == ["connection refused"]
    with Listener(["127.0.0.1", "192.0.2.77"]) as listener:  # the second one is no address of this host
        assert tried([Door("127.0.0.3", listener.port, listener.secret)]) == [""]


def test_a_launcher_that_is_stopped_for_a_while_is_behind_no_firewall(monkeypatch):
    """Its kernel takes connections meanwhile, and nobody answers them."""
    monkeypatch.setattr(interface_probe, "_PATIENCE", 1.0)
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as listening:
        listener = Listener(["127.0.0.1"])
        pool.submit(lambda: (time.sleep(2), listening.enter_context(listener)))
        assert tried([Door("127.0.0.1", listener.port, listener.secret)]) == [""]


STOPS = """
import asyncio, os, signal, sys
from autoddp.network import interface_probe
from autoddp.network.interface_probe import Door, tried

interface_probe._PAUSE, connect, stops = 0.2, asyncio.open_connection, [signal.SIGSTOP]

async def connected(*place):
    found = await connect(*place)
    if stops:
        os.kill(os.getpid(), stops.pop())
    return found

asyncio.open_connection = connected
print(tried([Door("127.0.0.1", int(sys.argv[1]), sys.argv[2])]))
"""


def test_a_launcher_that_was_stopped_while_it_tried_the_others_tries_again(monkeypatch):
    """By then they had taken it for a stranger, who connects and says nothing."""
    monkeypatch.setattr(interface_probe, "_PATIENCE", 1.0)
    with Listener(["127.0.0.1"]) as listener:
        words = [sys.executable, "-c", STOPS, str(listener.port), listener.secret]
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as stopped:
            os.waitpid(stopped.pid, os.WUNTRACED)
            time.sleep(2)
            stopped.send_signal(signal.SIGCONT)
            assert stopped.communicate(timeout=60)[0] == "['']\n"


def test_lost_packets_are_no_reason_to_refuse_a_job():
    """The first packet of a connection is lost three times: the kernel drops it while nobody takes another one."""
    with (
        Listener(["127.0.0.1"]) as listener,
        ThreadPoolExecutor(1) as pool,
        socket.create_server(("127.0.0.1", 0), backlog=0) as busy,
        socket.create_connection(busy.getsockname()),
    ):
        pool.submit(lambda: (time.sleep(2.2), listener._accept(busy)))
        answers = tried([Door(*busy.getsockname(), listener.secret)])
        busy.shutdown(socket.SHUT_RDWR)
        assert answers == [""]


class Board(dict):
    """What each of several threads says under a key."""

    def exchange(self, node, nodes):
        def say(key, mine):
            self[key, node] = mine
            while not all((key, other) in self for other in range(nodes)):
                time.sleep(0.001)
            return [self[key, other] for other in range(nodes)]

        return say


def test_a_silent_name_service_keeps_no_host_waiting(monkeypatch):
    """The others have met this host, and give it up after a minute; three dead name servers take that long."""
    answers = threading.Event()

    def asked(*_):
        answers.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]

    monkeypatch.setattr(interface_selection, "_NAMED", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", asked)
    try:
        assert interface_selection.places_here(None, False, {}).by_name == []
    finally:
        answers.set()


@pytest.mark.parametrize("name", ["a" * 64, "a..b", "\udcff"], ids=ascii)
def test_a_host_may_have_a_name_that_no_name_service_knows(monkeypatch, name):
    """Linux takes any 64 bytes; Python raises UnicodeError for some. It was said that another host had left."""
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert interface_selection.places_here(None, False, {}).by_name == []


def test_hosts_that_cannot_reach_each_other_are_told_so_on_all(monkeypatch):
    monkeypatch.setattr(interface_selection, "tried", lambda doors: ["no answer"] * len(doors))
    board, places = Board(), Places({"eth0": "192.0.2.77"})
    with ThreadPoolExecutor(2) as pool:
        labels = ["node 0 (a)", "node 1 (b)"]
        nodes = [
            pool.submit(interface_selection.choose, board.exchange(node, 2), node, labels, places) for node in range(2)
        ]
        for node in nodes:
            first, second = node.result(30).faults
            assert "node 0 (a) has no address that all others can connect to (eth0 192.0.2.77: from node 1 (b)" in first
            assert "node 1 (b) has no address" in second


@pytest.mark.parametrize(
    ("addresses", "here", "errors"),
    [
        ((1, 2), {}, 0),
        ((1, 2), {"named": {"GLOO_SOCKET_IFNAME": ["eth0"]}, "missing": {"GLOO_SOCKET_IFNAME": []}}, 0),
        ((1, 2), {"local_addr": "192.0.2.2"}, 0),
        ((1, 2), {"has_gpus": True}, 1),  # NCCL connects both ways
        ((2, 1), {}, 1),  # the one with the lower address waits for the other one, which gets no connection
        ((1, 2, 3), {}, 2),  # no way leads from one of the last two to the other
    ],
)
def test_a_host_that_lets_nobody_in_may_be_enough_for_gloo(monkeypatch, addresses, here, errors):
    """The firewall of the first host is open, those of the others are closed: torchrun trains on two such hosts."""
    first, *closed = [f"192.0.2.{n}" for n in addresses]
    monkeypatch.setattr(interface_selection, "tried", lambda doors: ["x" * (d.address != first) for d in doors])
    monkeypatch.setattr(interface_selection, "send_rate", lambda door, lasting: 1e9)
    board, labels = Board(), [f"node {node}" for node in range(len(addresses))]
    places = [Places({"eth0": first}), *(Places({"eth0": address}, **here) for address in closed)]
    with ThreadPoolExecutor(len(places)) as pool:
        choices = [
            pool.submit(interface_selection.choose, board.exchange(node, len(places)), node, labels, places[node])
            for node in range(len(places))
        ]
        found = [choice.result(30) for choice in choices]
    assert [len(one.faults) for one in found] == [errors] * len(places)
    if not errors:
        assert all("which may be enough for Gloo" in doubt for one in found for (doubt,) in [one.doubts])
        assert [one.network for one in found] == [Network()] * 2  # as torchrun would choose


@pytest.mark.parametrize("has_gpus", [False, True])
def test_a_host_that_is_reached_at_a_second_address_is_left_to_the_libraries(monkeypatch, has_gpus):
    """As where eth0 has 10.0.2.15 on each host, behind a router of its own, and an IPv6 address that all reach."""
    places = [Places({"eth0": "10.0.2.15"}, has_gpus=has_gpus, further=[f"fd00::{n}", f"fd77::{n}"]) for n in range(2)]
    monkeypatch.setattr(interface_selection, "tried", lambda doors: ["x" * ("fd77" not in d.address) for d in doors])
    board, labels = Board(), ["node 0 (a)", "node 1 (b)"]
    with ThreadPoolExecutor(2) as pool:
        choices = [
            pool.submit(interface_selection.choose, board.exchange(node, 2), node, labels, places[node])
            for node in range(2)
        ]
        found = [choice.result(30) for choice in choices]
    assert [one.faults for one in found] == [[], []]
    assert [one.network for one in found] == [Network()] * 2  # as torchrun would choose
    assert found[0].doubts == found[1].doubts
    assert "node 1 (b) is reached at fd77::1, and at the first address of no interface (eth0 10.0.2.15: from" in str(
        found[0].doubts
    )


def test_no_networks_are_used_at_once_where_the_user_has_named_one_on_some_host(monkeypatch):
    """Gloo waits in vain where a rank has more interfaces than another one, and what the user has set stays."""
    both = Places({"a": "127.0.0.1", "b": "127.0.0.2"})
    one = replace(both, named={"GLOO_SOCKET_IFNAME": ["a"]}, missing={"GLOO_SOCKET_IFNAME": []})
    several, labels = {"GLOO_SOCKET_IFNAME": "a,b"}, ["node 0 (x)", "node 1 (y)"]
    monkeypatch.setattr(environment, "not_here", lambda variables: {})
    for second, together in ((both, "a,b"), (one, "")):
        board = Board()
        with ThreadPoolExecutor(2) as pool:
            choices = [
                pool.submit(interface_selection.choose, board.exchange(node, 2), node, labels, here)
                for node, here in enumerate((both, second))
            ]
            first = choices[0].result(30)
            assert choices[1].result(30).faults == first.faults == []
        assert first.network.together == together
        kept = environment._reachable(several, first.network)
        assert kept == (several if together else {})


def test_networks_that_one_host_lacks_are_left_out_on_all(monkeypatch):
    """The host that had them used both, the other one a single one: Gloo waits in vain then."""
    both, one = Places({"a": "127.0.0.1", "b": "127.0.0.2"}), Places({"a": "127.0.0.3"})
    labels, board = ["node 0 (x)", "node 1 (y)"], Board()
    monkeypatch.setattr(environment, "not_here", lambda variables: {})
    with ThreadPoolExecutor(2) as pool:
        choices = [
            pool.submit(interface_selection.choose, board.exchange(node, 2), node, labels, here)
            for node, here in enumerate((both, one))
        ]
        for choice in choices:
            network = choice.result(30).network
            assert environment._reachable({"GLOO_SOCKET_IFNAME": "a,b"}, network) == {}
            assert environment._reachable({"GLOO_SOCKET_IFNAME": "a"}, network) == {"GLOO_SOCKET_IFNAME": "a"}


def test_late_hosts_are_told_by_which_networks_all_are_reached():
    """A host that joins measures nothing, and kept what the others had left out."""
    options, written = parse(["--nnodes", "2:3", "train.py"]), Mode(tune=False, several_nodes=True)
    met = Agreement(Network(everywhere=("a",), is_named=True), Hosts(nodes=3, _without=[2]), 2, None)
    running = _running(options, written, met, True)
    assert (running.everywhere, running.is_named, running.nodes) == (("a",), True, 2)


@pytest.mark.lab
@pytest.mark.whole
def test_two_networks_are_used_at_once(lab, tmp_path):
    """Two equal networks: tried by another start of the script, proved in turns, launched by the recipe's [env]."""
    hosts = lab(hosts=2, rate="100mbit", more={"eth1": "100mbit"}, trap=True)
    job = [str(ROOT / "benchmarks/jobs/mlp.py"), "--width", "256", "--depth", "6"]
    words = ["--trials", "10", "--tune-only", "--allow", "exact", "--recipe", "mlp.toml", *job, "--steps", "1000000"]
    launches = [launch.wait() for launch in on_all(hosts, AUTODDP, tmp_path, *words)]
    assert [launch.returncode for launch in launches] == [0, 0], launches[0].stderr[-2000:]
    studies = [json.loads(max(launch.folder.glob(".autoddp/2*/summary.json")).read_text()) for launch in launches]
    assert studies[0]["job"]["start_settings"] == [{"interfaces": "eth0,eth1"}]
    assert [one["promising"] for one in studies[0]["screened"]] == [True]
    assert studies[0]["screened"][0]["gain"] > 1.4
    assert studies[0]["decision"]["configuration"]["interfaces"] == "eth0,eth1"
    assert studies[0]["trials"] == studies[1]["trials"]
    assert len(studies[0]["trials"]) <= 10
    recipes = [load(launch.folder / "mlp.toml") for launch in launches]
    assert [recipe.env for recipe in recipes] == [{"GLOO_SOCKET_IFNAME": "eth0,eth1"}] * 2
    launches = [launch.wait() for launch in on_all(hosts, AUTODDP, tmp_path, "--recipe", "mlp.toml", *job)]
    assert [launch.returncode for launch in launches] == [0, 0], launches[0].stderr[-2000:]
    assert all("launching" in launch.stderr and "left out" not in launch.stderr for launch in launches)


@pytest.mark.lab
@pytest.mark.whole
def test_a_network_that_adds_nothing_costs_no_start(lab, tmp_path):
    """The second one is so much slower that its half of the messages holds all up: the benchmark says so beforehand."""
    hosts = lab(hosts=2, rate="100mbit", more={"eth1": "40mbit"}, trap=True)
    job = [str(ROOT / "benchmarks/jobs/mlp.py"), "--width", "256", "--depth", "6"]
    words = ["--trials", "12", "--tune-only", "--allow", "exact", "--recipe", "mlp.toml", *job, "--steps", "1000000"]
    launches = [launch.wait() for launch in on_all(hosts, AUTODDP, tmp_path, *words)]
    assert [launch.returncode for launch in launches] == [0, 0], launches[0].stderr[-2000:]
    studies = [json.loads(max(launch.folder.glob(".autoddp/2*/summary.json")).read_text()) for launch in launches]
    assert studies[0]["job"]["start_settings"] == [{"interfaces": "eth0,eth1"}]
    assert studies[0]["screened"] == studies[1]["screened"]
    assert [one["promising"] for one in studies[0]["screened"]] == [False]
    assert studies[0]["trials"] == studies[1]["trials"]
    assert all("interfaces" not in trial["configuration"] for trial in studies[0]["trials"])
    assert [path.name for path in launches[0].folder.glob(".autoddp/2*/attempt*")] == ["attempt0"]
