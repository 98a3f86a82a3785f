"""RDMA ports and addresses from text: what is at the end, what is damaged, and which address is the best."""

from __future__ import annotations

import pytest
from rdma_captures import capture, read_or_none, reading

from autoddp.topology.rdma.ports import Gid, best_gid
from autoddp.topology.rdma.texts import rate, read_ibstat, read_ibv_devinfo, read_show_gids


@pytest.mark.parametrize("name", ["ibstat_cx6dx_2ports_ethernet", "ibv_devinfo_4x_cx7_all_ports_down"])
def test_ports_without_their_heading_are_not_given_to_the_device_above(name: str) -> None:
    rows = capture(name)[0].split("\n")
    second = [i for i, row in enumerate(rows) if row.startswith(("CA '", "hca_id"))][1]
    whole, part = reading(name), read_or_none(name, "\n".join(rows[:second] + rows[second + 1 :]))
    assert part is not None
    assert part["devices"] == [device for device in whole["devices"] if device["name"] != "mlx5_1"]
    number = next(i for i in range(second, len(rows)) if rows[i].strip()) + 1
    assert part["missing"] == [
        f"line {number}: of another device or port than those above; passed over to the next heading"
    ]


# The last line of a text may be cut; whether a value is whole then depends on whether it shows its end.


def test_a_number_at_the_very_end_is_not_believed() -> None:
    head = capture("ibstat_cx4_edr_active")[0].split("Rate:")[0]
    (cut,), (whole,) = read_ibstat(head + "Rate: 10").ports, read_ibstat(head + "Rate: 10\n").ports
    assert (cut.rate_gbps, whole.rate_gbps) == (None, 10)


def test_a_link_layer_at_the_very_end_is() -> None:
    text = capture("ibstat_cx4_edr_active")[0].rstrip()
    assert read_ibstat(text).ports[0].link_layer == "InfiniBand"
    assert read_ibstat(text[:-1]).ports[0].link_layer is None


def test_an_interface_at_the_very_end_is_not_believed_but_its_row_is() -> None:
    gids = read_show_gids(capture("show_gids_bond_vxlan")[0].rstrip()).gids
    assert (gids[-1].index, gids[-1].kind, gids[-1].netdev) == (5, "v2", None)
    assert best_gid(gids) == {"mlx5_bond_0": 5}


TWO_PORTS = """\
CA 'mlx4_0'
\tCA type: MT4103
\tNumber of ports: 2
\tFirmware version: 2.42.5000
\tPort 1:
\t\tState: Initializing
\t\tRate: 40
\t\tLink layer: InfiniBand
\tPort 2:
\t\tState: Active
\t\tRate: 10
\t\tLink layer: Ethernet
"""


def test_two_ports_of_one_device() -> None:
    found = read_ibstat(TWO_PORTS)
    assert [(p.port, p.state, p.state_as_written, p.fabric, p.rate_gbps) for p in found.ports] == [
        (1, "INIT", "Initializing", "InfiniBand", 40),
        (2, "ACTIVE", "Active", "RoCE", 10),
    ]
    assert (found.fabric, found.rdma_usable, found.missing) == ("RoCE", True, ())


def test_an_announced_port_that_is_not_there() -> None:
    found = read_ibstat(TWO_PORTS.split("\tPort 2")[0])
    assert (found.unread, found.missing) == (("mlx4_0",), ("mlx4_0: 1 of 2 ports could be read",))
    assert found.rdma_usable is None  # the port that is there is not active; the other one may be


@pytest.mark.parametrize(
    ("line", "damaged", "sentence"),
    [
        ("State: Active", "State: Actxve", "mlx4_0 port 2: not read: state"),
        ("Rate: 10", "Rate: 1\x000", "mlx4_0 port 2: not read: rate"),
        ("Rate: 10", "Rate: 17", "mlx4_0 port 2: not read: rate"),
        ("Rate: 10", "Rate: 99999999999999999999999", "mlx4_0 port 2: not read: rate"),
        ("Rate: 10", "Rate: ٤٠", "mlx4_0 port 2: not read: rate"),
        ("Link layer: Ethernet", "Link layer: Ether", "mlx4_0 port 2: not read: link layer"),
    ],
)
def test_a_damaged_value_is_none_and_named(line: str, damaged: str, sentence: str) -> None:
    found = read_ibstat(TWO_PORTS.replace(line, damaged))
    assert len(found.ports) == 2
    assert found.missing == (sentence,)


def test_a_damaged_name_takes_its_ports_along() -> None:
    found = read_ibstat(TWO_PORTS.replace("mlx4_0", "mlx\x004_0") + TWO_PORTS.replace("mlx4_0", "mlx4_1"))
    assert [(port.device, port.port) for port in found.ports] == [("mlx4_1", 1), ("mlx4_1", 2)]
    assert found.missing == ("line 1: the name of a device could not be read",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("400 Gb/sec (4X NDR)", 400),
        ("2.5 Gb/sec (1X SDR)", 2.5),
        ("1600 Gb/sec (4X NEW)", 1600),
        ("100 Gb/sec (4X)", 100),
        ("40 Gb/sec (4X NDR)", None),
        ("400 Gb/sec (4X ND", None),
        ("0 Gb/sec (4X)", None),
    ],
)
def test_a_rate_and_what_it_is_made_of(text: str, expected: float | None) -> None:
    assert rate(text) == expected


def test_a_port_beyond_their_number() -> None:
    found = read_ibv_devinfo(capture("ibv_devinfo_1x_cx7_ethernet_active")[0].replace("port:   1", "port:   71"))
    assert (found.ports, found.missing) == ((), ("mlx5_1: 0 of 1 ports could be read",))
    assert found.rdma_usable is None


def test_iwarp_is_no_roce() -> None:
    text = capture("ibv_devinfo_1x_cx7_ethernet_active")[0].replace("InfiniBand (0)", "iWARP (1)")
    found = read_ibv_devinfo(text)
    assert (found.fabric, found.rdma_usable, found.ports[0].link_layer) == (None, True, "Ethernet")


def test_no_devices_is_an_answer() -> None:
    found = read_ibv_devinfo("No IB devices found\n")
    assert (found.ports, found.rdma_usable, found.missing) == ((), False, ())


# Addresses.


def mapped(index: int, netdev: str | None, ipv4: str = "0a00:0001", port: int = 1, device: str = "mlx5_0") -> Gid:
    return Gid(device, port, index, f"0000:0000:0000:0000:0000:ffff:{ipv4}", "v2", netdev)


def local(index: int, netdev: str) -> Gid:
    return Gid("mlx5_0", 1, index, "fe80:0000:0000:0000:0200:00ff:fe00:0001", "v2", netdev)


@pytest.mark.parametrize(
    ("gids", "best"),
    [
        ([mapped(3, "ens1f0"), mapped(5, "ens1f0")], {"mlx5_0": 3}),
        ([mapped(5, "ens1f0"), mapped(3, "ens1f0.100")], {"mlx5_0": 5}),
        ([mapped(3, "br0"), mapped(5, "vxlan7"), mapped(7, None)], {"mlx5_0": 7}),
        ([mapped(3, "ens1f0.100")], {"mlx5_0": 3}),
        ([local(0, "bond1"), mapped(3, "storage0"), mapped(5, "bond1")], {"mlx5_0": 5}),
        ([mapped(3, "ens1f0", ipv4="a9fe:0001"), mapped(5, "ens1f0", ipv4="7f00:0001")], {}),
        ([mapped(1, "ib1", port=2), mapped(3, "ib0", port=1)], {"mlx5_0": 3}),
        ([mapped(3, "a"), mapped(1, "b", device="mlx5_1")], {"mlx5_0": 3, "mlx5_1": 1}),
        ([Gid("mlx5_0", 1, 4, mapped(0, None).address, "v1", "ens1f0")], {}),
        ([], {}),
    ],
)
def test_the_best_address(gids: list[Gid], best: dict[str, int]) -> None:
    assert best_gid(gids) == best


def test_an_ipv4_that_is_not_the_one_in_the_address() -> None:
    text = capture("show_gids_6_two_link_locals")[0].replace("10.0.0.1        v2", "10.0.0.7        v2")
    found = read_show_gids(text)
    assert found.missing == ("line 8 could not be read", "n_gids_found is 6, and 5 could be read")
    assert best_gid(found.gids) == {}


def test_one_index_with_two_contents() -> None:
    row = "mlx5_0  1  3  0000:0000:0000:0000:0000:ffff:0a00:0001  10.0.0.1  {}  ens1f0\n"
    found = read_show_gids(row.format("v2") + row.format("v1") + row.format("v2") + "n_gids_found=3\n")
    assert found.gids == ()
    assert found.missing[0] == "mlx5_0 port 1 index 3: listed with two contents"
