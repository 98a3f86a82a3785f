"""Before a job on several hosts the launchers meet: they compare what they are about to do, and find their network.

    agreement = agree(torchrun, plan="digest", reads="a recipe")     # UsageError where the hosts cannot run together

Errors are only for what torchrun could not run either, and for hosts with different recipes; any other difference is a
warning. They come at most five seconds after the last host has arrived, and are the same on all hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import queue
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

from autoddp.codec import Struct, convert, encode
from autoddp.codec import replace as replace_fields
from autoddp.commandline.local_fingerprint import may_have_gpus
from autoddp.commandline.mode import torch_version
from autoddp.errors import UsageError, first_line
from autoddp.hosts.late_hosts import Notices, Plan, Running, cannot_join, joining
from autoddp.hosts.together import Hosts
from autoddp.log import tell
from autoddp.network.clock import Clock
from autoddp.network.gathering import Arrivals, Endpoint, say_if_not_ours, wait_for_answer
from autoddp.network.interface_selection import Found, choose, places_here, towards, with_rdma
from autoddp.network.own_network import Network
from autoddp.processes.polling import Asked, polls
from autoddp.processes.silence import awaiting
from autoddp.topology import interfaces
from autoddp.torchrun import meetings, options, surroundings
from autoddp.torchrun.meetings import Unheard
from autoddp.units import duration
from autoddp.version import __version__

_SILENT = 10.0  # seconds of waiting for another launcher before the user is told
_ANSWER = 60.0  # seconds for one answer of another launcher, on a machine that is busy elsewhere
_MEETINGS = 3  # one after another in which a launcher does not answer
_CLOCKS = 5.0  # seconds; less may come from the exchange itself, on a machine that is busy

T = TypeVar("T")


class HostFacts(Struct, frozen=True):
    """One launcher. Another version of autoddp may send fewer fields, or more: each has a default."""

    name: str = "?"
    """The host's own name."""
    plan: str = ""
    """A digest of what this host is about to do; it must be equal on all hosts."""
    reads: str = ""
    """The plan for people."""
    nodes: str = ""
    """--nnodes"""
    node_rank: int | None = None
    """--node-rank, under a static rendezvous."""
    processes: int = 0
    """Number of ranks on this node."""
    torch: str = ""
    autoddp: str = ""
    clock: float = 0.0
    """Seconds since 1970, read when all have arrived."""
    script: str = ""
    """A digest of what the script and its modules contain; "" where that is not known."""


def labels(hosts: Sequence[HostFacts]) -> list[str]:
    """The hosts' names in messages: --node-rank, or else the order at the meeting, and the host name."""
    ranks = [index if host.node_rank is None else host.node_rank for index, host in enumerate(hosts)]
    return [f"node {rank} ({host.name})" for rank, host in zip(ranks, hosts, strict=True)]


def compared(hosts: Sequence[HostFacts]) -> tuple[list[str], list[str]]:
    """(errors, warnings), one line each, the same on all hosts."""
    errors: list[str] = []
    warnings: list[str] = []

    def different(values: Sequence[object], shown: Sequence[object] | None = None) -> str:
        """Which hosts have which value; "" if all have the same. `shown` are the values for people."""
        return _told(hosts, values, shown or values) if len(set(values)) > 1 else ""

    if told := different([host.plan for host in hosts], [host.reads for host in hosts]):
        # A recipe for as many ranks on each host fits those that start as many, and the others would tune.
        are_uneven = len({host.processes for host in hosts}) > 1
        tune = "; for hosts with different numbers of ranks, --trials 20 on all makes one" if are_uneven else ""
        errors.append(
            f"hosts differ: {told}; every host needs the same options and recipe, and the same .unfit note or none: "
            f"copy both to all, or name the recipe by --recipe{tune}"
        )
    ranks = [host.node_rank for host in hosts if host.node_rank is not None]
    if len(set(ranks)) < len(ranks):
        told = ", ".join(f"{host.node_rank} on {host.name}" for host in hosts)
        errors.append(f"two hosts have the same --node-rank ({told}): number them from 0 to {len(hosts) - 1}")
    if told := different([host.nodes for host in hosts]):
        # Under a static rendezvous each host would wait for a number of ranks of its own.
        (errors if ranks else warnings).append(f"--nnodes differs: {told}; give every host the same")
    for name, values in (
        ("the number of processes per node", [host.processes for host in hosts]),
        ("torch's version", [host.torch for host in hosts]),
        ("autoddp's version", [host.autoddp for host in hosts]),
    ):
        if told := different(values):
            warnings.append(f"{name} differs: {told}")
    if all(host.script for host in hosts) and (told := different([host.script for host in hosts])):
        warnings.append(f"the script, or a module of yours that it imports, is not the same everywhere: {told}")
    ahead = [host.clock - min(other.clock for other in hosts) for host in hosts]
    if max(ahead) > _CLOCKS:
        told = _told(hosts, ahead, [f"{duration(seconds)} ahead" for seconds in ahead])
        warnings.append(f"the hosts' clocks are {duration(max(ahead))} apart ({told}): times in logs do not compare")
    return errors, warnings


def _told(hosts: Sequence[HostFacts], values: Sequence[object], shown: Sequence[object]) -> str:
    """`2 on node 0 (a), node 1 (b); 1 on node 2 (c)`: hosts of the same value are named together."""
    groups: dict[object, list[int]] = {}
    for index, value in enumerate(values):
        groups.setdefault(value, []).append(index)
    called, told = labels(hosts), []
    for members in groups.values():
        more = f" and {len(members) - 3} more" if len(members) > 3 else ""
        told.append(f"{shown[members[0]]} on {', '.join(called[index] for index in members[:3])}{more}")
    return "; ".join(told)


@dataclass(frozen=True)
class Agreement:
    """Keeps the job's meeting point open for as long as it lives; see `meetings.meeting_point`."""

    network: Network
    """The way to this node."""
    hosts: Hosts
    """All launchers that have met."""
    ranks: int
    """Number of ranks on all these hosts together."""
    _meeting_point: object
    _notices: Notices | None = None
    joins: tuple[Plan, Running] | None = None
    """What the others planned and what they launch, where they met before this host came; it has met nobody."""

    def tell_late_hosts(self, running: Running) -> None:
        """Say what the job is launched with, for hosts that come later."""
        if self._notices is not None and self.joins is None:
            self._notices.running(running)


class _Meeting:
    """What the launchers say to each other through the store of their rendezvous."""

    def __init__(self, store: Any, rank: int, nodes: int) -> None:
        store.set_timeout(timedelta(seconds=_ANSWER))
        self._store, self._rank, self._nodes = store, rank, nodes
        self.called = [f"node {node}" for node in range(nodes)]
        """Each node's name for people."""

    def exchange(self, key: str, mine: Any) -> list[Any]:
        """What each node says under the key (JSON types), by node. TimeoutError as `await_all`."""
        self.say(f"{key}/{self._rank}", encode(mine))
        self.await_all(key)
        return [json.loads(self._ask(functools.partial(self._store.get, f"{key}/{n}"))) for n in range(self._nodes)]

    def say(self, key: str, text: str) -> None:
        """Put a text into the store. TimeoutError if the store does not answer."""
        self._ask(lambda: self._store.set(key, text))

    def await_all(self, key: str) -> None:
        """Wait until each node has said something under the key. Unheard names the nodes that have not."""
        told = False
        for waited in polls(_ANSWER):
            if self._are_there([f"{key}/{node}" for node in range(self._nodes)]):
                return
            if waited > _SILENT and not told:
                told = True
                tell(f"waiting for {self._silent(key)} (up to {_ANSWER:.0f} s)")
        raise Unheard(f"{self._silent(key)} does not answer, for {_ANSWER:.0f} s: see what that launcher does")

    def _silent(self, key: str) -> str:
        absent = [node for node in range(self._nodes) if not self._are_there([f"{key}/{node}"])]
        return ", ".join(self.called[node] for node in absent) or "another host"

    def _are_there(self, keys: list[str]) -> bool:
        return self._ask(lambda: bool(self._store.check(keys)))

    def _ask(self, question: Callable[[], T]) -> T:
        """What the store answers. TimeoutError if it does not, because the link is down or the other host is off."""
        asked = Asked(question)
        with contextlib.suppress(queue.Empty):
            return asked.answer(_SILENT)
        tell(f"waiting for an answer of the launcher where the hosts meet (up to {_ANSWER:.0f} s)")
        with contextlib.suppress(queue.Empty):
            return asked.answer(_ANSWER)
        raise TimeoutError(
            f"the launcher where the hosts meet does not answer, for {_ANSWER:.0f} s: look at the link to it"
        )


@awaiting("the launchers of the other hosts", soon=_SILENT - 2)
def agree(
    torchrun: argparse.Namespace,
    plan: str,
    reads: str,
    variables: Collection[str] = (),
    job: bool = False,
    measures: bool = False,
    script: str = "",
) -> Agreement:
    """Meet the other nodes' launchers: `plan` must be the same on all, and the network is chosen unless the user did.

    `reads` is the plan for people, `variables` are the names of what the plan sets. `torchrun` is given the address by
    which the others reach this host, unless the user named one. UsageError, with all errors in one line and the same
    on all nodes. `job`: a job follows, which a host that comes later may join. `measures`, the same on all nodes too:
    all interfaces are measured, also where the user has chosen one. `script`: see `HostFacts`.
    """
    place = _reached(torchrun)
    with place.clock_is_shown:
        met = _met(torchrun, place)
    sets = {*os.environ, *variables}
    if met is None:
        return _met_without_us(torchrun, place, sets, script)
    info, meeting = met
    mine = HostFacts(
        name=socket.gethostname(),
        plan=plan,
        reads=reads,
        nodes=str(torchrun.nnodes),
        node_rank=torchrun.node_rank if place.static else None,
        processes=options.processes_per_node(torchrun),
        torch=torch_version(),
        autoddp=__version__,
        script=script,
    )
    with _told_in_one_line():
        found = _compared_by_all(torchrun, place, meeting, info.rank, mine, job, measures)
    if info.rank == 0:
        for warning in found.warnings + found.choice.doubts:
            tell(f"warning: {warning}")
    if faults := found.errors + found.choice.faults:
        raise UsageError("; ".join(faults))
    network = with_rdma(found.choice.network, sets)
    _set_local_address(torchrun, network)
    ahead = found.hosts[info.rank].clock - found.hosts[0].clock
    hosts = Hosts(
        info.store,
        info.rank,
        info.world_size,
        fewest=options.node_range(torchrun)[0],
        name=labels(found.hosts)[info.rank],
        endpoint=place.endpoint,
        ranks=tuple(host.processes for host in found.hosts),
        ahead=ahead if abs(ahead) > _CLOCKS else 0.0,
    )
    return Agreement(network, hosts, sum(hosts.ranks), place.handler, place.notices)


@dataclass(frozen=True)
class _Place:
    """The place where the launchers meet, once this host has reached it."""

    handler: Any
    """Elastic's rendezvous of the launchers; the endpoint's store lives as long as this object."""
    endpoint: Endpoint | None
    """None where the hosts meet by another backend than torch's own store."""
    has_store: bool
    """Whether this process keeps the endpoint's store."""
    static: bool
    arrivals: Arrivals | None = None
    notices: Notices | None = None
    clock_is_shown: contextlib.AbstractContextManager[None] = field(default_factory=contextlib.nullcontext)
    """While this is entered, the others can read the time of the host that keeps the store."""


def _reached(torchrun: argparse.Namespace) -> _Place:
    """Reach the endpoint, or keep its store if this is its host. UsageError where that fails."""
    ours = {address for nic in interfaces() for address in nic.addresses}
    options.host_endpoint_if_ours(torchrun, ours)
    static = torchrun.rdzv_backend == "static"
    endpoint, has_store = options.endpoint(torchrun) or (None, False)
    if endpoint is None:
        return _Place(meetings.meeting_point(torchrun, "plan"), None, False, static)
    if not torchrun.rdzv_endpoint and not static:
        tell(
            f"warning: --rdzv-endpoint is not given, so this host waits for the others at itself ({endpoint}): name "
            f"one host on all of them, e.g. --rdzv-endpoint {socket.gethostname()}:{endpoint.port}"
        )
    connect = functools.partial(meetings.board, endpoint)
    board = None
    if not has_store:
        board = wait_for_answer(endpoint, options.endpoint_patience(torchrun), tell, connect)
    elif static:
        options.require_free_port(endpoint)
        say_if_not_ours(endpoint, ours, tell)
    handler = meetings.meeting_point(torchrun, "plan")
    board = board or connect()  # this process's own store begins with the meeting point
    run_id, nodes = str(torchrun.rdzv_id), options.node_range(torchrun)
    limits = (options.last_call(torchrun), options.patience_with_hosts(torchrun))
    arrivals = Arrivals(board, endpoint, run_id, nodes, *limits, connect, has_store)
    notices = Notices(board, run_id)
    place = _Place(handler, endpoint, has_store, static, arrivals, notices)
    if has_store:
        place = replace(place, clock_is_shown=Clock(board).shown())
    elif not notices.has_plan and (ahead := Clock(board).ahead()):
        surroundings.follow_clock(ahead)
    meetings.end_in_silence(endpoint)
    return place


def _met_without_us(torchrun: argparse.Namespace, place: _Place, sets: Collection[str], script: str) -> Agreement:
    """What this host does where the others met before it came. UsageError where it cannot join them."""
    # Under a static rendezvous all hosts have met: one more would take the place of a host whose ranks train.
    if place.notices is None or place.endpoint is None or place.static:
        raise cannot_join(torchrun.rdzv_backend)
    _, most = options.node_range(torchrun)
    joins = place.notices.awaited(tell, most, script)
    running = joins[1]
    tell(joining(running, most))
    places = places_here(torchrun.local_addr, may_have_gpus(os.environ))
    way = towards(running.address or place.endpoint.host, places)
    way = replace(way, everywhere=running.everywhere, is_named=running.is_named)  # decided alike on all
    network = with_rdma(way, sets)
    _set_local_address(torchrun, network)
    return Agreement(network, Hosts(), 0, place.handler, place.notices, joins)


def _met(torchrun: argparse.Namespace, place: _Place) -> tuple[Any, _Meeting] | None:
    """Meet the other hosts: torch's RendezvousInfo, and what they say to each other. None if they have met already.

    Elastic counts a launcher for 15 seconds after it has ended, as one that was started again: that one says nothing.
    """
    with _told_in_one_line():
        for meets_again in reversed(range(_MEETINGS)):
            try:
                info = meetings.meet(place.handler, torchrun, place.arrivals)
                if info is None:
                    return None
                meeting = _Meeting(info.store, info.rank, info.world_size)
                names = meeting.exchange("arrived", socket.gethostname())  # all read their clocks after it
                break
            except Unheard as error:
                if not meets_again:
                    raise
                tell(f"warning: {error}; the hosts meet again")
    meeting.called = [f"node {node} ({name})" for node, name in enumerate(names)]
    return info, meeting


@contextlib.contextmanager
def _told_in_one_line() -> Iterator[None]:
    """A context in which another host that leaves, or does not answer, becomes a UsageError."""
    try:
        yield
    except TimeoutError as error:
        raise UsageError(str(error)) from None
    except (RuntimeError, ValueError) as error:
        why = f"another host has left the meeting, see its own last lines ({first_line(error)})"
        raise UsageError(why) from None


@dataclass(frozen=True)
class _Compared:
    """What all hosts have come to, the same on all of them."""

    hosts: list[HostFacts]
    errors: list[str]
    warnings: list[str]
    choice: Found


def _compared_by_all(
    torchrun: argparse.Namespace,
    place: _Place,
    meeting: _Meeting,
    rank: int,
    mine: HostFacts,
    job: bool,
    measures: bool,
) -> _Compared:
    """Exchange what each host is about to do, and choose the network. `rank`: this host's at the meeting."""
    plain = meeting.exchange("host", replace_fields(mine, clock=time.time()))
    hosts = [convert(one, HostFacts) for one in plain]
    errors, warnings = compared(hosts)
    if place.notices is not None and rank == 0:
        # A late host finds the meeting closed, and then reads this. No host closes it before `choose` ends.
        names = ", ".join(host.name for host in hosts)
        place.notices.plan(Plan(mine.plan, mine.reads, job and not errors, names, mine.script))
    here = places_here(torchrun.local_addr, may_have_gpus(os.environ))
    choice = choose(meeting.exchange, rank, labels(hosts), here, measures)
    place.handler.shutdown()
    meeting.say(f"read/{rank}", "1")
    if place.has_store:  # it ends with this process, and the others still have to read
        # The endpoint's name may stand for another host's address: then that host has the store, which has ended.
        with contextlib.suppress(RuntimeError):
            meeting.await_all("read")
    return _Compared(hosts, errors, warnings, choice)


def _set_local_address(torchrun: argparse.Namespace, network: Network) -> None:
    """Give the others this host's address: its name may stand for 127.0.0.1 or another network."""
    if network.address and not torchrun.local_addr:
        torchrun.local_addr = network.address
    if network.says:
        tell(network.says)
