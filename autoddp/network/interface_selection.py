"""Before several nodes start: by which of its addresses can the others reach each node, and which is the fastest?

    places = places_here(local_addr=None, has_gpus=False)
    found = choose(exchange, node, labels, places)  # every launcher calls it, with the same exchange
    found.network.variables                         # {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    found.faults                                    # the same on all nodes: what keeps them from reaching each other

Without a choice the libraries take the address of the host's name, or the first interface by name. On a host with a
docker bridge, a management network or a Debian-style name on 127.0.1.1 the job then hangs or becomes very slow. So
every launcher listens on a port, and every other one tries to connect to each of its addresses; a secret, which they
have exchanged where they meet, shows whether the right machine answers, because private addresses are not unique. The
next node measures, for a quarter of a second, how fast each address takes data.

A choice of the user's is kept: where GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is set on a node, its address is that of
the named interface, provided that the others can reach it. Nothing else is measured for that node.
"""

from __future__ import annotations

import ipaddress
import os
import queue
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autoddp.codec import Struct, convert
from autoddp.network.gathering import VANISH
from autoddp.network.interface_probe import Door, Listener, send_rate, tried
from autoddp.network.own_network import VARIABLES, Network
from autoddp.processes.polling import Asked
from autoddp.topology import interfaces
from autoddp.topology.nccl.conf import as_nccl_sees, nccl_conf
from autoddp.topology.nccl.interface_names import GLOO, LOOPBACK, NCCL, absent, named, preferred
from autoddp.topology.rdma.ports import rdma_settings
from autoddp.topology.rdma.sysfs import sysfs_rdma
from autoddp.units import figure

_CLEARLY = 1.2  # times as fast before a faster interface is taken instead of the one with the host name's address
_MEASURED = 0.25  # seconds of sending to one interface, twice
_TOUCHED = 0.001  # seconds of sending to one that the user has named: only whether data arrives is of interest there
_TRIES = 2  # the faster one counts, because one lost packet stalls a short transfer for long
_NAMED = 5.0  # seconds for the addresses of this host's name
_ALL_MEASURED = 1.5  # seconds for all interfaces of a node
_GID_INDEX = "NCCL_IB_GID_INDEX"
_ADDRESSES = frozenset(("NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE", "NCCL_IB_ROCE_VERSION_NUM"))
"""Variables that say which RoCE addresses NCCL chooses from. It does not choose where an index is set."""

Exchange = Callable[[str, Any], list[Any]]
"""`exchange(key, mine)`: what each node says under the key, by node, as JSON gives it back."""


@dataclass(frozen=True)
class Places:
    """What one launcher tells the others about its node's addresses. Fields of other versions are ignored."""

    addresses: dict[str, str] = field(default_factory=dict)
    """Interface → its first address. The loopback's is last; launchers on one machine may use it."""
    named: dict[str, list[str]] = field(default_factory=dict)
    """GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, where the user has set them → the interfaces here that they name."""
    missing: dict[str, list[str]] = field(default_factory=dict)
    """The variables in `named` → names in them that are not here, or have no address."""
    down: list[str] = field(default_factory=list)
    """Interfaces that are down."""
    local_addr: str = ""
    """The user's --local-addr."""
    by_name: list[str] = field(default_factory=list)
    """The addresses of this host's own name."""
    has_gpus: bool = False
    """Whether the ranks may use NCCL instead of Gloo."""
    further: list[str] = field(default_factory=list)
    """Addresses that are not the first of their interface."""

    @property
    def to_try(self) -> list[str]:
        """Every address, once."""
        return list(dict.fromkeys([*self.addresses.values(), *filter(None, [self.local_addr])]))

    @property
    def beyond_this_machine(self) -> dict[str, str]:
        """Interface → address, without the loopback."""
        return {name: a for name, a in self.addresses.items() if not _is_loopback(name, a)}


@dataclass(frozen=True)
class Found:
    """The result for this node, and for all."""

    network: Network
    """This node's network."""
    faults: list[str]
    """One line each: what keeps the nodes from reaching each other. The same on all nodes."""
    doubts: list[str]
    """One line each: what may do so, depending on the backend that the script uses. The same on all nodes."""


def places_here(local_addr: str | None, has_gpus: bool, environment: Mapping[str, str] | None = None) -> Places:
    """The addresses of this host."""
    environment = os.environ if environment is None else environment
    if has_gpus:
        environment = as_nccl_sees(environment)
    nics = [nic for nic in interfaces() if nic.addresses]
    addresses = {nic.name: nic.addresses[0] for nic in nics}
    if any(name == LOOPBACK for _, name in socket.if_nameindex()):
        addresses[LOOPBACK] = "127.0.0.1"
    choice = named(environment, addresses)
    if NCCL in choice:  # NCCL ignores the loopback unless its whole name is given
        choice[NCCL] = [n for n in choice[NCCL] if n != LOOPBACK or environment[NCCL].lstrip("=") == LOOPBACK]
    asked = {name for names in choice.values() for name in names}
    down = [nic.name for nic in nics if nic.up is False]
    try:
        # Where no name server answers, this may take longer than the other hosts, which have met, wait for this one.
        found = Asked(lambda: socket.getaddrinfo(socket.gethostname(), None)).answer(_NAMED)
    except (OSError, UnicodeError, queue.Empty):  # UnicodeError: what can be no name, such as one of 64 characters
        found = []
    return Places(
        addresses={name: address for name, address in addresses.items() if name not in down or name in asked},
        named=choice,
        missing={variable: absent(variable, environment[variable], addresses) for variable in choice},
        down=down,
        local_addr=local_addr or "",
        by_name=sorted({str(one[4][0]) for one in found}),
        has_gpus=has_gpus,
        further=[a for nic in nics if nic.name not in down for a in nic.addresses[1:] if not _is_loopback(nic.name, a)],
    )


def with_rdma(network: Network, taken: Collection[str]) -> Network:
    """The network with what NCCL must be told about this node's RDMA ports.

    Variables in `taken`, and those in NCCL's own files, stay as they are, and so does what they make NCCL choose.
    """
    found = sysfs_rdma()
    taken = {*taken, *nccl_conf(os.environ)}
    taken |= {_GID_INDEX} if taken & _ADDRESSES else set()
    settings = {n: value for n, value in rdma_settings(found.ports, found.gids).items() if n not in taken}
    says = [*filter(None, [network.says]), *(f"{name}={value}: {why}" for name, (value, why) in settings.items())]
    return replace(network, says="; ".join(says), rdma={name: value for name, (value, _) in settings.items()})


def choose(exchange: Exchange, node: int, labels: Sequence[str], places: Places, measures: bool = False) -> Found:
    """Let all nodes try each other's addresses, and choose the one by which this node is reached.

    `exchange` is the same on all nodes. `labels` has each node's name for people, such as "node 1 (host1)". With
    `measures`, which is the same on all nodes too, the rates are known also where the user has made the choice.
    """
    with Listener([*places.to_try, *places.further]) as listener:
        mine = _Listening(listener.port, listener.secret, places)
        all_ = [convert(one, _Listening) for one in exchange("network/address", mine)]
        nodes = [_Node(label, one.places) for label, one in zip(labels, all_, strict=True)]
        refused = _refused([(o, one.door(a)) for o, one in enumerate(all_) if o != node for a in one.places.to_try])
        for one, refusals in zip(nodes, exchange("network/reached", refused), strict=True):
            _note(refusals, one, nodes)
            closed = {(other, address) for other, address, _ in refusals}
            one.connects = all(
                {(o, a) for a in other.places.to_try} - closed and _may_connect(one.places, other.places)
                for o, other in enumerate(nodes)
                if other is not one
            )
        if further := [(o, a) for o, one in enumerate(nodes) if not one.usable for a in one.places.further]:
            refused = _refused([(o, all_[o].door(a)) for o, a in further if o != node])
            for one, refusals in zip(nodes, exchange("network/further", refused), strict=True):
                _note(refusals, one, nodes)
        complaints = [complaint for one in nodes for complaint in one.complaints()]
        faults, doubts = ([text for sure, text in complaints if sure is wanted] for wanted in (True, False))
        following = (node + 1) % len(nodes)
        next_ = nodes[following]
        is_taken = _is_taken(next_.places, next_.usable) and not measures
        names = preferred(next_.places.named) if is_taken else [*next_.usable]
        open_ = {} if faults else {name: next_.usable[name] for name in names if name in next_.usable}
        lasting = _TOUCHED if is_taken else min(_MEASURED, _ALL_MEASURED / (_TRIES * len(open_) or 1))
        rates = {name: _rate(all_[following].door(address), lasting) for name, address in open_.items()}
        rates_of_all = exchange("network/rate", rates)
        rates_to = [rates_of_all[number - 1] for number in range(len(nodes))]
        # Connections succeed, and no data arrives: the ranks would wait for each other in their first collective.
        if lost := [one.label for one, to in zip(nodes, rates_to, strict=True) if to and not any(to.values())]:
            doubts.append(VANISH.format(", ".join(lost)))
        exchange("network/done", True)  # nobody stops listening before all have measured
    if faults:
        return Found(Network(), faults, doubts)
    if not all(one.usable for one in nodes):  # all as torchrun: by their addresses elastic decides which has rank 0
        return Found(Network(), faults, doubts)
    network = _chosen(places, nodes[node].usable, rates_to[node])
    if measures and _is_taken(places, nodes[node].usable):
        network = replace(network, rates=rates_to[node])
    is_named = any(GLOO in one.places.named for one in nodes)
    everywhere = set.intersection(*(set(one.usable) for one in nodes))
    return Found(replace(network, is_named=is_named, everywhere=tuple(sorted(everywhere))), [], doubts)


def towards(address: str, places: Places) -> Network:
    """The user's choice; else the interface by which an address, or a name, of another host is reached.

    Nothing is measured: it is for a host that comes when the others are at work.
    """
    if _is_taken(places, places.addresses):
        return _as_named(places, places.addresses)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # sends nothing
            own = str(probe.getsockname()[0])
    except OSError:  # as torchrun would choose
        return Network()
    name = next((name for name, known in places.addresses.items() if known == own), "")
    if not name or (own in places.by_name and len(places.beyond_this_machine) <= 1):
        return Network(address=own)
    says = f"network: {name} {own}, by which {address} is reached{_by_name(places, own)}"
    return Network(name, own, says, told=tuple(variable for variable in VARIABLES if variable not in places.named))


def _refused(doors: Sequence[tuple[int, Door]]) -> list[tuple[int, str, str]]:
    """The nodes and addresses of doors, of each of which the node is known, to which this host cannot connect; why."""
    answers = tried([door for _, door in doors])
    return [(other, door.address, why) for (other, door), why in zip(doors, answers, strict=True) if why]


def _note(refusals: Sequence[tuple[int, str, str]], by: _Node, nodes: Sequence[_Node]) -> None:
    """Keep, with the nodes that they concern, the refusals that a node has met."""
    for other, address, why in refusals:
        nodes[other].refusals.setdefault(address, []).append((by.label, why))


class _Listening(Struct, frozen=True):
    """What a launcher tells the others about its listener."""

    port: int
    secret: str
    places: Places

    def door(self, address: str) -> Door:
        return Door(address, self.port, self.secret)


@dataclass
class _Node:
    """One node, and which of its addresses the others cannot reach."""

    label: str
    places: Places
    refusals: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Address → the nodes that cannot connect to it, with the reason."""
    connects: bool = False
    """Whether it can connect to an address of each other node, and Gloo may let it do so."""

    @cached_property
    def usable(self) -> dict[str, str]:
        """Interface → address, of those that all others reach; the loopback only where there is nothing else."""
        found = {name: address for name, address in self.places.addresses.items() if address not in self.refusals}
        beyond = {name: address for name, address in found.items() if name in self.places.beyond_this_machine}
        return beyond if beyond and not set(preferred(self.places.named)) & (found.keys() - beyond.keys()) else found

    @property
    def lets_nobody_in(self) -> bool:
        """Whether only this node can connect to the others, as behind a firewall, and torchrun may train all the same.

        Gloo connects one way, NCCL both ways.
        """
        return not self.usable and self.connects and not self.places.has_gpus

    @cached_property
    def elsewhere(self) -> str:
        """An address at which all others reach it, of those that are no interface's first one; "" if there is none.

        Ranks take the first address of an interface. Where Gloo is given none, it takes that of the host's name.
        """
        return next((address for address in self.places.further if address not in self.refusals), "")

    def complaints(self) -> Iterator[tuple[bool, str]]:
        """What keeps the other nodes from reaching this one: (whether it surely does so, text)."""
        local = self.places.local_addr
        if local in self.refusals and not self.lets_nobody_in:
            why = self._why_not(local)
            yield True, f"--local-addr {local} of {self.label} leads nowhere: {why}: give an address that does"
        for variable, why in self._wrongly_named():
            # Which of the two libraries the script uses is not known before it runs.
            yield variable == GLOO and not self.places.has_gpus, f"{variable} on {self.label}: {why}"
        if not self.usable:
            tries = self.places.beyond_this_machine or self.places.addresses
            told = "; ".join(f"{name} {address}: {self._why_not(address)}" for name, address in tries.items())
            more = "; it can connect to them, which may be enough for Gloo" if self.lets_nobody_in else ""
            if self.elsewhere:
                yield (
                    False,
                    f"{self.label} is reached at {self.elsewhere}, and at the first address of no interface ({told}): "
                    "as under torchrun, its name has to stand for the former",
                )
                return
            yield (
                not self.lets_nobody_in,
                f"{self.label} has no address that all others can connect to ({told or 'it has none at all'}): open "
                f"its firewall for all TCP ports between the hosts{more}",
            )

    def _wrongly_named(self) -> Iterator[tuple[str, str]]:
        """The variables that name unusable interfaces, and why. Gloo uses all that are named, NCCL needs one."""
        places = self.places
        for variable, names in places.named.items():
            bad = {name: a for name in names if (a := places.addresses[name]) in self.refusals}
            missing = ", ".join(places.missing[variable])
            if missing and (variable == GLOO or not names):
                known = ", ".join(places.addresses) or "none"
                yield variable, f"no interface {missing} with an address there (it has {known})"
            elif not names:
                yield variable, "it excludes every interface"
            elif bad and (variable == GLOO or len(bad) == len(names)) and not self.lets_nobody_in:
                name, address = next(iter(bad.items()))
                why = f"{name} is down" if name in places.down else self._why_not(address)
                yield variable, f"{name} {address} is not reached by all hosts: {why}"

    def _why_not(self, address: str) -> str:
        """The first node that cannot connect, its reason, and how many others there are."""
        (label, why), *others = self.refusals[address]
        return f"from {label}{f' (and {len(others)} more)' if others else ''}: {why}"


def _is_loopback(name: str, address: str) -> bool:
    """Whether only this machine can connect to it."""
    return name == LOOPBACK or ipaddress.ip_address(address).is_loopback


def _may_connect(one: Places, other: Places) -> bool:
    """Whether Gloo may let the first of two nodes connect to the second one: the one with the lower address waits."""
    ours, theirs = ([ipaddress.ip_address(a).packed for a in p.beyond_this_machine.values()] for p in (one, other))
    return any(own > address for own in ours for address in theirs)


def _is_taken(places: Places, usable: Mapping[str, str]) -> bool:
    """Whether the user has made this node's choice."""
    return any(name in usable for name in preferred(places.named))


def _rate(door: Door, lasting: float) -> float:
    """Gbit/s to one interface of the next node: the better of two."""
    return max(send_rate(door, lasting) for _ in range(_TRIES)) * 8 / 1e9


def _chosen(places: Places, usable: dict[str, str], rates: dict[str, float]) -> Network:
    """The user's choice; else the fastest interface, or the one with the host name's address if it is about as fast."""
    if _is_taken(places, usable):
        return _as_named(places, usable)
    default = next((name for name in rates if usable[name] in places.by_name), "")
    best = max(rates, key=lambda name: rates[name])
    if default and rates[best] < _CLEARLY * rates[default]:
        best = default
    beyond, address = places.beyond_this_machine, usable[best]
    if default == best and len(beyond) <= 1:
        return Network(address=address, rates=rates)
    others = [f"{name} {figure(rate, 2)} Gbit/s" for name, rate in rates.items() if name != best]
    others += [f"{name} reaches not all hosts" for name in beyond if name not in rates]
    beside = f" ({'; '.join(others)})" if others else ""
    fast = f"{figure(rates[best], 2)} Gbit/s"
    says = f"network: {best} {address} reaches all hosts at {fast}{beside}{_by_name(places, address)}"
    told = tuple(variable for variable in VARIABLES if variable not in places.named)
    return Network(best, address, says, rates, told=told)


def _as_named(places: Places, usable: dict[str, str]) -> Network:
    """The interface that the user has named. Gloo gets it too if the host name's address leads nowhere."""
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
