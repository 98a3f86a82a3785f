"""Floor 1. The hardware that gradients travel over: facts about this node, with their sources, and expected speeds."""

from autoddp.topology.facts import Gpu, GpuPair, Nic, Node, NumaNode, switches
from autoddp.topology.fingerprint import Fingerprint, fingerprint
from autoddp.topology.nvidia.nvml import GpuClock, read_gpu_clock
from autoddp.topology.rdma.ports import RdmaPort
from autoddp.topology.system.interfaces import interfaces
from autoddp.topology.system.machine import cpus, free_memory, numa_nodes, own_memory, usable_cores
from autoddp.topology.verdict import Verdict, verdicts

__all__ = [
    "Fingerprint",
    "Gpu",
    "GpuClock",
    "GpuPair",
    "Nic",
    "Node",
    "NumaNode",
    "RdmaPort",
    "Verdict",
    "cpus",
    "fingerprint",
    "free_memory",
    "interfaces",
    "numa_nodes",
    "own_memory",
    "read_gpu_clock",
    "switches",
    "usable_cores",
    "verdicts",
]
