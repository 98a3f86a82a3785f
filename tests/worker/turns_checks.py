"""Two ranks make their steps by turns, under the real runner.

    python turns_checks.py FOLDER      # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set

Each rank leaves `RANK.json`: when its steps began and ended, by the clock that both read. Rank 0 leaves `alone.json`,
with one list for each block: which ranks had the time for themselves. In the second block each step of rank 0 needs one
of rank 1.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.knobs import AS_WRITTEN
from autoddp.wire import BlockDone, Experiment, Finish, Measure, Message
from autoddp.worker.ddp.patch import Patch
from autoddp.worker.effects.compiling import Compiling
from autoddp.worker.gradients.switch import ReductionSwitch
from autoddp.worker.observe.stopwatch import Stopwatch
from autoddp.worker.process.rank_store import RankStore
from autoddp.worker.trial.experiments import Experiments
from autoddp.worker.trial.live_ddp import LiveDdp
from autoddp.worker.trial.runner import TrialRunner

BEFORE, WARMUP, STEPS = 3, 2, 4
BLOCK = WARMUP + STEPS
SLEEP = 0.02  # seconds


class Over(BaseException):
    """All blocks are measured."""


class Orders:
    """Asks for two blocks by turns."""

    def __init__(self) -> None:
        limits = {0: 60.0, 1: 0.5}
        self._orders: list[Message] = [
            Measure(n, AS_WRITTEN, WARMUP, STEPS, reduce=False, anatomy=True, experiment=Experiment(by_turns=limit))
            for n, limit in limits.items()
        ]
        self.alone: list[list[bool]] = []

    def next(self, done: BlockDone | None) -> Message:
        if done is not None:
            self.alone.append([one.alone for one in done.ranks])
        return self._orders.pop(0) if self._orders else Finish()

    def heard(self, done: BlockDone) -> None:
        pass

    def finish(self, order: Finish) -> None:
        raise Over


def need(folder: Path, rank: int, step: int) -> None:
    """Rank 0 waits for the same step of rank 1; no collective shows it."""
    done = folder / f"step {step}"
    if rank == 1:
        done.touch()
    while not done.exists():
        time.sleep(0.001)


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    patch = Patch()
    switch = ReductionSwitch(patch.of)
    patch.install()
    switch.install()
    orders = Orders()
    experiments = Experiments(patch)
    model = DDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    live = LiveDdp(patch, switch, (), Compiling(patch.alive), experiments)
    runner = TrialRunner(live, RankStore(), orders, Stopwatch(torch.device("cpu")))
    steps: list[tuple[float, float]] = []
    try:
        for step in itertools.count():
            began = time.monotonic()
            time.sleep(SLEEP)
            if step > BEFORE + BLOCK + WARMUP:
                need(folder, rank, step)
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            steps.append((began, time.monotonic()))
            runner.begin() if step == BEFORE else runner.on_step() if step > BEFORE else None
    except Over:
        (folder / f"{rank}.json").write_text(json.dumps(steps))
    if rank == 0:
        (folder / "alone.json").write_text(json.dumps(orders.alone))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
