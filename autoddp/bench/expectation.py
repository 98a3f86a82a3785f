"""Compares what was measured with what the probe expects of the links that were used."""

from __future__ import annotations

from collections.abc import Sequence

from autoddp.bench.conventions import busbw
from autoddp.bench.result import BenchResult, Sweep
from autoddp.topology import Verdict

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
    slowest = min(known, key=lambda verdict: verdict.low or 0.0)  # a ring is as fast as its slowest link
    best = max(busbw(point.bytes, point.seconds, sweep.ranks) for point in sweep.points)
    said = f"{sweep.layout}: {best:.3g} GB/s measured at best, {slowest.expected} ({slowest.transport}, {slowest.why})"
    if best >= (slowest.low or 0.0):
        return f"{said}: as it should be"
    likely = "; ".join(filter(None, [slowest.holds_back, _CAUSES.get(slowest.transport, "")]))
    return f"{said}: too slow; look for {likely}"
