"""What a forked child of a rank does is no part of the training: nothing that it does is told to autoddp's handlers."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.worker.ddp.handlers import DdpEvents
from autoddp.worker.ddp.patch import Patch
from autoddp.worker.gradients.access import GradientHandler, add_handler


class Told(DdpEvents, GradientHandler):
    def __init__(self) -> None:
        self.count = 0

    def forward_begins(self, ddp: DDP) -> None:
        self.count += 1

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.count += 1


def forks(_rank: int) -> dict[str, int]:
    """How often a handler is told of something in each child, and in their parent."""
    told, patch = Told(), Patch()
    patch.events = told
    patch.install()
    add_handler(told)

    def uses(model: nn.Module) -> int:
        """Without a backward pass: the threads that would send its gradients are not in a fork."""
        with torch.no_grad():
            model(torch.ones(2, 4))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return told.count

    def in_a_child(work: object) -> int:
        assert callable(work)
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = work()
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    # A process that has built nothing yet may start the ranks themselves.
    found = {"a rank that it starts": in_a_child(lambda: uses(DDP(nn.Linear(4, 4), init_sync=False)))}
    model = DDP(nn.Linear(4, 4))
    found["an evaluation"] = in_a_child(lambda: uses(model))
    found["itself"] = uses(model)
    return found


def test_only_the_process_that_trains_is_heard(tmp_path: Path) -> None:
    """Else the child of a tuned script would take the order that its parent waits for."""
    assert on_ranks(1, forks, tmp_path) == [{"a rank that it starts": 2, "an evaluation": 0, "itself": 2}]
