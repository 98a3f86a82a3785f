"""May DDP be told that the graph is static? Seen on real backward passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autoddp.worker.first_steps import ReadyOrder

Step = Callable[[nn.ModuleList, int], None]


def forward(layers: list[nn.Module]) -> torch.Tensor:
    values = torch.ones(1, 3)
    for layer in layers:
        values = layer(values)
    return values.sum()


def plain(layers: nn.ModuleList, _step: int) -> None:
    forward(list(layers)).backward()


def one_is_never_used(layers: nn.ModuleList, _step: int) -> None:
    forward(list(layers)[:-1]).backward()


def one_is_used_in_turn(layers: nn.ModuleList, step: int) -> None:
    forward(list(layers)[: 3 - step % 2]).backward()


def order_changes(layers: nn.ModuleList, step: int) -> None:
    forward([layers[0], layers[1 + step % 2], layers[2 - step % 2]]).backward()


def two_micro_batches(layers: nn.ModuleList, step: int) -> None:
    plain(layers, step)
    plain(layers, step)


def no_backward(_layers: nn.ModuleList, _step: int) -> None:
    pass


def watched(step: Step, steps: int = 6, partial: bool = False) -> ReadyOrder:
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    order = ReadyOrder(layers.parameters())
    if partial:  # the watch began in the middle of a step
        forward(list(layers)[:1]).backward()
        order.step()
    for number in range(steps):
        step(layers, number)
        order.step()
    order.stop()
    plain(layers, 0)  # no longer watched
    return order


def test_the_same_in_every_step_is_static() -> None:
    assert watched(plain).is_static
    assert watched(plain, partial=True).is_static


@pytest.mark.parametrize(
    "step", [one_is_never_used, one_is_used_in_turn, order_changes, two_micro_batches, no_backward]
)
def test_what_is_not_static(step: Step) -> None:
    assert not watched(step).is_static


@pytest.mark.parametrize(("steps", "static"), [(0, False), (1, False), (3, False), (4, True)])
def test_it_takes_three_whole_steps(steps: int, static: bool) -> None:
    assert watched(plain, steps).is_static is static


def test_the_hooks_are_taken_off() -> None:
    layer = nn.Linear(2, 2)
    order = ReadyOrder(layer.parameters())
    order.stop()
    assert not layer.weight._post_accumulate_grad_hooks
