"""Compares what was measured with what the probe expects of the links that were used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoddp.bench.conventions import SMALLEST, busbw
from autoddp.bench.result import BenchResult, Sweep
from autoddp.topology import Verdict
from autoddp.units import data_size

_CAUSES = {
    "P2P/NVLink": "other processes on these GPUs, lowered clocks, or NVLinks that are down (nvidia-smi nvlink -s)",
    "P2P/PCIe": "an IOMMU or ACS that sends peer traffic over the CPU, or other processes on these GPUs",
    "SHM": "memory of another NUMA node: bind ranks to their GPU's node with --numa-binding",
    "NET/IB/GDRDMA": "a NIC far from its GPU, a congested fabric, or a port below its rate (ibstat)",
    "NET/IB": "a NIC far from its GPU, a congested fabric, or a port below its rate (ibstat)",
    "NET/Socket": "another job on the link, a small MTU, or too few sockets (NCCL_NSOCKS_PERTHREAD)",
    "Gloo/TCP": "another job on the link, a link shaped below its NIC's rate, or a small MTU",
}
"""Transport → what is most often behind a rate far below what it can do."""
_TCP = ("Gloo/TCP", "NET/Socket")
_LATENCY = 0.05
"""Share of the largest message's time that the smallest one may take: with more, latency counts beside the rate."""


def judge(result: BenchResult, verdicts: Sequence[Verdict]) -> list[str]:
    """A sentence for each measured layout: what its links should give, by `verdicts` on this node, and whether they do.

    Layouts of whose links no verdict knows a rate are left out.
    """
    if result.facts.backend != "nccl":  # the verdicts between GPUs are NCCL's
        verdicts = [verdict for verdict in verdicts if verdict.transport in _TCP]
    return [line for sweep in result.sweeps if (line := _judged(sweep, verdicts))]


def _judged(sweep: Sweep, verdicts: Sequence[Verdict]) -> str:
    between_nodes = sweep.layout == "between"
    known = [v for v in verdicts if v.low is not None and (v.between == "nodes") == between_nodes]
    if not known or not sweep.points or sweep.layout == "all":
        return ""
    # A ring is as fast as its slowest link.
    slowest = _of_one_rank(min(known, key=lambda verdict: verdict.low or 0.0))
    best = max(busbw(point.bytes, point.seconds, sweep.ranks) for point in sweep.points)
    said = f"{sweep.layout}: {best:.3g} GB/s measured at best, {slowest.expected} ({slowest.transport}, {slowest.why})"
    if best >= (slowest.low or 0.0):
        return f"{said}: as it should be"
    first, largest = sweep.points[0], sweep.points[-1]
    if first.bytes == SMALLEST and first.seconds > _LATENCY * largest.seconds:
        small = f"{data_size(largest.bytes)} is too small to tell, because latency counts there"
        return f"{said}: {small}; measure larger ones by --max-size or --budget"
    likely = "; ".join(filter(None, [slowest.holds_back, _CAUSES.get(slowest.transport, "")]))
    return f"{said}: too slow; look for {likely}"


def _of_one_rank(verdict: Verdict) -> Verdict:
    """What one rank of a node can expect, as in `between`: it has the ports near its GPU, often a single one."""
    if verdict.low is None or verdict.ports == 1:
        return verdict
    why = f"{verdict.why}; one rank alone may use a single one of these"
    return replace(verdict, low=verdict.low / verdict.ports, why=why)
