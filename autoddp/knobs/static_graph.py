"""What DDP may assume about the autograd graph."""

from autoddp.knobs.base import Knob, boolean, exact

STATIC_GRAPH = Knob(
    name="static_graph",
    says="DDP assumes the same graph in every step; offered only where the tuning job saw that it holds",
    check=boolean,
    rung_of=exact,
    ddp_argument=True,
)
