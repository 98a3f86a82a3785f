"""The transports that NCCL used according to its log, compared with those predicted from this node's topology."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoddp.topology.facts import Node
from autoddp.topology.nccl_log import NcclLog, transport_kind
from autoddp.topology.text import some
from autoddp.topology.verdict import verdicts

_LONGEST_NUMBER = 2  # digits; NCCL names a GPU by its number, older ones by its PCI address, which is longer
_COMPARABLE = ("P2P", "SHM", "NET/IB/GDRDMA", "NET/IB", "NET/Socket")
"""NCCL's own; of a plugin's network nothing is predicted."""


@dataclass(frozen=True)
class Way:
    """One connection (two GPUs of this node, or this node and the others): its predicted and its used transports."""

    between: str
    """`GPU0-GPU4`, or `nodes`."""
    predicted: str
    """What `autoddp probe` says: P2P/NVLink, P2P/PCIe, SHM, NET/IB/GDRDMA, NET/IB, NET/Socket; empty if not known."""
    used: tuple[str, ...]
    """What NCCL's log names: P2P, SHM, NET/IB, …"""

    @property
    def differs(self) -> bool:
        """Whether NCCL used something else, and nothing of what was predicted."""
        # Whether P2P goes over NVLink or PCIe cannot be told from the log.
        expected = "P2P" if self.predicted.startswith("P2P/") else self.predicted
        comparable = [one for one in self.used if one in _COMPARABLE]
        return bool(comparable) and expected in _COMPARABLE and expected not in comparable

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"between": self.between, "predicted": self.predicted, "used": list(self.used)}


def ways(node: Node, log: NcclLog) -> tuple[Way, ...]:
    """Each connection for which the log names a transport, with the prediction for it, in the order of `verdicts`.

    The prediction depends on this process's environment variables, so the log must be of a job that had the same.
    """
    found = {"nodes": {one for one in used(log) if one.startswith("NET/")}}
    for names, texts in log.within_node.items():
        a, b = (_index(node, name) for name in names)
        if a is not None and b is not None:
            found.setdefault(f"GPU{min(a, b)}-GPU{max(a, b)}", set()).update(map(transport_kind, texts))
    return tuple(
        Way(verdict.between, verdict.transport, tuple(sorted(found[verdict.between])))
        for verdict in verdicts(node)
        if found.get(verdict.between)
    )


def used(log: NcclLog) -> list[str]:
    """The distinct transports of a log, without the details of a connection: `P2P`, `SHM`, `NET/IB/GDRDMA`."""
    return sorted({transport_kind(text) for texts in log.transports.values() for text in texts})


def findings(node: Node, log: NcclLog) -> list[str]:
    """Sentences on where NCCL does not do what was predicted, with what to look at; and on how often it warned."""
    differing: dict[tuple[str, str], list[str]] = {}
    for way in ways(node, log):
        if way.differs:
            differing.setdefault((way.predicted, " and ".join(way.used)), []).append(way.between)
    said = []
    for (predicted, seen), between in differing.items():
        where = "nodes" if between == ["nodes"] else some(between, most=3)
        said.append(f"NCCL used {seen} between {where}, and {predicted} was predicted{_look_at(node, predicted, seen)}")
    if log.warn_lines:
        said.append(f"NCCL warned {log.warn_lines} times: see its log")
    return said


def _look_at(node: Node, predicted: str, seen: str) -> str:
    if predicted.startswith("P2P/"):
        return ": look at NCCL_P2P_DISABLE and NCCL_P2P_LEVEL, and whether each process sees all GPUs"
    if predicted.startswith("NET/IB") and "NET/IB" not in seen:
        active = ", ".join(port.device for port in node.rdma if port.active)
        return (
            f" because {active} is active: look at NCCL_IB_DISABLE, NCCL_IB_HCA, the GID index, and whether the "
            "container sees /dev/infiniband"
        )
    if predicted == "NET/IB/GDRDMA":
        return f" because {node.gpudirect} is there: look at NCCL_NET_GDR_LEVEL"
    return ": it is better than predicted"


def _index(node: Node, name: str) -> int | None:
    """The driver's number of a GPU that NCCL names; None where this node has no GPU at that address."""
    if name.isdecimal() and len(name) <= _LONGEST_NUMBER:
        return int(name)
    # NCCL's number for a PCI address: `0000:1a:00.0` is 0x1a000.
    addresses = {int(gpu.bus.replace(":", "").replace(".", ""), 16): gpu.index for gpu in node.gpus if gpu.bus}
    return addresses.get(int(name, 16))
