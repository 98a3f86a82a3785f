"""Before several nodes start: which interface of each node do the others reach, and which of these is the fastest?

    chosen = choose(store, node, nodes)         # every launcher calls it; the same store on all
    chosen.variables                            # {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1"}

Left to themselves the libraries take what the host name resolves to, or the first interface by name: on a host with a
docker bridge, a management network or a Debian-style name on 127.0.1.1 that hangs the job or makes it crawl. Here every
launcher listens, every other tries to connect to each of its addresses (a secret tells a peer from a stranger with the
same private address), and its neighbour measures how fast each of them takes data, for a quarter of a second.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Protocol

from autoddp.errors import UsageError
from autoddp.launch.listener import Listener, reaches, send_rate
from autoddp.launch.network import VARIABLES, Network
from autoddp.topology import Nic, interfaces
from autoddp.topology.rdma_settings import rdma_settings
from autoddp.topology.sysfs_rdma import sysfs_rdma

_CLEARLY = 1.2  # times as fast before a faster interface beats the one that the host's name stands for


class Store(Protocol):
    """torch's store, as far as this needs it."""

    def set(self, key: str, value: str) -> Any:
        """Tell all."""

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""


def with_rdma(network: Network, taken: Collection[str]) -> Network:
    """The same with what NCCL must be told about this node's RDMA ports; variables in `taken` stay as they are."""
    found = sysfs_rdma()
    settings = {n: told for n, told in rdma_settings(found.ports, found.gids).items() if n not in taken}
    says = [*filter(None, [network.says]), *(f"{name}={value}: {why}" for name, (value, why) in settings.items())]
    return replace(network, says="; ".join(says), rdma={name: value for name, (value, _) in settings.items()})


def choose(store: Store, node: int, nodes: int) -> Network:
    """The same exchange on all nodes. UsageError, on all of them, if some node has no address that all others reach."""
    candidates = _candidates(interfaces())
    with Listener() as listener:
        mine = {"port": listener.port, "secret": listener.secret, "addresses": candidates}
        all_ = _exchange(store, "network/address", node, nodes, mine)
        found = {other: _reached(all_[other]) for other in range(nodes) if other != node}
        reached = _exchange(store, "network/reached", node, nodes, found)
        usable = [_usable(all_[other], reached, other) for other in range(nodes)]
        _require_all(usable, all_)
        following = (node + 1) % nodes
        rates = {name: _rate(all_[following], name) for name in usable[following]}
        rates_of_all = _exchange(store, "network/rate", node, nodes, rates)
        _exchange(store, "network/done", node, nodes, True)  # nobody stops listening before all have measured
    return _chosen(candidates, rates_of_all[(node - 1) % nodes])


def _candidates(nics: tuple[Nic, ...]) -> dict[str, str]:
    """Interface → its first address, of those that are not down."""
    return {nic.name: nic.addresses[0] for nic in nics if nic.up is not False and nic.addresses}


def _exchange(store: Store, name: str, node: int, nodes: int, value: object) -> list[Any]:
    store.set(f"{name}/{node}", json.dumps(value))
    return [json.loads(store.get(f"{name}/{other}")) for other in range(nodes)]


def _reached(other: dict[str, Any]) -> list[str]:
    """Interfaces of another node that this one can connect to."""
    addresses: dict[str, str] = other["addresses"]
    return [name for name, address in addresses.items() if reaches(address, other["port"], other["secret"])]


def _usable(other: dict[str, Any], reached: list[dict[str, list[str]]], number: int) -> list[str]:
    """Interfaces of a node that all others reach."""
    heard = [of_one[str(number)] for of_one in reached if str(number) in of_one]
    return [name for name in other["addresses"] if all(name in names for names in heard)]


def _require_all(usable: list[list[str]], all_: list[dict[str, Any]]) -> None:
    for node, names in enumerate(usable):
        if not names:
            tried = ", ".join(f"{name} {address}" for name, address in all_[node]["addresses"].items()) or "none"
            raise UsageError(
                f"the hosts cannot reach each other: node {node} has no address that all others can connect to "
                f"(tried {tried}): open its firewall between the hosts, or skip this "
                f"check by setting {' or '.join(VARIABLES)}"
            )


def _rate(other: dict[str, Any], name: str) -> float:
    """Gbit/s to one interface of the next node: the better of two, as one lost packet stops a short one for long."""
    address, port, secret = other["addresses"][name], other["port"], other["secret"]
    return max(send_rate(address, port, secret) for _ in range(2)) * 8 / 1e9


def _chosen(candidates: dict[str, str], rates: dict[str, float]) -> Network:
    """The fastest; the one that the host's own name stands for, if that is no slower."""
    own = _addresses_of_name()
    default = next((name for name in rates if candidates[name] in own), "")
    best = max(rates, key=lambda name: rates[name])
    if default and rates[best] < _CLEARLY * rates[default]:
        best = default
    if default == best and len(candidates) == 1:
        return Network(rates=rates)
    others = [f"{name} {rate:.2g} Gbit/s" for name, rate in rates.items() if name != best]
    others += [f"{name} reaches not all hosts" for name in candidates if name not in rates]
    beside = f" ({'; '.join(others)})" if others else ""
    name = "" if candidates[best] in own else f"; this host's name stands for {', '.join(sorted(own)) or 'no address'}"
    says = f"network: {best} {candidates[best]} reaches all hosts at {rates[best]:.2g} Gbit/s{beside}{name}"
    return Network(best, candidates[best], says, rates)


def _addresses_of_name() -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return set()
