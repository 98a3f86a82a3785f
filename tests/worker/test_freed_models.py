"""A model that the script has dropped is freed at another moment on each rank: no rank communicates for it alone."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from launchers import free_port
from on_ranks import on_ranks
from torch import nn
from torch.distributed import TCPStore
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.wire import BlockDone, Finish, Measure, Message
from autoddp.worker.ddp.patch import Patch
from autoddp.worker.effects.compiling import Compiling
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.observe.stopwatch import Stopwatch
from autoddp.worker.process.rank_store import RankStore
from autoddp.worker.trial.experiments import Experiments
from autoddp.worker.trial.live_ddp import DdpObjects, LiveDdp
from autoddp.worker.trial.runner import TrialRunner

WIDTH = 8


class Over(BaseException):
    """There are no more orders."""


class Orders:
    """Without reduction and with it again, then with other buckets: both communicate for each model."""

    def __init__(self) -> None:
        view = Configuration({"gradient_as_bucket_view": True})
        off = Measure(0, AS_WRITTEN, 1, 2, reduce=False)
        self._left = iter([off, Measure(1, AS_WRITTEN, 1, 2), Measure(2, view, 2, 2), Finish()])

    def next(self, done: BlockDone | None) -> Message:
        return next(self._left)

    def heard(self, done: BlockDone) -> None:
        pass

    def finish(self, order: Finish) -> None:
        raise Over


def drops_a_model(rank: int) -> dict[str, Any]:
    """Trains a second model; the first one waits for the garbage collector on rank 1, and not on rank 0."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    port = int(os.environ["MASTER_PORT"])
    host: Any = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False) if rank == 0 else None
    gc.disable()
    patch = Patch()
    switch = ReductionSwitch(patch.of)
    patch.install()
    switch.install()
    first, second = DDP(nn.Linear(WIDTH, WIDTH)), DDP(nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    first.itself = first  # type: ignore[assignment]
    del first
    if rank == 0:
        gc.collect()
    held_before = len(patch.alive())
    model = LiveDdp(patch, switch, (DdpObjects(patch),), Compiling(patch.alive), Experiments(patch))
    runner = TrialRunner(model, RankStore(), Orders(), Stopwatch(torch.device("cpu")))
    try:
        for step in range(100):
            optimizer.zero_grad()
            second(torch.full((2, WIDTH), float(rank))).sum().backward()
            optimizer.step()
            runner.begin() if step == 0 else runner.on_step()
    except Over:
        found = {"before": held_before, "after": len(patch.alive()), "steps": step, "hosts": host is not None}
        return {**found, "weight": second.module.weight}
    raise AssertionError("there were more orders than steps")


def test_what_one_rank_has_freed_is_left_out_on_all(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MASTER_ADDR", "127.0.0.1")
        patched.setenv("MASTER_PORT", free_port())
        ranks = on_ranks(2, drops_a_model, tmp_path)
    assert [rank["before"] for rank in ranks] == [1, 2]
    assert [rank["after"] for rank in ranks] == [1, 1]
    assert ranks[0]["steps"] == ranks[1]["steps"]
    assert torch.equal(ranks[0]["weight"], ranks[1]["weight"])


class State:
    """What the script's hook keeps of a model; torch's PowerSGD keeps as much as the gradients."""


def builds_one_after_another(rank: int) -> dict[str, Any]:
    """A script that registers a hook with a state on each model: what is left of those that it has dropped."""
    patch = Patch()
    patch.install()
    states: list[weakref.ref[State]] = []
    held: list[int] = []
    for _ in range(3):
        ddp, state = DDP(nn.Linear(WIDTH, WIDTH)), State()
        ddp.register_comm_hook(state, lambda state, bucket: None)
        states.append(weakref.ref(state))
        held.append(len(patch.wrapped))
        del ddp, state
        gc.collect()
    return {"held": held, "states": [one() is not None for one in states]}


def test_nothing_is_kept_of_models_that_the_script_has_dropped(tmp_path: Path) -> None:
    (found,) = on_ranks(1, builds_one_after_another, tmp_path)
    assert found == {"held": [1, 1, 1], "states": [False, False, False]}
