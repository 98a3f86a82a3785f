"""Start-up settings of NCCL that this topology gives a reason to try; nothing is offered without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoddp.topology.facts import Node
from autoddp.topology.verdict import between_nodes, verdicts

_FAST_ETHERNET = 20_000  # Mbit/s; below, one socket thread keeps up


def nccl_settings(node: Node, nodes: int, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Values for the start knobs of `knobs.start`, one dict for each setting, the most promising first.

    A variable that is set already pins its knob.
    """
    found: list[dict[str, Any]] = []
    fast = any((nic.speed_mbit or 0) >= _FAST_ETHERNET for nic in node.nics if nic.up)
    over_tcp = nodes > 1 and between_nodes(node).transport == "NET/Socket"
    if over_tcp and fast and not {"NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"} & set(environment):
        found.append({"nccl_socket_threads": 4, "nccl_sockets_per_thread": 4})
    # Peer access works there, only NCCL's caution keeps it off.
    shy = [v for v in verdicts(node, environment) if v.transport == "SHM"]
    able = [pair for pair in node.pairs if pair.p2p == "OK"]
    if shy and len(able) == len(node.pairs) and not {"NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE"} & set(environment):
        found.append({"nccl_p2p_level": "SYS"})
    return found
