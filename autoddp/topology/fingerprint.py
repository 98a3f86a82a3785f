"""The properties of this machine that a recipe depends on (GPUs, links, network), as short texts that are compared."""

from __future__ import annotations

import os
from dataclasses import dataclass

from autoddp.topology.facts import RELATIONS, Nic, Node, fastest
from autoddp.topology.rdma.sysfs import sysfs_rdma
from autoddp.topology.system.interfaces import interfaces, stands_on_a_device

_DRIVER = "/proc/driver/nvidia"


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of one node. An empty value: not known, or not there."""

    devices: tuple[str, ...] = ()
    """Distinct GPU names."""
    links: str = ""
    """Classes of link between its GPUs, nearest first: `NV18`, `PIX SYS`."""
    network: str = ""
    """What leads to other nodes: `InfiniBand 8 x 400 Gbit/s`, `TCP 25 Gbit/s`, `TCP` where no rate is told."""
    tcp_gbps: float = 0.0
    """Gbit/s of its fastest Ethernet device; 0 where none says its rate, as in most containers and virtual machines."""
    rdma_ports: tuple[float, ...] = ()
    """Gbit/s of each of its active RDMA ports, the fastest first."""

    def rdma_gbps(self, ranks: int) -> float:
        """Gbit/s that so many ranks may have by RDMA: a rank takes the port near its GPU, mostly a single one."""
        return sum(self.rdma_ports[:ranks])


def fingerprint() -> Fingerprint:
    """The fingerprint of this node. Takes milliseconds where there is no NVIDIA driver: NVML is then not loaded."""
    devices, links = _gpus() if os.path.isdir(_DRIVER) else ((), "")
    node = Node("", nics=interfaces(), rdma=sysfs_rdma().ports)
    tcp = max((nic.speed_mbit or 0 for nic in _usable(node) if stands_on_a_device(nic.name)), default=0) / 1e3
    rdma = sorted((port.rate_gbps or 0.0 for port in node.rdma if port.active), reverse=True)
    return Fingerprint(devices, links, network_of(node), tcp, tuple(rdma))


def _gpus() -> tuple[tuple[str, ...], str]:
    from autoddp.topology.nvidia.nvml import read_nvml

    facts = read_nvml()
    node = Node("", gpus=facts.gpus, pairs=facts.pairs)
    return tuple(sorted({gpu.name for gpu in facts.gpus if gpu.name})), links_of(node)


def links_of(node: Node) -> str:
    """The classes of link between its GPUs, the closest first."""
    nvlinks = sorted({pair.nvlinks for pair in node.pairs if pair.nvlinks}, reverse=True)
    others = {pair.relation for pair in node.pairs if not pair.nvlinks}
    return " ".join([*(f"NV{count}" for count in nvlinks), *(word for word in RELATIONS if word in others)])


def network_of(node: Node) -> str:
    """RDMA if a port is active, else TCP over the interface that the default route takes, else over the fastest."""
    active = [port for port in node.rdma if port.active]
    if active:
        rates = sorted({port.rate_gbps for port in active if port.rate_gbps is not None}, reverse=True)
        fabric = "InfiniBand" if any(port.fabric == "InfiniBand" for port in active) else "RoCE"
        rate = f" x {' and '.join(f'{rate:g}' for rate in rates)} Gbit/s" if rates else ""
        return f"{fabric} {len(active)}{rate}"
    usable = _usable(node)
    if not usable:
        return ""
    best = fastest(usable)
    return "TCP" if best.speed_mbit is None else f"TCP {best.speed_mbit / 1e3:g} Gbit/s"


def _usable(node: Node) -> list[Nic]:
    return [nic for nic in node.nics if nic.up is not False and nic.addresses and nic.kind != "bridge"]
