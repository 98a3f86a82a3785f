"""What every launcher tells the others once all have met, and what must be equal on all hosts.

    errors, warnings = compared([HostFacts(...), HostFacts(...)])

A difference that torchrun accepts is a warning at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from autoddp.units import duration

_CLOCKS = 5.0  # seconds; less may come from the exchange itself, on a machine that is busy


class HostFacts(msgspec.Struct, frozen=True):
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
    """On this node."""
    torch: str = ""
    autoddp: str = ""
    clock: float = 0.0
    """Seconds since 1970, read when all have arrived."""


def labels(hosts: Sequence[HostFacts]) -> list[str]:
    """The hosts' names in messages: --node-rank, or else the order at the meeting, and the host name."""
    ranks = [index if host.node_rank is None else host.node_rank for index, host in enumerate(hosts)]
    return [f"node {rank} ({host.name})" for rank, host in zip(ranks, hosts, strict=True)]


def compared(hosts: Sequence[HostFacts]) -> tuple[list[str], list[str]]:
    """(errors, warnings), one line each, the same on all hosts."""
    errors: list[str] = []
    warnings: list[str] = []

    def differ(by: Callable[[HostFacts], Any]) -> bool:
        return len({by(host) for host in hosts}) > 1

    if differ(lambda host: host.plan):
        told = _told(hosts, lambda host: host.plan, lambda host: host.reads)
        errors.append(
            f"hosts differ: {told}; every host needs the same recipe, and the same .unfit note beside it or none: "
            "copy both to all, or name the recipe by --recipe"
        )
    ranks = [host.node_rank for host in hosts if host.node_rank is not None]
    if len(set(ranks)) < len(ranks):
        told = ", ".join(f"{host.node_rank} on {host.name}" for host in hosts)
        errors.append(f"two hosts have the same --node-rank ({told}): number them from 0 to {len(hosts) - 1}")
    if differ(lambda host: host.nodes):
        told = _told(hosts, lambda host: host.nodes)
        # Under a static rendezvous each host would wait for a number of ranks of its own.
        (errors if ranks else warnings).append(f"--nnodes differs: {told}; give every host the same")
    for name, by in (
        ("the number of processes per node", lambda host: host.processes),
        ("torch's version", lambda host: host.torch),
        ("autoddp's version", lambda host: host.autoddp),
    ):
        if differ(by):
            warnings.append(f"{name} differs: {_told(hosts, by)}")
    apart = max(host.clock for host in hosts) - min(host.clock for host in hosts)
    if apart > _CLOCKS:
        told = _told(hosts, lambda host: f"{duration(host.clock - min(h.clock for h in hosts))} ahead")
        warnings.append(f"the hosts' clocks are {duration(apart)} apart ({told}): times in logs do not compare")
    return errors, warnings


def _told(
    hosts: Sequence[HostFacts], by: Callable[[HostFacts], Any], shown: Callable[[HostFacts], Any] | None = None
) -> str:
    """`2 on node 0 (a), node 1 (b); 1 on node 2 (c)`: hosts grouped by a value. `shown`: the value for people."""
    groups: dict[Any, list[int]] = {}
    for index, host in enumerate(hosts):
        groups.setdefault(by(host), []).append(index)
    called = labels(hosts)
    told = []
    for members in groups.values():
        names = [called[index] for index in members]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        told.append(f"{(shown or by)(hosts[members[0]])} on {', '.join(names[:3])}{more}")
    return "; ".join(told)
