"""The step clock on real optimizers: one boundary per step of the script, wherever its last optimizer stands."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from autoddp.worker.observe.step_clock import StepClock


class Script:
    """Two networks under DDP and one that is not; `boundaries` counts what the clock says of what the script did."""

    def __init__(self) -> None:
        self.ours, self.second, self.foreign = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.boundaries = 0
        self.held = [self.ours, self.second]
        self.reduces = True
        self.clock = StepClock(self._wrapped, self._boundary, lambda _ddp: self.reduces)

    def _wrapped(self) -> list[Any]:
        return [SimpleNamespace(parameters=list(network.parameters())) for network in self.held]

    def _boundary(self) -> None:
        self.boundaries += 1

    def during(self, action: Callable[[], object]) -> int:
        """How many boundaries an action of the script makes."""
        before = self.boundaries
        action()
        return self.boundaries - before

    def forward(self, reduces: bool = True) -> None:
        self.reduces = reduces
        self.clock.forward_begins(cast("Any", self.ours))


@pytest.fixture
def script() -> Iterator[Script]:
    found = Script()
    yield found
    found.clock.stop()


def optimizer(*networks: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for network in networks for parameter in network.parameters()], lr=0.1)


def test_one_optimizer(script: Script) -> None:
    one = optimizer(script.ours, script.second)
    assert [script.during(one.step) for _ in range(6)] == [0, 0, 1, 1, 1, 1]


class Around(torch.optim.Optimizer):
    """Steps by another optimizer of the same parameters, as SAM and Lookahead do; fails when told to."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.fails = False

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if self.fails:
            raise ValueError("out of memory")
        self.inner.step(closure)


def test_an_optimizer_around_another_one_is_no_second(script: Script) -> None:
    outer = Around(Around(optimizer(script.ours, script.second)))
    assert [script.during(outer.step) for _ in range(5)] == [0, 0, 1, 1, 1]
    outer.inner.fails = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="out of memory"):
        outer.step()
    outer.inner.fails = False  # type: ignore[attr-defined]
    assert [script.during(outer.step) for _ in range(2)] == [1, 1]
    assert script.during(optimizer(script.ours, script.second).step) == 1


class Clipping(torch.optim.SGD):
    """Clips in its step, as optimizers of detectron2 do."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        super().step(closure)


def test_a_class_that_calls_the_step_of_its_parent_makes_one(script: Script) -> None:
    """torch wraps the parent's method once there is a plain one of it, here for a network that is not under DDP."""
    plain = optimizer(script.foreign)
    one = Clipping([p for network in script.held for p in network.parameters()], lr=0.1)
    assert [script.during(one.step) for _ in range(6)] == [0, 0, 1, 1, 1, 1]
    assert script.during(plain.step) == 0


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1.0])
def test_a_step_that_a_scaler_leaves_out_is_one(script: Script, bad: float) -> None:
    """Where nothing is reduced one rank alone may leave it out, and all ranks count alike."""
    one, scaler = optimizer(script.ours, script.second), torch.amp.GradScaler("cpu", init_scale=2.0)

    def step() -> None:
        for network in script.held:
            scaler.scale(network(torch.full((1, 2), bad)).sum()).backward()
        scaler.step(one)
        scaler.update()
        one.zero_grad()

    assert [script.during(step) for _ in range(6)] == [0, 0, 1, 1, 1, 1]


def test_a_step_that_raises_is_none(script: Script) -> None:
    def closure() -> float:
        raise ValueError("no data")

    one = optimizer(script.ours, script.second)
    for _ in range(3):
        one.step()
    with pytest.raises(ValueError, match="no data"):
        one.step(closure)
    assert script.boundaries == 1


def test_of_two_optimizers_the_last_in_the_cycle(script: Script) -> None:
    discriminator, generator = optimizer(script.ours), optimizer(script.second)
    cycles = [(script.during(discriminator.step), script.during(generator.step)) for _ in range(5)]
    assert cycles == [(0, 0), (0, 0), (0, 1), (0, 1), (0, 1)]


def test_a_discriminator_that_steps_five_times(script: Script) -> None:
    """As in a Wasserstein GAN: the boundary is still after the generator."""
    discriminator, generator = optimizer(script.ours), optimizer(script.second)
    for _ in range(3):
        assert [script.during(discriminator.step) for _ in range(5)] == [0] * 5
        script.during(generator.step)
    assert script.during(generator.step) == 1


def test_parameters_that_nobody_steps_hold_up_nothing_for_long(script: Script) -> None:
    one = optimizer(script.ours)
    found = [script.during(one.step) for _ in range(20)]
    assert found[0] == 0
    assert found[12:] == [1] * 8


def test_an_optimizer_made_anew_each_epoch(script: Script) -> None:
    epochs = [[script.during(one.step) for _ in range(3)] for one in (optimizer(script.ours) for _ in range(6))]
    assert epochs[-2:] == [[1] * 3] * 2
    assert sum(map(sum, epochs)) >= 6


def test_an_optimizer_that_goes_on_with_more_parameters(script: Script) -> None:
    """A head is trained first, then all: its optimizer is given the rest, or a new one of all takes its place."""
    one = optimizer(script.ours)
    assert sum(script.during(one.step) for _ in range(20)) > 0
    one.add_param_group({"params": [script.second.weight]})
    assert [script.during(one.step) for _ in range(4)] == [1] * 4
    assert [script.during(optimizer(script.ours, script.second).step) for _ in range(4)] == [1] * 4


def test_an_optimizer_of_more_in_the_same_cycle_changes_nothing(script: Script) -> None:
    """The one of the head is the last in each cycle."""
    whole, head = optimizer(script.ours, script.second), optimizer(script.ours)
    cycles = [(script.during(whole.step), script.during(head.step)) for _ in range(6)]
    assert cycles[3:] == [(0, 1)] * 3


def test_an_optimizer_that_takes_the_place_of_another_one(script: Script) -> None:
    """The script goes on with other parameters of the same model. A critic of a GAN makes fewer steps in a row."""
    critic, generator = optimizer(script.ours), optimizer(script.second)
    cycles = [(script.during(critic.step), script.during(generator.step)) for _ in range(5)]
    assert cycles[-1] == (0, 1)
    assert sum(script.during(critic.step) for _ in range(100)) == 0
    assert script.during(generator.step) == 1
    assert [script.during(critic.step) for _ in range(300)][-50:] == [1] * 50


@pytest.mark.parametrize("kept", [False, True], ids=["freed", "not yet freed"])
def test_one_model_after_another(script: Script, kept: bool) -> None:
    """Folds of a cross-validation. Ranks count alike, whenever the memory of the model before is freed."""
    memory, counts = [], []
    for _ in range(4):
        script.ours = nn.Linear(2, 2)
        script.held = [script.ours]
        script.clock.built(cast("Any", None))
        one = optimizer(script.ours)
        if kept:
            memory.append(script.ours)
        counts.append([script.during(one.step) for _ in range(40)])
        del one
        gc.collect()
    assert counts[0] == [0] * 2 + [1] * 38
    assert counts[1:] == [[0] * 23 + [1] * 17] * 3


def test_a_model_that_is_built_and_not_trained_changes_nothing(script: Script) -> None:
    one = optimizer(script.ours, script.second)
    assert [script.during(one.step) for _ in range(4)] == [0, 0, 1, 1]
    script.held = [*script.held, nn.Linear(2, 2)]
    script.clock.built(cast("Any", None))
    assert [script.during(one.step) for _ in range(40)] == [1] * 40


def test_an_optimizer_of_other_parameters(script: Script) -> None:
    other, one = optimizer(script.foreign), optimizer(script.ours, script.second, script.foreign)
    for _ in range(4):
        assert script.during(other.step) == 0
    assert script.clock.steps_without_ddp == 4
    assert [script.during(one.step) for _ in range(4)] == [0, 0, 1, 1]
    assert script.during(other.step) == 0


def test_without_an_optimizer_forwards_count(script: Script) -> None:
    found = [script.during(script.forward) for _ in range(20)]
    assert found[:12] == [0] * 12
    assert found[-6:] == [1] * 6
    assert script.during(optimizer(script.ours, script.second).step) == 0  # one clock, not two


def test_without_an_optimizer_each_step_has_one_forward(script: Script) -> None:
    """Else each step would seem to have one more reduction than the step before it."""
    found: list[int] = []
    script.clock._on_step = lambda: found.append(script.clock.forwards)
    for _ in range(20):
        script.forward()
    assert found[1:] == [1] * 6


def test_an_optimizer_that_steps_after_many_forwards_is_waited_for(script: Script) -> None:
    one, found = optimizer(script.ours, script.second), []
    for _ in range(5):
        assert [script.during(script.forward) for _ in range(32)] == [0] * 32
        found.append(script.during(one.step))
    assert found == [0, 0, 1, 1, 1]


def test_an_optimizer_of_other_parameters_is_not_waited_for(script: Script) -> None:
    other = optimizer(script.foreign)
    assert sum(script.during(script.forward) for _ in range(20)) > 5
    assert other.param_groups


def test_forwards_that_reduce_nothing_do_not_count(script: Script) -> None:
    for _ in range(40):
        script.forward(reduces=False)
        with torch.no_grad():
            script.forward()
    assert (script.boundaries, script.clock.forwards) == (0, 0)


def test_forwards_per_step(script: Script) -> None:
    one, found = optimizer(script.ours, script.second), []
    for _ in range(6):
        for reduces in (False, True, True):
            script.forward(reduces)
        found.append(script.clock.forwards)
        one.step()
    assert found[-3:] == [2, 2, 2]
    assert script.clock.forwards == 0


def test_a_stopped_clock_stands(script: Script) -> None:
    one = optimizer(script.ours, script.second)
    for _ in range(4):
        one.step()
    script.clock.stop()
    assert script.during(one.step) == 0


def test_stopped_from_within_a_step_with_other_hooks_behind_it(script: Script) -> None:
    one, behind = optimizer(script.ours, script.second), []
    handle = register_optimizer_step_post_hook(lambda *_: behind.append(1))
    script.clock._on_step = lambda: (setattr(script, "boundaries", script.boundaries + 1), script.clock.stop())
    for _ in range(6):
        one.step()
    handle.remove()
    assert (script.boundaries, len(behind)) == (1, 6)
