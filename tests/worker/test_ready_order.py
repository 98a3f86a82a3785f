"""May DDP be told that the graph is static? Seen on real backward passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn

from autoddp.knobs import FirstLook, ObservedSteps, knobs_of, why_left_out
from autoddp.worker.observe.first_steps import ReadyOrder


class Model:
    """Three layers. What they return is told to `order`, as what DDP's module returns is."""

    def __init__(self) -> None:
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.order = ReadyOrder(self.layers.parameters())

    def __call__(self, *numbers: int, at: torch.Tensor | None = None) -> torch.Tensor:
        values = torch.ones(1, 3) if at is None else at
        for number in numbers:
            values = self.layers[number](values)
        self.order.returned(cast("Any", self), values)
        return values.sum()


Step = Callable[[Model, int], None]


def plain(model: Model, _step: int) -> None:
    model(0, 1, 2).backward()


def one_is_never_used(model: Model, _step: int) -> None:
    model(0, 1).backward()


def one_is_used_in_turn(model: Model, step: int) -> None:
    model(*range(3 - step % 2)).backward()


def order_changes(model: Model, step: int) -> None:
    model(0, 1 + step % 2, 2 - step % 2).backward()


def two_micro_batches(model: Model, step: int) -> None:
    plain(model, step)
    plain(model, step)


def no_backward(_model: Model, _step: int) -> None:
    pass


def gradient_penalty(model: Model, _step: int) -> None:
    inputs = torch.ones(1, 3, requires_grad=True)
    output = model(0, 1, 2, at=inputs)
    (gradient,) = torch.autograd.grad(output, inputs, create_graph=True)
    (output + gradient.square().sum()).backward()


def nothing_is_returned(model: Model, _step: int) -> None:
    """DDP finds no tensors in what the module returns."""
    model.layers[2](model.layers[1](model.layers[0](torch.ones(1, 3)))).sum().backward()


def evaluates(model: Model, step: int) -> None:
    with torch.no_grad():
        model(0, 1, 2)
    plain(model, step)


def part_is_not_returned(model: Model, _step: int) -> None:
    """Another head's output is taken by other ways; the pass begins at what is returned all the same."""
    (model(0, 1) + model.layers[2](torch.ones(1, 3)).sum()).backward()


def watched(step: Step, steps: int = 6, partial: bool = False) -> ReadyOrder:
    model = Model()
    if partial:  # the watch began in the middle of a step
        model(0).backward()
        model.order.step()
    for number in range(steps):
        step(model, number)
        model.order.step()
    model.order.stop()
    plain(model, 0)  # no longer watched
    return model.order


def test_the_same_in_every_step_is_static() -> None:
    assert watched(plain).is_static
    assert watched(plain, partial=True).is_static
    assert watched(evaluates).is_static
    assert watched(part_is_not_returned).is_static


@pytest.mark.parametrize(
    "step",
    [
        one_is_never_used,
        one_is_used_in_turn,
        order_changes,
        two_micro_batches,
        no_backward,
        gradient_penalty,
        nothing_is_returned,
    ],
)
def test_what_is_not_static(step: Step) -> None:
    assert not watched(step).is_static


@pytest.mark.parametrize(("steps", "static"), [(0, False), (1, False), (3, False), (4, True)])
def test_it_takes_three_whole_steps(steps: int, static: bool) -> None:
    assert watched(plain, steps).is_static is static


def two_forward_passes(model: Model, _step: int) -> None:
    """As of two views of one batch: one backward pass."""
    (model(0, 1, 2) + model(0, 1, 2)).backward()


def test_backward_passes_of_a_step_are_those_that_give_gradients() -> None:
    found = [watched(step).passes for step in (plain, two_micro_batches, two_forward_passes, evaluates, no_backward)]
    assert found == [1, 2, 1, 1, 0]
    assert watched(two_micro_batches, partial=True).passes == 2


def test_the_hooks_are_taken_off() -> None:
    layer = nn.Linear(2, 2)
    order = ReadyOrder(layer.parameters())
    order.stop()
    assert not layer.weight._post_accumulate_grad_hooks


def test_where_ddp_looks_for_unused_parameters_a_static_graph_has_to_be_asked_for() -> None:
    """A job under it stops at the first unused one, perhaps after hours."""
    steps = ObservedSteps(
        is_static=watched(plain).is_static,
        forwards=(1, 1),
        steps_by_closure=False,
        clears=True,
        one_optimizer=True,
        why_no_graphs={},
    )
    available, arguments = frozenset({"static_graph"}), [{"find_unused_parameters": True}]
    look = FirstLook([steps], frozenset({"CPU"}), "2", available, arguments)
    assert "--static-graph" in why_left_out(look)["static_graph"]
    assert "static_graph" in knobs_of(replace(look, options=frozenset({"--static-graph"})))
    assert "static_graph" in knobs_of(replace(look, arguments=[{}]))
