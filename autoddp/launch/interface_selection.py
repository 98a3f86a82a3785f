"""Before several nodes start: by which of its addresses do the others reach each node, and which is the fastest?

    found = choose(store, node, nodes, places)      # every launcher calls it; the same store on all
    found.network.variables                         # {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1"}
    found.faults                                    # the same on all nodes: what keeps them from reaching each other

Left to themselves the libraries take what the host name resolves to, or the first interface by name: on a host with a
docker bridge, a management network or a Debian-style name on 127.0.1.1 that hangs the job or makes it crawl. Here every
launcher listens, every other tries to connect to each of its addresses (a secret tells a peer from a stranger with the
same private address), and its neighbour measures how fast each of them takes data, for a quarter of a second.

The user's own choice is kept: where GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is set on a node, nothing is measured for
it, and its address is that of the interface named, once the others have reached it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoddp.launch.addresses import Places, is_loopback
from autoddp.launch.interface_probe import Door, Listener, send_rate, tried
from autoddp.launch.network import VARIABLES, Network
from autoddp.topology.naming import GLOO, NCCL, preferred
from autoddp.topology.rdma import rdma_settings
from autoddp.topology.sysfs_rdma import sysfs_rdma

_CLEARLY = 1.2  # times as fast before a faster interface beats the one that the host's name stands for
_MEASURED = 0.25  # seconds of sending to one interface, twice
_TRIES = 2  # of which the better counts: one lost packet stops a short one for long
_ALL_MEASURED = 1.5  # seconds for all of a node's interfaces

Exchange = Callable[[str, Any], list[Any]]
"""`exchange(key, mine)`: what each node says under the key, by node."""
Reached = Sequence[dict[str, dict[str, str]]]
"""By node: other node → address → "" or why this node could not connect."""


@dataclass(frozen=True)
class Found:
    """What came of it."""

    network: Network
    """This node's."""
    faults: list[str]
    """One line each: what keeps the nodes from reaching each other. The same on all nodes."""
    doubts: list[str]
    """One line each: what may do so, depending on the backend that the script takes. The same on all nodes."""


def with_rdma(network: Network, taken: Collection[str]) -> Network:
    """The same with what NCCL must be told about this node's RDMA ports; variables in `taken` stay as they are."""
    found = sysfs_rdma()
    settings = {n: told for n, told in rdma_settings(found.ports, found.gids).items() if n not in taken}
    says = [*filter(None, [network.says]), *(f"{name}={value}: {why}" for name, (value, why) in settings.items())]
    return replace(network, says="; ".join(says), rdma={name: value for name, (value, _) in settings.items()})


def choose(exchange: Exchange, node: int, labels: Sequence[str], places: Places) -> Found:
    """The same exchange on all nodes. `labels` has each node's name for people, such as "node 1 (host1)"."""
    nodes = len(labels)
    with Listener() as listener:
        mine = {"port": listener.port, "secret": listener.secret, "places": places.plain}
        all_ = exchange("network/address", mine)
        everywhere = [Places.of(one["places"]) for one in all_]
        reached = exchange("network/reached", _reached(all_, everywhere, node))
        usable = [_usable(everywhere[other], reached, other) for other in range(nodes)]
        faults, doubts = _complaints(everywhere, usable, reached, labels)
        following = (node + 1) % nodes
        open_ = {} if faults or _is_taken(everywhere[following], usable[following]) else usable[following]
        lasting = min(_MEASURED, _ALL_MEASURED / (_TRIES * len(open_) or 1))
        rates = {name: _rate(_door(all_[following], address), lasting) for name, address in open_.items()}
        rates_of_all = exchange("network/rate", rates)
        exchange("network/done", True)  # nobody stops listening before all have measured
    if faults:
        return Found(Network(), faults, doubts)
    return Found(_chosen(places, usable[node], rates_of_all[(node - 1) % nodes]), [], doubts)


def _reached(all_: Sequence[dict[str, Any]], everywhere: Sequence[Places], node: int) -> dict[str, dict[str, str]]:
    """Other node → address → "" or why this node cannot connect to it."""
    where = [(o, address) for o, one in enumerate(everywhere) if o != node for address in one.to_try]
    answers = tried([_door(all_[other], address) for other, address in where])
    found: dict[str, dict[str, str]] = {}
    for (other, address), answer in zip(where, answers, strict=True):
        found.setdefault(str(other), {})[address] = answer
    return found


def _door(other: dict[str, Any], address: str) -> Door:
    return Door(address, other["port"], other["secret"])


def _usable(places: Places, reached: Reached, number: int) -> dict[str, str]:
    """Interface → address, of those that all others reach; the loopback only where there is nothing else."""
    found = {name: address for name, address in places.addresses.items() if not _why_not(address, reached, number)}
    beyond = {name: address for name, address in found.items() if not is_loopback(name, address)}
    return beyond if beyond and not set(preferred(places.named)) & (found.keys() - beyond.keys()) else found


def _why_not(address: str, reached: Reached, number: int) -> list[tuple[int, str]]:
    """Which nodes cannot connect to this address of node `number`, and why."""
    heard = [(other, of_one[str(number)].get(address, "")) for other, of_one in enumerate(reached) if other != number]
    return [(other, why) for other, why in heard if why]


def _is_taken(places: Places, usable: dict[str, str]) -> bool:
    """Whether the user has made this node's choice."""
    return any(name in usable for name in preferred(places.named))


def _complaints(
    everywhere: Sequence[Places], usable: Sequence[dict[str, str]], reached: Reached, labels: Sequence[str]
) -> tuple[list[str], list[str]]:
    """What certainly keeps the nodes from reaching each other, and what may."""
    faults: list[str] = []
    doubts: list[str] = []
    for number, places in enumerate(everywhere):
        here = labels[number]
        if places.local_addr and (hearing := _why_not(places.local_addr, reached, number)):
            why = _from(hearing, labels)
            faults.append(f"--local-addr {places.local_addr} of {here} leads nowhere: {why}: give an address that does")
        for variable, why in _wrongly_named(places, reached, number, labels):
            # Which of the two libraries the script takes is not known before it runs.
            sure = variable == GLOO and not places.has_gpus
            (faults if sure else doubts).append(f"{variable} on {here}: {why}")
        if not usable[number]:
            faults.append(_unreachable(places, reached, number, labels))
    return faults, doubts


def _wrongly_named(places: Places, reached: Reached, number: int, labels: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(variable, what is wrong with it). Gloo uses all that it is told; to NCCL one is enough."""
    for variable, names in places.named.items():
        bad = {name: _why_not(places.addresses[name], reached, number) for name in names}
        bad = {name: hearing for name, hearing in bad.items() if hearing}
        if places.missing[variable] and (variable == GLOO or not names):
            known = ", ".join(places.addresses) or "none"
            yield variable, f"no interface {', '.join(places.missing[variable])} with an address there (it has {known})"
        elif not names:
            yield variable, "it excludes every interface"
        elif bad and (variable == GLOO or len(bad) == len(names)):
            name = next(iter(bad))
            down = f"{name} is down" if name in places.down else _from(bad[name], labels)
            yield variable, f"{name} {places.addresses[name]} is not reached by all hosts: {down}"


def _unreachable(places: Places, reached: Reached, number: int, labels: Sequence[str]) -> str:
    beyond = {name: address for name, address in places.addresses.items() if not is_loopback(name, address)}
    tries = beyond or places.addresses
    told = "; ".join(f"{name} {a}: {_from(_why_not(a, reached, number), labels)}" for name, a in tries.items())
    return (
        f"{labels[number]} has no address that all others can connect to ({told or 'it has none at all'}): open its "
        "firewall for all TCP ports between the hosts"
    )


def _from(hearing: Sequence[tuple[int, str]], labels: Sequence[str]) -> str:
    """The first complaint, and of how many."""
    other, why = hearing[0]
    more = f" (and {len(hearing) - 1} more)" if len(hearing) > 1 else ""
    return f"from {labels[other]}{more}: {why}"


def _rate(door: Door, lasting: float) -> float:
    """Gbit/s to one interface of the next node: the better of two."""
    return max(send_rate(door, lasting) for _ in range(_TRIES)) * 8 / 1e9


def _chosen(places: Places, usable: dict[str, str], rates: dict[str, float]) -> Network:
    """The user's choice; else the fastest, or the one that the host's own name stands for if that is no slower."""
    if _is_taken(places, usable):
        return _as_named(places, usable)
    own = set(places.by_name)
    default = next((name for name in rates if usable[name] in own), "")
    best = max(rates, key=lambda name: rates[name])
    if default and rates[best] < _CLEARLY * rates[default]:
        best = default
    beyond = [name for name, address in places.addresses.items() if not is_loopback(name, address)]
    address = usable[best]
    if default == best and len(beyond) <= 1:
        return Network(address=address, rates=rates)
    others = [f"{name} {rate:.2g} Gbit/s" for name, rate in rates.items() if name != best]
    others += [f"{name} reaches not all hosts" for name in beyond if name not in rates]
    beside = f" ({'; '.join(others)})" if others else ""
    says = f"network: {best} {address} reaches all hosts at {rates[best]:.2g} Gbit/s{beside}{_by_name(places, address)}"
    told = tuple(variable for variable in VARIABLES if variable not in places.named)
    return Network(best, address, says, rates, told=told)


def _as_named(places: Places, usable: dict[str, str]) -> Network:
    """The interface that the user has named. Gloo is told too where it would take what the name stands for."""
    best = next(name for name in preferred(places.named) if name in usable)
    address = usable[best]
    by_name = _by_name(places, address)
    variable = GLOO if best in places.named.get(GLOO, ()) else NCCL
    gloo_is_lost = GLOO not in places.named and not set(places.by_name) & set(usable.values())
    told = (GLOO,) if gloo_is_lost else ()
    also = f"; {GLOO} is set to it too" if told else ""
    says = f"network: {best} {address}, which {variable} names, reaches all hosts{by_name}{also}" if by_name else ""
    return Network(best if told else "", address, says, told=told)


def _by_name(places: Places, address: str) -> str:
    known = ", ".join(places.by_name) or "no address"
    return "" if address in places.by_name else f"; this host's name stands for {known}"
