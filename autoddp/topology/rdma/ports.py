"""RDMA ports and their addresses, whatever told them, and what NCCL must be told about them.

    found = read_ibstat(text)
    found.fabric, found.rdma_usable      # 'InfiniBand', True
    best_gid(read_show_gids(text).gids)  # {'mlx5_0': 5}: what NCCL_IB_GID_INDEX should be
    rdma_settings(ports, gids)           # {'NCCL_IB_GID_INDEX': ('5', reason)}

A value that is not certain is None; `missing` says in sentences what could not be read.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"]
LinkLayer = Literal["InfiniBand", "Ethernet"]
Fabric = Literal["InfiniBand", "RoCE"]
GidKind = Literal["IB", "v1", "v2"]
"""What an address is for: InfiniBand, RoCE v1 (one Ethernet segment), RoCE v2 (routable, over UDP)."""

# Interfaces that live on top of another one: its VLANs (a dot in the name), tunnels, bridges, containers' ends.
_VIRTUAL = re.compile(r"[^.@]*[.@].*|(?:br[0-9-]|bridge|vlan|vxlan|docker|virbr|veth|cni|flannel|cali|tun|tap|ovs).*")


@dataclass(frozen=True)
class RdmaPort:
    """One port of an RDMA device."""

    device: str
    port: int
    state: State | None = None
    state_as_written: str = ""
    """The state in the tool's own spelling: `Active`, `PORT_ACTIVE`, `ACTIVE`."""
    link_layer: LinkLayer | None = None
    rate_gbps: float | None = None
    """Gbit/s as the tool says; of a port that is not active it is no speed."""
    firmware: str | None = None
    ca_type: str | None = None
    """Model of the device, `MT4129`."""
    board_id: str | None = None
    transport: str | None = None
    """`InfiniBand` (also on RoCE), `iWARP`, `unspecified` (EFA)."""
    numa: int | None = None
    bus: str = ""
    """PCI address, `0000:0f:00.0`."""
    link_downed: int | None = None
    """How often its link was lost since the counters began, which is the driver's start; None if nobody tells."""

    @property
    def active(self) -> bool | None:
        """Whether traffic can pass; None if that is not known."""
        return None if self.state is None else self.state == "ACTIVE"

    @property
    def fabric(self) -> Fabric | None:
        """What the port speaks. Only the link layer tells: "4X EDR" is also the rate of Ethernet ports."""
        if self.link_layer is None or self.transport not in (None, "InfiniBand"):
            return None
        return "RoCE" if self.link_layer == "Ethernet" else "InfiniBand"

    def plain(self) -> dict[str, Any]:
        """For JSON; `state` as the tool spells it."""
        found = dict(vars(self))
        found["name"], found["fw"] = found.pop("device"), found.pop("firmware")
        found["state"] = found.pop("state_as_written") or None
        if self.link_downed is None:  # only sysfs tells it
            del found["link_downed"]
        return found | {"active": self.active}


@dataclass(frozen=True)
class RdmaPorts:
    """The RDMA ports of one machine."""

    ports: tuple[RdmaPort, ...] = ()
    unread: tuple[str, ...] = ()
    """Devices that have more ports than could be read."""
    missing: tuple[str, ...] = ()

    @property
    def rdma_usable(self) -> bool | None:
        """Whether any port is active; None if none is, but some could not be read."""
        if any(port.active for port in self.ports):
            return True
        return None if self.unread or any(port.active is None for port in self.ports) else False

    @property
    def fabric(self) -> Fabric | None:
        """What the active ports speak: InfiniBand if any of them does. It says nothing about GPUDirect (Omni-Path)."""
        spoken = {port.fabric for port in self.ports if port.active}
        return "InfiniBand" if "InfiniBand" in spoken else "RoCE" if "RoCE" in spoken else None

    def plain(self) -> dict[str, Any]:
        """Return the fields in types of JSON."""
        return {
            "devices": [port.plain() for port in self.ports],
            "fabric": self.fabric,
            "rdma_usable": self.rdma_usable,
            "unread": list(self.unread),
            "missing": list(self.missing),
        }


@dataclass(frozen=True)
class Gid:
    """One address in a port's table."""

    device: str
    port: int
    index: int
    address: str
    """Eight groups of four hexadecimal digits."""
    kind: GidKind | None = None
    netdev: str | None = None
    """The network interface it belongs to; InfiniBand addresses have none."""

    @property
    def ipv4(self) -> str | None:
        """The IPv4 address that this IPv6 address stands for; None if it stands for none."""
        mapped = ipaddress.IPv6Address(self.address).ipv4_mapped
        return None if mapped is None else str(mapped)

    def plain(self) -> dict[str, Any]:
        """Return the fields in types of JSON."""
        return vars(self) | {"ipv4": self.ipv4}


def best_gid(gids: Iterable[Gid]) -> dict[str, int]:
    """Device → index of its first RoCE v2 address with a global IPv4, for the devices that have one.

    Of several, one on the device's own interface goes before one on a VLAN, tunnel or bridge above it: traffic through
    those leaves the NIC's hardware path. Of a device with two ports, the first port that has such an address counts.
    """
    gids = [*gids]
    # The kernel fills the head of the table from the port's own interface.
    own = {(gid.device, gid.port): gid.netdev for gid in gids if gid.index == 0 and gid.netdev}
    order = sorted(
        (gid.device, gid.port, _distance(gid, own.get((gid.device, gid.port))), gid.index)
        for gid in gids
        if gid.kind == "v2" and _is_global(gid.ipv4)
    )
    best: dict[str, int] = {}
    for device, _, _, index in order:
        best.setdefault(device, index)
    return best


def _is_global(ipv4: str | None) -> bool:
    if ipv4 is None:
        return False
    address = ipaddress.IPv4Address(ipv4)
    # Private networks are where RoCE lives: only what no router would forward is out.
    return not (address.is_link_local or address.is_loopback or address.is_multicast or address.packed[0] == 0)


def _distance(gid: Gid, own: str | None) -> int:
    if gid.netdev is not None and gid.netdev == own:
        return 0
    return 2 if gid.netdev is not None and _VIRTUAL.fullmatch(gid.netdev) else 1


def rdma_settings(ports: tuple[RdmaPort, ...], gids: tuple[Gid, ...]) -> dict[str, tuple[str, str]]:
    """Variables that NCCL needs on this node to work at all: variable → (value, reason).

    Nothing where NCCL's own choice is as good, or the node has no RDMA device. RoCE needs an address that other
    networks can answer to: the first RoCE v2 one with a global IPv4. One variable serves all devices of a node, so
    nothing is said where they differ. InfiniBand needs none.
    """
    if ports and all(port.active is False for port in ports):
        names = ", ".join(dict.fromkeys(port.device for port in ports))
        return {"NCCL_IB_DISABLE": ("1", f"no port of {names} is active")}
    roce = {port.device for port in ports if port.active and port.fabric == "RoCE"}
    gids = tuple(gid for gid in gids if gid.device in roce)
    best = best_gid(gids)
    if set(best) != roce or len(set(best.values())) != 1:
        return {}
    index = next(iter(best.values()))
    addresses = sorted({gid.ipv4 or "" for gid in gids if gid.index == index})
    reason = f"the first RoCE v2 address with a global IPv4 on {', '.join(sorted(roce))}: {', '.join(addresses)}"
    return {"NCCL_IB_GID_INDEX": (str(index), reason)}
