"""The numbers of the model of a step that differ from machine to machine."""

from __future__ import annotations

from autoddp.codec import Struct, field


class Coefficients(Struct, frozen=True, forbid_unknown_fields=True):
    """What a machine takes for what. The defaults are guesses; a study replaces them by what it has measured."""

    latency: float = 1.0
    """Times the latency of the model of the link."""
    per_byte: float = 1.0
    """Times the seconds that bytes take in the model of the link."""
    sharing: float = 1.0
    """How many times longer the link takes in all where reductions share it."""
    stretch: float = 0.05
    """Share by which computing is slower while gradients travel: both use the same cores or memory."""
    copying: float = 2e-10
    """Seconds per byte of the copies between gradients and buckets, which gradient_as_bucket_view saves."""
    rounding: float = 4e-10
    """Seconds per byte of a gradient that a hook converts to 16 bits; the way back takes as long."""
    low_rank: float = 6e-10
    """Seconds per byte of a gradient for each of the three passes of PowerSGD over it, at rank 1."""
    call: float = 1e-4
    """Seconds of a hook for each bucket, however small; PowerSGD takes them for each shape, rank by rank."""
    computing: dict[str, float] = field(default_factory=dict)
    """Settings of computing, such as threads → how many times as long computing takes as in the script as written."""
