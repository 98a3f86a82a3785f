"""Whether a model's kernels are launched one by one or replayed as CUDA graphs."""

from __future__ import annotations

from autoddp.knobs.base import Knob, exact, one_of
from autoddp.knobs.copies import GRADIENT_AS_BUCKET_VIEW

WHOLE_MODEL, BLOCKS = "model", "blocks"

CUDA_GRAPHS = Knob(
    name="cuda_graphs",
    says='"model" replays it as one CUDA graph, "blocks" its blocks one by one: fewer launches, gradients come later',
    check=one_of(WHOLE_MODEL, BLOCKS),
    rung_of=exact,
    ddp_argument=False,
    # A graph leaves its gradients where its next replay will write: they must be copied out at once.
    needs=(GRADIENT_AS_BUCKET_VIEW.name, True),
)
