"""What hooks compute is measured without a process group, and leaves everything as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoddp.worker.hooks.arithmetic import arithmetic_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_it_is_measured_on_gradients_as_large_as_the_models(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(300, 200), nn.Conv2d(3, 8, 3), nn.Linear(200, 300)).to(dtype)
    found = arithmetic_of(list(model.parameters()))
    assert found is not None
    assert min(found.copying, found.rounding, found.low_rank, found.call, found.shape) > 0
    assert min(found.further_rank, found.further_row) >= 0
    assert max(found.copying, found.rounding, found.low_rank) < 1e-5  # seconds per byte: 100 kB/s is no computer
    assert max(found.call, found.shape) < 0.1


def test_it_changes_nothing_of_the_script() -> None:
    model = nn.Linear(64, 64)
    model(torch.ones(1, 64)).sum().backward()
    before = [one.clone() for p in model.parameters() for one in (p, p.grad) if one is not None]
    random = torch.get_rng_state()
    assert arithmetic_of(list(model.parameters())) is not None
    after = [one for p in model.parameters() for one in (p, p.grad) if one is not None]
    assert all(map(torch.equal, before, after))
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_model_of_one_huge_parameter_and_one_of_thin_ones(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    try:
        for parameters in ([torch.empty(6 * 2**20, requires_grad=True)], [torch.empty(7, requires_grad=True)]):
            found = arithmetic_of(parameters)
            assert found is not None
            assert found.low_rank > 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_type_with_which_hooks_cannot_compute() -> None:
    assert arithmetic_of([torch.empty(64, 64, requires_grad=True, dtype=torch.float8_e4m3fn)]) is None


def test_without_gradients_there_is_nothing_to_measure() -> None:
    assert arithmetic_of([]) is None
    assert arithmetic_of([torch.ones(3), torch.ones(3, dtype=torch.int64)]) is None
    assert arithmetic_of([torch.empty(0, requires_grad=True)]) is None


def test_it_is_measured_whatever_device_the_script_has_made_the_default() -> None:
    """As by `torch.set_default_device("cuda")`."""
    parameters = list(nn.Linear(64, 64).parameters())
    with torch.device("meta"):
        assert arithmetic_of(parameters) is not None
