"""Where the other nodes may reach this one: its interfaces, which of them the user has named, and --local-addr."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from autoddp.topology import interfaces
from autoddp.topology.naming import NCCL, absent, named

_LOOPBACK = "lo"


@dataclass(frozen=True)
class Places:
    """What one launcher tells the others about its node's addresses."""

    addresses: dict[str, str] = field(default_factory=dict)
    """Interface → its first address. The loopback's is last, for several launchers on one machine."""
    named: dict[str, list[str]] = field(default_factory=dict)
    """GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, where the user has set them → the interfaces that they name here."""
    missing: dict[str, list[str]] = field(default_factory=dict)
    """The same → what they name and is not here, or has no address."""
    down: list[str] = field(default_factory=list)
    """Interfaces that are down."""
    local_addr: str = ""
    """What the user gave as --local-addr."""
    by_name: list[str] = field(default_factory=list)
    """What this host's own name stands for here."""
    has_gpus: bool = False
    """So its ranks may talk by NCCL, not by Gloo."""

    @property
    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Places:
        """The reverse; what only another version of autoddp knows is left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in plain.items() if name in known})

    @property
    def to_try(self) -> list[str]:
        """Every address, once."""
        return list(dict.fromkeys([*self.addresses.values(), *filter(None, [self.local_addr])]))


def places_here(local_addr: str | None, has_gpus: bool, environment: Mapping[str, str] | None = None) -> Places:
    """Look at this host."""
    environment = os.environ if environment is None else environment
    nics = [nic for nic in interfaces() if nic.addresses]
    addresses = {nic.name: nic.addresses[0] for nic in nics} | _loopback()
    choice = named(environment, addresses)
    if NCCL in choice:  # NCCL leaves the loopback out, unless its whole name is given
        choice[NCCL] = [n for n in choice[NCCL] if n != _LOOPBACK or environment[NCCL].lstrip("=") == _LOOPBACK]
    asked = {name for names in choice.values() for name in names}
    down = [nic.name for nic in nics if nic.up is False]
    return Places(
        addresses={name: address for name, address in addresses.items() if name not in down or name in asked},
        named=choice,
        missing={variable: absent(variable, environment[variable], addresses) for variable in choice},
        down=down,
        local_addr=local_addr or "",
        by_name=sorted(_addresses_of(socket.gethostname())),
        has_gpus=has_gpus,
    )


def is_loopback(name: str, address: str) -> bool:
    """Whether only this machine can connect to it."""
    return name == _LOOPBACK or ipaddress.ip_address(address).is_loopback


def _loopback() -> dict[str, str]:
    return {_LOOPBACK: "127.0.0.1"} if any(name == _LOOPBACK for _, name in socket.if_nameindex()) else {}


def _addresses_of(name: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
    except OSError:
        return set()
