"""How hooks begin an all-reduce, and how they go on when it has arrived."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

AllReduce = Callable[[torch.Tensor, dist.ProcessGroup], dist.Work]

_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
"""Variables by which a script's waits for NCCL hold up the host, so that they may end with an error."""
_YES = ("y", "yes", "1", "t", "true")  # as torch reads them


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin the sum over the group's ranks, in place."""
    work: dist.Work = dist.all_reduce(tensor, group=group, async_op=True)
    return work


def when_reduced(work: dist.Work, use: Callable[[torch.Tensor], torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
    """A future of `use(sum)`, which is computed as soon as the sum has arrived.

    The work of NCCL holds its tensors until somebody waits for it, or until a thread of NCCL's looks again (torch 2.8
    and newer). So this waits: on a GPU only the stream of `use` does, and not the host.
    """
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    # NCCL's future is done as soon as the work is queued. gloo completes its future before it ends the work, and calls
    # back in between: whoever waits for the work there waits for ever.
    may_wait = future.done() and not _holds_up_the_host()

    def arrived(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        if may_wait:
            work.wait()
        return use(future.value()[0])

    return future.then(arrived)


def await_on_the_stream(work: dist.Work) -> None:
    """Wait until the sum has arrived; on a GPU only its current stream does, and not the host."""
    future = work.get_future()
    if future.done() and _holds_up_the_host():
        future.wait()
    else:
        work.wait()


def _holds_up_the_host() -> bool:
    """Whether `Work.wait` does: then no bucket would travel beside the backward pass. DDP waits for futures alone."""
    return any(os.environ.get(name, "").lower() in _YES for name in _BLOCKING)
