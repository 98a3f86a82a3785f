"""Gradients under `gradient_as_bucket_view`: models that are dropped, and scripts that wait for their reductions."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.worker.ddp.patch import Patch
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.gradients.views import BucketViews

VIEW = Configuration({"gradient_as_bucket_view": True})


def trains(rank: int) -> dict[str, Any]:
    """Compares each gradient with that of the step before, which it keeps: as written, then under the knob."""
    patch = Patch()
    switch = ReductionSwitch(patch.of)
    told: list[str] = []
    patch.events = BucketViews(switch, told.append)
    patch.install()
    switch.install()
    found: dict[str, Any] = {}
    for name, configuration in (("as written", AS_WRITTEN), ("under the knob", VIEW)):
        patch.configuration = configuration
        torch.manual_seed(1)
        ddp = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        cast("Any", ddp).require_manual_backward_finalization = True
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        kept: list[torch.Tensor] = []
        turned = []
        for step in range(6):
            optimizer.zero_grad()
            ddp(torch.full((3, 4), float(rank + step))).square().sum().backward()
            cast("Any", ddp).finalize_backward()
            now = [cast("torch.Tensor", p.grad) for p in ddp.parameters()]
            turned.append([(a * b).sum() for a, b in zip(kept, now, strict=False)])
            kept = now
            optimizer.step()
        found[name] = (turned, [p.detach() for p in ddp.parameters()])
    return found | {"told": told}


def drops_its_model(rank: int) -> dict[str, Any]:
    """Goes backward through a model that it has dropped, as torch lets it; nothing is reduced then."""
    patch = Patch()
    patch.configuration = VIEW
    switch = ReductionSwitch(patch.of)
    patch.events = BucketViews(switch, lambda why: None)
    patch.install()
    switch.install()
    layer = nn.Linear(4, 2)
    error = DDP(layer)(torch.ones(1, 4)).sum()
    gc.collect()
    assert patch.alive() == []
    error.backward()
    return {"gradient": layer.weight.grad}


class Fourier(nn.Module):
    """Has complex weights, as Fourier neural operators do, beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Linear(4, 4)
        self.spectrum = nn.ParameterList(nn.Parameter(torch.ones(4, dtype=torch.complex64)) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = torch.fft.fft(self.real(inputs))
        for weights in self.spectrum:
            found = found * weights
        return torch.fft.ifft(found).real


def trains_complex_weights(rank: int) -> dict[str, Any]:
    """Keeps nothing; then a part of each gradient, by another tensor in its memory, over one backward pass."""
    patch = Patch()
    patch.configuration = VIEW
    switch = ReductionSwitch(patch.of)
    told: list[str] = []
    patch.events = BucketViews(switch, told.append)
    patch.install()
    switch.install()
    found = []
    for keeps in (False, True):
        ddp = DDP(Fourier())
        kept: list[torch.Tensor] = []
        for step in range(4):
            loss = ddp(torch.full((3, 4), float(rank + step))).square().sum()
            ddp.zero_grad()  # after the forward pass, in which DDP has put the first gradients into its final buckets
            loss.backward()
            if keeps:
                kept = [p.grad.detach() for p in ddp.module.spectrum]
        found.append(len(told))
        del kept
    return {"told": found}


def test_a_complex_gradient_that_nobody_keeps_is_not_kept(tmp_path: Path) -> None:
    """DDP's own view of its bucket as real numbers was counted as the script's hold on a gradient."""
    assert [one["told"] for one in on_ranks(2, trains_complex_weights, tmp_path)] == [[0, 1]] * 2


def test_a_model_may_be_dropped_before_its_backward_pass(tmp_path: Path) -> None:
    assert [one["gradient"].tolist() for one in on_ranks(2, drops_its_model, tmp_path)] == [[[1.0] * 4] * 2] * 2


@pytest.mark.skipif(not hasattr(DDP, "finalize_backward"), reason="needs torch 2.15, whose DDP has finalize_backward")
def test_gradients_are_given_memory_of_their_own_after_the_scripts_finalization(tmp_path: Path) -> None:
    """Taken out of their buckets at the end of the backward pass, they would not be where DDP looks for them."""
    for rank in on_ranks(2, trains, tmp_path):
        assert len(rank["told"]) == 1
        torch.testing.assert_close(rank["under the knob"], rank["as written"], rtol=0, atol=0)
