"""What a model returns is looked at without calling the script: it may compute, or lack, what it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from autoddp.worker.ddp.backward import when_backward_begins

HIDDEN = torch.ones(3, requires_grad=True)


@dataclass
class Unset:
    hidden: torch.Tensor
    loss: torch.Tensor = field(init=False)


@dataclass(slots=True)
class WithSlots:
    hidden: torch.Tensor
    loss: torch.Tensor = field(init=False)


@dataclass
class Draws:
    hidden: torch.Tensor
    sample: torch.Tensor = field(init=False)

    def __getattr__(self, name: str) -> Any:
        return self.hidden + torch.rand(())


class LazyDict(dict[str, Any]):
    def values(self) -> Any:
        return [value + torch.rand(()) for value in super().values()]


class LazyTuple(tuple[Any, ...]):
    def __iter__(self) -> Any:
        return (value + torch.rand(()) for value in super().__iter__())


def in_itself() -> dict[str, Any]:
    output: dict[str, Any] = {"hidden": HIDDEN * 2}
    output["whole"] = output
    return output


class Asks(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"was asked for {func}")


OUTPUTS = [Unset(HIDDEN * 2), WithSlots(HIDDEN * 2), Draws(HIDDEN * 2), LazyDict(hidden=HIDDEN * 2), in_itself()]


@pytest.mark.parametrize("output", [*OUTPUTS, LazyTuple([HIDDEN * 2]), [(HIDDEN * 2,)]], ids=type)
def test_looking_at_an_output_changes_nothing(output: Any) -> None:
    before = torch.get_rng_state()
    assert when_backward_begins(output, lambda: None)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tensor_of_the_scripts_own_class_is_not_asked() -> None:
    begun: list[int] = []
    output = HIDDEN * 2
    assert when_backward_begins(output.as_subclass(Asks), lambda: begun.append(1))
    output.sum().backward()
    assert not begun  # another tensor; the hook is on the one that was returned
