"""The timeline of some steps on one rank: when each stage, gradient and bucket began and ended."""

from __future__ import annotations

from autoddp.codec import Struct
from autoddp.timing.arithmetic import HookArithmetic


class Span(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds on the rank's own clock since the timeline began."""

    name: str
    """A name of `anatomy.STAGES`."""
    begin: float
    end: float


class Bucket(Struct, frozen=True, forbid_unknown_fields=True):
    """One reduction: seconds since the timeline began."""

    index: int
    """Position in the order in which DDP launches buckets; 0 is the first of a backward pass."""
    bytes: int
    launched: float
    ended: float


class Gradient(Struct, frozen=True, forbid_unknown_fields=True):
    """One gradient becomes ready."""

    parameter: int
    """Position among the parameters that DDP reduces, over all its models, in DDP's order."""
    ready: float
    """Seconds since the timeline began."""


class Timeline(Struct, frozen=True, forbid_unknown_fields=True):
    """Consecutive steps of one rank."""

    rank: int
    host: str
    began: float
    """Seconds on the clock of the job's rank 0 at the timeline's begin, as far as `error` tells."""
    error: float
    """Seconds by which `began` may be wrong."""
    steps: tuple[float, ...]
    """Ends of the steps, in seconds since the timeline began."""
    spans: tuple[Span, ...]
    """Stages, in their order, without gaps."""
    gradients: tuple[Gradient, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    parameter_bytes: tuple[int, ...] = ()
    """Bytes of the gradients, by `Gradient.parameter`."""
    no_buckets: str = ""
    """Why no buckets were recorded; "" where they were."""
    arithmetic: HookArithmetic | None = None
    """What hooks' arithmetic takes, measured after the steps; None where it could not be."""
