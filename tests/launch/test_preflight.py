"""The preflight names the host and the cause of what keeps a job of several hosts from running, and refuses no more.

Real launchers on hosts of a lab, with real faults planted: names, addresses, interfaces, firewalls. `make test` runs a
fault of each kind; `--whole` all of them, and all kinds of names.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
from launchers import whole
from meeting_hosts import Meetings

from autoddp.hosts.agreement import HostFacts, _set_local_address, compared
from autoddp.network.interface_selection import Places
from autoddp.network.own_network import VARIABLES, Network
from autoddp.topology.nccl.interface_names import named

PORT = 29500
SHORT = "timeout=4,read_timeout=6,join_timeout=6"  # seconds, of meetings that cannot come about
ALONE = "127.0.0.1 localhost\n::1 localhost\n"
NAMES = {
    "loopback": [f"{ALONE}127.0.0.1 host{host}\n" for host in range(2)],
    "nothing": [ALONE] * 2,
    "debian": [f"{ALONE}127.0.1.1 host{host}\n" for host in range(2)],
    "each-other": [f"{ALONE}10.77.0.{2 - host} host{host}\n" for host in range(2)],
    "right": [f"{ALONE}10.77.0.1 host0\n10.77.0.2 host1\n"] * 2,
}


@pytest.fixture(scope="module")
def meetings() -> Iterator[Meetings]:
    with Meetings() as found:
        yield found


def static(lab, **more):
    """Words by host; `more` replaces options, by a value for each host or one for all."""

    def words(host):
        options = {"nnodes": 2, "nproc_per_node": 1, "node_rank": host, "master_addr": lab.address(0)}
        options |= {"master_port": PORT}
        options |= {name: value[host] if isinstance(value, list) else value for name, value in more.items()}
        options = {name: value for name, value in options.items() if value is not None}
        return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]

    return words


def c10d(lab, **more):
    address = lab.address(0)
    endpoint = f"{f'[{address}]' if ':' in address else address}:{PORT}"
    own = {"rdzv_backend": "c10d", "rdzv_endpoint": endpoint, "rdzv_id": "job"}
    return static(lab, **{"node_rank": None, "master_addr": None, "master_port": None, **own, **more})


NETWORKS = {
    "gloo": ({"GLOO_SOCKET_IFNAME": "eth0"}, {}),
    "nccl": ({"NCCL_SOCKET_IFNAME": "eth"}, {"GLOO_SOCKET_IFNAME": "eth0"}),
    "nccl-exactly": ({"NCCL_SOCKET_IFNAME": "=eth0"}, {"GLOO_SOCKET_IFNAME": "eth0"}),
    "nccl-without": ({"NCCL_SOCKET_IFNAME": "^docker,lo,eth1"}, {"GLOO_SOCKET_IFNAME": "eth0"}),
    "both": ({"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}, {}),
    "nothing": ({}, {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}),
}


def test_no_interface_whose_name_only_begins_alike_is_taken() -> None:
    """A VLAN on the interface, whose network may reach no other host: by a beginning NCCL would take it too."""
    variables = Network("bond0", told=VARIABLES).variables
    assert named(variables, ["bond0", "bond0.100", "lo"]) == {name: ["bond0"] for name in VARIABLES}


@pytest.mark.parametrize("given", [None, ""])
def test_an_empty_address_of_this_host_is_as_none(given: str | None) -> None:
    """As of `--local-addr "$MY_IP"`: torch takes it for none, and the address of the host's name, as 127.0.1.1."""
    torchrun = argparse.Namespace(local_addr=given)
    _set_local_address(torchrun, Network(address="10.0.0.1"))
    assert torchrun.local_addr == "10.0.0.1"


@pytest.mark.lab
@pytest.mark.parametrize("rendezvous", [static, whole(c10d)])
@pytest.mark.parametrize("network", ["gloo", "nccl", *map(whole, ["nccl-exactly", "nccl-without", "both", "nothing"])])
@pytest.mark.parametrize("ipv6", [False, whole(True)], ids=["ipv4", "ipv6"])
@pytest.mark.parametrize("names", ["loopback", *map(whole, ["nothing", "debian", "each-other", "right"])])
def test_the_address_is_that_of_the_interface_that_the_user_has_named(lab, meetings, names, ipv6, network, rendezvous):
    hosts = lab(hosts=2, names=NAMES[names], ipv6=ipv6)
    set_, given = NETWORKS[network]
    found = meetings.hold(hosts, rendezvous(hosts), lambda host: set_)
    assert [one.error for one in found] == ["", ""]
    assert [one.local_addr for one in found] == [hosts.address(0), hosts.address(1)]
    assert [one.variables for one in found] == [given if names != "right" or ipv6 else {}] * 2


@pytest.mark.lab
def test_interfaces_whose_names_and_networks_differ_from_host_to_host(lab, meetings):
    """ens3 here and eth0 there; the faster network is left alone where the user has named another one."""
    hosts = lab(hosts=2, more={"eth1": "1gbit"}, trap=True)
    for command in ("set eth0 down", "set eth0 name ens3", "set ens3 up"):
        hosts.run(1, "ip", "link", *command.split())
    variables = [{"GLOO_SOCKET_IFNAME": "eth0"}, {"GLOO_SOCKET_IFNAME": "ens3", "NCCL_SOCKET_IFNAME": "^eth,docker,lo"}]
    found = meetings.hold(hosts, static(hosts), variables.__getitem__)
    assert [one.error for one in found] == ["", ""]
    assert [one.local_addr for one in found] == [hosts.address(0), hosts.address(1)]
    assert [one.variables for one in found] == [{}, {}]
    # One host alone has named something: the other one's is found.
    found = meetings.hold(hosts, static(hosts, local_addr=[None, hosts.address(1)]), lambda h: [{}, variables[1]][h])
    assert [one.error for one in found] == ["", ""]
    assert found[0].variables["GLOO_SOCKET_IFNAME"] in ("eth0", "eth1")
    assert found[1].local_addr == hosts.address(1)


def drops(lab, host, *allowed):
    """A firewall on a host: to these ports and from them, and nothing else."""
    block(lab, host, "blackhole", *allowed)


def rejects(lab, host, *allowed):
    """The same, with an answer: administratively prohibited."""
    lab.run(host, "sysctl", "-qw", "net.ipv4.ip_forward=1")  # or the kernel would not answer
    block(lab, host, "prohibit", *allowed)


def block(lab, host, action, *allowed):
    for nic in ("eth0", "eth1"):
        rule = ("ip", "rule", "add", "iif", nic)
        lab.run(host, *rule, "pref", "9", action)
        for port in allowed:
            for way in ("sport", "dport"):
                lab.run(host, *rule, "pref", "5", "ipproto", "tcp", way, str(port), "lookup", "local")
    lab.run(host, "ip", "rule", "add", "pref", "10", "lookup", "local")
    lab.run(host, "ip", "rule", "del", "pref", "0")


def closed_port(lab, meetings, firewall):
    firewall(lab, 0, 22)
    return meetings.hold(lab, static(lab, rdzv_conf=SHORT), lambda _: {"GLOO_SOCKET_IFNAME": "eth0"})


def closed_to_the_ranks(lab, meetings, firewall):
    firewall(lab, 1, PORT)
    return meetings.hold(lab, c10d(lab))


def with_words(**more):
    return lambda lab, meetings: meetings.hold(lab, static(lab, **more), lambda _: {"GLOO_SOCKET_IFNAME": "eth0"})


def with_variables(*values, **more):
    return lambda lab, meetings: meetings.hold(lab, static(lab, **more), lambda host: values[host])


def down(lab, meetings):
    lab.run(1, "ip", "link", "set", "eth1", "down")
    return meetings.hold(lab, static(lab), lambda _: {"GLOO_SOCKET_IFNAME": "eth1"})


PROGRAM = """
import socket, sys
listening, taken = socket.create_server(("", int(sys.argv[1]))), []
print("listening", flush=True)
while True:
    taken.append(listening.accept()[0])
    if sys.argv[2] == "closes":
        taken.pop().close()
"""


def taken_port(lab, meetings, does, words=None):
    """Another program has the port; it `closes` each connection, or `says nothing`."""
    argv = [sys.executable, "-c", PROGRAM, str(PORT), does]
    with lab.popen(0, argv, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout.readline() == "listening\n"
            words = words or c10d(lab, rdzv_conf=f"{SHORT},is_host=0")
            return meetings.hold(lab, words, lambda _: {"GLOO_SOCKET_IFNAME": "eth0"}, gathering=[1.0, 1.0])
        finally:
            program.kill()


def small_packets(lab, meetings):
    """As where hosts send jumbo frames and a switch takes none: connections and short messages succeed."""
    lab.carry(800)
    return meetings.hold(lab, c10d(lab, rdzv_conf=SHORT), gathering=[2.0, 2.0])


GLOO = "GLOO_SOCKET_IFNAME"
FAULTS = {
    # name: (what is planted, the host that says it, what must be said: the host's name and the cause)
    "master address of nobody": (
        with_words(master_addr="10.77.0.99", rdzv_conf=SHORT),
        [
            r"10\.77\.0\.99:29500: .*\(host0\), but that is no address of this host",
            r"\(host1\): 10\.77\.0\.99.*for [45] s",
        ],
    ),
    "name without an address": (
        with_words(master_addr=["10.77.0.1", "node-zero"], rdzv_conf=SHORT),
        [
            r"1 of 2 hosts have arrived .*\(host0\)",
            r"node-zero:29500 from this host \(host1\): the name .* not resolve",
        ],
    ),
    "name of the host itself": (
        with_words(master_addr=["10.77.0.1", "localhost"], rdzv_conf=SHORT),
        [r"1 of 2 hosts have arrived", r"\(host1\): .*127\.0\.0\.1, which is this host itself: connection refused"],
    ),
    "port where nobody listens": (
        with_words(master_port=[PORT, PORT + 9], rdzv_conf=SHORT),
        [
            r"1 of 2 hosts have arrived",
            r"10\.77\.0\.1:29509 from this host \(host1\): 10\.77\.0\.1: connection refused",
        ],
    ),
    "port of a program that says nothing": (
        lambda *a: taken_port(*a, "says nothing"),
        [r"host\d\): connections are accepted there, but no launcher has answered yet .*this port.*, for \d s"] * 2,
    ),
    "port of a program on the master": (
        lambda *a: taken_port(*a, "says nothing", static(a[0], rdzv_conf=SHORT)),
        [
            r"--master-addr 10\.77\.0\.1:29500: another program on this host \(host0\) has port .* by --master-port",
            r"host1\): connections are accepted there, but no launcher has answered yet .*this port.*, for \d s",
        ],
    ),
    "port of a program that closes": (
        lambda *a: taken_port(*a, "closes"),
        [r"host\d\): 10\.77\.0\.1: the connection is closed at once .*, for \d s"] * 2,
    ),
    "port behind a firewall that drops": (
        lambda *a: closed_port(*a, drops),
        [r"1 of 2 hosts have arrived", r"\(host1\): 10\.77\.0\.1 does not answer \(a firewall"],
    ),
    "port behind a firewall that refuses": (
        lambda *a: closed_port(*a, rejects),
        [r"1 of 2 hosts have arrived", r"\(host1\): 10\.77\.0\.1: no route to host"],
    ),
    "ports of the ranks behind a firewall that drops": (
        lambda *a: closed_to_the_ranks(*a, drops),
        [r"node \d \(host1\) has no address .*eth0 10\.77\.0\.2: from node \d \(host0\): no answer .*firewall"] * 2,
    ),
    "ports of the ranks behind a firewall that refuses": (
        lambda *a: closed_to_the_ranks(*a, rejects),
        [r"node \d \(host1\) has no address .*eth0 10\.77\.0\.2: from node \d \(host0\): no route to host"] * 2,
    ),
    "interface that is not there": (
        with_variables({GLOO: "eth0"}, {GLOO: "eth7"}),
        [r"GLOO_SOCKET_IFNAME on node 1 \(host1\): no interface eth7"] * 2,
    ),
    "interface that is down": (
        down,
        [r"GLOO_SOCKET_IFNAME on node 1 \(host1\): eth1 10\.78\.0\.2 .*: eth1 is down"] * 2,
    ),
    "interface of the same address on all": (
        with_variables({GLOO: "docker0"}, {GLOO: "eth0"}),
        [r"GLOO_SOCKET_IFNAME on node 0 \(host0\): docker0 172\.17\.0\.1 .* \(host1\): connection refused"] * 2,
    ),
    "local address of another network": (
        with_words(local_addr=["10.77.0.1", "10.99.0.2"]),
        [r"--local-addr 10\.99\.0\.2 of node 1 \(host1\) leads nowhere: from node 0 \(host0\)"] * 2,
    ),
    "two hosts of one number": (
        with_words(node_rank=0),
        [r"two hosts have the same --node-rank \(0 on host\d, 0 on host\d\)"] * 2,
    ),
    "numbers of hosts that differ": (
        with_words(nnodes=["2", "1:2"]),
        [r"--nnodes differs: 2 on node 0 \(host0\); 1:2 on node 1 \(host1\)"] * 2,
    ),
    "recipes that differ": (
        lambda lab, meetings: meetings.hold(lab, static(lab), plan=["bf16", "fp16"].__getitem__),
        [r"hosts differ: plan bf16 on node 0 \(host0\); plan fp16 on node 1 \(host1\)"] * 2,
    ),
    "long packets that vanish": (
        small_packets,
        [r"2 of 2 hosts have arrived .*; long messages from or to host1 get lost \(.* compare the MTUs"] * 2,
    ),
    "job ids that differ": (
        lambda lab, meetings: meetings.hold(lab, c10d(lab, rdzv_id=["a", "b"], rdzv_conf=SHORT), gathering=[1.0, 1.0]),
        [r"1 of 2 hosts have arrived .*\(host0\); under another --rdzv-id: host1 \(b\)", r"\(host1\); .*host0 \(a\)"],
    ),
}
SAMPLE = (
    "name without an address",
    "port behind a firewall that drops",
    "port of a program that says nothing",
    "ports of the ranks behind a firewall that drops",
    "long packets that vanish",
    "interface of the same address on all",
    "recipes that differ",
)


@pytest.mark.lab
@pytest.mark.parametrize("fault", [fault if fault in SAMPLE else whole(fault) for fault in FAULTS])
def test_a_fault_is_named_with_its_host(lab, meetings, fault):
    plant, told = FAULTS[fault]
    hosts = lab(hosts=2, more={"eth1": "1gbit"}, trap=True)
    found = plant(hosts, meetings)
    for one, words in zip(found, told, strict=True):
        assert any(re.search(words, line) for line in [one.error, *one.said]), (words, found)
        assert "Traceback" not in one.error
    assert all(one.error for one in found if one is not found[0]), found


@pytest.mark.lab
def test_a_host_that_is_reached_at_a_second_address_is_not_refused(lab, meetings):
    """It was, though torchrun trains there: only the first address of each interface was tried."""
    hosts = lab(hosts=2, names=NAMES["right"])
    for host in range(2):
        hosts.run(host, "ip", "address", "flush", "dev", "eth0")
        for address in (f"10.0.2.{15 + host}/32", f"{hosts.address(host)}/16"):
            hosts.run(host, "ip", "address", "add", address, "dev", "eth0")
    found = meetings.hold(hosts, static(hosts))
    assert [one.error for one in found] == ["", ""]
    assert [one.variables for one in found] == [{}, {}]
    told = r"warning: node 1 \(host1\) is reached at 10\.77\.0\.2, and at the first address of no interface"
    assert any(re.search(told, line) for line in found[0].said), found


@pytest.mark.lab
def test_what_torchrun_accepts_is_a_warning_on_one_host(lab, meetings):
    hosts = lab(hosts=2)
    processes = [1, 2]
    found = meetings.hold(
        hosts,
        c10d(hosts, nproc_per_node=processes, nnodes=["2", "1:2"]),
        torch=["2.13.0", "2.12.1"],
        autoddp=["1.0", "1.1"],
        ahead=[0.0, 90.0],
    )
    assert [one.error for one in found] == ["", ""]
    assert [one.local_addr for one in found] == [hosts.address(0), hosts.address(1)]
    warnings = [line.partition("warning: ")[2] for one in found for line in one.said if "warning: " in line]
    assert [line.partition(":")[0].partition(" (")[0] for line in warnings] == [
        "--nnodes differs",
        "the number of processes per node differs",
        "torch's version differs",
        "autoddp's version differs",
        "the hosts' clocks are 1 min 30 s apart",
    ]
    assert "1 on node 0 (host0); 2 on node 1 (host1)" in warnings[1]


@pytest.mark.lab
@pytest.mark.parametrize("variables", [whole({}), {GLOO: "eth0"}], ids=["found", "named"])
def test_messages_that_are_too_long_for_the_network_are_told_also_where_the_hosts_have_met(lab, meetings, variables):
    """As where a tunnel carries packets of 1450 bytes: what launchers say to each other is short, gradients are not."""
    hosts = lab(hosts=2)
    hosts.carry(1450)
    found = meetings.hold(hosts, static(hosts), lambda _: variables)
    assert [one.error for one in found] == ["", ""]
    (line,) = [line for one in found for line in one.said if "warning: " in line]
    assert re.search(r"long messages from or to node 0 \(host0\), node 1 \(host1\) get lost .* compare the MTUs", line)


@pytest.mark.lab
@pytest.mark.parametrize(("rendezvous", "ahead"), [(static, [0, 3600]), whole(c10d, [0, 3600]), whole(c10d, [7200, 0])])
def test_clocks_that_are_hours_apart(lab, meetings, rendezvous, ahead):
    """Torch compares times that two hosts have written, and would take the host that is behind for lost.

    So would what asks which host's part of a start has failed first.
    """
    hosts = lab(hosts=2)
    found = meetings.hold(hosts, rendezvous(hosts), ahead=ahead)
    assert [one.error for one in found] == ["", ""]
    assert [one.ahead for one in found] == [0.0, pytest.approx(ahead[1] - ahead[0], abs=60)]
    assert [one.local_addr for one in found] == [hosts.address(0), hosts.address(1)]
    assert any("the hosts' clocks are" in line for one in found for line in one.said)


@pytest.mark.lab
@pytest.mark.parametrize("rendezvous", [static, whole(c10d)])
@pytest.mark.parametrize("late", [whole(0), 1])
def test_a_host_that_comes_late_is_waited_for(lab, meetings, rendezvous, late, tmp_path):
    """As long as torchrun waits, and not in silence: it comes once the other one has said so."""
    hosts = lab(hosts=2)
    said = str(tmp_path / "said")
    if late == 0:
        found = meetings.hold(hosts, rendezvous(hosts), says=[None, f"{said}1"], after=[f"{said}1", None])
        assert any("10.77.0.1: connection refused; trying for" in line for line in found[1].said)
    else:
        quick = {"gathering": [0.5, 0.5]}
        found = meetings.hold(hosts, rendezvous(hosts), says=[f"{said}0", None], after=[None, f"{said}0"], **quick)
        assert any("1 of 2 hosts have arrived at 10.77.0.1:29500 (host0)" in line for line in found[0].said)
    assert [one.error for one in found] == ["", ""]


@pytest.mark.lab
def test_a_name_that_stands_for_another_host_on_each(lab, meetings):
    """Each host keeps a store of its own, and waits there until it gives up, as under torchrun."""
    hosts = lab(hosts=2, names=[f"127.0.0.1 localhost\n10.77.0.{host + 1} meet\n" for host in range(2)])
    words = c10d(hosts, rdzv_endpoint=f"meet:{PORT}", rdzv_conf="join_timeout=2")
    for number, one in enumerate(meetings.hold(hosts, words)):
        assert f"1 of 2 hosts have arrived at meet:{PORT}, which is this host (host{number})" in one.error


@pytest.mark.lab
def test_a_host_that_stops_while_the_hosts_compare_themselves(lab, meetings, tmp_path):
    hosts, over = lab(hosts=2), str(tmp_path / "over")
    words = static(hosts)
    found = meetings.hold(hosts, words, silent=[(0.5, 3.0)] * 2, frozen_until=[None, over], ends=[over, None])
    assert any(line.endswith("waiting for node 1 (host1) (up to 3 s)") for line in found[0].said), found
    assert found[0].error.startswith("node 1 (host1) does not answer, for 3 s"), found


@pytest.mark.lab
@pytest.mark.parametrize("variables", [{}, whole({GLOO: "lo"})], ids=["as it is", "by loopback"])
def test_two_launchers_on_one_machine_without_a_network(lab, meetings, variables):
    hosts = lab(hosts=1)
    hosts.run(0, "ip", "link", "set", "eth0", "down")
    both = Twice(hosts)
    words = static(both, master_addr="localhost")
    found = meetings.hold(both, words, lambda host: variables)
    assert [one.error for one in found] == ["", ""]


class Twice:
    """One host of a lab as two."""

    def __init__(self, lab):
        self._lab = lab
        self.address = lab.address

    def __len__(self):
        return 2

    def holder(self, host):
        return self._lab.holder(0)


@pytest.mark.parametrize(
    ("variables", "interfaces"),
    [
        ({"NCCL_SOCKET_IFNAME": "eth"}, {"NCCL_SOCKET_IFNAME": ["eth0", "eth1"]}),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, {"NCCL_SOCKET_IFNAME": []}),
        ({"NCCL_SOCKET_IFNAME": "=eth1,ib0:2"}, {"NCCL_SOCKET_IFNAME": ["eth1", "ib0"]}),
        ({"NCCL_SOCKET_IFNAME": "ib:1"}, {"NCCL_SOCKET_IFNAME": ["ib0"]}),
        ({"NCCL_SOCKET_IFNAME": "^eth,lo"}, {"NCCL_SOCKET_IFNAME": ["docker0", "ib0"]}),
        ({"NCCL_SOCKET_IFNAME": "^=eth,docker0"}, {"NCCL_SOCKET_IFNAME": ["eth0", "eth1", "ib0", "lo"]}),
        ({"NCCL_SOCKET_IFNAME": ""}, {}),  # as if it were not set
        ({"GLOO_SOCKET_IFNAME": "eth1,eth0"}, {"GLOO_SOCKET_IFNAME": ["eth1", "eth0"]}),
        ({"GLOO_SOCKET_IFNAME": "eth"}, {"GLOO_SOCKET_IFNAME": []}),
        ({}, {}),
    ],
)
def test_which_interfaces_the_variables_name(variables, interfaces):
    assert named(variables, ["docker0", "eth0", "eth1", "ib0", "lo"]) == interfaces


def test_hosts_that_are_alike_give_no_line():
    assert compared([HostFacts(name=name, plan="a", clock=clock) for name, clock in (("x", 1.0), ("y", 4.0))]) == (
        [],
        [],
    )


def test_a_script_that_is_not_the_same_on_all_hosts_is_a_warning():
    hosts = [HostFacts(name=name, plan="a", script=script) for name, script in (("x", "01"), ("y", "02"), ("z", "01"))]
    told = "01 on node 0 (x), node 2 (z); 02 on node 1 (y)"
    script = "the script, or a module of yours that it imports, is not the same everywhere"
    assert compared(hosts) == ([], [f"{script}: {told}"])
    assert compared([*hosts[:2], HostFacts(name="z", plan="a")]) == ([], [])  # a host of an older version says nothing


def test_another_version_may_say_more_or_less():
    assert msgspec.convert({"name": "x", "unheard": 1}, HostFacts) == HostFacts(name="x")
    assert msgspec.convert({"addresses": {"a": "10.0.0.1"}, "unheard": 1}, Places) == Places({"a": "10.0.0.1"})


def test_many_hosts_are_one_short_line():
    hosts = [HostFacts(name=f"h{n}", processes=8 if n else 4) for n in range(40)]
    told = "4 on node 0 (h0); 8 on node 1 (h1), node 2 (h2), node 3 (h3) and 36 more"
    assert compared(hosts) == ([], [f"the number of processes per node differs: {told}"])


def test_a_recipe_for_as_many_ranks_on_each_host_is_no_recipe_where_one_host_has_fewer():
    """It fits the host that has as many. No copy of it would fit the other one."""
    hosts = [HostFacts(name="x", plan="a", reads="a recipe", processes=8)]
    hosts.append(HostFacts(name="y", plan="b", reads="no recipe, tuning", processes=4))
    (error,), _ = compared(hosts)
    assert error.endswith("by --recipe; for hosts with different numbers of ranks, --trials 20 on all makes one")
    (error,), _ = compared([msgspec.structs.replace(host, processes=8) for host in hosts])
    assert error.endswith("name the recipe by --recipe")
