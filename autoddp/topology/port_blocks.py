"""Reads what ibv_devinfo, ibstat and ibstatus have in common: blocks of `key: value` lines, one block for each port.

A line tells something of the device and port whose headings stand above it. When a heading is lost, the lines after it
must not be taken for the device before; that shows in the order of the keys, which the tools never change: a key that
belongs above the one just read begins a block without its heading, and is passed over up to the next heading.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autoddp.topology.rdma import LinkLayer, RdmaPort, RdmaPorts, State
from autoddp.topology.text import closed, lines, nothing_readable, number

MOST_PORTS = 255
"""Port numbers are one byte."""

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
_RATE = re.compile(r"([0-9]{1,4}(?:\.[0-9])?) Gb/sec \(([0-9]{1,2})X(?: ([A-Z0-9]{1,8}))?\)")
_LANE = {"SDR": 2.5, "DDR": 5, "QDR": 10, "FDR10": 10, "FDR": 14, "EDR": 25, "HDR": 50, "NDR": 100, "XDR": 200}
_WIDTHS = (1, 2, 4, 8, 12)
_WHOLE_RATES = {int(lane * width) for lane in _LANE.values() for width in _WIDTHS}
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
    gbps, lane = float(found.group(1)), _LANE.get(found.group(3))
    return None if lane is not None and gbps != lane * int(found.group(2)) else gbps or None


def whole_rate(text: str) -> float | None:
    """ibstat's bare Gbit/s, which is lanes times the rate of a lane, without the half of 2.5."""
    gbps = number(text, max(_WHOLE_RATES))
    return gbps if gbps in _WHOLE_RATES else None


def version(text: str) -> str | None:
    """A firmware's version."""
    return text if _VERSION.fullmatch(text) else None


def model(text: str) -> str | None:
    """A model or a board in one word; None for a placeholder such as `...`."""
    return text if _MODEL.fullmatch(text) else None


class Heading(NamedTuple):
    """A line that says whose lines follow. None: it says nothing of it; "" and 0: it does, and cannot be read."""

    device: str | None = None
    port: int | None = None


class Key(NamedTuple):
    """Where a value goes and how it is read."""

    field: str
    read: Callable[[str], Any]
    label: str = ""
    """For the sentence that says it is missing; empty if a tool may leave it out."""


@dataclass(frozen=True)
class Dialect:
    """How one tool writes it. A key with None is only a landmark in the order."""

    example: str
    """The tool and a line of it, for the error."""
    heading: Callable[[str], Heading | None]
    of_device: Mapping[str, Key | None]
    of_port: Mapping[str, Key | None]
    gone: Callable[[str], str | None] = lambda line: None
    """The device of which the tool says that it could not be read."""
    none: str | None = None
    """What the tool prints when there is no device."""

    def order(self) -> dict[str, int]:
        """Key → its place in a block."""
        return {key: place for place, key in enumerate([*self.of_device, *self.of_port])}


@dataclass
class _Block:
    device: str
    values: dict[str, Any] = field(default_factory=dict)
    ports: dict[int, dict[str, Any]] = field(default_factory=dict)


class _Reader:
    """Goes through the lines; knows whose they are."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect, self.order = dialect, dialect.order()
        self.blocks: dict[str, _Block] = {}
        self.missing: list[str] = []
        self.block: _Block | None = None
        self.port: dict[str, Any] | None = None
        self.place = -1  # of the last key in this block

    def begin(self, heading: Heading, line: int) -> None:
        if heading.device is not None:
            self.block, self.port, self.place = None, None, -1
            if heading.device:
                self.block = self.blocks.setdefault(heading.device, _Block(heading.device))
            else:
                self.missing.append(f"line {line}: the name of a device could not be read")
        if heading.port is None:
            return
        if self.block is None or heading.port == 0 or heading.port in self.block.ports:
            self.lose(line)
            return
        self.port = self.block.ports[heading.port] = {}
        self.place = len(self.dialect.of_device) - 1

    def tell(self, key: str, value: str, line: int) -> None:
        if self.block is None or (place := self.order.get(key)) is None:
            return
        of_port = key in self.dialect.of_port
        if place <= self.place or (of_port and self.port is None):
            self.lose(line)
            return
        self.place = place
        known = self.dialect.of_port[key] if of_port else self.dialect.of_device[key]
        values = self.port if of_port else self.block.values
        if known is not None and values is not None and (found := known.read(value)) is not None:
            values.setdefault(known.field, found)

    def lose(self, line: int) -> None:
        if self.block is not None:
            self.missing.append(
                f"line {line}: of another device or port than those above; passed over to the next heading"
            )
        self.block = self.port = None


def read_blocks(text: str, dialect: Dialect) -> RdmaPorts:
    """The ports in the order they are listed; NothingReadable if there is no heading."""
    reader, gone, said_none = _Reader(dialect), [], False
    for i, raw in enumerate(lines(text), start=1):
        line = raw.strip()
        if heading := dialect.heading(line):
            reader.begin(heading, i)
        elif lost := dialect.gone(line):
            gone.append(lost)
        elif line:
            said_none = said_none or closed(line) == dialect.none
            key, _, value = line.partition(":")
            reader.tell(key.rstrip(), value.strip(), i)
    if not (reader.blocks or gone or said_none):
        raise nothing_readable(dialect.example)
    return _result(reader, gone)


def _result(reader: _Reader, gone: list[str]) -> RdmaPorts:
    ports, unread, missing = [], dict.fromkeys(gone), [f"{name}: the tool could not read it" for name in gone]
    for block in reader.blocks.values():
        announced = block.values.pop("ports", None)
        # Ports are numbered from 1 up: a number above their count is damaged.
        known_ports = {n: values for n, values in block.ports.items() if announced is None or n <= announced}
        if len(known_ports) < (announced or 1):
            unread[block.device] = None
            missing.append(f"{block.device}: {len(known_ports)} of {announced or 1} ports could be read")
        missing += _absent(block.device, block.values, reader.dialect.of_device)
        for port, values in known_ports.items():
            missing += _absent(f"{block.device} port {port}", values, reader.dialect.of_port)
            known, spelled = values.pop("state", (None, ""))
            ports.append(RdmaPort(block.device, port, state=known, state_as_written=spelled, **block.values, **values))
    return RdmaPorts(tuple(ports), tuple(unread), (*missing, *reader.missing))


def _absent(whose: str, values: Mapping[str, Any], keys: Mapping[str, Key | None]) -> list[str]:
    labels = [key.label for key in keys.values() if key is not None and key.label and key.field not in values]
    return [f"{whose}: not read: {', '.join(labels)}"] if labels else []


def port_count(text: str) -> int | None:
    """How many ports a device says it has."""
    return number(text, MOST_PORTS)
