"""Reads `ibv_devinfo`, with or without -v. It does not tell the rate of a port."""

from __future__ import annotations

from autoddp.topology.port_blocks import (
    MOST_PORTS,
    Dialect,
    Heading,
    Key,
    link_layer,
    model,
    port_count,
    read_blocks,
    state,
    version,
)
from autoddp.topology.rdma import RdmaPorts
from autoddp.topology.text import closed, name, number

_TRANSPORTS = {
    f"{name} ({i})": name for i, name in enumerate(("InfiniBand", "iWARP", "usNIC", "usNIC UDP", "unspecified"))
}


def read_ibv_devinfo(text: str) -> RdmaPorts:
    """The ports `ibv_devinfo` lists; none where it says "No IB devices found". NothingReadable for another text."""
    return read_blocks(text, _DIALECT)


def _heading(line: str) -> Heading | None:
    key, _, value = line.partition(":")
    if key == "hca_id":
        return Heading(device=name(value.strip()) or "")
    return Heading(port=number(value.strip(), MOST_PORTS) or 0) if key == "port" else None


def _transport(text: str) -> str | None:
    return _TRANSPORTS.get(closed(text))


_DIALECT = Dialect(
    example="the output of ibv_devinfo, with lines like `hca_id: mlx5_0`",
    heading=_heading,
    of_device={
        "transport": Key("transport", _transport),
        "fw_ver": Key("firmware", version, "firmware"),
        "node_guid": None,
        "sys_image_guid": None,
        "vendor_id": None,
        "vendor_part_id": None,
        "hw_ver": None,
        "board_id": Key("board_id", model),
        "phys_port_cnt": Key("ports", port_count),
    },
    of_port={
        "state": Key("state", state, "state"),
        "max_mtu": None,
        "active_mtu": None,
        "sm_lid": None,
        "port_lid": None,
        "port_lmc": None,
        "link_layer": Key("link_layer", link_layer, "link layer"),
    },
    none="No IB devices found",
)
