"""How gradients get into the buckets: copied one by one, in one batch, or living there."""

from autoddp.knobs.base import Knob, boolean, exact

GRADIENT_AS_BUCKET_VIEW = Knob(
    name="gradient_as_bucket_view",
    says="gradients live inside the buckets: no copy, less memory (grad.detach_() becomes an error)",
    check=boolean,
    rung_of=exact,
    ddp_argument=True,
)

BATCHED_GRAD_COPY = Knob(
    name="batched_grad_copy",
    says="one batched copy into each bucket instead of one per parameter",
    check=boolean,
    rung_of=exact,
    ddp_argument=True,
)
