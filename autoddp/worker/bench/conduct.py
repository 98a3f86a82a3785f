"""Rank 0's part of the benchmark: the sweep and the model of every layout, then the hooks, within the budget."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from autoddp.bench import HookCost, Point, Settings, Sweep, busbw, fit, measure_size, sizes, sweep
from autoddp.units import data_size
from autoddp.worker.bench.all_reduce import of_slowest_group
from autoddp.worker.bench.hook_cost import SIDES, TIMED
from autoddp.worker.bench.lockstep import Lockstep

HOOKS_SHARE = 0.15  # share of the budget: with the default, 0.2 s for each of fifteen measurements


def conduct(
    lockstep: Lockstep, layouts: Mapping[str, Sequence[Sequence[int]]], settings: Settings, room: int
) -> tuple[tuple[Sweep, ...], tuple[HookCost, ...]]:
    """Run all measurements. `room` is the largest message in bytes that memory allows. Progress goes to stderr."""
    deadline = time.monotonic() + settings.budget * (1 - HOOKS_SHARE)
    sweeps: list[Sweep] = []
    for layout, groups in layouts.items():
        share = (deadline - time.monotonic()) / (len(layouts) - len(sweeps))  # later layouts share the time left over
        sweeps.append(_sweep(lockstep, layout, groups, settings, share, room))
    return tuple(sweeps), _hooks(lockstep, settings.budget * HOOKS_SHARE)


def _sweep(
    lockstep: Lockstep, layout: str, groups: Sequence[Sequence[int]], settings: Settings, budget: float, room: int
) -> Sweep:
    ranks = max(map(len, groups))

    def measure(size: int, iterations: int, blocks: int) -> list[float]:
        return of_slowest_group(lockstep.do("reduce", layout, size, iterations, blocks), groups)

    def seen(point: Point) -> None:
        bandwidth = busbw(point.bytes, point.seconds, ranks)
        _say(f"{layout} {data_size(point.bytes):>10} {point.seconds * 1e6:>11.1f} µs  busbw {bandwidth:.3g} GB/s")

    wanted = sizes(settings.largest, settings.factor)
    fitting = [size for size in wanted if size <= room] or wanted[:1]
    points, stopped = sweep(measure, fitting, budget, seen)
    if not stopped and len(fitting) < len(wanted):
        stopped = f"stopped before {data_size(wanted[len(fitting)])}: too little memory is free"
    model = fit([(point.bytes, point.seconds) for point in points]) if len(points) > 1 else None
    return Sweep(layout, ranks, tuple(points), stopped, model)


def _hooks(lockstep: Lockstep, budget: float) -> tuple[HookCost, ...]:
    """Measure the hooks on matrices of increasing size; larger ones are left out when the budget is used up."""
    found: list[HookCost] = []
    deadline = time.monotonic() + budget
    todo = [(side, *hook) for side in SIDES for hook in TIMED]
    for place, (side, name, rank) in enumerate(todo):
        left = deadline - time.monotonic()
        if left < 0:
            _say(f"hooks: the budget is used, {len(todo) - place} of {len(todo)} are not measured")
            break

        def measure(
            size: int, iterations: int, blocks: int, hook: tuple[str, int, int] = (name, rank, side)
        ) -> list[float]:
            by_rank = lockstep.do("hook", *hook, iterations, blocks)
            return [sum(block) / len(block) for block in zip(*by_rank, strict=True)]

        found.append(HookCost(name, rank, measure_size(measure, 4 * side * side, left / (len(todo) - place))))
    return tuple(found)


def _say(text: str) -> None:
    print(f"autoddp: bench: {text}", file=sys.stderr, flush=True)
