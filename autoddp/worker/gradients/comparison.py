"""Compares, on the live job, what a communication hook makes of a step's gradients with their exact mean.

The same local gradients travel twice: whole, and through the hook. As soon as a bucket has arrived both ways, norms are
all that is kept of it, so the script may clip, unscale or clear its gradients as it likes. The norms stay on the device
until `result`, which is the only moment at which the host waits for it.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autoddp.knobs import GradientError
from autoddp.worker.hooks import Hook
from autoddp.worker.hooks.bucket import GradBucket, gradients_in
from autoddp.worker.process.device import keep_for_current_stream

SAMPLED = 2**12
"""Elements of a parameter that are enough for the error of the sum: their norm is right within two percent, and the two
sums take 32 KiB."""


@dataclass
class _Parts:
    """The gradients in one bucket, in the order in which they lie in it."""

    identities: tuple[int, ...]
    """Identities of the gradients' parameters."""
    places: tuple[slice, ...]

    @classmethod
    def of(cls, bucket: GradBucket) -> "_Parts":
        """The gradients of this bucket."""
        gradients = gradients_in(bucket)
        identities = tuple(id(parameter) for parameter in bucket.parameters())[: len(gradients)]
        return cls(identities, _one_after_another([gradient.numel() for gradient in gradients]))


def _one_after_another(sizes: Sequence[int]) -> tuple[slice, ...]:
    ends = list(itertools.accumulate(sizes, initial=0))
    return tuple(itertools.starmap(slice, itertools.pairwise(ends)))


@dataclass
class _Norms:
    """Norms of the parts of one bucket in one reduction."""

    order: int
    """Position among the calls of the hook. Buckets arrive in another order on each rank."""
    step: int
    parts: _Parts
    values: torch.Tensor
    """Norms of the exact mean, of what the hook made, and of their difference; shape [parts, 3]."""


@dataclass
class _Sum:
    """Sums over the steps compared, for one parameter: of exact means, and of differences. Flat, of some elements."""

    order: int
    """`_Norms.order` in the first of these steps."""
    weight: float
    """Elements of the gradient for which one element here stands."""
    exact: torch.Tensor
    difference: torch.Tensor

    def norms(self) -> torch.Tensor:
        """Norms as those of a step, of shape [1, 3]."""
        exact, difference = (torch.linalg.vector_norm(values.float()) for values in (self.exact, self.difference))
        return torch.stack([exact, exact, difference]).mul_(self.weight**0.5).view(1, 3)


@dataclass
class _Taken:
    """What was taken of the steps compared since the last result."""

    steps: int = 0
    calls: int = 0
    norms: list[_Norms] = field(default_factory=list)
    sums: dict[int, _Sum] = field(default_factory=dict)
    """Sums by the identity of a parameter: DDP may put it into another bucket meanwhile."""
    overflows: list[tuple[Any, int]] = field(default_factory=list)
    """Hook state → overflows that it had noticed before."""


@dataclass
class Comparison:
    """`hook = comparison.around(hook, group)`; then `on = True` for some steps, `step()` after each, and `result()`.

    In a real job memory counts: there the error of the sum is taken from a sample of the elements, since it is the one
    figure for which values have to be kept from step to step.
    """

    sampled: int | None = None
    """Elements of each parameter at most, for the error of the sum over the steps. None: all. 0: of one step there is
    no such sum, and its error is the step's own."""
    on: bool = False
    taken: _Taken = field(default_factory=_Taken)

    # DDP reads a hook's annotations and wants its own types there: no `from __future__ import annotations` above.
    def around(self, hook: Hook, group: dist.ProcessGroup) -> Hook:
        """A hook that calls `hook`; while `on`, it also all-reduces each bucket whole, to compare the two.

        The whole bucket goes right before what the hook sends, so all ranks send both in the same order.
        """

        def compared(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            if not self.on:
                return hook(state, bucket)
            self._watch_overflows(state)
            parts, order = _Parts.of(bucket), self.taken.calls
            self.taken.calls += 1
            exact = bucket.buffer().detach().clone().div_(group.size())
            # First, so that waiting for it in the other one's callback cannot last: gloo, which has two threads for
            # all its work and runs callbacks on them, has begun with this before it began with the hook's.
            way = [(exact, dist.all_reduce(exact, group=group, async_op=True))]
            del exact

            def take(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
                exact, work = way.pop()  # out of the closure, which the reducer keeps alive for longer
                work.wait()
                self._take(order, parts, exact, done.value().detach())
                return done.value()

            return hook(state, bucket).then(take)

        return compared

    def _watch_overflows(self, state: Any) -> None:
        """Note the hook's count of overflows: it repairs them, so its result does not show them."""
        if not any(state is known for known, _ in self.taken.overflows):
            self.taken.overflows.append((state, getattr(state, "overflows", 0)))

    def _take(self, order: int, parts: _Parts, exact: torch.Tensor, made: torch.Tensor) -> None:
        """One bucket has arrived both ways. `exact` is used up: it becomes the difference."""
        keep_for_current_stream(exact)  # a callback has a stream of its own
        exact, made = exact.view(-1), made.view(-1)
        norms = [_norms(exact, parts.places), _norms(made, parts.places)]
        taken = [self._sample(place) for place in parts.places] if self.sampled != 0 else []
        before = [exact[place].clone() for place in taken]
        exact.sub_(made)
        values = torch.stack([*norms, _norms(exact, parts.places)], dim=1)
        self.taken.norms.append(_Norms(order, self.taken.steps, parts, values))
        if taken:
            self._add(order, parts, before, [exact[place].clone() for place in taken], values)

    def _sample(self, place: slice) -> slice:
        size = place.stop - place.start
        return slice(place.start, place.stop, max(1, -(-size // (self.sampled or size or 1))))

    def _add(
        self, order: int, parts: _Parts, exact: list[torch.Tensor], difference: list[torch.Tensor], norms: torch.Tensor
    ) -> None:
        """Add to the sums over the steps. A bucket with an infinite value counts as zeros, or it would stay so."""
        # Not torch.where with a number: torch copies it to the device, and the host waits for that copy.
        infinite = norms.sum().isfinite().logical_not()
        for place, identity, *pair in zip(parts.places, parts.identities, exact, difference, strict=True):
            for values in pair:
                values.masked_fill_(infinite, 0.0)
            weight = (place.stop - place.start) / max(1, pair[0].numel())
            sums = self.taken.sums.setdefault(identity, _Sum(order, weight, *pair))
            if sums.exact is not pair[0]:
                sums.exact += pair[0]
                sums.difference += pair[1]

    def go_on_from(self, other: "Comparison") -> None:
        """Go on with what `other` has compared, which begins anew."""
        self.on, other.on = other.on, False
        self.taken, other.taken = other.taken, _Taken()

    def step(self) -> None:
        """A step is over."""
        self.taken.steps += 1

    def result(self, names: Callable[[int], str], group: dist.ProcessGroup | None = None) -> GradientError | None:
        """The error over all steps since the last result; None if none of them had gradients.

        `names` gives a parameter's name by its identity. With a group, the error is the same to the last bit on all its
        ranks, which must all call this together.
        """
        taken, self.taken = self.taken, _Taken()
        norms = sorted(taken.norms, key=lambda one: one.order)
        sums = dict(sorted(taken.sums.items(), key=lambda one: one[1].order))
        finite = all(getattr(state, "overflows", 0) == before for state, before in taken.overflows)
        if not norms:
            return None
        found = _at_once([*(one.values for one in norms), *(one.norms() for one in sums.values())], group)
        of_sums = {identity: row for identity, (row,) in zip(sums, found[len(norms) :], strict=True)}
        return _error(norms, found[: len(norms)], of_sums, finite, names)


def _norms(values: torch.Tensor, places: Sequence[slice]) -> torch.Tensor:
    return torch.stack([torch.linalg.vector_norm(values[place].float()) for place in places])


def _at_once(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> list[list[list[float]]]:
    """Each tensor's values, shape [some, 3], with one wait for the device; with a group, the mean over its ranks."""
    flat = torch.cat([tensor.to(tensors[0].device) for tensor in tensors])  # a model may lie on several devices
    if group is not None:
        # They differ in the last bit at most, but two ranks that decide differently would wait for each other for ever.
        dist.all_reduce(flat.div_(group.size()), group=group)
    rows = iter(flat.tolist())
    return [[next(rows) for _ in range(len(tensor))] for tensor in tensors]


def _error(
    norms: Sequence[_Norms],
    values: Sequence[list[list[float]]],
    sums: Mapping[int, list[float]],
    finite: bool,
    names: Callable[[int], str],
) -> GradientError | None:
    """The error, from what was taken of each bucket, and of the sum of each parameter, by its identity."""
    steps: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    of: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for one, of_parts in zip(norms, values, strict=True):
        for identity, (exact, made, difference) in zip(one.parts.identities, of_parts, strict=True):
            if not math.isfinite(exact):
                continue  # the script's own overflow, by which AMP finds its scale
            if not math.isfinite(made):
                finite = False
                made, difference = 0.0, exact
            for total in (steps[one.step], of[identity]):
                for place, norm in enumerate((exact, made, difference)):
                    total[place] += norm * norm
    counted = [total for total in steps.values() if total[0] > 0]
    if not counted:
        return None
    worst, error = _worst({identity: (total[0], total[2]) for identity, total in of.items()})
    relative = sum(_ratio(difference, exact) for exact, _, difference in counted) / len(counted)
    squares = {identity: (row[0] ** 2, row[2] ** 2) for identity, row in sums.items()}
    exact_sum, difference_sum = (sum(pair[place] for pair in squares.values()) for place in (0, 1))
    worst_of_sum, error_of_sum = _worst(squares) if squares else (worst, error)
    return GradientError(
        steps=len(counted),
        relative=relative,
        cosine=sum(_cosine(*total) for total in counted) / len(counted),
        worst=error,
        worst_parameter=names(worst) if error > 0 else "",
        of_sum=_ratio(difference_sum, exact_sum) if sums else relative,
        finite=finite,
        worst_of_sum=error_of_sum,
        worst_parameter_of_sum=names(worst_of_sum) if error_of_sum > 0 else "",
    )


def _worst(squares: Mapping[int, tuple[float, float]]) -> tuple[int, float]:
    """The parameter with the largest relative error, and that error; from squares of norms: exact, and difference."""
    identity = max(squares, key=lambda one: _ratio(squares[one][1], squares[one][0]))
    exact, difference = squares[identity]
    return identity, _ratio(difference, exact)


def _cosine(exact: float, made: float, difference: float) -> float:
    """The cosine of two vectors, from their squared norms and that of their difference."""
    return min(1.0, (exact + made - difference) / (2 * (exact * made) ** 0.5)) if made > 0 else 0.0


def _ratio(difference: float, exact: float) -> float:
    """The ratio of two norms, from their squares.

    A parameter whose exact mean is zero counts only if it did not stay zero.
    """
    if exact > 0:
        return float((difference / exact) ** 0.5)
    return 0.0 if difference == 0 else float("inf")
