"""Measures what the hooks compute, on gradients as large as the model's, with nothing to send.

    arithmetic_of(parameters)             # a HookArithmetic, after some hundred milliseconds

A study predicts its trials. It would have to guess what a hook costs on this machine until it has tried one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from autoddp.knobs import Configuration
from autoddp.knobs.hook import hook_predicted_as
from autoddp.timing import median
from autoddp.timing.arithmetic import HookArithmetic
from autoddp.units import MIB
from autoddp.worker.hooks.by_itself import FullBucket, by_itself
from autoddp.worker.process.device import synchronize

_MOST = 16 * MIB  # bytes of gradients that are computed with
_TINY = ((32, 32), (32, 31), (31, 32), (31, 31))  # shapes whose arithmetic takes no time
_LARGE = (1024, 1024)  # where the model's are huge
_HIGH_RANK = 8
_TIMES = 3
_CACHES = 64 * MIB  # more than a processor's caches hold for a core
_LEAST = 1e-12  # seconds per byte, and seconds of a call; times may come out as zero
_PASSES, _HALVES = 3, 2  # of PowerSGD


def arithmetic_of(parameters: Sequence[torch.Tensor]) -> HookArithmetic | None:
    """What hooks' arithmetic takes for these parameters; None where there are none, or hooks cannot compute on them."""
    trained = [one for one in parameters if one.requires_grad and one.is_floating_point() and one.numel()]
    if not trained:
        return None
    like = trained[0]
    shapes: list[tuple[int, ...]] = []
    room = _MOST
    for one in trained:
        size = one.numel() * one.element_size()
        if (one.dtype, one.device) == (like.dtype, like.device) and size <= room:
            shapes.append(tuple(one.shape))
            room -= size
    try:
        with torch.no_grad():
            return _measured(
                FullBucket.of(shapes or [_LARGE], like), FullBucket.of(_TINY[:1], like), FullBucket.of(_TINY, like)
            )
    except RuntimeError:  # no memory, or a type for which this torch has no products
        return None


def _measured(full: FullBucket, one_shape: FullBucket, more_shapes: FullBucket) -> HookArithmetic:
    size = full.flat.numel() * full.flat.element_size()
    gradients = torch.empty_like(full.flat)
    # One for all: the kernel takes longer to give so much memory than a run takes.
    caches = torch.empty(_CACHES, dtype=torch.uint8, device=full.flat.device)

    def seconds(bucket: FullBucket, run: Callable[[FullBucket], object]) -> float:
        return _seconds(bucket, run, caches)

    copied = seconds(full, lambda bucket: bucket.flat.copy_(gradients.copy_(bucket.flat)))
    rounded = seconds(full, by_itself(Configuration(hook_predicted_as("16 bits").values())))
    shapes = len({view.shape for view in full.views if view.dim() > 1})
    calls, of_shape, passes = [], [], []
    for rank in (1, _HIGH_RANK):
        hook = Configuration(hook_predicted_as("low rank").values(rank))
        once, more = (seconds(bucket, by_itself(hook)) / _HALVES for bucket in (one_shape, more_shapes))
        of_shape.append(min(once, max(_LEAST, (more - once) / (len(_TINY) - 1))))
        calls.append(max(_LEAST, once - of_shape[-1]))
        all_passes = seconds(full, by_itself(hook)) - _HALVES * (calls[-1] + shapes * of_shape[-1])
        passes.append(max(_LEAST, all_passes / _PASSES / size))
    return HookArithmetic(
        copying=max(_LEAST, copied / size),
        rounding=max(_LEAST, rounded / 2 / size),
        low_rank=passes[0],
        further_rank=max(0.0, passes[1] - passes[0]) / (_HIGH_RANK - 1),
        call=calls[0],
        shape=of_shape[0],
        further_row=max(0.0, of_shape[1] - of_shape[0]) / (_HIGH_RANK - 1),
    )


def _seconds(bucket: FullBucket, run: Callable[[FullBucket], object], caches: torch.Tensor) -> float:
    """Median seconds of a run, after one in which memory is allocated.

    Before each run `caches` is written, because in a step the backward pass fills the processor's caches.
    """
    run(bucket)
    found = []
    for number in range(_TIMES):
        caches.fill_(number)
        synchronize(bucket.flat.device)
        began = time.perf_counter()
        run(bucket)
        synchronize(bucket.flat.device)
        found.append(time.perf_counter() - began)
    return median(found)
