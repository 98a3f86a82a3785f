"""One cell of the matrix: a training under a configuration, on two ranks that are forked from this process.

`torch` is imported once, here; each rank of each cell is a fork, armed as a process of the real job (or of the tuning
job) is, so that no cell can see what another one has patched.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it: seconds that each fork would spend again
import torch.distributed as dist
import trainings
from by_hand import Loop
from trainings import MOMENTUM, TRAININGS, by_hand_until, parameters, statistics

from autoddp.knobs import AS_WRITTEN, Configuration
from autoddp.knobs.ddp_arguments import STATIC_GRAPH
from autoddp.knobs.micro_batches import ACCUMULATE_STEPS, DEFER_REDUCTIONS
from autoddp.wire import BlockDone, Measure, Message, Ready, WorkerConfig
from autoddp.worker.gradients import same_on_all
from autoddp.worker.job import applying
from autoddp.worker.trial import tuning

WORLD = 2
PATIENCE = 180.0  # seconds for a cell; it takes one, and many where threads wait spinning for busy cores
ALONE = 5.0  # seconds that a rank lives on when the other has failed
WRITTEN, BY_HAND, RECIPE, TUNED, HEADROOM = "as torchrun", "by hand", "by recipe", "tuned", "headroom"
"""How a training is run. "by hand": several steps are one without autoddp, as the knobs of `OF_A_LOOP` say. "tuned"
turns to the configuration, back, and to it again, between the steps of the training; "headroom" leaves the reduction
out for some steps before that."""
OF_A_LOOP = (ACCUMULATE_STEPS.name, DEFER_REDUCTIONS.name, STATIC_GRAPH.name)
"""Knobs that say how many steps are one, and which of their passes broadcast or reduce."""

ENDS_TUNING = "tuning ends: "
"""Begins the error of a rank that has ended the tuning of its script, with a reason."""


@dataclass(frozen=True)
class Cell:
    """What to run."""

    training: str
    way: str = WRITTEN
    configuration: Mapping[str, Any] = field(default_factory=dict)
    fault: Callable[[], None] | None = None
    """Called in each rank before anything else: plants a fault."""


@dataclass(frozen=True)
class Ran:
    """What a cell left: of each rank its parameters and buffers, or its error; and what autoddp said."""

    ranks: tuple[dict[str, Any], ...]
    told: str
    signals: frozenset[int] = frozenset()
    """By which ranks have ended, other than those that were killed here for being late."""

    @property
    def errors(self) -> list[str]:
        return [found["error"] for found in self.ranks if found.get("error")]


class Matrix:
    """Runs cells one after another."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # what OpenMP has started does not survive a fork
        self._folder = tempfile.TemporaryDirectory(prefix="equality-")
        self._number = 0
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(self, cell: Cell) -> Ran:
        """Both ranks to their end, or killed after PATIENCE."""
        self._number += 1
        folder = Path(self._folder.name, str(self._number))
        folder.mkdir()
        children = [self._fork(rank, cell, folder) for rank in range(WORLD)]
        signals = _wait(children)
        ranks = tuple(_read(folder / f"{rank}.pt") for rank in range(WORLD))
        told = "".join((folder / f"{rank}.err").read_text() for rank in range(WORLD))
        return Ran(ranks, told, signals)

    def _fork(self, rank: int, cell: Cell, folder: Path) -> int:
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(WORLD),
            LOCAL_WORLD_SIZE=str(WORLD),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self._store.port),
            TORCHELASTIC_RUN_ID=str(folder),
        )
        errors = os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT)
        os.dup2(errors, 2)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115  pytest has put another in its place
        found: dict[str, Any] = {}
        try:
            found = _rank(rank, cell, folder)
        except BaseException as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"}
        torch.save(found, folder / f"{rank}.pt")
        sys.stderr.flush()
        os._exit(0)


def _wait(children: list[int]) -> frozenset[int]:
    """Until all have ended. Returns the signals by which some have ended before they were killed here."""
    deadline, signals = time.monotonic() + PATIENCE, set[int]()
    left = set(children)
    while left:
        for child in list(left):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                left.discard(child)
                signals |= {os.WTERMSIG(status)} if os.WIFSIGNALED(status) else set()
                deadline = min(deadline, time.monotonic() + ALONE)
        if time.monotonic() > deadline:
            for child in left:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            break
        time.sleep(0.005)
    return frozenset(signals)


def _read(path: Path) -> dict[str, Any]:
    return torch.load(path) if path.exists() else {"error": "killed: hung, or the other rank had failed"}


def _rank(rank: int, cell: Cell, folder: Path) -> dict[str, Any]:
    configuration = Configuration(cell.configuration)
    same_on_all._patience = lambda store: PATIENCE / 9  # seconds in which ranks agree: here all are on one machine
    if cell.fault is not None:
        cell.fault()
    torch.set_num_threads(int(str(configuration.get("threads", 1))) if cell.way == RECIPE else 1)
    found: dict[str, Any] = {}
    if cell.way == HEADROOM:
        MOMENTUM[0] = 0.0
    if cell.way == BY_HAND:
        broadcasts, learns = DEFER_REDUCTIONS.name in configuration, STATIC_GRAPH.name in configuration
        Loop(configuration.steps_per_update, by_hand_until(cell.training), broadcasts, learns).install()
    if cell.way == RECIPE:
        applying.start_applying(WorkerConfig(configuration=configuration.without_variables, static_graph=True))
    elif cell.way in (TUNED, HEADROOM):
        (folder / "heartbeats").mkdir(exist_ok=True)
        tuning.stopper = lambda _socket: lambda why: _tuning_ends(why, folder / f"{rank}.pt")
        link = Study(configuration, cell.way == HEADROOM, rank, folder)
        config = WorkerConfig(socket="none", scratch=str(folder), accumulates="accumulate_steps" in configuration)
        tuning.start_tuning(config, link, os.environ.get("OMP_NUM_THREADS"))  # type: ignore[arg-type]
        found["link"] = None
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=PATIENCE / 2)
    )
    modules = TRAININGS[cell.training](rank)
    if "link" in found:
        found = link.found
    return {**found, "parameters": parameters(modules), "buffers": statistics(modules)}


def _tuning_ends(why: str, place: Path) -> None:
    """Where no launcher is told, which would end the other rank: it ends for want of this one."""
    torch.save({"error": f"{ENDS_TUNING}{why}"}, place)
    os._exit(0)


class Study:
    """Stands where the launcher's study is: knows what to measure beforehand, and never ends."""

    def __init__(self, configuration: Configuration, headroom: bool, rank: int, folder: Path) -> None:
        self.rank = self.local_rank = rank
        self.found: dict[str, Any] = {"turned": False, "left out": {}}
        self._configuration = configuration
        at_once = configuration.steps_per_update
        forever = {"warmup": 0, "steps": 100 * trainings.STEPS}
        compare = 1 if configuration.hook else 0
        self._orders = [
            Measure(0, AS_WRITTEN, 1, 2, reduce=not headroom),
            Measure(1, AS_WRITTEN, 1, 2),
            Measure(2, configuration, 1, 4 // at_once, at_once=at_once, compare=compare),
            Measure(3, AS_WRITTEN, 1, 2),
            Measure(4, configuration, at_once=at_once, **forever),
        ]
        self._written = [Measure(0, AS_WRITTEN, 1, 2, reduce=not headroom), Measure(1, AS_WRITTEN, **forever)]

    def hello(self) -> bool:
        return True

    def goodbye(self, reason: str) -> None:
        """Nobody listens."""

    def send(self, message: Message) -> None:
        if isinstance(message, Ready):
            left_out = {name: why for name, why in message.facts.left_out.items() if name in self._configuration}
            self.found["left out"] = left_out
            if left_out:
                self._orders = self._written
        elif isinstance(message, BlockDone):
            self.found["turned"] |= message.index >= 2
            if message.error is not None:
                self.found["error of hook"] = asdict(message.error)

    def receive(self) -> Message:
        return self._orders.pop(0)
