"""Each rank may keep its own buffers (`broadcast_buffers = false`) where training does not read them, and only there.

In training mode BatchNorm computes with the mean and the variance of its batch, and only writes its running statistics.
So gradients stay the same, bit for bit, whether or not DDP copies rank 0's statistics to the other ranks. Any other
buffer may be read in training: a queue of keys, a mask, a moving average. Then ranks that keep their own would train
something else.

A recipe is bound to the model's parameters, not to its buffers, nor to the loop around it. So the real job looks again:
at the first training pass at all buffers, and at each later one at what a script may change meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.patch import watch_uneven_inputs
from autoddp.worker.ddp.private import has_buffer_hook, is_joining
from autoddp.worker.ddp.wrapped import Wrapped
from autoddp.worker.gradients.switch import ReductionSwitch

_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}
_JOINS = "the script uses join()"
_HOOK = "the script synchronises buffers by a hook of its own"


def why_alike(ddp: DDP) -> str:
    """Why the buffers of all ranks must stay alike, because training may read them; "" if it does not."""
    for path, module in ddp.module.named_modules():
        found = [name for name, _ in module.named_buffers(path, recurse=False) if name not in ddp.parameters_to_ignore]
        if found and not _is_batch_norm(module):
            return f"training may read the buffer {found[0]}: it belongs to no BatchNorm"
        if found and not module.training:
            return f"{path or 'the model'} computes with its running statistics"
    return _HOOK if has_buffer_hook(ddp) else ""


def _is_batch_norm(module: nn.Module) -> bool:
    """Whether this is one of torch's BatchNorms. A subclass with a forward of its own, as SyncBatchNorm, is none."""
    is_torchs = type(module).forward is nn.BatchNorm1d.forward and "forward" not in vars(module)
    return is_torchs and {name for name, _ in module.named_buffers(recurse=False)} <= _STATISTICS


class LocalBuffers(DdpEvents):
    """Lets DDP broadcast the buffers again, as the script has it, from the first training pass that may read them.

    From then on everything is as written: the first broadcast gives all ranks the buffers of rank 0. A pass of training
    is run by all ranks, so they all change in the same one.
    """

    def __init__(self, switch: ReductionSwitch, left_out: Callable[[str], None]) -> None:
        self._switch, self._left_out = switch, left_out
        self._norms: dict[Wrapped, list[nn.Module] | None] = {}
        self._ended: set[str] = set()
        """Descriptions of models whose buffers are broadcast again; see `worker.ddp.model`."""
        watch_uneven_inputs(self._no_more_inputs)

    def built(self, wrapped: Wrapped) -> None:
        """See `DdpEvents`."""
        self._norms = {one: norms for one, norms in self._norms.items() if one.ddp is not None}
        if wrapped.keeps_own_buffers and wrapped.model.description in self._ended:
            wrapped.broadcast_buffers()
        elif wrapped.keeps_own_buffers:
            self._norms[wrapped] = None

    def forget(self, wrapped: Wrapped) -> None:
        """See `DdpEvents`."""
        self._norms.pop(wrapped, None)

    def forward_begins(self, ddp: DDP) -> None:
        """See `DdpEvents`."""
        wrapped = next((one for one in self._norms if one.ddp is ddp), None)
        if wrapped is None or not torch.is_grad_enabled() or not (ddp.training or self._switch.as_written(ddp)):
            return
        why = self._why(wrapped, ddp)
        if why:
            self._leave_out(wrapped, why)

    def _why(self, wrapped: Wrapped, ddp: DDP) -> str:
        if is_joining(ddp):
            return _JOINS
        norms = self._norms[wrapped]
        if norms is None:
            self._norms[wrapped] = [module for module in ddp.module.modules() if _is_batch_norm(module)]
            return why_alike(ddp)
        if not all(norm.training for norm in norms):
            return "BatchNorm computes with its running statistics"
        return _HOOK if has_buffer_hook(ddp) else ""

    def _no_more_inputs(self) -> None:
        """Inside `join()` this rank shadows the collectives of ranks that go on, which broadcast their buffers."""
        for wrapped in list(self._norms):
            self._leave_out(wrapped, _JOINS)

    def _leave_out(self, wrapped: Wrapped, why: str) -> None:
        self.forget(wrapped)
        self._ended.add(wrapped.model.description)
        wrapped.broadcast_buffers()
        self._left_out(why)
