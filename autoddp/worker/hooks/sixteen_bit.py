"""Hooks that send gradients in 16 bits: half the bytes, converted back to the gradients' type on arrival.

torch's own bf16 hook refuses the backend gloo by its name, although gloo can add bfloat16.

float16 overflows where float32 does not, and one infinite gradient ruins a training. So no finite gradient becomes
infinite here. On a CPU, a bucket that overflowed is sent again in full precision before DDP uses it. On a GPU, reading
a value would block the host, so each rank's share is clamped to a limit below which the sum cannot overflow. Gradients
that are infinite or NaN in float32 stay so, because AMP finds its scale by them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from autoddp.knobs import Configuration
from autoddp.worker.hooks.all_reduce import AllReduce, all_reduce
from autoddp.worker.hooks.bucket import GradBucket

_LARGEST = torch.finfo(torch.float16).max
_ROUNDING = torch.finfo(torch.float16).eps / 2
"""Largest relative error by which rounding may increase the result of an addition in float16."""


@dataclass
class _Flight:
    """A bucket that is being reduced. Its buffer keeps this rank's share of the mean until a finite result arrives."""

    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor]
    good: bool = True


@dataclass
class SixteenBitState:
    """`dtype` is float16 (11 bits of precision, overflows above 65504) or bfloat16 (8 bits, float32's range)."""

    group: dist.ProcessGroup
    dtype: torch.dtype
    overflows: int = 0
    """Number of buckets that had to be sent again because of float16; the same on all ranks. Always 0 on a GPU."""
    flights: list[_Flight] = field(default_factory=list)
    all_reduce: AllReduce = all_reduce


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
    """The hook: the mean over the ranks, rounded to `state.dtype` before and during the sum.

    The division comes first, in full precision, because the sum over many ranks overflows float16 sooner than the mean.
    """
    buffer = bucket.buffer()
    ranks = state.group.size()
    share = buffer.div_(ranks)
    may_overflow = state.dtype is torch.float16
    clamps = may_overflow and buffer.device.type != "cpu"
    narrow = clamped_to_float16(share, ranks) if clamps else share.to(state.dtype)
    work = state.all_reduce(narrow, state.group)
    if may_overflow and buffer.device.type == "cpu":
        return _checked(state, bucket, work)

    def widen(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        widened: torch.Tensor = buffer.copy_(future.value()[0])
        return widened

    done: torch.futures.Future[torch.Tensor] = work.get_future().then(widen)
    return done


def clamped_to_float16(share: torch.Tensor, ranks: int) -> torch.Tensor:
    """A copy of `share` in float16 such that the sum over `ranks` ranks cannot overflow if all shares are finite.

    It takes only two kernels, because each reads all gradients: a clamp, and an addition that restores infinite values
    and converts the type. The addition adds `share` times the smallest number of its type: next to nothing for every
    finite value, and infinite for an infinite one.
    """
    wide = share if share.dtype in (torch.float32, torch.float64) else share.float()
    limit, smallest = largest_share(ranks), 2.0**-1074 if wide.dtype is torch.float64 else 2.0**-149
    narrow = torch.empty_like(share, dtype=torch.float16)
    return torch.add(wide.clamp(-limit, limit), wide, alpha=smallest, out=narrow)


def largest_share(ranks: int) -> float:
    """The largest float16 number of which `ranks` can be added in float16, in any order, without overflow.

    Each addition may round up, so this is a little less than the largest float16 divided by `ranks`.

    >>> largest_share(1), largest_share(2), largest_share(3)
    (65504.0, 32736.0, 21808.0)
    """
    bound = _LARGEST / (ranks * (1 + _ROUNDING) ** (ranks - 1))
    spacing = 2.0 ** (math.frexp(bound)[1] - 11)  # float16 has 11 significant bits
    return math.floor(bound / spacing) * spacing


def _checked(state: SixteenBitState, bucket: GradBucket, work: dist.Work) -> torch.futures.Future[torch.Tensor]:
    """As `widen`, but a result that is not finite is not written: the step's last call sends that bucket again.

    This is possible because DDP reads the buckets only after all calls of the step: a future may be done before its
    buffer is right.
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
    """Reduce the buckets that overflowed again, in full precision. All gradients are ready, so waiting is harmless."""
    for flight in state.flights:
        flight.future.wait()
    for flight in state.flights:
        if not flight.good:  # the same on all ranks, because all have received the same result
            state.all_reduce(flight.buffer, state.group).wait()
            state.overflows += bool(flight.buffer.isfinite().all())  # if not finite, the script's gradients were not
    state.flights.clear()
