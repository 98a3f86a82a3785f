"""Collects everything that can be learned about this node from all sources; see `facts`.

No source is required: it works without a GPU, without NVIDIA's tools, in a container and as an ordinary user.
"""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path

from autoddp.errors import NothingReadable
from autoddp.topology.facts import RELATIONS, UNTOLD, Gpu, GpuPair, Limits, Node, nearest
from autoddp.topology.nvidia.matrix import TopologyMatrix, read_matrix
from autoddp.topology.nvidia.nvml import NvmlFacts, read_nvml
from autoddp.topology.nvidia.smi import SmiFailed, SmiHangs, ask
from autoddp.topology.rdma.ports import RdmaPort
from autoddp.topology.rdma.sysfs import sysfs_rdma
from autoddp.topology.system.interfaces import interfaces
from autoddp.topology.system.machine import cpu, gpudirect, limits, numa_nodes, versions
from autoddp.topology.system.pci import relation

_ROOT = Path("/")


def probe() -> Node:
    """This node. Takes up to ten seconds where nvidia-smi hangs, else well under three."""
    matrix, because = _matrix()
    nvml = NvmlFacts(unknown={"gpus": because}) if isinstance(matrix, SmiHangs) else read_nvml()
    node = replace(
        machine(_ROOT),
        host=socket.gethostname(),
        limits=limits(),
        gpus=nvml.gpus,
        pairs=nvml.pairs,
        unknown=dict(nvml.unknown),
    )
    node.versions.update({**versions(), **nvml.versions})
    node.sources.update({"gpus": "NVML"} if nvml.gpus else {})
    if isinstance(matrix, TopologyMatrix):
        node = _checked(node, matrix)
    elif node.gpus:
        node.unknown["nvidia-smi topo -m"] = because
    return _with_nearness(_with_unknowns(node))


def machine(root: Path) -> Node:
    """What sysfs and /proc below `root` tell: also of a copy of another machine's."""
    ports = sysfs_rdma(root)
    found = {"nics": "sysfs", "numa": "sysfs", "rdma": "sysfs"}
    return Node(
        host="",
        nics=interfaces(root),
        rdma=ports.ports,
        gids=ports.gids,
        numa=numa_nodes(root),
        cpu=cpu(root),
        gpudirect=gpudirect(root),
        sources={name: source for name, source in found.items() if root == _ROOT or name == "rdma"},
        unknown={f"rdma.{number}": text for number, text in enumerate(ports.missing)},
    )


def _matrix() -> tuple[TopologyMatrix | SmiFailed | None, str]:
    """nvidia-smi's matrix, or why there is none."""
    try:
        return read_matrix(ask("topo", "-m")), ""
    except SmiFailed as failure:
        return failure, str(failure)
    except NothingReadable:
        return None, "nvidia-smi topo -m printed no matrix"


def node_of_matrix(matrix: TopologyMatrix) -> Node:
    """A node as far as the matrix tells."""
    gpus = tuple(
        Gpu(number, cpus=matrix.cpu_affinity.get(number, ""), numa=_first_number(matrix.numa_affinity.get(number, "")))
        for number in matrix.gpus
    )
    pairs = tuple(
        _pair(int(a), int(b), word) for name, word in matrix.links.items() for a, b in [name.split("-", maxsplit=1)]
    )
    near, numa = _near_by_matrix(matrix), {gpu.index: gpu.numa for gpu in gpus}
    amd = bool({"XGMI", "PCIE"} & {*matrix.links.values()})
    # A NIC stands with the GPUs nearest to it, if these stand together.
    beside = {name: {numa.get(gpu) for gpu in gpus_near} for name, gpus_near in near.items()}
    ports = tuple(
        RdmaPort(name, 1, numa=next(iter(beside[name])) if len(beside.get(name, ())) == 1 else None)
        for name in matrix.nic_names or ()
    )
    return Node(
        host="",
        gpus=gpus,
        pairs=pairs,
        rdma=ports,
        near=near,
        sources={"gpus": "rocm-smi --showtopo" if amd else "nvidia-smi topo -m"},
        unknown={f"matrix.{number}": text for number, text in enumerate(matrix.missing)},
    )


def _near_by_matrix(matrix: TopologyMatrix) -> dict[str, tuple[int, ...]]:
    """RDMA device → the GPUs nearest to it, where the legend names the devices."""
    near = {}
    for number, name in enumerate(matrix.nic_names or ()):
        words = {gpu: cells.get(f"NIC{number}", cells.get(name)) for gpu, cells in matrix.nic_links.items()}
        if gpus := nearest(words):
            near[name] = gpus
    return near


def _pair(a: int, b: int, word: str) -> GpuPair:
    if word.startswith("NV"):
        return GpuPair(a, b, nvlinks=int(word[2:]))
    word = "SYS" if word == "SOC" else word  # as drivers before 2017 call it
    return GpuPair(a, b, next((known for known in RELATIONS if known == word), None), xgmi=word == "XGMI")


def _first_number(text: str) -> int | None:
    """The number at the beginning: 0 for `0-1` and `0,2`; None for `N/A`."""
    head = re.match("[0-9]+", text)
    return int(head[0]) if head else None


def _checked(node: Node, matrix: TopologyMatrix) -> Node:
    """Adds what NVML did not tell from nvidia-smi's matrix, and notes where the two contradict each other."""
    second = node_of_matrix(matrix)
    if not node.gpus:
        return replace(node, gpus=second.gpus, pairs=second.pairs, sources={**node.sources, **second.sources})
    pairs = []
    for pair in node.pairs:
        other = second.pair(pair.a, pair.b)
        said, seen = (f"NV{p.nvlinks}" if p.nvlinks else p.relation for p in (pair, other))
        if said is None and seen is not None:
            pair = replace(pair, relation=other.relation, nvlinks=other.nvlinks)
        elif seen is not None and said != seen:
            node.unknown[f"GPU{pair.a}-GPU{pair.b}"] = f"NVML says {said} and nvidia-smi topo -m {seen}"
        pairs.append(pair)
    return replace(node, pairs=tuple(pairs), sources={**node.sources, "pairs": "NVML, checked by nvidia-smi topo -m"})


def _with_nearness(node: Node) -> Node:
    devices = {nic.name: nic.bus for nic in node.nics} | {port.device: port.bus for port in node.rdma}
    near = {
        name: nearest({gpu.index: relation(bus, gpu.bus) for gpu in node.gpus if gpu.bus})
        for name, bus in devices.items()
        if bus
    }
    return replace(node, near={name: gpus for name, gpus in near.items() if gpus})


def _untold_gpus(root: Path) -> str:
    """Why GPUs are not known although a device file shows that they are there; "" where none does."""
    if (root / "dev/kfd").exists():
        return "/dev/kfd is AMD's: nothing here asks its driver, see --topo-matrix"
    if any((root / "dev").glob("nvidia[0-9]*")):
        return "/dev/nvidia0 or another is there, and NVIDIA's driver does not answer"
    return ""


def _with_unknowns(node: Node) -> Node:
    """Notes which facts are not known, and why."""
    unknown = dict(node.unknown)
    if not node.gpus and (untold := _untold_gpus(_ROOT)):
        unknown[UNTOLD] = untold
    if not node.rdma:
        unknown.setdefault("rdma", "/sys/class/infiniband names no device")
    for nic in node.nics:
        if nic.up and nic.speed_mbit is None:
            unknown[f"nics.{nic.name}.speed_mbit"] = f"its driver ({nic.driver or 'none'}) tells no speed"
    if node.limits == Limits():
        unknown["limits"] = "the operating system told none"
    if "nccl" not in node.versions and node.gpus:
        unknown["versions.nccl"] = "no nvidia-nccl package is installed beside torch"
    return replace(node, unknown=unknown)
