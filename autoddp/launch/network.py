"""This node's way to the other nodes, as the launchers found it; see `choosing`. Light: every launch imports it."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoddp.topology.naming import GLOO, NCCL

_LIKE = 0.1  # of the fastest; it takes half to gain, but the rate is roughly measured, and a benchmark judges
VARIABLES = (GLOO, NCCL)


@dataclass(frozen=True)
class Network:
    """This node's way to the others. `interface` is "" where there was nothing to choose."""

    interface: str = ""
    address: str = ""
    """By which the others reach this node; "" where nobody has tried."""
    says: str = ""
    """What was chosen and why, for people."""
    rates: dict[str, float] = field(default_factory=dict)
    """Interface → Gbit/s, of those that all others reach."""
    rdma: dict[str, str] = field(default_factory=dict)
    """What NCCL is told about RDMA: variable → value."""
    told: tuple[str, ...] = ()
    """The variables by which the workers are told `interface`."""

    def has(self, interfaces: str) -> bool:
        """Whether all of these, with commas between them, reach all hosts; True where nothing was measured."""
        return not self.rates or set(interfaces.split(",")) <= set(self.rates)

    @property
    def together(self) -> str:
        """Interfaces, with commas, that are worth using at once: all that reach all hosts at a like rate."""
        best = max(self.rates.values(), default=0.0)
        like = sorted(name for name, rate in self.rates.items() if rate >= _LIKE * best)
        return ",".join(like) if len(like) > 1 else ""

    @property
    def variables(self) -> dict[str, str]:
        """For the workers alone."""
        return dict.fromkeys(self.told, self.interface) | self.rdma
