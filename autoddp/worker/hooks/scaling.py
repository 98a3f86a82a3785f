"""Powers of two that move gradients into float16's range, and back: exact, and the same on all ranks.

level = levels.of(bucket)                # in each call of the hook
if level.is_known:
    buffer.mul_(level.scale)             # before the sum over the ranks
    mean.mul_(level.inverse)             # after it
level.learn(mean)                        # the same bits on all ranks

All ranks must use one power, or their sum would mean nothing. To ask for the largest gradient of all ranks would take
another collective before each bucket. So the power comes from the means that have arrived in earlier reductions, which
all ranks have alike. The first reduction, before which there is none, has to be sent in full precision.

Each bucket has a power of its own, because the layers in it become ready together and are mostly alike. Nothing here
waits for a GPU: a power is computed from the bits of float32, on the bucket's device.
"""

from __future__ import annotations

import torch

from autoddp.worker.hooks.bucket import GradBucket

_ROOM_WITH_A_SECOND_TRY, _ROOM = 12, 16
"""By how many powers of two gradients may grow from one reduction to the next before they overflow. Each takes one
away from what small gradients keep, so there are fewer on a CPU, where a bucket that overflowed is sent again."""
_QUARTERS = 4  # the level falls by a quarter of a power of two in each reduction, so one quiet step changes little
_LAG = 8 * _QUARTERS  # but it stays this close to what was seen last, so that a sudden fall costs no precision
_MOST_FOR_ZEROS = 16  # where nothing but zeros arrives: what comes after a long pause is as large as ever
_MOST = 64  # beyond it float32 itself could overflow, where gradients that were next to nothing become large
_BIAS, _EXPONENT = 127, 23  # of float32: what is added to its exponent, and the bits below that
_TOP = 15  # the exponent of the largest float16


def can_send_again(device: torch.device) -> bool:
    """Whether a hook can see what has arrived, and send it again in the same step. For a GPU the host would wait."""
    return device.type == "cpu"


class Level:
    """How large the gradients of one bucket are."""

    def __init__(self, device: torch.device, height: torch.Tensor | None = None) -> None:
        """`height`: of a bucket that is presumably alike."""
        self.height = torch.zeros((), dtype=torch.int32, device=device) if height is None else height.clone()
        """The exponent of the largest mean, as float32 keeps it, in quarters; 0: none has arrived yet."""
        self._room = _ROOM_WITH_A_SECOND_TRY if can_send_again(device) else _ROOM
        # Written in place and never replaced: the stream that receives a bucket is not the one that sends it.
        self.scale, self.inverse = (torch.ones((), dtype=torch.float32, device=device) for _ in range(2))
        """The power of two for this reduction, and its inverse; float32."""
        self.is_known = False
        """Whether the power is right for this reduction; else the bucket has to be sent in full precision."""

    def begin(self, is_known: bool) -> None:
        """A reduction begins, and the one before it is over."""
        # On a CPU it can be seen whether all means so far were zero; elsewhere the power is 1 then.
        self.is_known = is_known and (not can_send_again(self.height.device) or bool(self.height))
        exponent = (self.height + (_QUARTERS - 1)) // _QUARTERS
        lift = (_TOP - self._room + _BIAS - exponent).clamp_max_(_MOST).masked_fill_(self.height == 0, 0)
        self.scale.copy_(_power(lift))
        self.inverse.copy_(_power(-lift))

    def learn(self, mean: torch.Tensor) -> None:
        """The mean over the ranks has arrived."""
        self.learn_largest(largest_in(mean).float())

    def learn_anew(self, mean: torch.Tensor) -> None:
        """A mean has arrived that was sent with a wrong power of two: learn the right one from it.

        If all of it is zero, the bucket is sent in full precision until it is not.
        """
        if not mean.any():
            self.height.zero_()
        self.learn(mean)

    def learn_largest(self, largest: torch.Tensor) -> None:
        """The mean's largest value is known. What is not finite tells nothing; zeros may have been too small."""
        exponent = largest.view(torch.int32) >> _EXPONENT
        now, fallen = exponent * _QUARTERS, self.height - 1
        seen = torch.minimum(torch.maximum(fallen, now), now + _LAG)
        lowest = (_TOP - self._room + _BIAS - _MOST_FOR_ZEROS) * _QUARTERS
        unseen = torch.where(self.height > lowest, fallen, self.height)
        tells = exponent <= 2 * _BIAS
        self.height.copy_(torch.where(tells, torch.where(exponent > 0, seen, unseen), self.height))


def largest_in(values: torch.Tensor) -> torch.Tensor:
    """The largest absolute value, in one pass; NaN if there is any."""
    if not values.numel():
        return values.new_zeros(())
    low, high = torch.aminmax(values)
    return torch.maximum(high, -low)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2 to the power of an int32, to the last bit, which `pow` and `exp2` do not promise on every device."""
    return ((exponent + _BIAS) << _EXPONENT).view(torch.float32)


class Levels:
    """The levels of all buckets of one DDP object."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], Level] = {}
        self._highest: torch.Tensor | None = None
        """The largest of all levels when the present reduction began; None before the first."""
        self._next = 0
        """The number of the bucket that comes next."""

    def of(self, bucket: GradBucket) -> Level | None:
        """The level for this reduction of the bucket; None in a pass in which DDP numbers no buckets.

        There (see `powersgd._look_at_the_number`) nobody knows which bucket it is, nor where the pass ends.
        """
        number, buffer = bucket.index(), bucket.buffer()
        is_numbered = number == self._next
        self._next = 0 if bucket.is_last() else number + 1
        if not is_numbered:
            return None
        if number == 0:
            # Now, because from here on levels change as means arrive, in another order on each rank.
            heights = [level.height for level in self._of.values()]
            self._highest = torch.stack([h.to(buffer.device) for h in heights]).max() if heights else None
        # By length as well, because DDP makes its buckets anew after the first reduction.
        key = number, buffer.numel()
        if key not in self._of:
            height = None if self._highest is None else self._highest.to(buffer.device)
            self._of[key] = Level(buffer.device, height)
        level = self._of[key]
        level.begin(self._highest is not None)
        return level
