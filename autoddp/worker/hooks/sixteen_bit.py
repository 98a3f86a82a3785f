"""Gradients in 16 bits on the wire: half the bytes, and float32 again on arrival.

torch's own bf16 hook refuses gloo by its name alone; gloo can add bfloat16.

float16 overflows where float32 does not, and one infinite gradient ends a training. So nothing infinite is let through
that was finite before: on a CPU a bucket that overflowed travels again, whole, before DDP looks at it; on a GPU, where
looking at a value would hold up the host, each rank's share keeps below what lets the sum overflow. What is infinite or
NaN in float32, by which AMP finds its scale, stays so.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from autoddp.knobs import Configuration
from autoddp.worker.hooks.bucket import GradBucket

_LARGEST = torch.finfo(torch.float16).max
_ROUNDING = torch.finfo(torch.float16).eps / 2
"""By which part an addition in float16 may be too large."""


@dataclass
class _Flight:
    """A bucket on the way. Its buffer keeps this rank's share of the mean until something good arrives."""

    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor]
    good: bool = True


@dataclass
class SixteenBitState:
    """`dtype` is float16 (11 bits of precision, overflows above 65504) or bfloat16 (8 bits, float32's range)."""

    group: dist.ProcessGroup
    dtype: torch.dtype
    overflows: int = 0
    """Buckets that had to travel again; the same on all ranks. Stays 0 on a GPU."""
    flights: list[_Flight] = field(default_factory=list)


def fp16(
    _configuration: Configuration, group: dist.ProcessGroup, _start: int | None
) -> tuple[SixteenBitState, Callable[[SixteenBitState, GradBucket], torch.futures.Future[torch.Tensor]]]:
    """The hook "fp16" with its state."""
    return SixteenBitState(group, torch.float16), sixteen_bit_hook


def bf16(
    _configuration: Configuration, group: dist.ProcessGroup, _start: int | None
) -> tuple[SixteenBitState, Callable[[SixteenBitState, GradBucket], torch.futures.Future[torch.Tensor]]]:
    """The hook "bf16" with its state."""
    return SixteenBitState(group, torch.bfloat16), sixteen_bit_hook


def sixteen_bit_hook(state: SixteenBitState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Mean over the ranks, rounded to `state.dtype` once before and once during the sum.

    The division comes first and in full precision: a sum over many ranks would overflow float16 sooner than its mean.
    """
    buffer = bucket.buffer()
    ranks = state.group.size()
    share = buffer.div_(ranks)
    may_overflow = state.dtype is torch.float16
    clamps = may_overflow and buffer.device.type != "cpu"
    narrow = clamped_to_float16(share, ranks) if clamps else share.to(state.dtype)
    work = dist.all_reduce(narrow, group=state.group, async_op=True)
    if may_overflow and buffer.device.type == "cpu":
        return _checked(state, bucket, work)

    def widen(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        widened: torch.Tensor = buffer.copy_(future.value()[0])
        return widened

    done: torch.futures.Future[torch.Tensor] = work.get_future().then(widen)
    return done


def clamped_to_float16(share: torch.Tensor, ranks: int) -> torch.Tensor:
    """A copy in float16, whose sum over as many ranks cannot overflow where all shares are finite.

    In two kernels, because each reads all gradients: a clamp, and an addition that brings back what was infinite and
    casts as it writes. Times the smallest number that the type has, every finite share is next to nothing, and inf is
    still inf.
    """
    wide = share if share.dtype in (torch.float32, torch.float64) else share.float()
    limit, smallest = largest_share(ranks), 2.0**-1074 if wide.dtype is torch.float64 else 2.0**-149
    narrow = torch.empty_like(share, dtype=torch.float16)
    return torch.add(wide.clamp(-limit, limit), wide, alpha=smallest, out=narrow)


def largest_share(ranks: int) -> float:
    """The largest float16 of which so many can be added in float16, in any order, without overflow.

    Each addition may round up, so it is a little less than the largest number divided by the ranks.

    >>> largest_share(1), largest_share(2), largest_share(3)
    (65504.0, 32736.0, 21808.0)
    """
    bound = _LARGEST / (ranks * (1 + _ROUNDING) ** (ranks - 1))
    spacing = 2.0 ** (math.frexp(bound)[1] - 11)  # float16 has 11 significant bits
    return math.floor(bound / spacing) * spacing


def _checked(state: SixteenBitState, bucket: GradBucket, work: dist.Work) -> torch.futures.Future[torch.Tensor]:
    """As `widen`, but what arrives infinite is not written; the step's last call sends those buckets again.

    DDP reads a bucket only after all calls of the step, so a future may be done before its buffer is right.
    """
    if bucket.index() == 0:
        state.flights.clear()
    flight = _Flight(bucket.buffer(), torch.futures.Future())

    def arrive(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        narrow = future.value()[0]
        flight.good = bool(narrow.sum(dtype=torch.float32).isfinite())
        return flight.buffer.copy_(narrow) if flight.good else flight.buffer

    flight.future = work.get_future().then(arrive)
    state.flights.append(flight)
    if bucket.is_last():
        _send_again(state)
    return flight.future


def _send_again(state: SixteenBitState) -> None:
    """All gradients are ready by now: there is nothing left that waiting here could hold up."""
    for flight in state.flights:
        flight.future.wait()
    for flight in state.flights:
        if not flight.good:  # the same on all ranks, for all have received the same
            dist.all_reduce(flight.buffer, group=state.group)
            state.overflows += bool(flight.buffer.isfinite().all())  # else the script's own, and right so
    state.flights.clear()
