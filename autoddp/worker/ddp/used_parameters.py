"""Stops a job whose script has DDP look for unused parameters, where the recipe's static_graph has ended that search.

With a static graph DDP assumes that each backward pass gives the gradients of all parameters. If one is missing later,
DDP never launches its bucket: this rank steps by its own gradients, may save what it has made of them, and fails in its
next forward pass; a rank that has all gradients waits meanwhile. So each rank counts its gradients, and one that misses
some stops with an exception before its optimizer steps. The launcher then ends the others.

Without `find_unused_parameters` a missing gradient is an error of the script's own, and nothing is counted.

DDP learns the graph in the first backward pass, and launches all buckets there, also under `no_sync()`: torch fails
then with an internal error (2.13 still does). So where the script does not reduce in that pass, as one that accumulates
does, the object goes on without the static graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs.ddp_arguments import FIND_UNUSED, STATIC_GRAPH
from autoddp.worker.ddp.backward import after_this_backward, when_backward_begins
from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.private import learns_order
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.gradients.switch import ReductionSwitch

_FIRST_IS_NOT_REDUCED = "the script does not reduce in the first backward pass, in which DDP learns the graph"


class _Watched:
    """The parameters of one object."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.missing: set[int] = set()
        """Places of those whose gradients the present backward pass has not given yet."""
        self._count = len(parameters)
        self.ids = [id(p) for p in parameters]
        """Identities of the parameters, which the DDP object keeps alive."""
        # Before a trial the script may have frozen some: they take no hook, and count as missing.
        asking = [(place, p) for place, p in enumerate(parameters) if p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(self._note(place)) for place, p in asking]

    def _note(self, place: int) -> Callable[[torch.Tensor], None]:
        return lambda _parameter: self.missing.discard(place)

    @property
    def gave_none(self) -> bool:
        """Whether the present pass has given no gradient at all: `torch.autograd.grad` gives none."""
        return len(self.missing) == self._count

    def begin(self) -> None:
        """A backward pass is about to begin."""
        self.missing.update(range(self._count))

    def stop(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


class UsedParameters(DdpEvents):
    """RuntimeError in a backward pass that reduces and does not reach all parameters.

    `of` gives what is known of an object; `left_out(why)` is called where one goes on without the static graph, and
    `fails(why)`, which raises that error, in such a pass.
    """

    def __init__(
        self,
        switch: ReductionSwitch,
        of: Callable[[DDP], Wrapped | None],
        left_out: Callable[[str], None],
        fails: Callable[[str], None],
    ) -> None:
        self._switch, self._of, self._left_out, self._fails = switch, of, left_out, fails
        self._watched: dict[Wrapped, _Watched] = {}

    def built(self, wrapped: Wrapped) -> None:
        """See `DdpEvents`."""
        self._watched = {one: watched for one, watched in self._watched.items() if one.ddp is not None}
        if wrapped.has_static_graph_of_ours and wrapped.arguments.get(FIND_UNUSED):
            self._watched[wrapped] = _Watched(wrapped.parameters)

    def look_again(self, wrapped: Sequence[Wrapped]) -> None:
        """These objects have another configuration: count the gradients of those alone that have a static graph now."""
        for one in wrapped:
            self.forget(one)
            self.built(one)

    def forget(self, wrapped: Wrapped) -> None:
        """See `DdpEvents`."""
        watched = self._watched.pop(wrapped, None)
        if watched is not None:
            watched.stop()

    def forward_begins(self, ddp: DDP) -> None:
        """See `DdpEvents`. A pass of training is run by all ranks, so they all change in the same one."""
        if not (torch.is_grad_enabled() and ddp.training and learns_order(ddp)) or self._switch.as_written(ddp):
            return
        wrapped = self._of(ddp)
        if wrapped is not None and wrapped.leave_out_static_graph():
            self.forget(wrapped)
            self._left_out(_FIRST_IS_NOT_REDUCED)

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
        if ddp is None or watched is None or not watched.missing or watched.gave_none:
            return
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        name = names.get(watched.ids[min(watched.missing)], "one that the script has taken out of the model")
        self._fails(f"{STATIC_GRAPH.name} needs the gradients of all parameters in each step, {name} has none")
