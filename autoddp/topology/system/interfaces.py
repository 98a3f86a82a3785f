"""Network interfaces from sysfs and the kernel's lists: kind, state, speed, addresses, default route."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import Literal

from autoddp.topology.facts import Nic
from autoddp.topology.system.files import entries, numa_node, number, target, word
from autoddp.topology.text import pci_address

_LOOPBACK = 772  # ARPHRD_LOOPBACK of linux/if_arp.h


def interfaces(root: Path = Path("/")) -> tuple[Nic, ...]:
    """Every interface but the loopback. Under another root only sysfs is read: no addresses, no routes."""
    here = root == Path("/")
    addresses = _addresses() if here else {}
    routed = default_routes(root)
    found = [
        _interface(folder, addresses.pop(folder.name, ()), folder.name in routed if here else None)
        for folder in entries(root / "sys/class/net")
        if number(folder / "type") not in (None, _LOOPBACK)
    ]
    # A container may show the host's /sys: what only the kernel's own list has is there all the same.
    found += [Nic(name, kind="virtual", addresses=known, routed=name in routed) for name, known in addresses.items()]
    return tuple(found)


def _interface(folder: Path, addresses: tuple[str, ...], routed: bool | None) -> Nic:
    state, speed = word(folder / "operstate"), number(folder / "speed")
    return Nic(
        name=folder.name,
        driver=target(folder / "device/driver"),
        kind=_kind(folder),
        up=None if state is None or state == "unknown" else state == "up",
        speed_mbit=speed if speed is not None and speed > 0 else None,
        numa=numa_node(folder / "device"),
        bus=pci_address(target(folder / "device")) or "",
        addresses=addresses,
        routed=routed,
    )


def _kind(folder: Path) -> Literal["physical", "bridge", "virtual"]:
    if (folder / "bridge").is_dir():
        return "bridge"
    return "physical" if (folder / "device").exists() else "virtual"


def stands_on_a_device(name: str, root: Path = Path("/")) -> bool:
    """Whether the interface has a device, or is made of interfaces that have one, as a bond or a VLAN is.

    Without one its speed says nothing: the driver of a container's veth always says 10 Gbit/s.
    """
    folder = root / "sys/class/net" / name
    below = (one.name.removeprefix("lower_") for one in entries(folder) if one.name.startswith("lower_"))
    return (folder / "device").exists() or any(stands_on_a_device(one, root) for one in below)


def _addresses() -> dict[str, tuple[str, ...]]:
    import psutil  # a launch that asks nothing about interfaces must not wait for it

    found = {}
    for name, entries_ in psutil.net_if_addrs().items():
        texts = [entry.address.partition("%")[0] for entry in entries_ if entry.family in _FAMILIES]
        usable = tuple(text for text in texts if not ipaddress.ip_address(text).is_link_local)
        if not all(ipaddress.ip_address(text).is_loopback for text in usable):
            found[name] = usable
    return found


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def default_routes(root: Path = Path("/")) -> set[str]:
    """Interfaces by which a default IPv4 route leaves."""
    table = word(root / "proc/self/net/route") or word(root / "proc/net/route") or ""
    rows = [line.split() for line in table.splitlines()[1:]]
    return {row[0] for row in rows if len(row) > 1 and row[1] == "00000000"}
