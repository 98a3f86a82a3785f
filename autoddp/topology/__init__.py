"""What the gradients travel over: frozen facts about this node, each with its source, and what to expect of them."""

from autoddp.topology.facts import Cpu, Gpu, GpuPair, Limits, Nic, Node, NumaNode, switches
from autoddp.topology.fingerprint import Fingerprint, fingerprint
from autoddp.topology.interfaces import interfaces
from autoddp.topology.rdma import RdmaPort
from autoddp.topology.system import cpus, numa_nodes
from autoddp.topology.verdict import Verdict, verdicts

__all__ = [
    "Cpu",
    "Fingerprint",
    "Gpu",
    "GpuPair",
    "Limits",
    "Nic",
    "Node",
    "NumaNode",
    "RdmaPort",
    "Verdict",
    "cpus",
    "fingerprint",
    "interfaces",
    "numa_nodes",
    "switches",
    "verdicts",
]
