"""Something that answers in place of a module's `forward`, on this one object and for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from autoddp.worker.graphs.signature import Unfit

Forward = Callable[..., Any]
Answer = Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any]
"""Gets the module's own `forward` and a call's arguments."""

_NAME, _STATE = "forward", "__getstate__"


class StandIn:
    """`StandIn(module, answer)` stands until `leave()`. The module's own hooks run around it as before.

    Copies and pickles of the module know nothing of it: an average of the weights, a deep copy, computes by itself.
    Raises Unfit where somebody else stands there already.
    """

    def __init__(self, module: nn.Module, answer: Answer) -> None:
        if _NAME in module.__dict__:
            raise Unfit("its forward was replaced")
        self._module = module
        self._answer = answer
        self.__wrapped__ = module.forward  # for whoever asks for its parameters' names
        module.__dict__[_NAME] = self
        module.__dict__[_STATE] = self._state = _State(module)

    def leave(self) -> None:
        """The module answers for itself again, unless somebody else stands there now."""
        for name, ours in ((_NAME, self), (_STATE, self._state)):
            if self._module.__dict__.get(name) is ours:
                del self._module.__dict__[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(self.__wrapped__, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # For a class that pickles its attributes in another way. Whoever restores the module has only its class so far:
        # `forward` is then the class's own.
        return getattr, (self._module, _NAME)


class _State:
    """What `pickle` and `copy` ask a module for: its state as without a stand-in."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self) -> Any:
        of_class = getattr(type(self._module), _STATE, None)  # since Python 3.11 each class has it
        state = dict(self._module.__dict__) if of_class is None else of_class(self._module)
        if not isinstance(state, dict):
            return state
        return {name: value for name, value in state.items() if not isinstance(value, (StandIn, _State))}

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, _STATE)
