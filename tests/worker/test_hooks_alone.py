"""Hooks in a world of one: what a script has around its backward pass, and which stream they run on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_cuda import FakeCuda
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.worker.ddp.arguments import why_untouchable
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.gradients.access import add_handler, remove_handler
from autoddp.worker.gradients.deferred import ImplicitNoSync
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.hooks import hook_for
from autoddp.worker.hooks.by_itself import one_matrix
from autoddp.worker.hooks.powersgd import _beside_the_backward_pass
from autoddp.worker.job.bypass import _needs_its_reduction
from autoddp.worker.process.device import _own_stream

SECOND = torch.device("cuda", 1)


def test_autocast_around_the_backward_pass_does_not_reach_the_factors(alone: dist.ProcessGroup) -> None:
    found = []
    for autocast in (False, True):
        made = hook_for(Configuration({"hook": "powersgd", "powersgd_rank": 2}), alone, 0)
        assert made is not None
        state, hook = made
        torch.manual_seed(0)
        bucket: Any = one_matrix(64, torch.device("cpu"))
        bucket.buffer().normal_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found.append(hook(state, bucket).wait().clone())
    assert torch.equal(*found)


def test_powersgd_waits_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    monkeypatch.setattr(torch, "autocast", FakeCuda.no_autocast)
    backward = cuda.current_stream(SECOND)
    _own_stream.cache_clear()
    waited = []
    streams = []
    for _ in range(2):
        with _beside_the_backward_pass(SECOND):
            stream = cuda.current_stream(SECOND)
            streams.append(stream)
            waited.append(stream.waited_for)
        assert cuda.current_stream(SECOND) is backward
    _own_stream.cache_clear()
    assert streams[0] is streams[1] is not backward
    assert waited[-1] == [backward, backward]
    assert cuda.contexts == {1}


class Queued:
    """A sum that is queued, as NCCL's: its future is done, and only `wait` may hold up the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.waits = 0
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future.set_result([tensor])

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future

    def wait(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
@pytest.mark.parametrize(("value", "waits"), [("1", False), ("True", False), ("0", True), (None, True)])
def test_the_host_goes_on_where_a_scripts_own_waits_hold_it_up(
    hook: str, value: str | None, waits: bool, alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP itself waits for no work under NCCL_BLOCKING_WAIT. Else no bucket would travel beside the backward pass."""
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv("NCCL_BLOCKING_WAIT", value)
    queued: list[Queued] = []
    made = hook_for(Configuration({"hook": hook, **({"powersgd_rank": 2} if hook == "powersgd" else {})}), alone, 0)
    assert made is not None
    state, function = made

    def send(tensor: torch.Tensor, _group: dist.ProcessGroup) -> Queued:
        queued.append(Queued(tensor))
        return queued[-1]

    state.all_reduce = send
    bucket: Any = one_matrix(64, torch.device("cpu"))
    before = bucket.buffer().clone()
    assert torch.allclose(function(state, bucket).wait(), before, atol=0.1) is (hook != "powersgd")
    assert queued
    assert all(bool(one.waits) is waits for one in queued)


@pytest.mark.parametrize("is_sliced", [True, False])
def test_a_mesh_that_also_splits_parameters_is_untouchable(is_sliced: bool) -> None:
    mesh: Any = SimpleNamespace()
    mesh._get_root_mesh = lambda: SimpleNamespace(larger=True) if is_sliced else mesh
    assert bool(why_untouchable({"device_mesh": mesh}, torch.nn.Linear(1, 1))) is is_sliced


def test_gradients_are_whole_before_a_scaler_judges_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a fused optimizer `step` itself looks for infinite gradients, before it calls the optimizer."""
    order: list[str] = []
    scaler, judge = torch.amp.GradScaler, torch.amp.GradScaler._check_inf_per_device

    def judged(this: Any, optimizer: torch.optim.Optimizer) -> Any:
        order.append("judged")
        return judge(this, optimizer)

    monkeypatch.setattr(scaler, "_check_inf_per_device", judged)
    implicit_no_sync = ImplicitNoSync(ReductionSwitch(lambda ddp: None), list)
    add_handler(implicit_no_sync)
    implicit_no_sync.reads = lambda _given: order.append("whole")
    layer = torch.nn.Linear(2, 2)
    fused = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    this = scaler("cpu", init_scale=2.0)
    this.scale(layer(torch.ones(1, 2)).sum()).backward()
    this.step(fused)
    remove_handler(implicit_no_sync)
    assert order[:2] == ["whole", "judged"]


def test_passes_that_the_script_finalizes_itself_are_reduced(alone: dist.ProcessGroup) -> None:
    """`finalize_backward` of torch 2.15 raises where nothing was reduced, and where a new reducer was not told."""
    ddp = DDP(torch.nn.Linear(2, 2))
    wrapped = Wrapped(ddp, {})
    switch = ReductionSwitch(lambda ddp: wrapped)
    switch.on = False
    assert (switch.reduces(ddp), wrapped.why_untouchable(), _needs_its_reduction(ddp)) == (False, "", False)
    ddp.require_manual_backward_finalization = True
    assert switch.reduces(ddp)
    assert "finalizes" in wrapped.why_untouchable()
    assert _needs_its_reduction(ddp)
    wrapped.rebuild(AS_WRITTEN, None)
    assert ddp.require_manual_backward_finalization
    ddp(torch.ones(1, 2)).sum().backward()
    getattr(ddp, "finalize_backward", lambda: None)()


def test_gradients_of_one_rank_among_others_are_not_rounded(
    alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a part of a model that one rank trains alone: nothing travels, so a lossy hook would gain nothing."""
    ddp = DDP(torch.nn.Linear(2, 2))
    wrapped = Wrapped(ddp, {})
    for world_size, is_exact in ((1, False), (2, True)):
        monkeypatch.setattr(dist, "get_world_size", lambda: world_size)  # noqa: B023
        wrapped.rebuild(Configuration({"hook": "bf16"}), 0)
        ddp.zero_grad()
        ddp(torch.full((1, 2), 1 / 3)).sum().backward()
        assert torch.equal(ddp.module.weight.grad, torch.full((2, 2), 1 / 3)) is is_exact
        assert wrapped.leave_out_hook()


def test_a_model_that_moves_to_another_memory_format_after_ddp_stays_as_written(alone: dist.ProcessGroup) -> None:
    """Its first gradients are mixed up by torch, and with `gradient_as_bucket_view` they are not: another training."""
    gradients = []
    for more in ({}, {"gradient_as_bucket_view": True}):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 5, 1))
        ddp = DDP(model, **more)
        wrapped = Wrapped(ddp, {})
        assert wrapped.why_untouchable() == ""
        model[1].to(memory_format=torch.channels_last)  # of one element in height and width: nothing has moved
        assert wrapped.why_untouchable() == ""
        model.to(memory_format=torch.channels_last)
        assert "call to(memory_format=...) before DistributedDataParallel(...)" in wrapped.why_untouchable()
        ddp(torch.randn(2, 3, 8, 8)).square().sum().backward()
        gradients.append(model[0].weight.grad)
    assert not torch.allclose(*gradients)
