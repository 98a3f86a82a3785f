"""Compares, on the live job, what a communication hook makes of a step's gradients with their exact mean.

The same local gradients travel twice: through the hook, and whole. Both are kept until the step is over, since the
script may clip, unscale or clear its gradients; that takes twice the gradients' memory for the steps compared.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autoddp.knobs import GradientError
from autoddp.worker.hooks import Hook
from autoddp.worker.hooks.bucket import GradBucket


@dataclass
class _Bucket:
    """One bucket of one reduction."""

    parameters: list[tuple[int, int]]
    """(identity, number of elements) in the order in which they lie in the bucket."""
    exact: torch.Tensor
    work: dist.Work
    made: torch.Tensor | None = None
    """What the hook handed back to DDP."""


@dataclass
class _Sums:
    """Of one parameter, over the steps compared."""

    difference: float = 0.0
    """Squared norm, summed over the steps; so is `exact`."""
    exact: float = 0.0
    exact_sum: torch.Tensor | None = None
    made_sum: torch.Tensor | None = None


@dataclass
class Comparison:
    """`hook = comparison.around(hook, group)`; then `on = True` for some steps, `step()` after each, and `result()`."""

    on: bool = False
    _buckets: list[_Bucket] = field(default_factory=list)
    _of: dict[int, _Sums] = field(default_factory=lambda: defaultdict(_Sums))
    _relative: list[float] = field(default_factory=list)
    _cosine: list[float] = field(default_factory=list)
    _finite: bool = True
    _overflows: list[tuple[Any, int]] = field(default_factory=list)
    """Hook state → overflows that it had noticed before."""

    # DDP reads a hook's annotations and wants its own types there: no `from __future__ import annotations` above.
    def around(self, hook: Hook, group: dist.ProcessGroup) -> Hook:
        """The same hook; while `on`, each bucket also travels whole, right behind it and so in one order everywhere."""

        def compared(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            if not self.on:
                return hook(state, bucket)
            self._watch_overflows(state)
            exact = bucket.buffer().detach().clone().div_(group.size())
            parameters = [(id(p), g.numel()) for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)]
            future = hook(state, bucket)
            kept = _Bucket(parameters, exact, dist.all_reduce(exact, group=group, async_op=True))
            self._buckets.append(kept)

            def keep(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
                kept.made = done.value().detach().clone()
                return done.value()

            return future.then(keep)

        return compared

    def _watch_overflows(self, state: Any) -> None:
        """A hook that notices overflows mends them, so that they cannot be seen in what it hands back."""
        if not any(state is known for known, _ in self._overflows):
            self._overflows.append((state, getattr(state, "overflows", 0)))

    def step(self) -> None:
        """A step is over: take its buckets into account and let go of them."""
        difference = exact = made = product = 0.0
        for bucket in self._buckets:
            bucket.work.wait()
            for identity, one, other in _each(bucket):
                if not torch.isfinite(one).all():
                    continue  # the script's own overflow, by which AMP finds its scale
                if not torch.isfinite(other).all():
                    self._finite = False
                    other = other.nan_to_num(0.0, 0.0, 0.0)
                d, e = _squared(other - one), _squared(one)
                difference, exact = difference + d, exact + e
                made, product = made + _squared(other), product + float((one.double() * other.double()).sum())
                self._keep(self._of[identity], d, e, one, other)
        self._buckets.clear()
        if exact > 0:
            self._relative.append((difference / exact) ** 0.5)
            self._cosine.append(product / (exact * made) ** 0.5 if made > 0 else 0.0)

    @staticmethod
    def _keep(sums: _Sums, difference: float, exact: float, one: torch.Tensor, other: torch.Tensor) -> None:
        sums.difference += difference
        sums.exact += exact
        sums.exact_sum = one if sums.exact_sum is None else sums.exact_sum.add_(one)
        sums.made_sum = other if sums.made_sum is None else sums.made_sum.add_(other)

    def result(self, names: Callable[[int], str]) -> GradientError | None:
        """Of all steps since the last result; None if none had gradients. `names`: a parameter's, by its identity."""
        of, relative, cosine = dict(self._of), self._relative, self._cosine
        finite = self._finite and all(getattr(state, "overflows", 0) == before for state, before in self._overflows)
        self._overflows.clear()
        self._of.clear()
        self._relative, self._cosine, self._finite = [], [], True
        if not relative or not of:
            return None
        worst = max(of, key=lambda identity: _ratio(of[identity].difference, of[identity].exact))
        error = _ratio(of[worst].difference, of[worst].exact)
        return GradientError(
            steps=len(relative),
            relative=sum(relative) / len(relative),
            cosine=sum(cosine) / len(cosine),
            worst=error,
            worst_parameter=names(worst) if error > 0 else "",
            of_sum=_of_sum(of.values()),
            finite=finite,
        )


def _each(bucket: _Bucket) -> Iterable[tuple[int, torch.Tensor, torch.Tensor]]:
    """Identity, exact mean and what the hook made of it, flat, parameter for parameter."""
    assert bucket.made is not None, "DDP waits for every bucket before the step goes on"
    offset = 0
    for identity, count in bucket.parameters:
        part = slice(offset, offset + count)
        yield identity, bucket.exact.view(-1)[part], bucket.made.view(-1)[part]
        offset += count


def _of_sum(of: Iterable[_Sums]) -> float:
    difference = exact = 0.0
    for sums in of:
        assert sums.exact_sum is not None
        assert sums.made_sum is not None
        difference += _squared(sums.made_sum - sums.exact_sum)
        exact += _squared(sums.exact_sum)
    return _ratio(difference, exact)


def _squared(values: torch.Tensor) -> float:
    """The squared norm, in double precision."""
    return float(values.double().square().sum())


def _ratio(difference: float, exact: float) -> float:
    """Of norms, from their squares. A parameter whose exact mean is zero counts only if it did not stay zero."""
    if exact > 0:
        return float((difference / exact) ** 0.5)
    return 0.0 if difference == 0 else float("inf")
