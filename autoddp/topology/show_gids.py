"""Reads `show_gids`: the address tables of all RDMA ports."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from autoddp.topology.rdma import Gid, GidKind, best_gid
from autoddp.topology.text import CUT, closed, lines, name, not_read, nothing_readable, number

ADDRESS = re.compile(r"[0-9a-f]{4}(?::[0-9a-f]{4}){7}")
"""As sysfs writes a GID."""

_MOST_PORTS = 255
_MOST_GIDS = 65535
_COUNT = re.compile(r"n_gids_found=([0-9]{1,9})")


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
    rows: list[Gid] = []
    unread: list[int] = []
    count, header = None, False
    for i, line in enumerate(lines(text), start=1):
        words = line.split()
        if words[:3] == ["DEV", "PORT", "INDEX"]:
            header = True
        elif found := _COUNT.fullmatch(closed(line)):
            count = int(found.group(1))
        elif row := _row(line):
            rows.append(row)
        elif words and words[0] != "---":
            unread.append(i)
    if not (rows or header or count is not None):
        raise nothing_readable("the output of show_gids, with its heading `DEV PORT INDEX GID IPv4 VER DEV`")
    return _table(rows, unread, count)


def _table(rows: list[Gid], unread: list[int], count: int | None) -> GidTable:
    slots: dict[tuple[str, int, int], set[Gid]] = {}
    for row in rows:
        slots.setdefault((row.device, row.port, row.index), set()).add(row)
    twice = [slot for slot, gids in slots.items() if len(gids) > 1]
    gids = tuple(found for (found, *others) in slots.values() if not others)
    missing = [*not_read(unread)]
    missing += [f"{device} port {port} index {index}: listed with two contents" for device, port, index in twice]
    if count is None:
        missing.append("there is no n_gids_found line: the list may go on")
    elif count != len(gids):
        missing.append(f"n_gids_found is {count}, and {len(gids)} could be read")
    return GidTable(gids, tuple(missing))


def _row(line: str) -> Gid | None:
    cut = line.endswith(CUT)
    words = closed(line).split()
    if not 5 <= len(words) <= 7:
        return None
    device, port, index = name(words[0]), number(words[1], _MOST_PORTS), number(words[2], _MOST_GIDS)
    address, printed, rest = words[3], "", words[4:]
    if rest[0] not in ("v1", "v2"):
        printed, *rest = rest
    if not (device and port and index is not None and ADDRESS.fullmatch(address) and rest and len(rest) <= 2):
        return None
    bare = Gid(device, port, index, address)
    # The IPv4 column repeats the end of the address: where they differ, one of them is damaged.
    if rest[0] not in ("v1", "v2") or (printed and printed != bare.ipv4):
        return None
    netdev = name(rest[1]) if len(rest) == 2 and not cut else None
    return Gid(device, port, index, address, _kind(rest, cut, bare.ipv4 is not None), netdev)


def _kind(rest: list[str], cut: bool, holds_ipv4: bool) -> GidKind | None:
    """An InfiniBand address is printed as v1 without an interface."""
    if rest[0] == "v2":
        return "v2"
    if len(rest) == 2 or holds_ipv4:
        return "v1"
    return None if cut else "IB"
