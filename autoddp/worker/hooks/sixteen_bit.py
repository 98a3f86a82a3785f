"""Hooks that send gradients in 16 bits: half the bytes, converted back to the gradients' type on arrival.

torch's own bf16 hook refuses the backend gloo by its name, although gloo can add bfloat16.

float16 reaches only from 6e-8 to 65504: a layer whose gradients are smaller would stop to train, and one infinite
gradient ruins a training. So the buckets are moved into the middle of that range before they are rounded, each by a
power of two, and back on arrival (`scaling.py`). What still overflows, because gradients have grown a thousandfold
within a step, does not become infinite. On a CPU, a bucket that overflowed is sent again in full precision before DDP
uses it. On a GPU, reading a value would block the host, so each rank's share is clamped to a limit below which the sum
cannot overflow. Gradients that are infinite or NaN in float32 stay so, because AMP finds its scale by them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from autoddp.knobs import Configuration
from autoddp.worker.hooks import scaling
from autoddp.worker.hooks.all_reduce import AllReduce, all_reduce, when_reduced
from autoddp.worker.hooks.bucket import GradBucket
from autoddp.worker.hooks.scaling import Level, Levels, largest_in

_LARGEST = torch.finfo(torch.float16).max
_ROUNDING = torch.finfo(torch.float16).eps / 2
"""Largest relative error by which rounding may increase the result of an addition in float16."""


@dataclass
class _Flight:
    """A bucket that is being reduced. Its buffer keeps this rank's share of the mean until a finite result arrives."""

    buffer: torch.Tensor
    level: Level
    future: torch.futures.Future[torch.Tensor]
    is_lost: bool = False
    """Whether nothing finite has arrived, or nothing but zeros."""
    overflowed: bool = False


@dataclass
class SixteenBitState:
    """State of either hook."""

    group: dist.ProcessGroup
    overflows: int = 0
    """Number of buckets that had to be sent again because of float16; the same on all ranks. Always 0 on a GPU."""
    flights: list[_Flight] = field(default_factory=list)
    levels: Levels = field(default_factory=Levels)
    all_reduce: AllReduce = all_reduce


Hook = Callable[[SixteenBitState, GradBucket], torch.futures.Future[torch.Tensor]]


def fp16(_configuration: Configuration, group: dist.ProcessGroup, _start: int | None) -> tuple[SixteenBitState, Hook]:
    """The hook "fp16" with its state: 11 bits of precision."""
    return SixteenBitState(group), fp16_hook


def bf16(_configuration: Configuration, group: dist.ProcessGroup, _start: int | None) -> tuple[SixteenBitState, Hook]:
    """The hook "bf16" with its state: 8 bits of precision, and float32's range."""
    return SixteenBitState(group), bf16_hook


def bf16_hook(state: SixteenBitState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: the mean over the ranks, rounded to bfloat16 before and during the sum."""
    return _mean(state, bucket, torch.bfloat16)


def _mean(
    state: SixteenBitState,
    bucket: GradBucket,
    dtype: torch.dtype,
    arrived: Callable[[torch.Tensor], object] = lambda mean: None,
) -> torch.futures.Future[torch.Tensor]:
    """Send the bucket as `dtype`. `arrived` is called with the mean before DDP gets it.

    The division comes first, in full precision, because it takes no precision and the sum over many ranks is larger.
    """
    buffer = bucket.buffer()
    work = state.all_reduce(buffer.div_(state.group.size()).to(dtype), state.group)

    def widen(narrow: torch.Tensor) -> torch.Tensor:
        widened = buffer.copy_(narrow)
        arrived(widened)
        return widened

    return when_reduced(work, widen)


def fp16_hook(state: SixteenBitState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: the mean over the ranks, moved into float16's range and rounded to it before and during the sum."""
    buffer = bucket.buffer()
    level = state.levels.of(bucket)
    if level is None or buffer.dtype is torch.float16:
        return _mean(state, bucket, buffer.dtype)
    if not level.is_known:
        return _mean(state, bucket, buffer.dtype, level.learn)
    ranks = state.group.size()
    share = buffer.mul_(level.scale / ranks)
    if scaling.can_send_again(buffer.device):
        return _checked(state, bucket, level, state.all_reduce(share.to(torch.float16), state.group))
    work = state.all_reduce(clamped_to_float16(share, ranks), state.group)

    def widen(narrow: torch.Tensor) -> torch.Tensor:
        widened = buffer.copy_(narrow).mul_(level.inverse)
        level.learn(widened)
        return widened

    return when_reduced(work, widen)


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


def _checked(
    state: SixteenBitState, bucket: GradBucket, level: Level, work: dist.Work
) -> torch.futures.Future[torch.Tensor]:
    """The mean on a CPU. A result that is lost is not written: the step's last call sends that bucket again.

    This is possible because DDP reads the buckets only after all calls of the step: a future may be done before its
    buffer is right.
    """
    if bucket.index() == 0:
        state.flights.clear()
    flight = _Flight(bucket.buffer(), level, torch.futures.Future())

    def arrive(narrow: torch.Tensor) -> torch.Tensor:
        largest = largest_in(narrow)
        flight.overflowed = not largest.isfinite()
        flight.is_lost = flight.overflowed or not largest
        if not flight.is_lost:
            flight.buffer.copy_(narrow).mul_(level.inverse)
            level.learn_largest(largest.float() * level.inverse)
        return flight.buffer

    flight.future = when_reduced(work, arrive)
    state.flights.append(flight)
    if bucket.is_last():
        _send_again(state)
    return flight.future


def _send_again(state: SixteenBitState) -> None:
    """Reduce the buckets that were lost again, in full precision. All gradients are ready, so waiting is harmless."""
    for flight in state.flights:
        flight.future.wait()
    for flight in state.flights:
        if flight.is_lost:  # the same on all ranks, because all have received the same result
            state.all_reduce(flight.buffer, state.group).wait()
            flight.level.learn_anew(flight.buffer.mul_(flight.level.inverse))
            # If the mean is not finite, the script's gradients were not.
            state.overflows += flight.overflowed and bool(flight.buffer.isfinite().all())
    state.flights.clear()
