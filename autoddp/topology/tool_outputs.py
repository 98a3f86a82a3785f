"""The options of `autoddp probe` that name another machine's outputs, their readers, and the node they describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol, cast

from autoddp.errors import NothingReadable
from autoddp.topology.facts import Gpu, GpuPair, Node
from autoddp.topology.nccl_log import NcclLog, read_nccl_log
from autoddp.topology.nvidia.matrix import read_matrix
from autoddp.topology.nvidia.smi_texts import (
    GpuList,
    NvlinkStatus,
    P2pStatus,
    read_gpu_list,
    read_nvlink_status,
    read_p2p_status,
)
from autoddp.topology.probe import machine, node_of_matrix
from autoddp.topology.rdma.ports import RdmaPort, RdmaPorts
from autoddp.topology.rdma.texts import read_rdma_ports, read_show_gids


class Output(Protocol):
    """What a reader returns."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""


@dataclass(frozen=True)
class Source:
    """One option of `autoddp probe` that names a file, or a folder."""

    says: str
    """For --help."""
    read: Callable[[Any], Output]
    """Takes the file's text (--sysfs: the folder); NothingReadable if it understands none of it."""
    add: Callable[[Node, Any], Node] = lambda node, output: node
    """Adds what was read to a node that another output describes."""


_PEER_MEMORY = ("sys/module", "proc/driver/nvidia/version", "proc/sys/kernel/osrelease")
"""What tells that a NIC cannot read a GPU's memory: no module for it, and no open driver on a recent kernel."""
_NO_PEER_MEMORY = f"it takes a copy of {', '.join(_PEER_MEMORY)}, see --sysfs"


def _machine(root: Path) -> Node:
    node = machine(root)
    if not (node.nics or node.rdma or node.numa):
        raise NothingReadable(f"{root}: no sys/class/net, sys/class/infiniband or sys/devices/system/node below it")
    if node.gpudirect is None and not all((root / name).exists() for name in _PEER_MEMORY):
        node.unknown["gpudirect"] = _NO_PEER_MEMORY
    return node


def _with_peer_access(node: Node, peers: P2pStatus) -> Node:
    """The node with peer access of its pairs, also of those of which the matrix tells nothing."""
    here = {gpu.index for gpu in node.gpus} & {*peers.gpus}
    known = {(pair.a, pair.b): pair for pair in node.pairs}
    told = {pair: code for pair in combinations(sorted(here), 2) if (code := peers.between(*pair))}
    both = {**{pair: GpuPair(*pair) for pair in told}, **known}
    return replace(node, pairs=tuple(replace(p, p2p=told.get(k, p.p2p)) for k, p in sorted(both.items())))


def _with_rates(node: Node, links: NvlinkStatus) -> Node:
    """GB/s of each pair, where all links run at one speed."""
    speed = links.speed_gbs
    if speed is None:
        return node
    pairs = (replace(p, nvlink_gbs=p.nvlinks * speed) if p.nvlinks else p for p in node.pairs)
    return replace(node, pairs=tuple(pairs))


def _with_names(node: Node, listed: GpuList) -> Node:
    """Name and UUID of each GPU, and MIG where `nvidia-smi -L` lists MIG devices below it."""
    told: dict[int, dict[str, Any]] = {}
    for gpu in listed.gpus:
        words = {"name": gpu.name, "uuid": gpu.uuid, "mig": True if gpu.mig else None}
        told[gpu.index] = {name: word for name, word in words.items() if word}
    more = told.keys() - {gpu.index for gpu in node.gpus}  # a matrix may be cut, and a copy of /sys tells of no GPU
    gpus = [*node.gpus, *(Gpu(index) for index in sorted(more))]
    return replace(node, gpus=tuple(replace(gpu, **told.get(gpu.index, {})) for gpu in gpus))


def _with_nccl(node: Node, log: NcclLog) -> Node:
    """NCCL's version, on which it depends how far peer access reaches."""
    return replace(node, versions={**node.versions, "nccl": log.nccl_version}) if log.nccl_version else node


def _with_ports(node: Node, told: RdmaPorts) -> Node:
    """What the tool says of each port, and what only others say: ibv_devinfo tells no rate and no NUMA node."""
    seen = {(port.device, port.port): port for port in node.rdma}
    found = {key: _filled(port, seen.get(key)) for port in told.ports for key in [(port.device, port.port)]}
    return replace(node, rdma=tuple({**seen, **found}.values()))


def _filled(port: RdmaPort, other: RdmaPort | None) -> RdmaPort:
    """The port, with the other's values where it has none."""
    lacks = {name: value for name, value in vars(other or port).items() if getattr(port, name) in (None, "")}
    return replace(port, **lacks)


SOURCES: Mapping[str, Source] = {
    "topo_matrix": Source("output of nvidia-smi topo -m, or of rocm-smi --showtopo", read_matrix),
    "gpu_list": Source("output of nvidia-smi -L", read_gpu_list, _with_names),
    "p2p_status": Source("output of nvidia-smi topo -p2p r", read_p2p_status, _with_peer_access),
    "nccl_log": Source("a log written under NCCL_DEBUG=INFO", read_nccl_log, _with_nccl),
    "ibv_devinfo": Source("output of ibv_devinfo, ibstat or ibstatus", read_rdma_ports, _with_ports),
    "show_gids": Source(
        "output of show_gids", read_show_gids, lambda node, table: replace(node, gids=table.gids or node.gids)
    ),
    "nvlink_status": Source("output of nvidia-smi nvlink -s", read_nvlink_status, _with_rates),
    "sysfs": Source("a folder that holds a copy of another machine's /sys, as sys/", _machine),
}
"""Option, with `_` for `-` → what it reads, in the order in which it is added: GPUs before what is told of them."""


def _with_matrix(node: Node, seen: Node) -> Node:
    """What the folder of /sys tells, and what the matrix tells; neither denies what only the other one knows."""
    numa = {port.device: port.numa for port in seen.rdma}
    ports = {port.device for port in node.rdma}
    rdma = [replace(port, numa=numa.get(port.device) if port.numa is None else port.numa) for port in node.rdma]
    return replace(
        node,
        gpus=seen.gpus,
        pairs=seen.pairs,
        rdma=(*rdma, *(port for port in seen.rdma if port.device not in ports)),
        near={**seen.near, **node.near},
        sources={**seen.sources, **node.sources},
        unknown={**seen.unknown, **node.unknown},
    )


def node_of(read: Mapping[str, Output]) -> Node | None:
    """One node of all outputs together; None where none of them describes its GPUs or its machine."""
    matrix: Any = read.get("topo_matrix")
    node: Any = read.get("sysfs")
    if matrix is not None:
        seen = node_of_matrix(matrix)
        alone = replace(seen, unknown={**seen.unknown, "gpudirect": _NO_PEER_MEMORY})
        node = alone if node is None else _with_matrix(node, seen)
    if node is None:
        return None
    for name, source in SOURCES.items():
        node = source.add(node, read[name]) if name in read else node
    return cast("Node", node)
