"""The power of two that moves a bucket's gradients into float16's range, and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoddp.worker.hooks.scaling import Level, Levels, largest_in

LARGEST = torch.finfo(torch.float16).max


def bucket(values: list[float], number: int = 0, last: bool = True) -> Any:
    tensor = torch.tensor(values)
    return SimpleNamespace(index=lambda: number, is_last=lambda: last, buffer=lambda: tensor)


def level_after(*means: list[float]) -> Any:
    """Of the reduction after those with these means, in a job with one bucket."""
    levels = Levels()
    for mean in means:
        level = levels.of(bucket(mean))
        assert level is not None
        level.learn(torch.tensor(mean))
    return levels.of(bucket(means[0]))


@pytest.mark.parametrize("largest", [1e-18, 1.6e-8, 4e-3, 1.0, 6e4, 3e38])
def test_it_is_exact_and_leaves_room_above_and_below(largest: float) -> None:
    level = level_after([largest, -largest / 3])
    scale, inverse = float(level.scale), float(level.inverse)
    assert scale * inverse == 1
    assert torch.frexp(level.scale)[0] == 0.5  # a power of two
    assert largest * scale * 2**12 <= LARGEST
    smallest = 2**-24 / scale
    assert smallest < largest * 2**-25


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16])
def test_a_default_type_of_the_scripts_has_no_part_in_it(default: torch.dtype) -> None:
    """In float16 a power of two beyond 65,504 is infinite, and the gradients would be; in bfloat16 a third is 0.334."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        level = Level(torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    assert level.scale.dtype is level.inverse.dtype is torch.float32


def test_the_first_reduction_has_none() -> None:
    level = Levels().of(bucket([1.0]))
    assert level is not None
    assert not level.is_known


@pytest.mark.parametrize("nothing", [[0.0], [float("inf")], [float("nan")]])
def test_what_tells_nothing_changes_nothing(nothing: list[float]) -> None:
    assert not level_after(nothing).is_known
    assert float(level_after([1e-5], nothing).scale) == float(level_after([1e-5]).scale)  # of zeros it takes many


def test_a_fall_is_followed_and_a_quiet_step_is_not() -> None:
    before, quiet, fallen = (level_after(*means) for means in ([[1.0]], [[1.0], [1e-2]], [[1.0], [1e-9]]))
    assert float(before.scale) == float(quiet.scale)
    assert 1e-9 * float(fallen.scale) > 2**-8


def test_each_bucket_has_its_own_and_new_buckets_begin_with_the_highest() -> None:
    levels = Levels()
    for number, value in enumerate((1e-7, 1e-2)):
        level = levels.of(bucket([value], number, last=number == 1))
        assert level is not None
        assert not level.is_known  # whatever the bucket before it has learned meanwhile
        level.learn(torch.tensor([value]))
    scales = []
    for number, size in enumerate((1, 1)):
        level = levels.of(bucket([0.0] * size, number, last=number == 1))
        assert level is not None
        scales.append(float(level.scale))
    assert scales[0] > 2**14 * scales[1]
    rebuilt = levels.of(bucket([0.0] * 5))
    assert rebuilt is not None
    assert rebuilt.is_known
    assert float(rebuilt.scale) == scales[1]


def test_buckets_without_numbers_have_none() -> None:
    levels = Levels()
    found = [levels.of(bucket([1.0], 0, last=False)) is None for _ in range(3)]
    assert found == [False, True, True]


def test_the_largest_value_in_one_pass() -> None:
    assert float(largest_in(torch.tensor([-5.0, 3.0]))) == 5
    assert float(largest_in(torch.tensor([]))) == 0
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not largest_in(torch.tensor([1.0, bad], dtype=torch.float16)).isfinite()
