"""Another machine's outputs: which reader serves which option of `autoddp probe`, and what node they describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from autoddp.errors import NothingReadable
from autoddp.topology.facts import Node
from autoddp.topology.matrix import TopologyMatrix, read_matrix
from autoddp.topology.nccl_log import read_nccl_log
from autoddp.topology.probe import machine, node_of_matrix
from autoddp.topology.rdma import RdmaPorts
from autoddp.topology.rdma_texts import GidTable, read_rdma_ports, read_show_gids
from autoddp.topology.smi_texts import (
    GpuList,
    NvlinkStatus,
    P2pStatus,
    read_gpu_list,
    read_nvlink_status,
    read_p2p_status,
)


class Output(Protocol):
    """What a reader returns."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""


@dataclass(frozen=True)
class Machine:
    """A copy of another machine's /sys."""

    node: Node

    def plain(self) -> dict[str, Any]:
        """The node, as `autoddp probe --json` shows one."""
        return self.node.plain()


def _machine(root: Path) -> Machine:
    node = machine(root)
    if not (node.nics or node.rdma or node.numa):
        raise NothingReadable(f"{root}: no sys/class/net, sys/class/infiniband or sys/devices/system/node below it")
    return Machine(node)


OUTPUTS: Mapping[str, Callable[[Any], Output]] = {
    "topo_matrix": read_matrix,
    "p2p_status": read_p2p_status,
    "gpu_list": read_gpu_list,
    "nccl_log": read_nccl_log,
    "ibv_devinfo": read_rdma_ports,
    "show_gids": read_show_gids,
    "nvlink_status": read_nvlink_status,
    "sysfs": _machine,
}
"""Option → reader. It takes the file's text (--sysfs: the folder); NothingReadable if it understands none of it."""


def node_of(read: Mapping[str, Output]) -> Node | None:
    """One node of all outputs together; None where none of them describes its GPUs or its machine."""
    matrix, folder = read.get("topo_matrix"), read.get("sysfs")
    node = folder.node if isinstance(folder, Machine) else None
    if isinstance(matrix, TopologyMatrix):
        seen = node_of_matrix(matrix)
        node = seen if node is None else replace(node, gpus=seen.gpus, pairs=seen.pairs)
    if node is None:
        return None
    ports, gids, links = read.get("ibv_devinfo"), read.get("show_gids"), read.get("nvlink_status")
    if isinstance(ports, RdmaPorts):
        node = replace(node, rdma=ports.ports)
    if isinstance(gids, GidTable):
        node = replace(node, gids=gids.gids)
    if isinstance(links, NvlinkStatus):
        node = _with_rates(node, links)
    peers, names = read.get("p2p_status"), read.get("gpu_list")
    if isinstance(peers, P2pStatus):
        node = replace(node, pairs=tuple(replace(pair, p2p=peers.between(pair.a, pair.b)) for pair in node.pairs))
    return _with_names(node, names) if isinstance(names, GpuList) else node


def _with_rates(node: Node, links: NvlinkStatus) -> Node:
    """GB/s of each pair, where all links run at one speed."""
    speed = links.speed_gbs
    if speed is None:
        return node
    pairs = (replace(p, nvlink_gbs=p.nvlinks * speed) if p.nvlinks else p for p in node.pairs)
    return replace(node, pairs=tuple(pairs))


def _with_names(node: Node, listed: GpuList) -> Node:
    """Name and UUID of each GPU, and MIG where `nvidia-smi -L` lists MIG devices below it."""
    by_index = {gpu.index: gpu for gpu in listed.gpus}
    gpus = [
        replace(gpu, name=found.name, uuid=found.uuid, mig=True if found.mig else None)
        if (found := by_index.get(gpu.index))
        else gpu
        for gpu in node.gpus
    ]
    return replace(node, gpus=tuple(gpus))
