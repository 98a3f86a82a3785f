"""The place of this node in a job of several nodes, where a cluster tells it and the user does not.

What the user says by an option of torchrun, or by one of its variables PET_*, always counts. Of the rest, the innermost
platform that tells a thing is believed.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from autoddp.cluster.base import Platform, Told
from autoddp.cluster.choice import platforms_here, require_same_nodes
from autoddp.cluster.kubeflow import Kubeflow
from autoddp.errors import UsageError
from autoddp.processes.silence import awaiting
from autoddp.torchrun.options import DEFAULT_PORT, node_range

_OPTIONS = {
    "nnodes": "nodes",
    "node_rank": "node_rank",
    "master_addr": "master_address",
    "master_port": "master_port",
    "nproc_per_node": "processes_per_node",
    "rdzv_id": "run_id",
}
"""Field of torchrun's options → the platforms' answer for it."""
_FLAGS = {"nnodes": "--nnodes", "node_rank": "--node-rank", "master_addr": "--master-addr"}
_MISSING = {"nnodes": "number of nodes", "node_rank": "node rank", "master_addr": "master"}
_SOON = 3.0  # seconds without an answer of the name service until a line says so
_ELSEWHERE = ("standalone", "rdzv_endpoint")
"""Fields that say by themselves where the nodes meet."""


class Settled(NamedTuple):
    """What became of this node's place."""

    says: str = ""
    """A line for the user; "" if no platform tells anything."""
    ranks_told: bool = False
    """Whether a platform has told how many ranks this node starts."""


def settle(torchrun: argparse.Namespace, given: Mapping[str, str], variables: Mapping[str, str]) -> Settled:
    """Set torchrun's options that the user has not given, as far as a platform tells them.

    `given` are the fields that the user has given, with the option or the variable that did it. UsageError for
    variables that contradict each other, and for a launcher that was not started once on each node.
    """
    if any(getattr(torchrun, field) for field in _ELSEWHERE) or torchrun.rdzv_backend not in ("", "static"):
        return Settled()
    platforms = platforms_here(variables)
    if not platforms:
        return Settled()
    if "nnodes" in given:
        if not _is_several(torchrun):
            return Settled()
    else:
        _require_launcher_per_node(platforms)
        require_same_nodes(platforms)
    nodes = _first_told(platforms, "nodes")
    if "nnodes" not in given and nodes is None:
        return Settled(_nothing_told(platforms))
    if "nnodes" not in given and nodes is not None and nodes.value == "1":
        return Settled()
    if all(field in given for field in _FLAGS):  # the whole place: Kubeflow gives it by torchrun's own variables
        if not isinstance(platforms[0], Kubeflow):
            return Settled()
        if not given["master_addr"].startswith("-"):
            torchrun.master_from = given["master_addr"]
        return Settled(_says(torchrun, {}, given, platforms))
    asked = _asked(platforms, given)
    told = {
        field: answer
        for field, name in _OPTIONS.items()
        if field not in given and (answer := _first_told(asked, name)) is not None
    }
    if "master_addr" in given:  # the port is the one of that master, which torchrun knows
        told.pop("master_port", None)
    if not told:
        return Settled()
    _require_whole(told, given, platforms)
    for field, answer in told.items():
        setattr(torchrun, field, int(answer.value) if field in ("node_rank", "master_port") else answer.value)
    _require_rank(torchrun, told)
    if "master_addr" in told:
        torchrun.master_from = told["master_addr"].variable
        torchrun.master_resolves = any(one.names_last and one.master_address == told["master_addr"] for one in asked)
    return Settled(_says(torchrun, told, given, platforms, asked), "nproc_per_node" in told)


def require_master(torchrun: argparse.Namespace) -> None:
    """UsageError for a master that a platform has named, and whose name has no address here, now or later."""
    if not getattr(torchrun, "master_resolves", False):
        return
    try:
        with awaiting(f"the name service to tell the address of the master, {torchrun.master_addr}", soon=_SOON):
            socket.getaddrinfo(torchrun.master_addr, None)
    except (OSError, UnicodeError) as error:  # the latter for what can be no name, such as .internal
        why = error.strerror if isinstance(error, OSError) else "no host can have it"
        raise UsageError(
            f"{torchrun.master_from} names the master {torchrun.master_addr}, and this node ({socket.gethostname()}) "
            f"knows no address of that name ({why}): give its address by --master-addr"
        ) from None


def _is_several(torchrun: argparse.Namespace) -> bool:
    try:
        return node_range(torchrun)[1] > 1
    except (ValueError, RuntimeError):
        return False  # the mode says what is wrong with it


def _first_told(platforms: Sequence[Platform], answer: str) -> Told | None:
    """The answer of the innermost platform that has one."""
    return next((told for platform in platforms if (told := getattr(platform, answer)) is not None), None)


def _asked(platforms: Sequence[Platform], given: Container[str]) -> Sequence[Platform]:
    """The innermost platforms, up to the first one that tells all of a place by itself: its answers belong together."""
    wanted = [_OPTIONS[field] for field in _FLAGS if field not in given]
    for count, platform in enumerate(platforms, start=1):
        if all(getattr(platform, answer) is not None for answer in wanted):
            return platforms[:count]
    return platforms


def _require_launcher_per_node(platforms: Sequence[Platform]) -> None:
    for platform in platforms:
        if platform.hindrance:
            raise UsageError(f"{platform.name}: {platform.hindrance}")
        if platform.nodes is not None:
            return


def _require_whole(told: Mapping[str, Told], given: Mapping[str, str], platforms: Sequence[Platform]) -> None:
    """UsageError where a platform tells of several nodes, and nobody tells this node's rank or the master."""
    lacking = [field for field in _FLAGS if field not in told and field not in given]
    if lacking and "nnodes" in told:
        raise UsageError(f"{_seen(platforms)}: {_lacks(lacking)}; --nnodes 1 starts a job on this node alone")


def _require_rank(torchrun: argparse.Namespace, told: Mapping[str, Told]) -> None:
    """UsageError for a rank that a platform has told, and that the number of nodes excludes."""
    rank, most = told.get("node_rank"), node_range(torchrun)[1]
    if rank is not None and int(rank.value) >= most:
        of_nodes = f"{told['nnodes'].variable}=" if "nnodes" in told else "--nnodes "
        raise UsageError(
            f"{rank.variable} makes this node {rank.value}, but {of_nodes}{torchrun.nnodes}, so that the last one is "
            f"{most - 1}: correct it, or overrule it by --node-rank or --nnodes"
        )


def _nothing_told(platforms: Sequence[Platform]) -> str:
    """A line about platforms that do not tell how many nodes there are: the job has one, as under torchrun."""
    lacking = [field for field in _FLAGS if _first_told(platforms, _OPTIONS[field]) is None]
    return f"{_seen(platforms)}: a job on this node alone, as under torchrun; {_lacks(lacking)} for a job on several"


def _lacks(fields: Sequence[str]) -> str:
    """What is missing, and the flags that give it."""
    things, flags = [_MISSING[field] for field in fields], [_FLAGS[field] for field in fields]
    return f"it tells no {' and no '.join(things)}: give {' and '.join(flags)}"


def _seen(platforms: Sequence[Platform]) -> str:
    """The innermost platform, with its variables."""
    return f"{platforms[0].name} ({platforms[0].why})"


def _says(
    torchrun: argparse.Namespace,
    told: Mapping[str, Told],
    given: Mapping[str, str],
    platforms: Sequence[Platform],
    asked: Sequence[Platform] = (),
) -> str:
    """What was found, each with the variable or the option that says it."""

    def source(*fields: str) -> str:
        names = [told[field].variable if field in told else given.get(field, "") for field in fields]
        return f" ({', '.join(dict.fromkeys(filter(None, names)))})" if any(names) else ""

    master = f"{torchrun.master_addr}:{torchrun.master_port or DEFAULT_PORT}"
    parts = [
        f"{torchrun.nnodes} nodes{source('nnodes')}",
        f"this is node {torchrun.node_rank}{source('node_rank')}",
        f"the master is {master}{source('master_addr', 'master_port')}",
    ]
    if "nproc_per_node" in told:
        ranks = f"{torchrun.nproc_per_node} rank{'s' if torchrun.nproc_per_node != '1' else ''}"
        parts.append(f"{ranks} on this node{source('nproc_per_node')}")
    return f"{_believed(told, platforms, asked)}: {', '.join(parts)}"


def _believed(told: Mapping[str, Told], platforms: Sequence[Platform], asked: Sequence[Platform]) -> str:
    """The platforms that have told something, and those that were left out for a platform inside them."""
    used = [one.name for one in asked if any(getattr(one, _OPTIONS[field]) == told[field] for field in told)]
    used = used or [platforms[0].name]
    others = [one.name for one in platforms if one.name not in used and type(one).nodes is not Platform.nodes]
    outside = f" (inside {' and '.join(others)}, which is not asked)" if others else ""
    return f"{' and '.join(used)}{outside}"
