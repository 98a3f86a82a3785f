"""Compares, on the live job, what a communication hook makes of a step's gradients with their exact mean.

The same local gradients travel twice: whole, and through the hook. As soon as a bucket has arrived both ways, norms are
all that is kept of it, so the script may clip, unscale or clear its gradients as it likes. The norms stay on the device
until `result`, which is the only moment at which the host waits for it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autoddp.knobs import GradientError
from autoddp.worker.hooks import Hook
from autoddp.worker.hooks.bucket import GradBucket, gradients_in


@dataclass
class _Parts:
    """The parts of one bucket, of each of which norms are taken."""

    identities: tuple[int, ...]
    """Of the parameters that they are the gradients of; only one where the bucket is a single part."""
    ends: tuple[slice, ...]

    @classmethod
    def of(cls, bucket: GradBucket, by_parameter: bool) -> "_Parts":
        """The bucket's gradients in the order in which they lie in it, or the bucket as one."""
        identities = tuple(id(parameter) for parameter in bucket.parameters())
        if not by_parameter:
            return cls(identities[:1], (slice(None),))
        slices, offset = [], 0
        for gradient in gradients_in(bucket):
            slices.append(slice(offset, offset + gradient.numel()))
            offset += gradient.numel()
        return cls(identities, tuple(slices))


@dataclass
class _Norms:
    """Of the parts of one bucket in one reduction."""

    step: int
    parts: _Parts
    values: torch.Tensor
    """[parts, 3]: of the exact mean, of what the hook made, and of their difference."""


@dataclass
class _Sums:
    """Of one bucket, over the steps compared: of the exact means, and of the differences. Flat, of sampled elements."""

    exact: torch.Tensor
    difference: torch.Tensor


@dataclass
class Comparison:
    """`hook = comparison.around(hook, group)`; then `on = True` for some steps, `step()` after each, and `result()`.

    In a real job memory counts: there a bucket's norms are taken as a whole, and the error of the sum is taken from a
    sample of its elements, since it is the one figure for which values have to be kept from step to step.
    """

    by_parameter: bool = True
    """Else the worst parameter is not known."""
    sampled: int | None = None
    """Elements of each bucket at most, for the error of the sum over the steps. None: all. 0: of one step there is no
    such sum, and its error is the step's own."""
    on: bool = False
    _steps: int = 0
    _norms: list[_Norms] = field(default_factory=list)
    _sums: dict[tuple[int, ...], _Sums] = field(default_factory=dict)
    """By the parameters of a bucket: after DDP has rebuilt its buckets they are others."""
    _overflows: list[tuple[Any, int]] = field(default_factory=list)
    """Hook state → overflows that it had noticed before."""

    # DDP reads a hook's annotations and wants its own types there: no `from __future__ import annotations` above.
    def around(self, hook: Hook, group: dist.ProcessGroup) -> Hook:
        """The same hook; while `on`, each bucket also travels whole, right before it and so in one order everywhere."""

        def compared(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            if not self.on:
                return hook(state, bucket)
            self._watch_overflows(state)
            parts = _Parts.of(bucket, self.by_parameter)
            exact = bucket.buffer().detach().clone().div_(group.size())
            # First, so that waiting for it in the other one's callback cannot last: gloo, which has two threads for
            # all its work and runs callbacks on them, has begun with this before it began with the hook's.
            way = [(exact, dist.all_reduce(exact, group=group, async_op=True))]
            del exact

            def take(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
                exact, work = way.pop()  # out of the closure, which the reducer keeps alive for longer
                work.wait()
                self._take(parts, exact, done.value().detach())
                return done.value()

            return hook(state, bucket).then(take)

        return compared

    def _watch_overflows(self, state: Any) -> None:
        """Note the hook's count of overflows: it repairs them, so its result does not show them."""
        if not any(state is known for known, _ in self._overflows):
            self._overflows.append((state, getattr(state, "overflows", 0)))

    def _take(self, parts: _Parts, exact: torch.Tensor, made: torch.Tensor) -> None:
        """One bucket has arrived both ways. `exact` is used up: it becomes the difference."""
        if exact.is_cuda:  # a callback has a stream of its own, which the allocator does not know to use this memory
            exact.record_stream(torch.cuda.current_stream(exact.device))
        exact, made = exact.view(-1), made.view(-1)
        norms = [_norms(exact, parts), _norms(made, parts)]
        kept = exact if self.sampled is None else exact[:: max(1, -(-exact.numel() // max(1, self.sampled)))]
        before = kept.clone() if self.sampled != 0 else None
        exact.sub_(made)
        values = torch.stack([*norms, _norms(exact, parts)], dim=1)
        self._norms.append(_Norms(self._steps, parts, values))
        if before is not None:
            self._add(parts, before, kept, values)

    def _add(self, parts: _Parts, exact: torch.Tensor, difference: torch.Tensor, norms: torch.Tensor) -> None:
        """Add to the sums over the steps. A bucket with an infinite value counts as zeros, or it would stay so."""
        # Not torch.where with a number: torch copies it to the device, and the host waits for that copy.
        infinite = norms.sum().isfinite().logical_not()
        exact, difference = (values.masked_fill(infinite, 0.0) for values in (exact, difference))
        sums = self._sums.get(parts.identities)
        if sums is None:
            self._sums[parts.identities] = _Sums(exact, difference)
        else:
            sums.exact += exact
            sums.difference += difference

    def step(self) -> None:
        """A step is over."""
        self._steps += 1

    def result(self, names: Callable[[int], str], group: dist.ProcessGroup | None = None) -> GradientError | None:
        """Of all steps since the last result; None if none had gradients. `names`: a parameter's, by its identity.

        With a group, the same to the last bit on all its ranks, which must all call this together.
        """
        norms, sums = self._norms, list(self._sums.values())
        finite = all(getattr(state, "overflows", 0) == before for state, before in self._overflows)
        self._overflows.clear()
        self._norms, self._sums, self._steps = [], {}, 0
        if not norms:
            return None
        found = _at_once([*(one.values for one in norms), *(_of_sums(one) for one in sums)], group)
        return _error(norms, found[: len(norms)], [pair for (pair,) in found[len(norms) :]], finite, names)


def _norms(values: torch.Tensor, parts: _Parts) -> torch.Tensor:
    return torch.stack([torch.linalg.vector_norm(values[part].float()) for part in parts.ends])


def _of_sums(sums: _Sums) -> torch.Tensor:
    """[1, 3], as the norms of a step."""
    exact, difference = (torch.linalg.vector_norm(values.float()) for values in (sums.exact, sums.difference))
    return torch.stack([exact, exact, difference]).view(1, 3)


def _at_once(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> list[list[list[float]]]:
    """Their values, each of shape [some, 3], with one wait for the device; with a group, the ranks' mean of each."""
    flat = torch.cat([tensor.to(tensors[0].device) for tensor in tensors])  # a model may lie on several devices
    if group is not None:
        # They differ in the last bit at most, but two ranks that decide differently would wait for each other for ever.
        dist.all_reduce(flat.div_(group.size()), group=group)
    rows = iter(flat.tolist())
    return [[next(rows) for _ in range(len(tensor))] for tensor in tensors]


def _error(
    norms: Sequence[_Norms],
    values: Sequence[list[list[float]]],
    sums: Sequence[list[float]],
    finite: bool,
    names: Callable[[int], str],
) -> GradientError | None:
    """From what was taken of each bucket, and of the sums of each bucket."""
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
    worst = max(of, key=lambda identity: _ratio(of[identity][2], of[identity][0]))
    error = _ratio(of[worst][2], of[worst][0])
    relative = sum(_ratio(difference, exact) for exact, _, difference in counted) / len(counted)
    exact_sum, difference_sum = (sum(row[place] ** 2 for row in sums) for place in (0, 2))
    return GradientError(
        steps=len(counted),
        relative=relative,
        cosine=sum(_cosine(*total) for total in counted) / len(counted),
        worst=error,
        worst_parameter=names(worst) if error > 0 else "",
        of_sum=_ratio(difference_sum, exact_sum) if sums else relative,
        finite=finite,
    )


def _cosine(exact: float, made: float, difference: float) -> float:
    """Between two vectors, from their squared norms and that of their difference."""
    return min(1.0, (exact + made - difference) / (2 * (exact * made) ** 0.5)) if made > 0 else 0.0


def _ratio(difference: float, exact: float) -> float:
    """Of norms, from their squares. A parameter whose exact mean is zero counts only if it did not stay zero."""
    if exact > 0:
        return float((difference / exact) ** 0.5)
    return 0.0 if difference == 0 else float("inf")
