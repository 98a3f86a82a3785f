"""This node's network to the other nodes, as `interface_selection` chose it. Light, because every launch imports it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoddp.topology.nccl.interface_names import GLOO, LOOPBACK, NCCL

_LIKE = 0.1  # of the fastest rate; only half of it gains, but rates are rough here, and a benchmark decides later
VARIABLES = (GLOO, NCCL)


def on_one_host(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for our own jobs on one host, so that no other host can connect to their ranks.

    What Gloo sends to its own host goes over the loopback interface in any case. What the user has set stays.
    """
    return {} if environment.get(GLOO) or sys.platform != "linux" else {GLOO: LOOPBACK}


@dataclass(frozen=True)
class Network:
    """How the others reach this node. `interface` is "" where there was nothing to choose."""

    interface: str = ""
    address: str = ""
    """Address at which the others reach this node; "" where that was not tried."""
    says: str = ""
    """What was chosen and why, for people."""
    rates: dict[str, float] = field(default_factory=dict)
    """Interface → Gbit/s, of those that all others reach."""
    rdma: dict[str, str] = field(default_factory=dict)
    """NCCL's variables for RDMA: name → value."""
    told: tuple[str, ...] = ()
    """The variables that are set to `interface` for the workers."""
    is_named: bool = False
    """Whether the user has named Gloo's interfaces on some host: Gloo wants as many of them on every rank."""
    everywhere: tuple[str, ...] | None = None
    """Names of interfaces by which each host is reached, alike on all; None where that was not tried."""

    def has(self, interfaces: str) -> bool:
        """Whether all of these, with commas between them, reach all hosts; True where nothing was measured."""
        return not self.rates or set(interfaces.split(",")) <= set(self.rates)

    @property
    def together(self) -> str:
        """Interfaces, with commas, that are worth using at once: all that reach all hosts at a similar rate."""
        if self.is_named:
            return ""
        best = max(self.rates.values(), default=0.0)
        like = sorted(name for name, rate in self.rates.items() if rate >= _LIKE * best)
        return ",".join(like) if len(like) > 1 else ""

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for the workers alone. NCCL would take `bond0` for the beginning of `bond0.100` too."""
        return {name: f"={self.interface}" if name == NCCL else self.interface for name in self.told} | self.rdma
