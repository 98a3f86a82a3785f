"""Which CPUs a rank runs on."""

from __future__ import annotations

from autoddp.knobs.base import Knob, exact, one_of

NUMA_BINDING = Knob(
    name="numa_binding",
    says="where a rank's threads run: node keeps them on the NUMA node of its GPU, or on the rank's share of the nodes",
    check=one_of("node"),
    rung_of=exact,
    ddp_argument=False,
)
