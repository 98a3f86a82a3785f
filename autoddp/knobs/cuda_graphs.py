"""Whether a model's kernels are launched one by one or replayed as CUDA graphs."""

from __future__ import annotations

from autoddp.knobs.base import Knob, exact, one_of
from autoddp.knobs.copies import GRADIENT_AS_BUCKET_VIEW

WHOLE_MODEL, BLOCKS = "model", "blocks"
REDUCE_OVERHEAD = "reduce-overhead"
"""For models that torch.compile has compiled: its own graphs, as its mode of that name makes them."""

CUDA_GRAPHS = Knob(
    name="cuda_graphs",
    says='replay kernels: "model" as one graph, "blocks" block by block, "reduce-overhead" what torch.compile has made',
    check=one_of(WHOLE_MODEL, BLOCKS, REDUCE_OVERHEAD),
    rung_of=exact,
    ddp_argument=False,
    # A graph leaves its gradients where its next replay will write: they must be copied out at once.
    needs=(GRADIENT_AS_BUCKET_VIEW.name, True),
)
