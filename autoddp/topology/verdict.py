"""Which transport gradients will take, how fast it is expected to be, why, and what slows it down.

    for verdict in verdicts(node):
        print(verdict.between, verdict.transport, verdict.expected, verdict.why)

The rules are NCCL's own, as its defaults and documentation state them. The figures are ranges of bus bandwidth in GB/s
(decimal, as nccl-tests prints them) that a ring of such links reaches. They are an expectation to compare a measurement
with, not a promise: firmware, IOMMU and other users of the network cannot be seen from here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from autoddp.topology.facts import P2P_REFUSED, UNTOLD, Gpu, GpuPair, Node, fastest
from autoddp.topology.nccl.conf import as_nccl_sees
from autoddp.topology.rdma.ports import RdmaPort
from autoddp.topology.text import some

PCIE_GBS_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one lane in one direction, by PCIe generation, after line coding."""

# Share of the raw rate that an all-reduce reaches: (low, high).
_OF_NVLINK = (0.70, 0.95)
_OF_PCIE_SWITCH = (0.65, 0.85)
_OF_PCIE_HOST = (0.40, 0.70)
_OF_SHM_NEAR = (0.25, 0.45)  # twice through main memory
_OF_SHM_FAR = (0.20, 0.32)  # and once over the sockets' link
_OF_RDMA = (0.80, 0.97)
_OF_RDMA_BY_HOST = (0.40, 0.70)  # through main memory on both sides
_OF_SOCKET = (0.50, 0.95)

_NVLINK_GBS = {1: 20, 2: 25, 3: 25, 4: 25, 5: 50}
"""GB/s of one link in one direction, by NVLink's version (NVIDIA's whitepapers of each architecture)."""
_NVLINK_OF = {
    1: re.compile(r"\bP100\b"),
    2: re.compile(r"\bV100"),
    3: re.compile(r"\bA(30|40|100|800|4500|5000|5500|6000)\b|\bRTX 30\d\d"),
    4: re.compile(r"\bG?H(20|100|200|800)\b"),
    5: re.compile(r"\bG?B[123]00\b"),
}
"""NVLink's version by the name of the GPU. A name that is not here is of no known version."""
_USUAL_NVLINK_GBS = 25
_BRIDGED = re.compile(r"\bA(40|4500|5000|5500|6000)\b|\bRTX 30\d\d")
_BRIDGED_GBS = 14.0625
"""GB/s of a link of these, whose version is 3 all the same: 56.25 GB/s over the four links of a bridge."""

_LEVELS = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")
"""Values of NCCL_P2P_LEVEL, nearest first. What nvidia-smi calls NODE is PHB to NCCL: its CPUs are NUMA nodes."""
_OLD_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")
"""What the numbers from 0 on stand for, which NCCL still takes; a higher one is as the last."""
_BELOW_ONE_CPU = ("GenuineIntel", "ARM", "CentaurHauls", "Shanghai")
_NEARER_SINCE = (2, 23, 4)
"""NCCL's version from which on PXB is the default on every CPU, except for two GPUs on AMD's (src/graph/paths.cc)."""
_GEFORCE = re.compile(r"\bGeForce\b")
_NO_GPUDIRECT = "no GPUDirect: load nvidia_peermem, or use the open kernel module for dma-buf"
_OF_PLUGINS = "unspecified"  # transport of EFA's ports, which NCCL's own InfiniBand code passes over
_SWITCHES_OFF = "NCCL_IB_DISABLE"
_FLAPS = 2  # times that a link is lost before it counts: one may be a switch that was restarted

_CROSSING = {
    "PIX": "share a PCIe switch",
    "PXB": "are several PCIe switches apart",
    "PHB": "meet at a CPU's host bridge",
    "NODE": "hang on different host bridges of one NUMA node",
    "SYS": "cross the sockets",
}


@dataclass(frozen=True)
class Verdict:
    """The expectation for one connection: two GPUs of this node, or this node and another like it."""

    between: str
    """`GPU0-GPU4`, or `nodes`."""
    transport: str
    """P2P/NVLink, P2P/xGMI, P2P/PCIe, SHM, NET/IB/GDRDMA, NET/IB, NET/Socket, Gloo/TCP; two with `or`; or empty."""
    low: float | None
    high: float | None
    """Expected bus bandwidth, GB/s; None if a rate is not known."""
    why: str
    holds_back: str = ""
    ports: int = 1
    """Ports that carry this together, where the ranks of a node use all of them."""

    @property
    def expected(self) -> str:
        """The range of bus bandwidth in words."""
        if self.low is None or self.high is None:
            return "no expectation: a rate is not known"
        return f"expected {self.low:.3g}-{self.high:.3g} GB/s"


def verdicts(node: Node, environment: Mapping[str, str] | None = None) -> tuple[Verdict, ...]:
    """One for each pair of GPUs, then one for the connection to another node like this one.

    `environment`: NCCL's variables; None for those of this process and of NCCL's files.
    """
    environment = as_nccl_sees(os.environ) if environment is None else environment
    pairs = (node.pair(a.index, b.index) for a, b in combinations(node.gpus, 2))
    return (*(between_gpus(node, pair, environment) for pair in pairs), between_nodes(node, environment))


def between_gpus(node: Node, pair: GpuPair, environment: Mapping[str, str]) -> Verdict:
    """The transport that NCCL takes between two GPUs of this node."""
    name = f"GPU{pair.a}-GPU{pair.b}"
    gpus = [gpu for gpu in node.gpus if gpu.index in (pair.a, pair.b)]
    if any(gpu.mig for gpu in gpus):
        back = "MIG is on: switch it off to train"
        return Verdict(name, "SHM", None, None, "MIG instances have no peer access", back)
    switched_off = environment.get("NCCL_P2P_DISABLE") == "1"
    if pair.nvlinks and not switched_off and pair.p2p in ("", "OK"):
        return _by_nvlink(name, pair, gpus)
    if pair.xgmi and not switched_off:
        return Verdict(name, "P2P/xGMI", None, None, "xGMI joins them, AMD's link between GPUs; its rate is not told")
    refused = "NCCL_P2P_DISABLE=1 is set" if switched_off else P2P_REFUSED.get(pair.p2p, "")
    if pair.relation is None:
        not_known = "how they are joined is not known"
        return Verdict(name, "SHM" if refused else "", None, None, f"{refused}; {not_known}" if refused else not_known)
    if not refused and not pair.p2p and any(_GEFORCE.search(gpu.name) for gpu in gpus):
        refused = "NVIDIA's driver gives GeForce cards no peer access over PCIe"
    raw = _pcie_gbs(gpus)
    crossing = f"they {_CROSSING[pair.relation]}"
    levels = _peer_levels(node, environment)
    reach = _LEVELS.index("PHB" if pair.relation == "NODE" else pair.relation)
    reached = {when: reach <= _LEVELS.index(level) for when, level in levels.items()}
    if not refused and all(reached.values()):
        share = _OF_PCIE_SWITCH if pair.relation in ("PIX", "PXB") else _OF_PCIE_HOST
        return Verdict(name, "P2P/PCIe", *_range(raw, share), crossing, _slow_slot(gpus))
    if not refused and any(reached.values()):
        unknown = "NCCL's version" if node.cpu.vendor else "the CPU's vendor"
        cases = " or ".join(when for when, works in reached.items() if works)
        return Verdict(
            name, "P2P/PCIe or SHM", None, None, f"{unknown} is not known: P2P {cases}, else SHM; {crossing}"
        )
    share = _OF_SHM_FAR if pair.relation == "SYS" else _OF_SHM_NEAR
    if refused:
        return Verdict(name, "SHM", *_range(raw, share), f"{refused}; {crossing}")
    level = max(levels.values(), key=_LEVELS.index)
    farther = "NCCL_P2P_LEVEL=SYS allows it" if pair.p2p == "OK" else ""
    return Verdict(name, "SHM", *_range(raw, share), f"{crossing}; NCCL's peer access ends at {level} here", farther)


def _by_nvlink(name: str, pair: GpuPair, gpus: list[Gpu]) -> Verdict:
    links = f"{pair.nvlinks} NVLink{'s' if pair.nvlinks > 1 else ''}"
    if pair.nvlink_gbs is not None:
        raw, rate = pair.nvlink_gbs, f"{pair.nvlink_gbs:.4g} GB/s each way"
    else:
        of_names = {version for version, names in _NVLINK_OF.items() for gpu in gpus if names.search(gpu.name)}
        versions = {pair.nvlink_version} if pair.nvlink_version in _NVLINK_GBS else of_names
        each: float = min((_NVLINK_GBS[version] for version in versions if version), default=_USUAL_NVLINK_GBS)
        each = min(each, _BRIDGED_GBS) if any(_BRIDGED.search(gpu.name) for gpu in gpus) else each
        raw, rate = float(pair.nvlinks * each), f"at {each:g} GB/s a link"
        rate += "" if versions else ", which is assumed: NVLink 5 has 50"
    return Verdict(name, "P2P/NVLink", *_range(raw, _OF_NVLINK), f"{links}, {rate}")


def _range(raw: float | None, share: tuple[float, float]) -> tuple[float | None, float | None]:
    return (None, None) if raw is None else (raw * share[0], raw * share[1])


def _peer_levels(node: Node, environment: Mapping[str, str]) -> dict[str, str]:
    """How far apart two GPUs may be for NCCL to let one write to the other's memory.

    A value of `_LEVELS` for each case that cannot be ruled out: when the CPU, or NCCL's version, is not known.
    """
    asked = environment.get("NCCL_P2P_LEVEL", "")  # of "sys" NCCL takes no notice
    if asked.isdecimal():
        asked = _OLD_LEVELS[min(int(asked[:2]), len(_OLD_LEVELS) - 1)]
    if asked in _LEVELS:
        return {"": asked}
    vendor, version = node.cpu.vendor, node.versions.get("nccl", "")
    numbers = tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdecimal())
    on_amd = "SYS" if len(node.gpus) <= 2 else "PXB"
    old = {"on Intel and ARM": "PXB", "on others than Intel and ARM": "SYS"}
    new = {"on AMD": on_amd, "on others than AMD": "PXB"}
    if vendor:
        old = {"": "PXB" if vendor in _BELOW_ONE_CPU else "SYS"}
        new = {"": on_amd if vendor == "AuthenticAMD" else "PXB"}
    if numbers:
        return new if numbers >= _NEARER_SINCE else old
    if set(old.values()) == set(new.values()) and len(set(old.values())) == 1:
        return old
    since = ".".join(map(str, _NEARER_SINCE))
    eras = {f"with NCCL before {since}": old, f"from {since} on": new}
    return {f"{when} {era}".strip(): level for era, cases in eras.items() for when, level in cases.items()}


def _pcie_gbs(gpus: list[Gpu]) -> float | None:
    """Raw GB/s, one direction, of the lesser of two slots. An idle GPU slows its link down: its best counts."""
    lanes = [PCIE_GBS_PER_LANE.get(gpu.pcie_generation_max or gpu.pcie_generation or 0) for gpu in gpus]
    widths = [gpu.pcie_width or gpu.pcie_width_max for gpu in gpus]
    known = [lane * width for lane, width in zip(lanes, widths, strict=True) if lane and width]
    return min(known, default=None) if len(known) == len(gpus) else None


def _slow_slot(gpus: list[Gpu]) -> str:
    for gpu in gpus:
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
            return (
                f"GPU{gpu.index} runs on {gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes: look at its slot or riser"
            )
    return ""


def between_nodes(node: Node, environment: Mapping[str, str] | None = None) -> Verdict:
    """The connection to another node like this one, over all active RDMA ports together."""
    ports = [port for port in node.rdma if port.active and port.transport != _OF_PLUGINS]
    # Plugins do not go by this variable, nor does Gloo.
    switched_off = bool(node.gpus and ports) and (environment or {}).get(_SWITCHES_OFF, "").strip() not in ("", "0")
    if switched_off:
        ports = []
    elif why := _not_told(node, ports):
        return Verdict("nodes", "", None, None, why)
    if ports and (node.gpus or not node.nics):
        return _by_rdma(node, ports)
    idle = "an RDMA device is there and not active" if any(port.active is False for port in node.rdma) else ""
    idle = f"{_SWITCHES_OFF} is set: without it NCCL takes the RDMA ports" if switched_off else idle
    if not node.nics and not idle:
        return Verdict("nodes", "", None, None, "what joins nodes is not known")
    transport = "NET/Socket" if node.gpus else "Gloo/TCP" if _tells_of_gpus(node) else "NET/Socket or Gloo/TCP"
    up = [nic for nic in node.nics if nic.up]
    if not up:
        return Verdict("nodes", transport if node.nics else "", None, None, "no interface is up", idle)
    best = fastest([nic for nic in up if nic.kind == "physical"] or up)
    raw = None if best.speed_mbit is None else best.speed_mbit / 8e3
    speed = "of unknown speed" if best.speed_mbit is None else f"of {best.speed_mbit / 1e3:g} Gbit/s"
    why = f"TCP over {best.name} {speed}" + ("" if node.rdma else "; no RDMA device")
    return Verdict("nodes", transport, *_range(raw, _OF_SOCKET), why, idle)


def _tells_of_gpus(node: Node) -> bool:
    """Whether GPUs would be known. A node of another machine's files has no name, and a copy of /sys tells of none."""
    return bool(node.gpus or (node.host and UNTOLD not in node.unknown))


def _not_told(node: Node, ports: list[RdmaPort]) -> str:
    """Why it cannot be said what joins nodes; "" where it can. `ports`: active ones that NCCL takes by itself."""
    unsure = [port.device for port in node.rdma if port.active is None]
    others = [port.device for port in node.rdma if port.active]
    if ports:
        if node.nics and not _tells_of_gpus(node):
            return f"GPUs take RDMA over {some(others)}, CPUs TCP; nothing tells of GPUs: see --topo-matrix"
        return ""
    if node.gpus and others:
        return f"NCCL takes {some(others)} by a plugin only (AWS: aws-ofi-nccl), else TCP, and nothing tells of one"
    if node.gpus and node.nics and unsure:
        return f"NCCL takes {some(unsure)} if active, else TCP, and nothing tells whether they are: --ibv-devinfo"
    return ""


def _by_rdma(node: Node, ports: list[RdmaPort]) -> Verdict:
    layers = {port.link_layer for port in ports}
    fabric = "InfiniBand" if "InfiniBand" in layers else "RoCE" if "Ethernet" in layers else "RDMA"
    rates = [port.rate_gbps for port in ports if port.rate_gbps is not None]
    raw = sum(rates) / 8 if len(rates) == len(ports) else None
    direct = node.gpudirect is not None
    why = f"{fabric} over {', '.join(port.device for port in ports)}"
    why += f", GPUDirect by {node.gpudirect}" if direct else ""
    flaps = [*map(_flapping, ports)]
    if not direct and "gpudirect" in node.unknown:
        why += "; whether NICs read a GPU's memory by themselves is not known"
        either = _OF_RDMA_BY_HOST[0], _OF_RDMA[1]
        back = "; ".join(filter(None, flaps))
        return Verdict("nodes", "NET/IB/GDRDMA or NET/IB", *_range(raw, either), why, back, len(ports))
    back = "; ".join(filter(None, ["" if direct else _NO_GPUDIRECT, *flaps]))
    transport, share = ("NET/IB/GDRDMA", _OF_RDMA) if direct else ("NET/IB", _OF_RDMA_BY_HOST)
    return Verdict("nodes", transport, *_range(raw, share), why, back, len(ports))


def _flapping(port: RdmaPort) -> str:
    """Advice for a port that keeps losing its link. With NCCL's defaults (20 and 7) a job waits only seconds for it."""
    if (port.link_downed or 0) < _FLAPS:
        return ""
    return (
        f"{port.device} has lost its link {port.link_downed} times: look at its cable; meanwhile "
        "NCCL_IB_TIMEOUT=22 and NCCL_IB_RETRY_CNT=7 let a job wait longer for it"
    )
