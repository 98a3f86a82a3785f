"""float16 on a GPU's wire, where nobody can look: finite gradients give a finite sum, and what is not finite passes.

The arithmetic is the same on a CPU, so it is tried here; tests/gpu does it under NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoddp.knobs import Configuration
from autoddp.worker.hooks import hook_for, scaling
from autoddp.worker.hooks.by_itself import FullBucket
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


class Both:
    """Two ranks with the same gradients."""

    def size(self) -> int:
        return 2


def reduction(device_cannot_look: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[..., list[float]]]:
    """The hook's state, and a function that gives the mean of a bucket with these gradients, as a GPU computes it."""
    if device_cannot_look:
        monkeypatch.setattr(scaling, "can_send_again", lambda device: False)
    group: Any = Both()
    made = hook_for(Configuration({"hook": "fp16"}), group)
    assert made is not None
    state, hook = made

    class Sum:
        def __init__(self, tensor: torch.Tensor, _group: Any) -> None:
            self.future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            self.future.set_result([tensor.add_(tensor.clone())])

        def wait(self) -> None:
            """It is done."""

        def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
            return self.future

    state.all_reduce = Sum
    return state, lambda *values: hook(state, FullBucket(torch.tensor(values), [])).wait().tolist()


@pytest.mark.parametrize("device_cannot_look", [True, False])
def test_a_layer_that_float16_cannot_hold_keeps_its_gradients(
    monkeypatch: pytest.MonkeyPatch, device_cannot_look: bool
) -> None:
    _, mean = reduction(device_cannot_look, monkeypatch)
    given = [4e-3, 1.6e-8, -3e-3]
    assert mean(*given) == pytest.approx(given, rel=1e-6)  # the first is sent in full precision
    for scale in (1.0, 0.5, 1e-5, 1e-10, 3e-2, 1e6):  # a sudden change costs one reduction, also on a GPU
        mean(*(scale * value for value in given))
        assert mean(*(scale * value for value in given)) == pytest.approx([scale * v for v in given], rel=0.05)


def test_a_gpu_clamps_what_grows_too_much_and_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    state, mean = reduction(True, monkeypatch)
    mean(1e-4, 1e-5)
    clamped = mean(1e4, 1e-5)
    assert 1 < clamped[0] < 1e4
    assert mean(1e4, 1.0) == pytest.approx([1e4, 1.0], rel=1e-3)
    assert state.overflows == 0


def test_a_gpu_finds_what_has_become_too_small_to_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    _, mean = reduction(True, monkeypatch)
    mean(1.0, 1e-3)
    assert mean(1e-10, 1e-10) == [0.0, 0.0]
    arrived = [mean(1e-10, 1e-10)[0] for _ in range(100)]
    assert arrived[-1] == pytest.approx(1e-10, rel=1e-2)


def test_a_cpu_sends_again_what_grows_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    state, mean = reduction(False, monkeypatch)
    mean(1e-4, 1e-5)
    assert mean(1e4, 1e-5) == pytest.approx([1e4, 1e-5], rel=1e-6)
    assert state.overflows == 1
    assert mean(1e4, 1.0) == pytest.approx([1e4, 1.0], rel=1e-3)
    assert state.overflows == 1


@pytest.mark.parametrize("device_cannot_look", [True, False])
def test_a_grad_scaler_sees_infinite_gradients(monkeypatch: pytest.MonkeyPatch, device_cannot_look: bool) -> None:
    state, mean = reduction(device_cannot_look, monkeypatch)
    for _ in range(2):
        assert mean(float("inf"), 1.0)[0] == float("inf")
        assert mean(1e-5, -2.0) == pytest.approx([1e-5, -2.0], rel=2e-2)
        assert mean(1e-5, -float("inf"))[1] == -float("inf")
        assert torch.tensor(mean(float("nan"), 1.0))[0].isnan()
    assert state.overflows == 0


@pytest.mark.parametrize("device_cannot_look", [True, False])
def test_gradients_that_are_zero_at_first(monkeypatch: pytest.MonkeyPatch, device_cannot_look: bool) -> None:
    state, mean = reduction(device_cannot_look, monkeypatch)
    assert [mean(0.0, 0.0) for _ in range(3)] == [[0.0, 0.0]] * 3
    assert mean(1e-3, 2.0) == pytest.approx([1e-3, 2.0], rel=1e-3)
    assert mean(0.0, 0.0) == [0.0, 0.0]
    assert mean(1e-3, 2.0) == pytest.approx([1e-3, 2.0], rel=1e-3)
    assert state.overflows == 0
