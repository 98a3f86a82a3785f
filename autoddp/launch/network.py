"""This node's way to the other nodes, as the launchers found it; see `choosing`. Light: every launch imports it."""

from __future__ import annotations

from dataclasses import dataclass, field

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Network:
    """This node's way to the others. `interface` is "" where there was nothing to choose."""

    interface: str = ""
    address: str = ""
    says: str = ""
    """What was chosen and why, for people."""
    rates: dict[str, float] = field(default_factory=dict)
    """Interface → Gbit/s, of those that all others reach."""
    rdma: dict[str, str] = field(default_factory=dict)
    """What NCCL is told about RDMA: variable → value."""

    @property
    def variables(self) -> dict[str, str]:
        """For the workers alone."""
        return (dict.fromkeys(VARIABLES, self.interface) if self.interface else {}) | self.rdma
