"""Reads `ibdev2netdev`, with or without -v: the network interface of each RDMA port."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from autoddp.topology.text import closed, lines, name, not_read, nothing_readable, number, pci_address

_ARROWS = ("==>", "<===>")
_MOST_PORTS = 255
_STATE = re.compile(r"\((Up|Down)\)(?:\s*#.*)?")


@dataclass(frozen=True)
class NetdevOfPort:
    """One line."""

    device: str
    port: int
    netdev: str
    state: Literal["Up", "Down"]
    """Of the IP interface: an InfiniBand port without IPoIB is Down here and may well be active."""


@dataclass(frozen=True)
class NetdevMap:
    """The lines, in their order."""

    links: tuple[NetdevOfPort, ...]
    missing: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """For JSON; the keys of `map` are devices, or `device:port` for all but the first listed port of a device."""
        found: dict[str, list[str]] = {}
        first: dict[str, int] = {}
        for link in self.links:
            own = first.setdefault(link.device, link.port) == link.port
            found.setdefault(link.device if own else f"{link.device}:{link.port}", [link.netdev, link.state])
        return {
            "map": found,
            "entries": len(self.links),
            "links": [dict(vars(link)) for link in self.links],
            "missing": list(self.missing),
        }


def read_ibdev2netdev(text: str) -> NetdevMap:
    """The interface of each port. NothingReadable if there is none."""
    links: dict[NetdevOfPort, None] = {}
    unread = []
    for i, line in enumerate(lines(text), start=1):
        if link := _link(line.split()):
            links[link] = None
        elif line and not line.lstrip().startswith("#"):
            unread.append(i)
    if not links:
        raise nothing_readable("the output of ibdev2netdev, with lines like `mlx5_0 port 1 ==> ib0 (Up)`")
    return NetdevMap(tuple(links), not_read(unread))


def _link(words: list[str]) -> NetdevOfPort | None:
    arrow = next((i for i, word in enumerate(words) if word in _ARROWS), None)
    if arrow is None or arrow + 2 >= len(words):
        return None
    left, (netdev, *state) = words[:arrow], words[arrow + 1 :]
    # -v writes `0000:05:00.0 mlx5_0 (MT4115 - …) … port 1 (ACTIVE) ==> …`
    verbose = pci_address(left[0]) is not None if left else False
    if len(left) < 3 or (not verbose and len(left) != 3):
        return None
    device, (word, port) = left[1] if verbose else left[0], left[-3:-1] if verbose else left[1:]
    numbered = number(port, _MOST_PORTS)
    up = _STATE.fullmatch(closed(" ".join(state)))
    if word != "port" or not numbered or not up or not name(device) or not name(netdev):
        return None
    return NetdevOfPort(device, numbered, netdev, "Up" if up.group(1) == "Up" else "Down")
