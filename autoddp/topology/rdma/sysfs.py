"""Reads /sys/class/infiniband, of this machine or of a copy."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from autoddp.errors import NothingReadable
from autoddp.topology.rdma.ports import Gid, GidKind, RdmaPort, RdmaPorts
from autoddp.topology.rdma.texts import ADDRESS, MOST_GIDS, MOST_PORTS, link_layer, model, rate, state, version
from autoddp.topology.system.files import entries, numa_node, target
from autoddp.topology.text import name, nothing_readable, number, pci_address

_CLASS = "sys/class/infiniband"
_PAGE = 4096  # bytes; no attribute of sysfs is longer
_EMPTY_GIDS = ("0000:" * 7 + "0000", "fe80:" + "0000:" * 6 + "0000")
_TRANSPORTS = {"1: CA": "InfiniBand", "4: RNIC": "iWARP"}


def _transport(node_type: str) -> str | None:
    """The transport in ibv_devinfo's words, from `1: CA`."""
    return _TRANSPORTS.get(node_type, node_type.partition(": ")[2] or None)


# Attribute → the field of RdmaPort that it tells, and how it is read.
_Value = tuple[str, Callable[[str], Any]]
_OF_DEVICE: dict[str, _Value] = {
    "board_id": ("board_id", model),
    "fw_ver": ("firmware", version),
    "hca_type": ("ca_type", model),
    "node_type": ("transport", _transport),
}
_OF_PORT: dict[str, _Value | None] = {
    "link_layer": ("link_layer", link_layer),
    "phys_state": None,  # shown only
    "rate": ("rate_gbps", rate),
    "state": ("state", state),
    "counters/link_downed": ("link_downed", partial(number, most=2**64 - 1)),
}
_NEEDED = ("state", "rate", "link_layer")  # hfi1 has no hca_type, old kernels have no node_type: that is no loss


@dataclass(frozen=True)
class SysfsRdma(RdmaPorts):
    """The ports and their addresses."""

    gids: tuple[Gid, ...] = ()
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Device → path below its folder → what stands there: the source of all but the addresses."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        files = {device: dict(found) for device, found in self.files.items()}
        return super().plain() | {"gids": [gid.plain() for gid in self.gids], "files": files}


def read_sysfs_rdma(root: Path = Path("/")) -> SysfsRdma:
    """The RDMA devices below `root`/sys/class/infiniband; without that folder there are none.

    Addresses that stand for nothing (all zero, or fe80:: alone) are left out, as show_gids does. NothingReadable if
    there is no `root`/sys, or the folder cannot be listed.
    """
    folder = root / _CLASS
    try:
        devices = sorted(folder.iterdir())
    except FileNotFoundError:
        if not (root / "sys").is_dir():
            raise nothing_readable(f"a folder sys, as a copy of /sys, below {root}") from None
        return SysfsRdma()
    except OSError as problem:
        raise nothing_readable(f"{folder} to be a folder that can be listed ({_reason(problem)})") from None
    found = _Reading()
    for device in devices:
        if name(device.name):
            found.device(device)
    return SysfsRdma(tuple(found.ports), tuple(found.unread), tuple(found.missing), tuple(found.gids), found.files)


def sysfs_rdma(root: Path = Path("/")) -> SysfsRdma:
    """What `read_sysfs_rdma` finds; nothing, and the reason in `missing`, where there is no /sys."""
    try:
        return read_sysfs_rdma(root)
    except NothingReadable as problem:
        return SysfsRdma(missing=(str(problem),))


def _reason(problem: OSError) -> str:
    return errno.errorcode.get(problem.errno or 0, "unreadable")


class _Reading:
    """What was found so far."""

    def __init__(self) -> None:
        self.ports: list[RdmaPort] = []
        self.unread: list[str] = []
        self.missing: list[str] = []
        self.gids: list[Gid] = []
        self.files: dict[str, dict[str, str]] = {}

    def device(self, folder: Path) -> None:
        self.files[folder.name] = {}
        common = {field: read(self._text(folder, attribute)) for attribute, (field, read) in _OF_DEVICE.items()}
        common |= {"numa": numa_node(folder / "device"), "bus": pci_address(target(folder / "device")) or ""}
        numbers = sorted(n for path in entries(folder / "ports") if (n := number(path.name, MOST_PORTS)))
        if not numbers:
            self.unread.append(folder.name)
            self.missing.append(f"{folder.name}: no port could be read")
        for port in numbers:
            self._port(folder, port, common)

    def _port(self, folder: Path, port: int, common: Mapping[str, Any]) -> None:
        said = {
            attribute: self._text(folder, f"ports/{port}/{attribute}", attribute in _NEEDED) for attribute in _OF_PORT
        }
        told = {value[0]: value[1](said[attribute]) for attribute, value in _OF_PORT.items() if value}
        whose = f"{folder.name} port {port}"
        for attribute in _NEEDED:
            if said[attribute] and (value := _OF_PORT[attribute]) and told[value[0]] is None:
                self.missing.append(f"{whose}: {attribute} {said[attribute][:40]!r} is not understood")
        known, spelled = told.pop("state") or (None, "")
        self.ports.append(RdmaPort(folder.name, port, state=known, state_as_written=spelled, **told, **common))
        self._gids(folder / f"ports/{port}", self.ports[-1], whose)

    def _text(self, folder: Path, attribute: str, needed: bool = False) -> str:
        """What an attribute says; empty where it cannot be read, which is noted."""
        try:
            return self.files[folder.name].setdefault(attribute, _read(folder / attribute))
        except FileNotFoundError:
            if needed:
                self.missing.append(f"{folder.name}: there is no {attribute}")
        except OSError as problem:
            self.missing.append(f"{folder.name}: {attribute} could not be read ({_reason(problem)})")
        return ""

    def _gids(self, folder: Path, port: RdmaPort, whose: str) -> None:
        refused: Counter[str] = Counter()
        found = []
        slots = ((number(path.name, MOST_GIDS), path) for path in entries(folder / "gids"))
        for index, path in sorted((index, path) for index, path in slots if index is not None):
            try:
                address = _read(path)
            except OSError as problem:
                refused[_reason(problem)] += 1
                continue
            if not ADDRESS.fullmatch(address):
                refused["no address"] += 1
            elif address not in _EMPTY_GIDS:
                found.append(Gid(port.device, port.port, index, address, *_attributes(folder, index, port)))
        self.gids += found
        self.missing += [f"{whose}: GIDs that could not be read: {count} ({why})" for why, count in refused.items()]
        if untyped := sum(gid.kind is None for gid in found):
            self.missing.append(f"{whose}: GIDs of unknown type: {untyped}")


def _attributes(folder: Path, index: int, port: RdmaPort) -> tuple[GidKind | None, str | None]:
    """What an address is for, and its interface. InfiniBand has no interface to tell, and old kernels no types."""
    kind, netdev = (_read_or_nothing(folder / f"gid_attrs/{attribute}/{index}") for attribute in ("types", "ndevs"))
    if kind == "RoCE v2":
        return "v2", name(netdev)
    if port.link_layer == "InfiniBand":
        return "IB", name(netdev)
    return "v1" if kind == "IB/RoCE v1" and port.link_layer == "Ethernet" else None, name(netdev)


def _read_or_nothing(path: Path) -> str:
    try:
        return _read(path)
    except OSError:
        return ""


def _read(path: Path) -> str:
    """An attribute without its line end; OSError where the kernel refuses (EINVAL of an empty slot) or we may not."""
    if not path.is_file():  # a pipe in a copied tree would be waited for
        raise FileNotFoundError(errno.ENOENT, "no such attribute")
    with path.open("rb") as file:
        return file.read(_PAGE).decode(errors="replace").strip()
