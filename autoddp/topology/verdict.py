"""Which way the gradients will go, how fast that is, why, and what holds it back.

    for verdict in verdicts(node):
        print(verdict.between, verdict.transport, verdict.expected, verdict.why)

The rules are NCCL's own, as its defaults and documentation state them; the figures are bus bandwidths in GB/s (decimal,
as nccl-tests prints them) that a ring of such links reaches, as a range. They are an expectation to hold a measurement
against, not a promise: a machine's firmware, IOMMU and neighbours are not seen from here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from autoddp.topology.facts import P2P_REFUSED, RELATIONS, GpuPair, Node, Relation
from autoddp.topology.rdma import RdmaPort

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

_USUAL_NVLINK_GBS = 25  # one way, from V100 to H100; taken where only the number of links is known

_NO_GPUDIRECT = "no GPUDirect: load nvidia_peermem, or use the open kernel module for dma-buf"
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
    """About one way: two GPUs of this node, or this node and another like it."""

    between: str
    """`GPU0-GPU4`, or `nodes`."""
    transport: str
    """P2P/NVLink, P2P/PCIe, SHM, NET/IB/GDRDMA, NET/IB, NET/Socket, Gloo/TCP; empty if it cannot be told."""
    low: float | None
    high: float | None
    """Expected bus bandwidth, GB/s; None if a rate is not known."""
    why: str
    holds_back: str = ""

    @property
    def expected(self) -> str:
        """For people."""
        if self.low is None or self.high is None:
            return "no expectation: a rate is not known"
        return f"expected {self.low:.3g}-{self.high:.3g} GB/s"


def verdicts(node: Node, environment: Mapping[str, str] = os.environ) -> tuple[Verdict, ...]:
    """One for each pair of GPUs, then one for the way to another node like this one."""
    numbers = [gpu.index for gpu in node.gpus]
    pairs = [node.pair(a, b) for i, a in enumerate(numbers) for b in numbers[i + 1 :]]
    return (*(between_gpus(node, pair, environment) for pair in pairs), between_nodes(node))


def between_gpus(node: Node, pair: GpuPair, environment: Mapping[str, str] = os.environ) -> Verdict:
    """The way NCCL takes between two GPUs of this node."""
    name = f"GPU{pair.a}-GPU{pair.b}"
    if any(gpu.mig for gpu in node.gpus if gpu.index in (pair.a, pair.b)):
        return Verdict(
            name, "SHM", None, None, "MIG instances have no peer access", "MIG is on: switch it off to train"
        )
    switched_off = environment.get("NCCL_P2P_DISABLE") == "1"
    if pair.nvlinks and not switched_off and pair.p2p in ("", "OK"):
        return _by_nvlink(name, pair)
    if pair.relation is None:
        return Verdict(name, "", None, None, "how they are joined is not known")
    refused = "NCCL_P2P_DISABLE=1 is set" if switched_off else P2P_REFUSED.get(pair.p2p, "")
    raw = _pcie_gbs(node, pair)
    crossing = f"they {_CROSSING[pair.relation]}"
    level = _peer_level(node, environment)
    if not refused and RELATIONS.index(pair.relation) <= RELATIONS.index(level):
        share = _OF_PCIE_SWITCH if pair.relation in ("PIX", "PXB") else _OF_PCIE_HOST
        return Verdict(name, "P2P/PCIe", *_range(raw, share), crossing, _slow_slot(node, pair))
    far = pair.relation == "SYS"
    because = refused or f"NCCL's peer access on this CPU ends at {level}"
    better = "NVLink machines of this class give 200 GB/s and more"
    return Verdict(name, "SHM", *_range(raw, _OF_SHM_FAR if far else _OF_SHM_NEAR), f"{crossing}; {because}", better)


def _by_nvlink(name: str, pair: GpuPair) -> Verdict:
    links = f"{pair.nvlinks} NVLink{'s' if pair.nvlinks > 1 else ''}"
    if pair.nvlink_gbs is not None:
        why = f"{links}, {pair.nvlink_gbs:.4g} GB/s each way"
        return Verdict(name, "P2P/NVLink", *_range(pair.nvlink_gbs, _OF_NVLINK), why)
    usual = pair.nvlinks * _USUAL_NVLINK_GBS
    return Verdict(name, "P2P/NVLink", *_range(usual, _OF_NVLINK), f"{links}, at {_USUAL_NVLINK_GBS} GB/s a link")


def _range(raw: float | None, share: tuple[float, float]) -> tuple[float | None, float | None]:
    return (None, None) if raw is None else (raw * share[0], raw * share[1])


def _peer_level(node: Node, environment: Mapping[str, str]) -> Relation:
    """How far apart two GPUs may be for NCCL to let one write to the other: anywhere on AMD, else below one CPU."""
    asked = environment.get("NCCL_P2P_LEVEL", "").upper()
    if asked in RELATIONS:
        return next(level for level in RELATIONS if level == asked)
    return "SYS" if node.cpu.vendor == "AuthenticAMD" else "PXB"


def _pcie_gbs(node: Node, pair: GpuPair) -> float | None:
    """Raw GB/s, one direction, of the lesser of two slots. An idle GPU slows its link down: its best counts."""
    rates = []
    for gpu in node.gpus:
        if gpu.index in (pair.a, pair.b):
            lane = PCIE_GBS_PER_LANE.get(gpu.pcie_generation_max or gpu.pcie_generation or 0)
            width = gpu.pcie_width or gpu.pcie_width_max
            if lane is None or width is None:
                return None
            rates.append(lane * width)
    return min(rates, default=None)


def _slow_slot(node: Node, pair: GpuPair) -> str:
    for gpu in node.gpus:
        now, most = gpu.pcie_width, gpu.pcie_width_max
        if gpu.index in (pair.a, pair.b) and now and most and now < most:
            return f"GPU{gpu.index} runs on {now} of {most} PCIe lanes: look at its slot or riser"
    return ""


def between_nodes(node: Node) -> Verdict:
    """The way to another node like this one; all active rails together."""
    ports = [port for port in node.rdma if port.active]
    if ports and (node.gpus or not node.nics):
        return _by_rdma(node, ports)
    transport = "NET/Socket" if node.gpus else "Gloo/TCP"
    usable = [nic for nic in node.nics if nic.up and nic.kind == "physical"] or [nic for nic in node.nics if nic.up]
    if not node.nics and not any(port.active is False for port in node.rdma):
        return Verdict("nodes", "", None, None, "what joins nodes is not known")
    idle = "an RDMA device is there and not active" if any(port.active is False for port in node.rdma) else ""
    if not usable:
        return Verdict("nodes", transport if node.nics else "", None, None, "no interface is up", idle)
    best = max(usable, key=lambda nic: (bool(nic.routed), nic.speed_mbit or 0))
    raw = None if best.speed_mbit is None else best.speed_mbit / 8e3
    speed = "of unknown speed" if best.speed_mbit is None else f"of {best.speed_mbit / 1e3:g} Gbit/s"
    why = f"TCP over {best.name} {speed}" + ("" if node.rdma else "; no RDMA device")
    return Verdict("nodes", transport, *_range(raw, _OF_SOCKET), why, idle)


def _by_rdma(node: Node, ports: list[RdmaPort]) -> Verdict:
    fabric = "InfiniBand" if any(port.link_layer == "InfiniBand" for port in ports) else "RoCE"
    rates = [port.rate_gbps for port in ports]
    known = [rate for rate in rates if rate is not None]
    raw = sum(known) / 8 if len(known) == len(rates) else None
    names = ", ".join(port.device for port in ports)
    direct = node.gpudirect is not None
    why = f"{fabric} over {names}" + (f", GPUDirect by {node.gpudirect}" if direct else "")
    back = "; ".join(filter(None, ["" if direct else _NO_GPUDIRECT, *map(_flapping, ports)]))
    transport = "NET/IB/GDRDMA" if direct else "NET/IB"
    return Verdict("nodes", transport, *_range(raw, _OF_RDMA if direct else _OF_RDMA_BY_HOST), why, back)


def _flapping(port: RdmaPort) -> str:
    """What lets a job outlast a link that comes and goes: NCCL's own patience (20, 7) is some seconds."""
    if (port.link_downed or 0) < _FLAPS:
        return ""
    return (
        f"{port.device} has lost its link {port.link_downed} times: look at its cable; meanwhile "
        "NCCL_IB_TIMEOUT=22 and NCCL_IB_RETRY_CNT=7 let a job wait longer for it"
    )
