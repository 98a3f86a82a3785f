"""Which sockets listen on a host, as the kernel lists them, and which process holds each.

for found in listeners(pid):       # of the network namespace of that process
    print(found.address, found.port, found.owner)
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

_LISTENS = "0A"


@dataclass(frozen=True)
class Listener:
    """One listening TCP socket."""

    address: str
    port: int
    inode: str

    @property
    def everywhere(self) -> bool:
        """Whether it listens on all interfaces."""
        return ipaddress.ip_address(self.address).is_unspecified

    @property
    def only_here(self) -> bool:
        """Whether only this host can connect to it."""
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback

    @property
    def owners(self) -> list[int]:
        """The processes that hold it, whichever of them opened it."""
        wanted, found = f"socket:[{self.inode}]", []
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                with contextlib.suppress(OSError):
                    if any(os.readlink(each) == wanted for each in (process / "fd").iterdir()):
                        found.append(int(process.name))
        return found


def listeners(pid: int | str = "self") -> set[Listener]:
    """Those in the network namespace of a process; empty if it is gone."""
    found = set()
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENS:
                    address, _, port = words[1].partition(":")
                    found.add(Listener(_address(address), int(port, 16), words[9]))
    return found


def _address(text: str) -> str:
    """Words of 32 bits in the byte order of this machine, in hexadecimal digits."""
    words = struct.pack(f"={len(text) // 8}I", *(int(word, 16) for word in re.findall(".{8}", text)))
    return str(ipaddress.ip_address(words))


class Watch:
    """`with Watch(pid) as seen:` looks again and again; `seen.found` has each listener, with its owners' commands."""

    def __init__(self, pid: int, every: float = 0.05) -> None:
        self.found: dict[Listener, str] = {}
        self._pid, self._every = pid, every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(self._every):
            for new in listeners(self._pid) - self.found.keys():
                self.found[new] = " | ".join(dict.fromkeys(map(_command, new.owners)))


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        rank = re.search(rb"(?:^|\0)RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())
        return f"rank {rank[1].decode()}: {words}" if rank else words
    return "?"
