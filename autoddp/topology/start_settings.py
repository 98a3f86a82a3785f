"""Start-up settings of NCCL that this topology gives a reason to try; nothing is offered without one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autoddp.topology.facts import Node
from autoddp.topology.verdict import Verdict, between_nodes, verdicts

_FAST_ETHERNET = 20_000  # Mbit/s; below, one socket thread keeps up
_NVLINKS_OF_A_SWITCH = 12  # per GPU: from there on (A100, H100) all of them go to NVLink switches
_VERSION_WITH_NVLS = 4  # of NVLink, as the H100 has it
_ALGORITHM_OF_EACH = (2, 24)
"""From this NCCL on a collective that does not have the one algorithm named ends the job, as Broadcast has no trees."""
TREES = "ring,tree;allreduce:tree"
"""Trees for the all-reduces alone, as that NCCL has it."""
_MANY_CHANNELS, _FEW_CHANNELS = 16, 8
"""More channels carry more, and each takes a multiprocessor from the backward pass: one candidate for either side."""
_SOCKET_THREADS = _SOCKETS_PER_THREAD = 4  # what NCCL's documentation advises for networks of 100 Gbit/s
_LARGE_BUFFER = 8 * 2**20  # bytes; twice NCCL's own
_OTHER_CLASS = 0.5  # of the fastest port's rate: a slower one serves storage or logins

Offer = tuple[dict[str, Any], tuple[str, ...]]
"""A setting of `knobs.env`, and the variables of which any, set already, pins it."""


def nccl_settings(
    node: Node, nodes: int, environment: Mapping[str, str], nccl: tuple[int, ...] = (), tuner: str = ""
) -> list[dict[str, Any]]:
    """Values for the start knobs of `knobs.env`, one dict for each setting, the most promising first.

    `nccl` is its version. `tuner`: the plugin by which the cloud chooses algorithms itself, as `nccl_tuner` gives it.
    """
    ways = verdicts(node, environment)
    offers = list(_within(node, ways))
    if nodes > 1:
        offers += _between(node)
        offers += () if tuner else _choices(nccl)  # a plugin takes them for an error, or is overruled
        offers.append(({"nccl_buffer_bytes": _LARGE_BUFFER}, ("NCCL_BUFFSIZE",)))
    return [setting for setting, variables in offers if not set(variables) & set(environment)]


def _within(node: Node, ways: tuple[Verdict, ...]) -> Iterator[Offer]:
    peers = ("NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE")
    by_memory = any(way.transport == "SHM" for way in ways)
    able = all(pair.p2p == "OK" for pair in node.pairs)
    if by_memory and able:  # peer access works there, only NCCL's caution keeps it off
        yield {"nccl_p2p_level": "SYS"}, peers
    over_cpu = {(p.a, p.b) for p in node.pairs if p.relation in ("PHB", "NODE", "SYS") and not p.nvlinks}
    if any(way.transport == "P2P/PCIe" and _pair(way) in over_cpu for way in ways):
        # An IOMMU, or access control in the bridges, can make that slower than memory.
        yield {"nccl_p2p_disable": "1"}, peers
    links = [pair.nvlinks for pair in node.pairs]
    if any(links):
        yield {"nccl_min_channels": _MANY_CHANNELS}, ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS")
        yield {"nccl_max_channels": _FEW_CHANNELS}, ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")
    versions = [pair.nvlink_version or 0 for pair in node.pairs]
    if links and min(links) >= _NVLINKS_OF_A_SWITCH and min(versions) >= _VERSION_WITH_NVLS:
        yield {"nccl_nvls": "0"}, ("NCCL_NVLS_ENABLE", "NCCL_ALGO")


def _between(node: Node) -> Iterator[Offer]:
    way = between_nodes(node)
    fast = any((nic.speed_mbit or 0) >= _FAST_ETHERNET for nic in node.nics if nic.up)
    if way.transport == "NET/Socket" and fast:
        yield (
            {"nccl_socket_threads": _SOCKET_THREADS, "nccl_sockets_per_thread": _SOCKETS_PER_THREAD},
            ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"),
        )
    near = _near_devices(node)
    if near:
        yield {"nccl_ib_hca": "=" + ",".join(near)}, ("NCCL_IB_HCA",)
    if way.transport == "NET/IB/GDRDMA" and not any(pair.nvlinks for pair in node.pairs):
        # By itself NCCL lets a NIC read a GPU's memory only below one host bridge.
        yield {"nccl_gdr_level": "SYS"}, ("NCCL_NET_GDR_LEVEL",)


def _choices(nccl: tuple[int, ...]) -> Iterator[Offer]:
    """Which is best follows from NCCL's idea of the network's latency, and it cannot know every network."""
    yield {"nccl_algo": TREES if nccl >= _ALGORITHM_OF_EACH else "Tree"}, ("NCCL_ALGO",)
    yield {"nccl_algo": "Ring"}, ("NCCL_ALGO",)
    yield {"nccl_proto": "Simple"}, ("NCCL_PROTO",)


def _pair(way: Verdict) -> tuple[int, int]:
    a, _, b = way.between.replace("GPU", "").partition("-")
    return (int(a), int(b)) if b else (-1, -1)


def _near_devices(node: Node) -> list[str]:
    """RDMA devices of the fast class on the GPUs' NUMA nodes; empty where that is all of them, or none."""
    active = [port for port in node.rdma if port.active]
    best = max((port.rate_gbps or 0.0 for port in active), default=0.0)
    homes = {gpu.numa for gpu in node.gpus}
    near = [
        port.device
        for port in active
        if (port.rate_gbps or 0.0) >= _OTHER_CLASS * best and (port.numa in homes or None in (port.numa, *homes))
    ]
    return list(dict.fromkeys(near)) if len(near) < len(active) else []
