"""Reads `ibstat` and `ibstatus`: the same facts, the first in blocks of a device, the second one block a port."""

from __future__ import annotations

import re

from autoddp.topology.port_blocks import (
    MOST_PORTS,
    Dialect,
    Heading,
    Key,
    link_layer,
    model,
    port_count,
    rate,
    read_blocks,
    state,
    version,
    whole_rate,
)
from autoddp.topology.rdma import RdmaPorts
from autoddp.topology.text import closed, name, number

_PORT = re.compile(r"Port ([^:]{1,16}):")
_GONE = re.compile(r"ibpanic: .{0,64}IB device '([A-Za-z0-9_.-]{1,64})' failed")
_STATUS = re.compile(r"Infiniband device (.{1,80}) port (.{1,16}) status:")


def read_ibstat(text: str) -> RdmaPorts:
    """The ports `ibstat` lists, also when it gave up half-way (`ibpanic`). NothingReadable for another text."""
    return read_blocks(text, _IBSTAT)


def read_ibstatus(text: str) -> RdmaPorts:
    """The ports `ibstatus` lists. NothingReadable for another text."""
    return read_blocks(text, _IBSTATUS)


def _quoted(text: str) -> str:
    """The name between quotes; empty if that cannot be read."""
    whole = len(text) > 2 and text[0] == text[-1] == "'"
    return (name(text[1:-1]) or "") if whole else ""


def _ibstat_heading(line: str) -> Heading | None:
    if line.startswith("CA '"):
        return Heading(device=_quoted(closed(line)[3:]))
    found = _PORT.fullmatch(closed(line))
    return Heading(port=number(found.group(1), MOST_PORTS) or 0) if found else None


def _ibstatus_heading(line: str) -> Heading | None:
    found = _STATUS.fullmatch(closed(line))
    if found:
        return Heading(_quoted(found.group(1)), number(found.group(2), MOST_PORTS) or 0)
    return Heading(device="") if line.startswith("Infiniband device") else None


def _gone(line: str) -> str | None:
    found = _GONE.match(line)
    return found.group(1) if found else None


_IBSTAT = Dialect(
    example="the output of ibstat, with lines like `CA 'mlx5_0'`",
    heading=_ibstat_heading,
    of_device={
        "CA type": Key("ca_type", model, "CA type"),
        "Number of ports": Key("ports", port_count),
        "Firmware version": Key("firmware", version, "firmware"),
        "Hardware version": None,
        "Node GUID": None,
        "System image GUID": None,
    },
    of_port={
        "State": Key("state", state, "state"),
        "Physical state": None,
        "Rate": Key("rate_gbps", whole_rate, "rate"),
        "Base lid": None,
        "LMC": None,
        "SM lid": None,
        "Capability mask": None,
        "Port GUID": None,
        "Link layer": Key("link_layer", link_layer, "link layer"),
    },
    gone=_gone,
)

_IBSTATUS = Dialect(
    example="the output of ibstatus, with lines like `Infiniband device 'mlx5_0' port 1 status:`",
    heading=_ibstatus_heading,
    of_device={},
    of_port={
        "default gid": None,
        "base lid": None,
        "sm lid": None,
        "state": Key("state", state, "state"),
        "phys state": None,
        "rate": Key("rate_gbps", rate, "rate"),
        "link_layer": Key("link_layer", link_layer, "link layer"),
    },
)
