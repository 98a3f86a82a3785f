"""PowerSGD of a higher rank than the gradients have: what it adds to them must be nothing."""

from __future__ import annotations

import pytest
import torch

from autoddp.worker.hooks.powersgd import _first_factor, _orthogonal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("true", "asked"), [(1, 2), (1, 8), (3, 4), (4, 8), (8, 8)])
def test_rows_are_orthonormal_whatever_the_rank(true: int, asked: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    low = torch.randn(3, asked, true, dtype=dtype) @ torch.randn(3, true, 512, dtype=dtype) * 1e-4
    gradient = torch.randn(3, 64, true, dtype=dtype) @ torch.randn(3, true, 512, dtype=dtype)
    q = _orthogonal(low.clone())
    assert float((q @ q.transpose(1, 2) - torch.eye(asked, dtype=dtype)).abs().max()) < 1e-5
    for _ in range(3):  # as from step to step: the product's other factor becomes the next one's first
        p = _orthogonal((gradient @ q.transpose(1, 2)).transpose(1, 2).contiguous())
        product = p.transpose(1, 2) @ (p @ gradient)
        q = _orthogonal(p @ gradient)
    assert float((product - gradient).norm() / gradient.norm()) < 1e-5


def test_nothing_stays_nothing() -> None:
    assert not _orthogonal(torch.zeros(1, 4, 16)).any()


def test_the_first_factor_is_drawn_whatever_device_the_script_has_made_the_default() -> None:
    """As by `torch.set_default_device("cuda")`."""
    stack = torch.zeros(2, 8, 16)
    expected = _first_factor(stack, 4, 0)
    with torch.device("meta"):
        assert torch.equal(_first_factor(stack, 4, 0), expected)
