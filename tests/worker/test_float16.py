"""float16 on a GPU's wire, where nobody can look: finite gradients give a finite sum, and what is not finite passes.

The arithmetic is the same on a CPU, so it is tried here; tests/gpu does it under NCCL.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoddp.worker.hooks.sixteen_bit import clamped_to_float16, largest_share

LARGE = [49_984.0, 65_504.0, 65_520.0, 1e6, 3.4e38]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]


def summed(values: list[float], ranks: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a ring makes of shares that are equal on all ranks: one float16 addition after another."""
    share = clamped_to_float16(torch.tensor(values, dtype=dtype), ranks)
    total = share.clone()
    for _ in range(ranks - 1):
        total += share
    return total


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8, 64, 1000, 4096])
def test_the_sum_of_finite_shares_is_finite(ranks: int) -> None:
    for value in LARGE:
        high, low = summed([value, -value], ranks).tolist()
        assert 0 < high < float("inf")
        assert low == -high


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8, 64, 1000, 4096])
def test_no_more_is_cut_off_than_has_to_be(ranks: int) -> None:
    limit = largest_share(ranks)
    above = limit * (1 + 2**-10)
    bound = 65504 / ranks / (1 + 2**-11) ** (ranks - 1)
    assert limit <= bound < above
    share = torch.tensor([limit, above, 1.0, 2.0**-24, 0.0])
    assert clamped_to_float16(share, ranks).tolist() == [limit, limit, *(min(v, limit) for v in (1.0, 2**-24)), 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 1000])
def test_what_is_not_finite_passes(dtype: torch.dtype, ranks: int) -> None:
    inf, low, nan, large = summed([float("inf"), -float("inf"), float("nan"), torch.finfo(dtype).max], ranks, dtype)
    assert (inf, low) == (float("inf"), -float("inf"))
    assert nan.isnan()
    assert large.isfinite()


def test_it_takes_two_kernels() -> None:
    class Count(TorchDispatchMode):
        calls: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.calls.append(str(function))
            return function(*args, **(kwargs or {}))

    share = torch.ones(10)
    with Count() as count:
        clamped_to_float16(share, 2)
    assert count.calls == ["aten.empty_like.default", "aten.clamp.default", "aten.add.out"]
