"""Two ranks that differ for a while: what a scaler leaves out on one of them, and what is to stay each one's own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from two_ranks import EARLY_AND_INFINITE, LOCALLY_INFINITE, MICRO_BATCHES, STEPS, checks


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Both, on the CPU, or on the one GPU that they share."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and here are 0")
    return on_ranks(2, functools.partial(checks, request.param), tmp_path_factory.mktemp("ranks"))


def test_a_fused_optimizer_judges_whole_gradients_under_deferral(ranks, figure):
    """Its step is left out on both ranks or on none, as in the loop that one writes with `no_sync`."""
    figure("scales", ranks[0]["fused deferred"]["scales"])
    scales = [4.0 if step < EARLY_AND_INFINITE else 2.0 for step in range(len(MICRO_BATCHES))]
    for found in ranks:
        assert found["fused as written"]["scales"] == scales
        assert found["fused deferred"]["scales"] == scales
        written, deferred = found["fused as written"]["parameters"], found["fused deferred"]["parameters"]
        for one, other, of_first in zip(written, deferred, ranks[0]["fused deferred"]["parameters"], strict=True):
            assert one.isfinite().all()
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
            assert torch.equal(other, of_first)


def test_a_step_that_one_rank_leaves_out_is_counted_by_both(ranks, figure):
    """Without reduction an infinite gradient stays with one rank."""
    first, second = (found["locally infinite"] for found in ranks)
    figure("scales", f"{first['scale']} and {second['scale']}")
    assert (first["scale"], second["scale"]) == (4.0, 4.0 / 2 ** len(LOCALLY_INFINITE))  # the second did leave them out
    assert first["boundaries"] == second["boundaries"] == [0, 0, *range(1, STEPS - 1)]  # from its choice on
    assert not any(torch.equal(*pair) for pair in zip(first["apart"], second["apart"], strict=True))
    for one, other in zip(first["together"], second["together"], strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()


def test_parameters_that_ddp_ignores_stay_each_ranks_own(ranks):
    for rank, found in enumerate(ranks):
        assert found["kept apart"] == {"weight": [1.0] * 6, "adapter": [float(rank)] * 3, "shared": [0.0]}
