"""A process group in Python, with the collectives that DDP and autoddp use. A subclass says what happens at each.

class Mine(PythonGroup):
    def collective(self, call: Call) -> dist.Work: …

dist.Backend.register_backend("mine", lambda store, rank, size, timeout: Mine(rank, size), devices=["cpu"])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Call:
    """What one rank gives to a collective, and what it is given."""

    name: str
    sent: list[torch.Tensor]
    received: list[torch.Tensor]
    """Of an all-gather one tensor for each rank."""
    reduction: str = ""
    """ "SUM", "MAX" or "MIN", of an all-reduce."""
    root: int = 0

    @property
    def what(self) -> tuple[str, ...]:
        """What has to be the same on all ranks: the collective, and the type and the bytes of each tensor."""
        of_each = (f"{tensor.dtype} {tensor.numel() * tensor.element_size()}" for tensor in self.sent)
        return (f"{self.name} {self.reduction}".strip(), *of_each)


@torch.no_grad()
def perform(calls: Sequence[Call]) -> None:
    """Give each rank what the collective makes of what all have given; `calls` are those of the ranks in order."""
    first = calls[0]
    if first.name == "all_gather":
        all_sent = [call.sent[0].clone() for call in calls]
    elif first.name == "broadcast":
        all_sent = [tensor.clone() for tensor in calls[first.root].sent]
    else:
        of_ranks = zip(*(call.sent for call in calls), strict=True)
        all_sent = [_reduced(torch.stack(list(tensors)), first.reduction) for tensors in of_ranks]
    for call in calls:
        for own, tensor in zip(call.received, all_sent, strict=True):
            own.detach().copy_(tensor)


def _reduced(stacked: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "SUM":
        return stacked.sum(0, dtype=stacked.dtype)
    return {"MAX": stacked.amax, "MIN": stacked.amin}[reduction](0)


class PythonGroup(dist.ProcessGroup):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._size = size

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return "python"

    def collective(self, call: Call) -> dist.Work:
        raise NotImplementedError

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        wanted = options.reduceOp if options else dist.ReduceOp.SUM
        reduction = next(name for name in ("SUM", "MAX", "MIN") if wanted == getattr(dist.ReduceOp, name))
        return self.collective(Call("all_reduce", tensors, tensors, reduction))

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        return self.collective(Call("broadcast", tensors, tensors, root=options.rootRank if options else 0))

    def allgather(self, received: list[list[torch.Tensor]], sent: list[torch.Tensor], options: Any = None) -> dist.Work:
        return self.collective(Call("all_gather", sent, received[0]))

    def barrier(self, options: Any = None) -> dist.Work:
        return self.allreduce([torch.zeros(1)])
