"""What several of the checks use."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def layers(width: int, count: int) -> nn.Sequential:
    """Linear layers with ReLUs in between, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(width, width), nn.ReLU())))


def measured(run: Callable[[], Any], count: int = 20) -> float:
    """Median seconds of a call on the current device, by events."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    seconds = sorted(one.elapsed_time(other) / 1e3 for one, other in itertools.pairwise(marks))
    return seconds[len(seconds) // 2]
