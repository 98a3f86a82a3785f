"""One node as it was found: frozen facts, where each came from, and why the missing ones are missing.

    node = probe()
    for fact, because in node.unknown.items():
        print(f"{fact}: could not be learned, because {because}")

A value that is not known is None (or empty), never a guess. The key of `unknown` is the path of the fact as
`plain()` shows it: `gpus.3.memory_bytes`, `rdma`, `limits.memlock_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from autoddp.topology.rdma.ports import Gid, RdmaPort

Relation = Literal["PIX", "PXB", "PHB", "NODE", "SYS"]
"""What traffic between two PCIe devices crosses, in nvidia-smi's words, nearest first: one PCIe switch (PIX), several
(PXB), the CPU's host bridge (PHB), several host bridges of a NUMA node (NODE), the link between sockets (SYS)."""
RELATIONS: tuple[Relation, ...] = ("PIX", "PXB", "PHB", "NODE", "SYS")

UNTOLD = "gpus.0"
"""Key of `Node.unknown` where a device file shows that there are GPUs, of which no source has told."""

P2P_REFUSED = {
    "CNS": "the chipset does not support peer access",
    "GNS": "this GPU model does not support peer access",
    "TNS": "the topology does not support peer access",
    "DR": "the driver has peer access switched off",
    "NS": "peer access is not supported",
}
"""Why one GPU may not reach into another's memory, by nvidia-smi's letters; OK is the driver's word, no measurement."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver numbers it."""

    index: int
    name: str = ""
    uuid: str = ""
    bus: str = ""
    """PCI address, `0000:0f:00.0`."""
    memory_bytes: int | None = None
    pcie_generation: int | None = None
    """Now; an idle GPU may have slowed its link down."""
    pcie_width: int | None = None
    pcie_generation_max: int | None = None
    pcie_width_max: int | None = None
    numa: int | None = None
    cpus: str = ""
    """CPUs near it, as a list: `0-23,48-71`."""
    mig: bool | None = None


@dataclass(frozen=True)
class GpuPair:
    """What joins two GPUs; a < b."""

    a: int
    b: int
    relation: Relation | None = None
    nvlinks: int = 0
    nvlink_version: int | None = None
    nvlink_gbs: float | None = None
    """GB/s of all their NVLinks together, in one direction."""
    p2p: str = ""
    """OK or a key of `P2P_REFUSED`; empty where that is not known."""
    xgmi: bool = False
    """Whether xGMI, AMD's link between GPUs, joins them."""


@dataclass(frozen=True)
class Nic:
    """A network interface that is not the loopback."""

    name: str
    driver: str = ""
    kind: Literal["physical", "bridge", "virtual"] = "physical"
    """virtual: veth, bond, vlan, tunnel: no device of its own."""
    up: bool | None = None
    speed_mbit: int | None = None
    """Mbit/s as the driver says; virtual interfaces often claim 10000."""
    numa: int | None = None
    bus: str = ""
    addresses: tuple[str, ...] = ()
    """IPv4 and global IPv6."""
    routed: bool | None = None
    """Whether the node's default route leaves by it."""


@dataclass(frozen=True)
class NumaNode:
    """CPUs that share memory."""

    number: int
    cpus: str
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Limits:
    """What the operating system grants this process."""

    shm_bytes: int | None = None
    """Size of /dev/shm, which NCCL's SHM transport and data loaders share."""
    memlock_bytes: int | None = None
    """How much memory may be pinned; RDMA needs plenty. -1: no limit."""
    cgroup_cpus: float | None = None
    cgroup_memory_bytes: int | None = None
    container: bool | None = None


@dataclass(frozen=True)
class Cpu:
    """The processor."""

    model: str = ""
    vendor: str = ""
    """GenuineIntel, AuthenticAMD, ARM, …: NCCL's default for peer access depends on it."""
    cores: int | None = None
    threads: int | None = None
    usable: int | None = None
    """CPUs this process may run on."""


@dataclass(frozen=True)
class Node:
    """Everything known about one node."""

    host: str
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    nics: tuple[Nic, ...] = ()
    rdma: tuple[RdmaPort, ...] = ()
    gids: tuple[Gid, ...] = ()
    near: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """NIC or RDMA device → the GPUs nearest to it."""
    gpudirect: Literal["nvidia_peermem", "dma-buf"] | None = None
    """How a NIC reads a GPU's memory, if it can."""
    numa: tuple[NumaNode, ...] = ()
    cpu: Cpu = Cpu()
    limits: Limits = Limits()
    versions: dict[str, str] = field(default_factory=dict)
    """torch, cuda, nccl, driver, python, kernel."""
    sources: dict[str, str] = field(default_factory=dict)
    """Fact or group of facts → what told it."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Fact → why it could not be learned."""

    def pair(self, a: int, b: int) -> GpuPair:
        """What joins GPUs a and b; an empty pair if nothing is known."""
        low, high = sorted((a, b))
        return next((pair for pair in self.pairs if (pair.a, pair.b) == (low, high)), GpuPair(low, high))

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def nearest(relations: Mapping[int, str | None]) -> tuple[int, ...]:
    """The GPUs, of those given with their relation to one device, that are nearest to it; none if that is not known."""
    known = {gpu: RELATIONS.index(relation) for gpu, relation in relations.items() if relation in RELATIONS}
    least = min(known.values(), default=0)
    return tuple(sorted(gpu for gpu, place in known.items() if place == least))


def fastest(nics: Iterable[Nic]) -> Nic:
    """The interface that traffic to other nodes takes: that of the default route, else the fastest."""
    return max(nics, key=lambda nic: (bool(nic.routed), nic.speed_mbit or 0))


def switches(node: Node, gpus: Iterable[Gpu]) -> list[list[Gpu]]:
    """`gpus` grouped by PCIe switch: each group is a set of GPUs of which every two are known to share one.

    A GPU of which nothing is known, or that is joined by NVLink (which hides the PCIe relation in nvidia-smi's matrix),
    stands alone.
    """
    groups: list[list[Gpu]] = []
    for gpu in gpus:
        for group in groups:
            if all(node.pair(gpu.index, other.index).relation == "PIX" for other in group):
                group.append(gpu)
                break
        else:
            groups.append([gpu])
    return groups
