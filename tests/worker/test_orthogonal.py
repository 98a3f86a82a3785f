"""Both ways in which PowerSGD makes its factors orthonormal: the CPU's, and the one that takes few kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autoddp.worker.hooks.powersgd import by_cholesky, by_gram_schmidt

BOTH = [by_gram_schmidt, by_cholesky]


def source() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def parallel() -> torch.Tensor:
    rows = torch.randn(2, 4, 300, generator=source())
    rows[:, 1] = rows[:, 0]
    return rows


def nearly_parallel() -> torch.Tensor:
    rows = parallel()
    rows[:, 1] += 1e-6 * torch.randn(2, 300, generator=source())
    return rows


def with_zeros() -> torch.Tensor:
    rows = torch.randn(2, 4, 300, generator=source())
    rows[:, 2] = 0
    return rows


def of_low_rank() -> torch.Tensor:
    return torch.randn(2, 8, 2, generator=source()) @ torch.randn(2, 2, 300, generator=source())


def falling() -> torch.Tensor:
    return torch.randn(2, 8, 300, generator=source()) * torch.logspace(0, -12, 8).view(1, 8, 1)


CASES: dict[str, Callable[[], torch.Tensor]] = {
    "one": lambda: torch.randn(3, 1, 500, generator=source()),
    "eight": lambda: torch.randn(3, 8, 500, generator=source()),
    "square": lambda: torch.randn(3, 8, 8, generator=source()),
    "parallel": parallel,
    "nearly parallel": nearly_parallel,
    "zeros among them": with_zeros,
    "of low rank": of_low_rank,
    "falling": falling,
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("orthonormal", BOTH)
def test_rows_are_orthonormal_and_span_the_same(orthonormal: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    given = CASES[name]()
    made = orthonormal(given.clone()).double()
    alive = (given.norm(dim=2) > 0).double()
    assert torch.allclose(made @ made.transpose(1, 2), torch.diag_embed(alive), atol=2e-5)
    rest = given.double() - (given.double() @ made.transpose(1, 2)) @ made
    assert float(rest.norm() / given.double().norm()) < 2e-6


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("orthonormal", BOTH)
def test_what_is_not_finite_is_seen(orthonormal: Callable[[torch.Tensor], torch.Tensor], bad: float) -> None:
    """AMP finds its scale by it: it must not become a direction like any other."""
    rows = torch.randn(1, 4, 300, generator=source())
    rows[0, 1, 5] = bad
    assert not orthonormal(rows).isfinite().all()


def test_zeros_stay_zeros() -> None:
    for orthonormal in BOTH:
        assert not orthonormal(torch.zeros(2, 4, 100)).any()
