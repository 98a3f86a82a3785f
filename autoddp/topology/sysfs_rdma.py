"""Reads /sys/class/infiniband, of this machine or of a copy."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoddp.errors import NothingReadable
from autoddp.topology.files import entries, number, target
from autoddp.topology.port_blocks import MOST_PORTS, link_layer, model, rate, state, version
from autoddp.topology.rdma import Gid, GidKind, RdmaPort, RdmaPorts
from autoddp.topology.show_gids import ADDRESS
from autoddp.topology.text import name, nothing_readable, pci_address
from autoddp.topology.text import number as natural

_CLASS = "sys/class/infiniband"
_PAGE = 4096  # no attribute of sysfs is longer
_MOST_GIDS = 65535
_MOST_COUNTED = 2**64 - 1
_OF_DEVICE = ("board_id", "fw_ver", "hca_type", "node_type")
_OF_PORT = ("link_layer", "phys_state", "rate", "state")
_NEEDED = ("link_layer", "rate", "state")
_EMPTY_GIDS = ("0000:" * 7 + "0000", "fe80:" + "0000:" * 6 + "0000")
_TRANSPORTS = {"1: CA": "InfiniBand", "4: RNIC": "iWARP"}


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
    reading = _Reading()
    for device in devices:
        reading.device(device)
    return reading.result()


def sysfs_rdma(root: Path = Path("/")) -> SysfsRdma:
    """The same where having no /sys is no fault: nothing then, and the reason in `missing`."""
    try:
        return read_sysfs_rdma(root)
    except NothingReadable as problem:
        return SysfsRdma(missing=(str(problem),))


def _reason(problem: OSError) -> str:
    return errno.errorcode.get(problem.errno or 0, "unreadable")


class _Reading:
    def __init__(self) -> None:
        self.ports: list[RdmaPort] = []
        self.unread: list[str] = []
        self.missing: list[str] = []
        self.gids: list[Gid] = []
        self.files: dict[str, dict[str, str]] = {}

    def result(self) -> SysfsRdma:
        return SysfsRdma(tuple(self.ports), tuple(self.unread), tuple(self.missing), tuple(self.gids), self.files)

    def device(self, folder: Path) -> None:
        if name(folder.name) is None:
            return
        files = self.files[folder.name] = {}
        for attribute in _OF_DEVICE:
            # hfi1 has no hca_type, old kernels no node_type: an attribute that is not there is no loss.
            self._keep(files, folder, attribute, needed=False)
        numbers = sorted(n for path in entries(folder / "ports") if (n := natural(path.name, MOST_PORTS)))
        if not numbers:
            self.unread.append(folder.name)
            self.missing.append(f"{folder.name}: no port could be read")
        for port in numbers:
            self._port(folder, files, port)

    def _port(self, folder: Path, files: dict[str, str], port: int) -> None:
        for attribute in _OF_PORT:
            self._keep(files, folder, f"ports/{port}/{attribute}", needed=attribute in _NEEDED)
        counter = f"ports/{port}/counters/link_downed"
        self._keep(files, folder, counter, needed=False)
        found = {attribute: files.get(f"ports/{port}/{attribute}", "") for attribute in _OF_PORT}
        known, spelled = state(found["state"]) or (None, "")
        numa, bus = number(folder / "device/numa_node"), target(folder / "device")
        self.ports.append(
            RdmaPort(
                device=folder.name,
                port=port,
                state=known,
                state_as_written=spelled,
                link_layer=link_layer(found["link_layer"]),
                rate_gbps=rate(found["rate"]),
                firmware=version(files.get("fw_ver", "")),
                ca_type=model(files.get("hca_type", "")),
                board_id=model(files.get("board_id", "")),
                transport=_transport(files.get("node_type", "")),
                numa=numa if numa is not None and numa >= 0 else None,
                bus=pci_address(bus) or "",
                link_downed=natural(files.get(counter, ""), _MOST_COUNTED),
            )
        )
        self._note(self.ports[-1], found)
        self._gids(folder / f"ports/{port}", self.ports[-1])

    def _note(self, port: RdmaPort, found: Mapping[str, str]) -> None:
        """An attribute that is there and says something new or damaged."""
        values = {"state": port.state, "rate": port.rate_gbps, "link_layer": port.link_layer}
        for attribute, value in values.items():
            if found[attribute] and value is None:
                said = found[attribute][:40]
                self.missing.append(f"{port.device} port {port.port}: {attribute} {said!r} is not understood")

    def _keep(self, files: dict[str, str], folder: Path, attribute: str, needed: bool) -> None:
        try:
            files[attribute] = _read(folder / attribute)
        except FileNotFoundError:
            if needed:
                self.missing.append(f"{folder.name}: there is no {attribute}")
        except OSError as problem:
            self.missing.append(f"{folder.name}: {attribute} could not be read ({_reason(problem)})")

    def _gids(self, folder: Path, port: RdmaPort) -> None:
        refused: Counter[str] = Counter()
        untyped = 0
        slots = sorted(
            (i, path) for path in entries(folder / "gids") if (i := natural(path.name, _MOST_GIDS)) is not None
        )
        for index, path in slots:
            try:
                address = _read(path)
            except OSError as problem:
                refused[_reason(problem)] += 1
                continue
            if not ADDRESS.fullmatch(address):
                refused["no address"] += 1
            elif address not in _EMPTY_GIDS:
                kind, netdev = _attributes(folder, index, port)
                untyped += kind is None
                self.gids.append(Gid(port.device, port.port, index, address, kind, netdev))
        whose = f"{port.device} port {port.port}"
        self.missing += [f"{whose}: GIDs that could not be read: {count} ({why})" for why, count in refused.items()]
        if untyped:
            self.missing.append(f"{whose}: GIDs of unknown type: {untyped}")


def _transport(node_type: str) -> str | None:
    """In ibv_devinfo's words, from `1: CA`."""
    return _TRANSPORTS.get(node_type, node_type.partition(": ")[2] or None)


def _attributes(folder: Path, index: int, port: RdmaPort) -> tuple[GidKind | None, str | None]:
    """What an address is for, and its interface. InfiniBand has no interface to tell, and old kernels no types."""
    texts = []
    for attribute in ("types", "ndevs"):
        try:
            texts.append(_read(folder / f"gid_attrs/{attribute}/{index}"))
        except OSError:
            texts.append("")
    if texts[0] == "RoCE v2":
        kind: GidKind | None = "v2"
    elif port.link_layer == "InfiniBand":
        kind = "IB"
    else:
        kind = "v1" if texts[0] == "IB/RoCE v1" and port.link_layer == "Ethernet" else None
    return kind, name(texts[1])


def _read(path: Path) -> str:
    """An attribute without its line end; OSError where the kernel refuses (EINVAL of an empty slot) or we may not."""
    if not path.is_file():  # a pipe in a copied tree would be waited for
        raise FileNotFoundError(errno.ENOENT, "no such attribute")
    with path.open("rb") as file:
        return file.read(_PAGE).decode(errors="replace").strip()
