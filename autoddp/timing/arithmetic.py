"""What the arithmetic of communication hooks takes on a rank, measured without sending anything."""

from __future__ import annotations

from autoddp.codec import Struct


class HookArithmetic(Struct, frozen=True, forbid_unknown_fields=True):
    """What hooks' arithmetic takes on one rank, while the others compute the same.

    Bytes are those of gradients in their own type.
    """

    copying: float
    """Seconds per byte of the copies from gradients to buckets and back, both together."""
    rounding: float
    """Seconds per byte of the conversion to 16 bits; the way back takes as long."""
    low_rank: float
    """Seconds per byte of each of the three passes of PowerSGD of rank 1."""
    further_rank: float
    """Seconds per byte by which such a pass takes longer for each further rank."""
    call: float
    """Seconds that PowerSGD takes in each half of a bucket, however small it is."""
    shape: float
    """Seconds that PowerSGD of rank 1 takes in each half for the matrices of one shape, however small they are."""
    further_row: float
    """Seconds by which that takes longer for each further rank."""
