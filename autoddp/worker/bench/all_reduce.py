"""Times all-reduces: float32 sums, in place, back to back, as nccl-tests runs them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from autoddp.timing import median
from autoddp.worker.process.device import synchronize


class AllReduces:
    """Makes a process group for every group of ranks. All ranks must construct it, after `init_process_group`."""

    def __init__(self, layouts: Mapping[str, Sequence[Sequence[int]]], device: torch.device) -> None:
        self._device = device
        self._mine: dict[str, dist.ProcessGroup] = {}
        self._tensor = torch.empty(0, device=device)
        self._one = torch.zeros(1, device=device)
        for layout, groups in layouts.items():
            for ranks in groups:
                group = dist.new_group(list(ranks))
                if isinstance(group, dist.ProcessGroup):  # else this rank is in another one
                    self._mine[layout] = group

    def run(self, layout: str, size: int, iterations: int, blocks: int) -> list[float]:
        """Seconds per all-reduce of `size` bytes, one value a block; empty on a rank outside the layout."""
        group = self._mine.get(layout)
        if group is None:
            return []
        if self._tensor.numel() != size // 4:
            # Zeros, because repeated sums of other values would overflow; the time does not depend on the values.
            self._tensor = torch.empty(0, device=self._device)  # free the old tensor first
            self._tensor = torch.zeros(size // 4, device=self._device)
        return [self._block(group, iterations) for _ in range(blocks)]

    def _block(self, group: dist.ProcessGroup, iterations: int) -> float:
        # The ranks return from the store at different times, so they synchronise on the group itself first.
        dist.all_reduce(self._one, group=group)
        synchronize(self._device)
        if self._device.type == "cpu":
            return median([self._once(group) for _ in range(iterations)])
        began = time.perf_counter()
        for _ in range(iterations):
            dist.all_reduce(self._tensor, group=group)
        synchronize(self._device)
        return (time.perf_counter() - began) / iterations

    def _once(self, group: dist.ProcessGroup) -> float:
        """Time one all-reduce by itself: if the scheduler interrupts a thread, a mean would measure its time slices."""
        began = time.perf_counter()
        dist.all_reduce(self._tensor, group=group)
        return time.perf_counter() - began


def of_slowest_group(by_rank: Sequence[Sequence[float]], groups: Sequence[Sequence[int]]) -> list[float]:
    """For each block, the mean seconds over the ranks of the slowest group.

    `by_rank` is [rank][block]. The mean over ranks is what nccl-tests prints; the slowest group counts, because a job
    waits for it.
    """
    blocks = len(by_rank[groups[0][0]])
    return [max(sum(by_rank[rank][b] for rank in ranks) / len(ranks) for ranks in groups) for b in range(blocks)]
