"""The transports that NCCL really used, held against those that this node's topology promises."""

from __future__ import annotations

from collections.abc import Iterable

from autoddp.topology.facts import Node
from autoddp.topology.nccl_log import NcclLog, transport_kind
from autoddp.topology.verdict import verdicts


def predicted(node: Node) -> dict[str, str]:
    """Way → transport, as `autoddp probe` would say it."""
    return {verdict.between: verdict.transport for verdict in verdicts(node) if verdict.transport}


def used(log: NcclLog) -> list[str]:
    """The distinct transports of a log, without the details of a connection: `P2P`, `SHM`, `NET/IB/GDRDMA`."""
    return sorted({transport_kind(text) for texts in log.transports.values() for text in texts})


def findings(node: Node, log: NcclLog) -> list[str]:
    """What is slower than it could be, a sentence each, with what to look at."""
    seen = used(log)
    return list(_findings(node, log, seen))


def _findings(node: Node, log: NcclLog, seen: list[str]) -> Iterable[str]:
    active = [port.device for port in node.rdma if port.active]
    if "NET/Socket" in seen and active:
        yield (
            f"NCCL went over TCP sockets although {', '.join(active)} is active: look at NCCL_IB_DISABLE, NCCL_IB_HCA, "
            "the GID index, and whether the container sees /dev/infiniband"
        )
    if any(word.startswith("NET/IB") for word in seen) and not log.gdrdma and node.gpudirect and node.gpus:
        yield f"NCCL copied through main memory although {node.gpudirect} is there: look at NCCL_NET_GDR_LEVEL"
    joined = [pair for pair in node.pairs if pair.nvlinks]
    if "SHM" in seen and joined and "P2P" not in seen:
        yield (
            f"NCCL went through shared memory although {len(joined)} pairs of GPUs have NVLink: look at "
            "NCCL_P2P_DISABLE, and whether each process sees all GPUs"
        )
    if log.warn_lines:
        yield f"NCCL warned {log.warn_lines} times: see its log"
