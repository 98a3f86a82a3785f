"""The numbers of the model of a step that differ from machine to machine."""

from __future__ import annotations

from collections.abc import Sequence

from autoddp.codec import Struct, field, replace
from autoddp.timing.arithmetic import HookArithmetic

_ON_A_GPU = 0.02  # of a CPU's seconds, for the guesses of what hooks compute
_BESIDE_A_STEP = 1.3  # times as long on a CPU as by itself: the threads that move gradients want the same cores


class Coefficients(Struct, frozen=True, forbid_unknown_fields=True):
    """What a machine takes for what. The defaults are guesses; a study replaces them by what it has measured."""

    pace: float = 1.0
    """Times the seconds of computing in the few steps without reductions that were measured."""
    latency: float = 1.0
    """Times the latency of the model of the link."""
    per_byte: float = 1.0
    """Times the seconds that bytes take in the model of the link."""
    sharing: float = 1.0
    """How many times longer the link takes in all where reductions share it."""
    burst: float = 64e3
    """Bytes that the link carries at once after a pause. Links whose rate is limited by a token bucket save them up."""
    stretch: float = 0.05
    """Share by which computing is slower while gradients travel: both use the same cores or memory."""
    copying: float = 2e-10
    """Seconds per byte of the copies between gradients and buckets, which gradient_as_bucket_view saves."""
    rounding: float = 4e-10
    """Seconds per byte of a gradient that a hook converts to 16 bits; the way back takes as long."""
    low_rank: float = 6e-10
    """Seconds per byte of a gradient for each of the three passes of PowerSGD over it, at rank 1."""
    further_rank: float = 7.5e-11
    """Seconds per byte by which such a pass takes longer for each further rank."""
    call: float = 1e-4
    """Seconds of a hook for each bucket, however small; PowerSGD takes them twice."""
    shape: float = 4e-5
    """Seconds of PowerSGD of rank 1 for the matrices of one shape in a bucket, in each of its two halves."""
    further_row: float = 3e-5
    """Seconds by which PowerSGD takes longer for a shape for each further rank."""
    wake: float = 6e-4
    """Seconds that a hook on a CPU waits for a reduction beyond its time on the link: for ranks and for a core."""
    crowding: float = 1e-3
    """Seconds by which PowerSGD takes longer on a CPU for each bucket beyond the first: their reductions are under way
    while all ranks compute, so each of gloo's threads waits for a core."""
    computing: dict[str, float] = field(default_factory=dict)
    """Settings of computing, such as threads → how many times as long computing takes as in the script as written."""


def first_coefficients(backend: str, arithmetic: Sequence[HookArithmetic | None], stretch: float = 0.0) -> Coefficients:
    """Guesses, with what was measured of each rank's hooks in their place: the slowest rank counts.

    `stretch` is the guess for that coefficient where the host has too few cores; the usual guess if that is larger.
    """
    guess, measured = Coefficients(), HookArithmetic.__struct_fields__
    guess = replace(guess, stretch=max(guess.stretch, stretch))
    if backend != "gloo":
        guess = replace(guess, **{name: getattr(guess, name) * _ON_A_GPU for name in (*measured, "crowding")})
    known = [one for one in arithmetic if one is not None]
    if known:
        times = _BESIDE_A_STEP if backend == "gloo" else 1.0
        guess = replace(guess, **{name: times * max(getattr(one, name) for one in known) for name in measured})
    return guess
