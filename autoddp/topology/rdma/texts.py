"""Readers of what RDMA tools print: `ibv_devinfo`, `ibstat` and `ibstatus` (ports), `show_gids` (their addresses).

The first three print blocks of `key: value` lines, one block for each port. A line belongs to the device and port whose
headings stand above it. Where a heading is lost, the lines after it must not be taken for the device before. The order
of the keys shows this, because the tools never change it: a key that belongs above the one just read begins a block
without its heading, and is passed over up to the next heading.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from autoddp.errors import NothingReadable
from autoddp.topology.rdma.ports import Gid, LinkLayer, RdmaPort, RdmaPorts, State, best_gid
from autoddp.topology.text import CUT, closed, lines, name, not_read, nothing_readable, number

MOST_PORTS = 255
"""Port numbers are one byte."""
MOST_GIDS = 65535
"""Indices of addresses are two bytes."""
ADDRESS = re.compile(r"[0-9a-f]{4}(?::[0-9a-f]{4}){7}")
"""An address as sysfs and show_gids write it."""

_STATES: tuple[State, ...] = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
_SPELLINGS: dict[str, tuple[State, str]] = {
    **{f"PORT_{state} ({i})": (state, f"PORT_{state}") for i, state in enumerate(_STATES)},  # ibv_devinfo
    **{f"{i}: {state}": (state, state) for i, state in enumerate(_STATES)},  # ibstatus, sysfs
    "Down": ("DOWN", "Down"),  # ibstat
    "Initializing": ("INIT", "Initializing"),
    "Armed": ("ARMED", "Armed"),
    "Active": ("ACTIVE", "Active"),
}
_LINK_LAYERS: dict[str, LinkLayer] = {"InfiniBand": "InfiniBand", "Ethernet": "Ethernet"}
_TRANSPORTS = {
    f"{kind} ({i})": kind for i, kind in enumerate(("InfiniBand", "iWARP", "usNIC", "usNIC UDP", "unspecified"))
}
_RATE = re.compile(r"([0-9]{1,4}(?:\.[0-9])?) Gb/sec \(([0-9]{1,2})X(?: ([A-Z0-9]{1,8}))?\)")
_LANE = {"SDR": 2.5, "DDR": 5, "QDR": 10, "FDR10": 10, "FDR": 14, "EDR": 25, "HDR": 50, "NDR": 100, "XDR": 200}
_WHOLE_RATES = {int(lane * width) for lane in _LANE.values() for width in (1, 2, 4, 8, 12)}
_VERSION = re.compile(r"[0-9]{1,5}(?:\.[0-9]{1,6}){1,3}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def state(text: str) -> tuple[State, str] | None:
    """The state and its spelling without numbers."""
    return _SPELLINGS.get(closed(text))


def link_layer(text: str) -> LinkLayer | None:
    """InfiniBand, Ethernet or not known."""
    return _LINK_LAYERS.get(closed(text))


def rate(text: str) -> float | None:
    """Gbit/s from `400 Gb/sec (4X NDR)`; None where the two halves contradict each other."""
    if not (found := _RATE.fullmatch(closed(text))):
        return None
    gbps, lane = float(found[1]), _LANE.get(found[3])
    return None if lane is not None and gbps != lane * int(found[2]) else gbps or None


def version(text: str) -> str | None:
    """A firmware's version."""
    return text if _VERSION.fullmatch(text) else None


def model(text: str) -> str | None:
    """A model or a board in one word; None for a placeholder such as `...`."""
    return text if _MODEL.fullmatch(text) else None


def _whole_rate(text: str) -> float | None:
    """ibstat's bare Gbit/s, which is lanes times the rate of a lane, without the half of 2.5."""
    gbps = number(text, max(_WHOLE_RATES))
    return gbps if gbps in _WHOLE_RATES else None


def _transport(text: str) -> str | None:
    return _TRANSPORTS.get(closed(text))


_port = partial(number, most=MOST_PORTS)


class _Key(NamedTuple):
    """The field to which a value goes, and how it is read."""

    field: str
    """Field of RdmaPort; `ports`: how many ports the device says it has."""
    read: Callable[[str], Any]
    label: str = ""
    """What the value is called in the sentence that says it is missing; empty if a tool may leave it out."""


@dataclass(frozen=True)
class _Tool:
    """How one tool writes it. A key with None serves as a landmark in the order only."""

    example: str
    """The tool and a line of it, for the error."""
    device_heading: re.Pattern[str]
    """A line that begins a device's block; `name` and `port` are None where they cannot be read."""
    of_port: Mapping[str, _Key | None]
    of_device: Mapping[str, _Key | None]
    port_heading: re.Pattern[str] | None = None
    """None: the device's heading also names the port."""
    gone: re.Pattern[str] | None = None
    """A line that names a device which the tool could not read."""
    none: str | None = None
    """What the tool prints when there is no device."""


_IBV_DEVINFO = _Tool(
    example="the output of ibv_devinfo, with lines like `hca_id: mlx5_0`",
    device_heading=re.compile(r"hca_id(?::\s*(?P<name>.*))?"),
    port_heading=re.compile(r"port(?::\s*(?P<port>.*))?"),
    of_device={
        "transport": _Key("transport", _transport),
        "fw_ver": _Key("firmware", version, "firmware"),
        **dict.fromkeys(("node_guid", "sys_image_guid", "vendor_id", "vendor_part_id", "hw_ver")),
        "board_id": _Key("board_id", model),
        "phys_port_cnt": _Key("ports", _port),
    },
    of_port={
        "state": _Key("state", state, "state"),
        **dict.fromkeys(("max_mtu", "active_mtu", "sm_lid", "port_lid", "port_lmc")),
        "link_layer": _Key("link_layer", link_layer, "link layer"),
    },
    none="No IB devices found",
)
_IBSTAT = _Tool(
    example="the output of ibstat, with lines like `CA 'mlx5_0'`",
    device_heading=re.compile(rf"CA '(?:(?P<name>.*)'{CUT}?|.*)"),
    port_heading=re.compile(rf"Port (?P<port>[^:]{{1,16}}):{CUT}?"),
    of_device={
        "CA type": _Key("ca_type", model, "CA type"),
        "Number of ports": _Key("ports", _port),
        "Firmware version": _Key("firmware", version, "firmware"),
        **dict.fromkeys(("Hardware version", "Node GUID", "System image GUID")),
    },
    of_port={
        "State": _Key("state", state, "state"),
        "Physical state": None,
        "Rate": _Key("rate_gbps", _whole_rate, "rate"),
        **dict.fromkeys(("Base lid", "LMC", "SM lid", "Capability mask", "Port GUID")),
        "Link layer": _Key("link_layer", link_layer, "link layer"),
    },
    gone=re.compile(r"ibpanic: .{0,64}IB device '(?P<name>[A-Za-z0-9_.-]{1,64})' failed.*"),
)
_IBSTATUS = _Tool(
    example="the output of ibstatus, with lines like `Infiniband device 'mlx5_0' port 1 status:`",
    device_heading=re.compile(rf"Infiniband device(?: '(?P<name>.*)' port (?P<port>.{{1,16}}) status:{CUT}?|.*)"),
    of_device={},
    of_port={
        **dict.fromkeys(("default gid", "base lid", "sm lid")),
        "state": _Key("state", state, "state"),
        "phys state": None,
        "rate": _Key("rate_gbps", rate, "rate"),
        "link_layer": _Key("link_layer", link_layer, "link layer"),
    },
)


class _Blocks:
    """The blocks as they are read line by line: whose lines these are, and what they have said."""

    def __init__(self, tool: _Tool) -> None:
        self.tool = tool
        self.places = {key: place for place, key in enumerate([*tool.of_device, *tool.of_port])}
        self.devices: dict[str, dict[int, dict[str, Any]]] = {}
        """Device → port → field → value; port 0 stands for the device itself."""
        self.missing: list[str] = []
        self.gone: list[str] = []
        self.device: dict[int, dict[str, Any]] | None = None
        self.port = 0
        self.place = -1  # of the last key in this block

    def take(self, line: str, at: int) -> None:
        tool = self.tool
        if found := tool.device_heading.fullmatch(line):
            self._begin_device(name(found["name"] or ""), at)
            if tool.port_heading is None and found["port"]:
                self._begin_port(_port(found["port"]), at)
        elif tool.port_heading and (found := tool.port_heading.fullmatch(line)):
            self._begin_port(_port(found["port"] or ""), at)
        elif tool.gone and (found := tool.gone.fullmatch(line)):
            self.gone.append(found["name"])
        else:
            key, _, value = line.partition(":")
            self._tell(key.rstrip(), value.strip(), at)

    def _begin_device(self, device: str | None, at: int) -> None:
        self.device, self.port, self.place = None, 0, -1
        if device:
            self.device = self.devices.setdefault(device, {0: {}})
        else:
            self.missing.append(f"line {at}: the name of a device could not be read")

    def _begin_port(self, port: int | None, at: int) -> None:
        if self.device is None or not port or port in self.device:
            self._lose(at)
            return
        self.device[port], self.port = {}, port
        self.place = len(self.tool.of_device) - 1

    def _tell(self, key: str, value: str, at: int) -> None:
        if self.device is None or (place := self.places.get(key)) is None:
            return
        if place <= self.place or (key in self.tool.of_port and not self.port):
            self._lose(at)
            return
        self.place = place
        known = self.tool.of_port.get(key) or self.tool.of_device.get(key)
        if known is not None and (found := known.read(value)) is not None:
            self.device[self.port].setdefault(known.field, found)

    def _lose(self, at: int) -> None:
        if self.device is not None:
            self.missing.append(
                f"line {at}: of another device or port than those above; passed over to the next heading"
            )
        self.device = None

    def result(self) -> RdmaPorts:
        ports, unread = [], dict.fromkeys(self.gone)
        missing = [f"{device}: the tool could not read it" for device in self.gone]
        for device, told in self.devices.items():
            of_device = told.pop(0)
            announced = of_device.pop("ports", None)
            # Ports are numbered from 1 up: a number above their count is damaged.
            known = {port: values for port, values in told.items() if announced is None or port <= announced}
            if len(known) < (announced or 1):
                unread[device] = None
                missing.append(f"{device}: {len(known)} of {announced or 1} ports could be read")
            missing += _absent(device, of_device, self.tool.of_device)
            for port, of_port in known.items():
                missing += _absent(f"{device} port {port}", of_port, self.tool.of_port)
                value, spelled = of_port.pop("state", (None, ""))
                ports.append(RdmaPort(device, port, state=value, state_as_written=spelled, **of_device, **of_port))
        return RdmaPorts(tuple(ports), tuple(unread), (*missing, *self.missing))


def _absent(whose: str, values: Mapping[str, Any], keys: Mapping[str, _Key | None]) -> list[str]:
    labels = [key.label for key in keys.values() if key is not None and key.label and key.field not in values]
    return [f"{whose}: not read: {', '.join(labels)}"] if labels else []


def _read_blocks(tool: _Tool, text: str) -> RdmaPorts:
    blocks, said_none = _Blocks(tool), False
    for at, line in enumerate(map(str.strip, lines(text)), start=1):
        said_none = said_none or closed(line) == tool.none
        blocks.take(line, at)
    if not (blocks.devices or blocks.gone or said_none):
        raise nothing_readable(tool.example, text.count("\n") + 1)
    return blocks.result()


read_ibv_devinfo = partial(_read_blocks, _IBV_DEVINFO)
"""The ports that `ibv_devinfo` lists, with or without -v, without rates; no port where it says that there is none."""
read_ibstat = partial(_read_blocks, _IBSTAT)
"""The ports that `ibstat` lists, also when it gave up half-way (`ibpanic`)."""
read_ibstatus = partial(_read_blocks, _IBSTATUS)
"""The ports that `ibstatus` lists. All three raise NothingReadable for another text."""


def read_rdma_ports(text: str) -> RdmaPorts:
    """What any of the three printed: their headings tell which it was. NothingReadable for another text."""
    for read in (read_ibv_devinfo, read_ibstatus, read_ibstat):
        try:
            found = read(text)
        except NothingReadable:
            continue
        if found.ports:
            return found
    return read_ibv_devinfo(text)


# Addresses.

_COUNT = re.compile(r"n_gids_found=([0-9]{1,9})")
_ROW = re.compile(rf"(\S+)\s+(\S+)\s+(\S+)\s+({ADDRESS.pattern})(?:\s+([0-9.]+))?\s+(v[12])(?:\s+(\S+))?")


@dataclass(frozen=True)
class GidTable:
    """The addresses that were listed, in that order."""

    gids: tuple[Gid, ...] = ()
    missing: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """For JSON; `gids` is their number, `best_rocev2_ipv4` device → index."""
        return {
            "gids": len(self.gids),
            "best_rocev2_ipv4": best_gid(self.gids),
            "entries": [gid.plain() for gid in self.gids],
            "missing": list(self.missing),
        }


def read_show_gids(text: str) -> GidTable:
    """The addresses; none is a valid answer (`n_gids_found=0`). NothingReadable for another text."""
    slots: dict[tuple[str, int, int], set[Gid]] = {}
    unread: list[int] = []
    count, header = None, False
    for i, line in enumerate(lines(text), start=1):
        words = line.split()
        if words[:3] == ["DEV", "PORT", "INDEX"]:
            header = True
        elif found := _COUNT.fullmatch(closed(line)):
            count = int(found[1])
        elif row := _row(line):
            slots.setdefault((row.device, row.port, row.index), set()).add(row)
        elif words and words[0] != "---":
            unread.append(i)
    if not (slots or header or count is not None):
        example = "the output of show_gids, with its heading `DEV PORT INDEX GID IPv4 VER DEV`"
        raise nothing_readable(example, text.count("\n") + 1)
    gids = tuple(found for (found, *others) in slots.values() if not others)
    twice = (slot for slot, contents in slots.items() if len(contents) > 1)
    missing = [*not_read(unread)]
    missing += [f"{device} port {port} index {index}: listed with two contents" for device, port, index in twice]
    if count is None:
        missing.append("there is no n_gids_found line: the list may go on")
    elif count != len(gids):
        missing.append(f"n_gids_found is {count}, and {len(gids)} could be read")
    return GidTable(gids, tuple(missing))


def _row(line: str) -> Gid | None:
    if not (found := _ROW.fullmatch(closed(line).strip())):
        return None
    device, port, index = name(found[1]), _port(found[2]), number(found[3], MOST_GIDS)
    if not device or not port or index is None:
        return None
    gid = Gid(device, port, index, found[4], "v2" if found[6] == "v2" else "v1")
    # The IPv4 column repeats the end of the address: where they differ, one of them is damaged.
    if found[5] not in (None, gid.ipv4):
        return None
    cut = line.endswith(CUT)
    if found[6] == "v1" and not found[7] and not gid.ipv4:  # so InfiniBand's addresses are printed
        return replace(gid, kind=None if cut else "IB")
    return replace(gid, netdev=None if cut else name(found[7] or ""))
