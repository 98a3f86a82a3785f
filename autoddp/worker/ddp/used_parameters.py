"""Stops a job whose script has DDP look for unused parameters, where the recipe's static_graph has ended that search.

With a static graph DDP assumes that each backward pass gives the gradients of all parameters. If one is missing later,
DDP never launches its bucket: this rank steps by its own gradients, may save what it has made of them, and fails in its
next forward pass; a rank that has all gradients waits meanwhile. So each rank counts its gradients, and one that misses
some stops with an exception before its optimizer steps. The launcher then ends the others.

Without `find_unused_parameters` a missing gradient is an error of the script's own, and nothing is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs.ddp_arguments import FIND_UNUSED, STATIC_GRAPH
from autoddp.log import tell
from autoddp.worker.ddp.backward import after_this_backward, when_backward_begins
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.gradients.switch import ReductionSwitch


class _Watched:
    """The parameters of one object."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.missing: set[int] = set()
        """Places of those whose gradients the present backward pass has not given yet."""
        self._count = len(parameters)
        self.ids = [id(p) for p in parameters]
        """Identities of the parameters, which the DDP object keeps alive."""
        self._handles = [p.register_post_accumulate_grad_hook(self._note(place)) for place, p in enumerate(parameters)]

    def _note(self, place: int) -> Callable[[torch.Tensor], None]:
        return lambda _parameter: self.missing.discard(place)

    def begin(self) -> None:
        """A backward pass is about to begin."""
        self.missing.update(range(self._count))

    def stop(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


class UsedParameters(DdpEvents):
    """RuntimeError in a backward pass that reduces and does not reach all parameters."""

    def __init__(self, switch: ReductionSwitch) -> None:
        self._switch = switch
        self._watched: dict[Wrapped, _Watched] = {}

    def built(self, wrapped: Wrapped) -> None:
        """See `DdpEvents`."""
        self._watched = {one: watched for one, watched in self._watched.items() if one.ddp is not None}
        if wrapped.takes and wrapped.arguments.get(FIND_UNUSED):
            self._watched[wrapped] = _Watched(wrapped.parameters)

    def forget(self, wrapped: Wrapped) -> None:
        """Forget an object that is as written again."""
        watched = self._watched.pop(wrapped, None)
        if watched is not None:
            watched.stop()

    def returned(self, ddp: DDP, what: object) -> object:
        """See `DdpEvents`. A backward pass from what the module has returned is about to give all gradients."""
        wrapped = next((one for one in self._watched if one.ddp is ddp), None)
        if wrapped is None or not torch.is_grad_enabled() or not self._switch.reduces(ddp):
            return what
        self._watched[wrapped].begin()
        when_backward_begins(what, lambda: after_this_backward(lambda: self._check(wrapped)))
        return what

    def _check(self, wrapped: Wrapped) -> None:
        ddp, watched = wrapped.ddp, self._watched.get(wrapped)
        if ddp is None or watched is None or not watched.missing:
            return
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        name = names.get(watched.ids[min(watched.missing)], "one that the script has taken out of the model")
        why = (
            f"the recipe's {STATIC_GRAPH.name} needs the gradients of all parameters in each step, {name} has none: "
            "the job stops; launch it without the recipe (--trials 0), or tune again (--trials 20)"
        )
        tell(why)
        raise RuntimeError(f"autoddp: {why}")
