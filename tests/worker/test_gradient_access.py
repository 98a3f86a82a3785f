"""Several steps that are one, in a world of one: each function of torch that reads gradients finds their mean."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.errors import JobStops
from autoddp.knobs.micro_batches import DISCARDS_GRADIENTS
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.gradients import access, same_on_all
from autoddp.worker.gradients.access import GradientHandler, OwnReads, add_handler, remove_handler
from autoddp.worker.gradients.accumulation import Accumulation
from autoddp.worker.gradients.deferred import ImplicitNoSync
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.observe.first_steps import FirstSteps
from autoddp.worker.observe.step_clock import StepClock

AT_ONCE, UPDATES = 3, 4
SMALL = 0.05  # below every norm and every gradient here, so that clipping changes something


class Script:
    """A model under DDP and one beside it. `before_step()` is what the script does between backward and step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.foreign = DDP(nn.Linear(4, 4)), nn.Linear(4, 4)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        self.scaled = False

    def backward(self, number: int, share: float) -> None:
        loss = (self.model(torch.full((2, 4), 0.1 * number)) - 1).square().mean() * share
        loss = loss + self.foreign(torch.ones(1, 4)).sum()
        (self.scaler.scale(loss) if self.scaled else loss).backward()

    def step(self) -> None:
        if self.scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()


def nothing(script: Script) -> None:
    pass


def clip_norm(script: Script) -> None:
    nn.utils.clip_grad_norm_(script.model.parameters(), max_norm=SMALL)


def clip_norm_told_by_position(script: Script) -> None:
    nn.utils.clip_grad_norm_((p for p in script.parameters), SMALL, 2.0)


def clip_value(script: Script) -> None:
    nn.utils.clip_grad_value_(script.parameters, SMALL)


def clip_in_two_parts(script: Script) -> None:
    norm = nn.utils.get_total_norm([p.grad for p in script.parameters])
    nn.utils.clip_grads_with_norm_(script.parameters, SMALL, norm)


def clip_another_model(script: Script) -> None:
    nn.utils.clip_grad_norm_(script.foreign.parameters(), SMALL)


def test_a_patched_function_is_one_under_all_its_names() -> None:
    """Else pickle would refuse an object that holds one of them."""
    handler = Reads()
    add_handler(handler)
    remove_handler(handler)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        function = getattr(nn.utils, name)
        assert hasattr(function, "__wrapped__")
        assert pickle.loads(pickle.dumps(function)) is function


class Reads(GradientHandler):
    def before_reading(self, parameters: Sequence[torch.Tensor]) -> bool:
        return False


def trained(at_once: int, accumulates: bool, before_step: Callable[[Script], None], scaled: bool) -> list[torch.Tensor]:
    """Parameters after some updates, each by as many batches: in steps that become one, or in one as one writes it."""
    script = Script()
    script.scaled = scaled
    wrapped = [Wrapped(script.model, {})]
    switch = ReductionSwitch(lambda ddp: wrapped[0])
    implicit_no_sync = ImplicitNoSync(switch, lambda: wrapped)
    accumulation = Accumulation(switch, lambda: wrapped, implicit_no_sync, pytest.fail)
    handlers: tuple[GradientHandler, ...] = (implicit_no_sync, accumulation)
    for handler in handlers:
        add_handler(handler)
    accumulation.steps = at_once if accumulates else 1
    for number in range(AT_ONCE * UPDATES):
        accumulation.forward_begins(script.model)
        script.backward(number, 1.0 if accumulates else 1 / at_once)
        if accumulates or (number + 1) % at_once == 0:
            before_step(script)
            script.step()
            script.optimizer.zero_grad()
            script.foreign.zero_grad()
    for handler in handlers:
        remove_handler(handler)
    return [p.detach().clone() for p in script.parameters]


WAYS = [nothing, clip_norm, clip_norm_told_by_position, clip_value, clip_in_two_parts, clip_another_model]


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("before_step", WAYS)
@pytest.mark.usefixtures("alone")
def test_steps_that_are_one_train_as_one_step_of_all_their_batches(
    before_step: Callable[[Script], None], scaled: bool
) -> None:
    def with_scale(script: Script) -> None:
        if scaled:
            script.scaler.unscale_(script.optimizer)
        before_step(script)

    as_one, by_hand = (trained(AT_ONCE, accumulates, with_scale, scaled) for accumulates in (True, False))
    for one, other in zip(as_one, by_hand, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("throws_away", [(), (1,), (1, 4), (1, 2), tuple(range(6))])
@pytest.mark.usefixtures("alone")
def test_a_script_that_clears_gradients_within_each_step_gets_its_own_steps_back(
    throws_away: tuple[int, ...], scaled: bool
) -> None:
    """Else no step would ever be the last of several, and the job would train nothing."""
    script, reasons = Script(), []
    script.scaled = scaled
    wrapped = [Wrapped(script.model, {})]
    switch = ReductionSwitch(lambda ddp: wrapped[0])
    implicit_no_sync = ImplicitNoSync(switch, lambda: wrapped)
    accumulation = Accumulation(switch, lambda: wrapped, implicit_no_sync, reasons.append)
    handlers: tuple[GradientHandler, ...] = (implicit_no_sync, accumulation)
    for handler in handlers:
        add_handler(handler)
    accumulation.steps = AT_ONCE
    before = script.parameters[0].detach().clone()
    for number in range(6):
        for _ in range(2 if number in throws_away else 1):
            script.optimizer.zero_grad()
            accumulation.forward_begins(script.model)
            script.backward(number, 1.0)
        script.step()
    for handler in handlers:
        remove_handler(handler)
    assert not torch.equal(script.parameters[0], before)
    twice_in_a_row = throws_away not in ((), (1,), (1, 4))
    assert reasons == ([DISCARDS_GRADIENTS] if twice_in_a_row else [])


@pytest.mark.usefixtures("alone")
def test_a_pass_by_autograd_grad_reduces_nothing_that_was_put_off() -> None:
    script = Script()
    wrapped = [Wrapped(script.model, {})]
    switch = ReductionSwitch(lambda ddp: wrapped[0])
    put_off = ImplicitNoSync(switch, lambda: wrapped)
    put_off.every = 2

    def loss() -> torch.Tensor:
        put_off.forward_begins(script.model)
        return put_off.returned(script.model, script.model(torch.ones(2, 4))).square().sum()

    loss().backward()
    last = loss()
    assert put_off.pending
    torch.autograd.grad(last, script.parameters, retain_graph=True)
    assert put_off.pending
    last.backward()
    assert not put_off.pending


@pytest.mark.usefixtures("alone")
def test_an_epoch_may_leave_over_passes_that_were_put_off() -> None:
    """The next epoch begins with `zero_grad`. Nobody has read what that clears."""
    script = Script()
    wrapped = [Wrapped(script.model, {})]
    switch = ReductionSwitch(lambda ddp: wrapped[0])
    put_off = ImplicitNoSync(switch, lambda: wrapped)
    accumulation = Accumulation(switch, lambda: wrapped, put_off, pytest.fail)
    first_steps = FirstSteps(lambda: wrapped, put_off, accumulation, pytest.fail)
    first_steps.built(wrapped[0])
    put_off.every = 3
    add_handler(put_off)

    def backward() -> None:
        first_steps.forward_begins(script.model)
        put_off.forward_begins(script.model)
        put_off.returned(script.model, script.model(torch.ones(2, 4))).square().mean().backward()

    backward()
    script.optimizer.zero_grad()
    for _ in range(3):
        backward()
    script.optimizer.step()
    remove_handler(put_off)
    assert not put_off.pending
    assert put_off.every == 3


@pytest.mark.usefixtures("alone")
def test_a_script_that_holds_gradients_of_kept_steps_is_stopped() -> None:
    script = Script()
    wrapped = [Wrapped(script.model, {})]
    switch = ReductionSwitch(lambda ddp: wrapped[0])
    implicit_no_sync = ImplicitNoSync(switch, lambda: wrapped)
    accumulation = Accumulation(switch, lambda: wrapped, implicit_no_sync, pytest.fail)
    add_handler(accumulation)
    accumulation.steps = AT_ONCE
    accumulation.forward_begins(script.model)
    script.backward(1, 1.0)
    held = [p.grad for p in script.parameters]
    with pytest.raises(JobStops, match=r"autoddp: the script keeps gradients.*accumulate_steps"):
        script.step()
    remove_handler(accumulation)
    assert held


@pytest.mark.usefixtures("alone")
def test_a_script_that_uses_gradients_without_a_step_is_stopped() -> None:
    """Every tenth step Sophia goes backward once more, clips, squares the gradients by itself, and clears them."""
    script = Script()
    wrapped = [Wrapped(script.model, {})]
    switch = ReductionSwitch(lambda ddp: wrapped[0])
    implicit_no_sync = ImplicitNoSync(switch, lambda: wrapped)
    accumulation = Accumulation(switch, lambda: wrapped, implicit_no_sync, pytest.fail)
    squares: list[torch.Tensor] = []
    add_handler(accumulation)
    accumulation.steps = AT_ONCE

    def backward() -> None:
        implicit_no_sync.forward_begins(script.model)
        accumulation.forward_begins(script.model)
        accumulation.returned(script.model, script.model(torch.ones(2, 4))).square().mean().backward()
        clip_norm(script)

    for _ in range(AT_ONCE):
        backward()
        script.step()
        script.optimizer.zero_grad()
    backward()
    squares.extend(p.grad.square() for p in script.parameters if p.grad is not None)
    with pytest.raises(JobStops, match=r"autoddp: the script reads, clears or changes.*accumulate_steps"):
        script.optimizer.zero_grad()
    remove_handler(accumulation)


@pytest.mark.usefixtures("alone")
def test_a_script_may_leave_out_a_step_whose_norm_is_large() -> None:
    """Were it told that norm in the steps that are kept, it would leave out each later step too."""
    script = Script()
    wrapped = [Wrapped(script.model, {})]
    switch = ReductionSwitch(lambda ddp: wrapped[0])
    implicit_no_sync = ImplicitNoSync(switch, lambda: wrapped)
    accumulation = Accumulation(switch, lambda: wrapped, implicit_no_sync, pytest.fail)
    add_handler(accumulation)
    accumulation.steps = AT_ONCE
    left_out = []
    for number in range(AT_ONCE * UPDATES):
        implicit_no_sync.forward_begins(script.model)
        accumulation.forward_begins(script.model)
        loss = accumulation.returned(script.model, script.model(torch.ones(2, 4))).square().mean()
        (loss * (1e6 if number == 2 * AT_ONCE - 1 else 1)).backward()
        if nn.utils.clip_grad_norm_(script.parameters, SMALL) < 1e3:
            script.step()
        else:
            left_out.append(number)
        script.optimizer.zero_grad()
    remove_handler(accumulation)
    assert left_out == [2 * AT_ONCE - 1]


@pytest.mark.parametrize("factor", [1e6, float("inf")])
@pytest.mark.usefixtures("alone")
def test_a_script_may_leave_out_its_first_step_by_the_norm(factor: float) -> None:
    """Were it told that norm again in the steps that are kept, it would leave out each later step too."""
    script = Script()
    wrapped = [Wrapped(script.model, {})]
    switch = ReductionSwitch(lambda ddp: wrapped[0])
    implicit_no_sync = ImplicitNoSync(switch, lambda: wrapped)
    accumulation = Accumulation(switch, lambda: wrapped, implicit_no_sync, pytest.fail)
    add_handler(accumulation)
    accumulation.steps = AT_ONCE
    left_out = []
    for number in range(1 + AT_ONCE):
        implicit_no_sync.forward_begins(script.model)
        accumulation.forward_begins(script.model)
        loss = accumulation.returned(script.model, script.model(torch.ones(2, 4))).square().mean()
        (loss * (1 if number else factor)).backward()
        if nn.utils.clip_grad_norm_(script.parameters, SMALL) < 1e3:
            script.step()
        else:
            left_out.append(number)
        script.optimizer.zero_grad()
    remove_handler(accumulation)
    assert left_out == [0]
    assert script.optimizer.state


@pytest.mark.parametrize("clears_first", [False, True])
@pytest.mark.parametrize(("infinite", "scale"), [(0, 2.0), (2 * AT_ONCE - 1, 1.0)])
@pytest.mark.usefixtures("alone")
def test_a_script_may_leave_out_a_step_and_update_its_scaler(infinite: int, scale: float, clears_first: bool) -> None:
    """In a step that is kept the scaler has recorded nothing; in the last one it has, and must begin anew."""
    script = Script()
    wrapped = [Wrapped(script.model, {})]
    switch = ReductionSwitch(lambda ddp: wrapped[0])
    implicit_no_sync = ImplicitNoSync(switch, lambda: wrapped)
    accumulation = Accumulation(switch, lambda: wrapped, implicit_no_sync, pytest.fail)
    add_handler(accumulation)
    accumulation.steps = AT_ONCE
    left_out = []
    for number in range(3 * AT_ONCE):
        implicit_no_sync.forward_begins(script.model)
        accumulation.forward_begins(script.model)
        loss = accumulation.returned(script.model, script.model(torch.ones(2, 4))).square().mean()
        script.scaler.scale(loss * (float("inf") if number == infinite else 1)).backward()
        script.scaler.unscale_(script.optimizer)
        if nn.utils.clip_grad_norm_(script.parameters, SMALL).isfinite():
            script.scaler.step(script.optimizer)
        else:
            left_out.append(number)
        if clears_first:
            script.optimizer.zero_grad()
        script.scaler.update()
        script.optimizer.zero_grad()
    remove_handler(accumulation)
    assert left_out == [infinite]
    assert script.scaler.get_scale() == scale


@pytest.mark.usefixtures("alone")
def test_a_script_may_leave_out_a_step_after_clipping() -> None:
    """By its loss, for example. It has read no gradient, so it has used none."""
    script = Script()
    wrapped = [Wrapped(script.model, {})]
    switch = ReductionSwitch(lambda ddp: wrapped[0])
    implicit_no_sync = ImplicitNoSync(switch, lambda: wrapped)
    accumulation = Accumulation(switch, lambda: wrapped, implicit_no_sync, pytest.fail)
    add_handler(accumulation)
    accumulation.steps = AT_ONCE
    before = script.parameters[0].detach().clone()
    for number in range(1 + 2 * AT_ONCE):
        implicit_no_sync.forward_begins(script.model)
        accumulation.forward_begins(script.model)
        accumulation.returned(script.model, script.model(torch.ones(2, 4))).square().mean().backward()
        clip_norm(script)
        if number == AT_ONCE:
            before = script.parameters[0].detach().clone()
        else:
            script.step()
        script.optimizer.zero_grad()
    remove_handler(accumulation)
    assert not torch.equal(script.parameters[0], before)
    assert "grad" not in vars(nn.Parameter)


@pytest.mark.usefixtures("alone")
def test_a_script_that_clips_by_hand_what_a_scaler_has_left_scaled_is_stopped() -> None:
    """In a step that is kept `unscale_` does nothing: a limit of the script's own would be one for scaled gradients."""
    script = Script()
    script.scaled = True
    wrapped = [Wrapped(script.model, {})]
    switch = ReductionSwitch(lambda ddp: wrapped[0])
    implicit_no_sync = ImplicitNoSync(switch, lambda: wrapped)
    accumulation = Accumulation(switch, lambda: wrapped, implicit_no_sync, pytest.fail)
    add_handler(accumulation)
    accumulation.steps = AT_ONCE
    accumulation.forward_begins(script.model)
    script.backward(1, 1.0)
    script.scaler.unscale_(script.optimizer)
    for p in script.parameters:
        p.grad.data.mul_(0.5)
    stops = pytest.raises(JobStops, match=r"autoddp: the script reads and changes gradients itself.*accumulate_steps")
    with stops, contextlib.suppress(Exception):  # a script that leaves out a batch that fails would train on
        script.step()
    remove_handler(accumulation)


def test_a_rank_that_alone_reads_a_norm_comes_before_a_collective_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It logs the norm; the others are at their next reduction, and wait there for this rank."""
    store, waits = dist.HashStore(), list[float]()

    def never(is_there: Callable[[], bool], seconds: float) -> bool:
        waits.append(seconds)
        return is_there()

    monkeypatch.setattr(same_on_all, "store_of", lambda ddp: store)
    monkeypatch.setattr(same_on_all, "waited", never)
    ddp = SimpleNamespace(process_group=SimpleNamespace(size=lambda: 2, rank=lambda: 1))
    norm = same_on_all.Norms().last("clip_grad_norm_ 0 2", torch.ones(()), cast("Any", ddp))
    assert float(norm) == 1.0
    assert waits[0] <= store.timeout.total_seconds() / 2


@pytest.mark.usefixtures("alone")
def test_a_rate_that_is_set_in_a_hook_of_the_optimizer_stays() -> None:
    """A scheduler goes on with every step of the script, wherever the script calls it."""
    script = Script()
    wrapped = [Wrapped(script.model, {})]
    switch = ReductionSwitch(lambda ddp: wrapped[0])
    implicit_no_sync = ImplicitNoSync(switch, lambda: wrapped)
    accumulation = Accumulation(switch, lambda: wrapped, implicit_no_sync, pytest.fail)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(script.optimizer, 0.5)
    script.optimizer.register_step_post_hook(lambda *_: scheduler.step())
    add_handler(accumulation)
    accumulation.steps = AT_ONCE
    for number in range(AT_ONCE):
        accumulation.forward_begins(script.model)
        script.backward(number, 1.0)
        script.step()
        script.optimizer.zero_grad()
    remove_handler(accumulation)
    assert script.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**AT_ONCE)


def test_a_scaler_that_is_off_steps_whatever_has_a_step() -> None:
    """Such an object has no parameters that anybody knows."""

    class Steps:
        count = 0

        def step(self) -> None:
            self.count += 1

    clock, steps = StepClock(list, pytest.fail, pytest.fail), Steps()
    torch.amp.GradScaler("cpu", enabled=False).step(steps)
    clock.stop()
    assert (steps.count, clock.steps_without_ddp) == (1, 1)


def test_a_handler_that_is_removed_is_told_no_more() -> None:
    class Ends(GradientHandler):
        count = 0

        def after_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.count += 1
            remove_handler(self)

    ends = Ends()
    add_handler(ends)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    for _ in range(3):
        optimizer.step()
    assert ends.count == 1


class OwnOptimizer(torch.optim.Optimizer):
    """The `step` of torch's own optimizers has a graph break in any case."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad)


def test_a_step_is_compiled_whole_where_nobody_is_told_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a script that compiles its step with fullgraph=True would fail, which runs under torchrun."""
    monkeypatch.setattr(access, "_handlers", ())
    StepClock(list, pytest.fail, pytest.fail).stop()
    access.keep_compilers_out()
    parameter = nn.Parameter(torch.full((1,), 3.0))
    parameter.grad = torch.ones(1)
    optimizer = OwnOptimizer([parameter])

    @torch.compile(fullgraph=True, backend="eager")
    def step() -> None:
        optimizer.step()

    step()
    assert parameter.item() == 2.0


def _reads_values(network: nn.Module) -> object:
    return [p.grad.norm() for p in network.parameters() if p.grad is not None]


def _looks_which_are_there(network: nn.Module) -> object:
    assert not any(p.grad is None for p in network.parameters())
    return list(filter(lambda p: p.grad is not None, network.parameters()))


@pytest.mark.parametrize(
    ("what", "counts"),
    [
        (_reads_values, True),
        (torch.compile(_reads_values, backend="eager"), True),
        (_looks_which_are_there, False),
        (lambda network: nn.utils.clip_grad_norm_(network.parameters(), 1.0), False),
        (copy.deepcopy, False),
        (lambda network: network.zero_grad(), False),
    ],
)
def test_what_the_script_itself_reads_is_told_apart(what: Callable[[nn.Module], object], counts: bool) -> None:
    network, reads = nn.Linear(2, 2), OwnReads()
    network(torch.ones(1, 2)).sum().backward()
    reads.begin(network.parameters())
    what(network)
    assert reads.has_read() == counts
    assert not reads.has_read()
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    assert not reads.has_read(gradients)
    reads.end()
    assert "grad" not in vars(nn.Parameter)
    _reads_values(network)
    assert not reads.has_read()
