"""What the ranks' heartbeats say while one of two gloo ranks waits for the other; see test_heartbeat.py."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from autoddp.attempts.job.hang_timeout import HangTimeout
from autoddp.worker.observe.collectives import collectives
from autoddp.worker.process import heartbeat

LIMIT = 1.0  # seconds; the real one is 20
PATIENCE = 60  # seconds for which ranks may have to wait until a launcher has seen them wait for LIMIT without a break
WORKS = 1.8  # seconds
BURN = f"import time\nend = time.time() + {WORKS}\nwhile time.time() < end: pass"


class Watch:
    """A launcher's looks at the files of both ranks."""

    def __init__(self, folder: Path) -> None:
        self._timeout = HangTimeout()
        self._timeout.attempt_begins(folder)
        self._phase, self._began = "", 0.0
        self.hung: dict[str, bool] = defaultdict(bool)
        self.said = ""
        self.seen = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._began, self._phase = time.monotonic(), name
        yield
        self._phase = ""

    def _look(self) -> None:
        while not self._over.wait(0.05):
            phase = self._phase
            if phase and phase not in self.hung and self._timeout.is_over(self._began, LIMIT):
                self.said = self._timeout.says(LIMIT)
                self.hung[phase] = True
                self.seen.set()

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def in_a_loop_of_short_calls() -> None:
    end = time.monotonic() + WORKS
    while time.monotonic() < end:
        time.sleep(0.02)


def in_a_child_that_works() -> None:
    subprocess.run([sys.executable, "-S", "-c", BURN], check=True)


def in_one_long_sleep() -> None:
    time.sleep(WORKS)


def end_when_both_have_seen(watch: Watch, rank: int, folder: Path, group: Any) -> None:
    """Send what the other rank waits for, once both launchers have seen that nobody goes on, or PATIENCE is over."""
    watch.seen.wait(PATIENCE)
    (folder / f"seen {rank}").touch()
    while not (folder / f"seen {1 - rank}").exists():
        time.sleep(0.05)
    dist.send(torch.ones(1), 1 - rank, group=group)


def checks(rank: int) -> dict[str, Any]:
    """By phase, whether a launcher would have called the ranks hung."""
    heartbeat._INTERVAL, heartbeat._CLOSER = 0.1, 0.2
    folder = Path(os.environ["HEARTBEATS"])
    os.environ["RANK"] = str(rank)
    collectives.tell_waits(lambda: "", lambda stage: None)
    model = DDP(torch.nn.Linear(4, 4))
    apart = dist.new_group(timeout=timedelta(seconds=2 * PATIENCE))  # until a collective of this group is given up
    heartbeat.start_heartbeat(str(folder))
    watch = Watch(folder)

    def backward() -> None:
        model(torch.ones(2, 4)).sum().backward()

    def all_reduce() -> None:
        dist.all_reduce(torch.ones(1))

    def both(name: str, works: Callable[[], None], waits: Callable[[], None]) -> None:
        """Rank 0 works for a while, and rank 1 waits for it."""
        with watch.phase(name):
            if rank == 0:
                works()
            waits()

    both("loop, backward", in_a_loop_of_short_calls, backward)
    both("child, all_reduce", in_a_child_that_works, all_reduce)
    both("sleep, backward", in_one_long_sleep, backward)
    with watch.phase("short collectives"):
        for _ in range(60):
            if rank == 0:
                time.sleep(0.03)
            dist.all_reduce(torch.ones(1))
    with watch.phase("a long backward pass"):
        inputs = torch.ones(64, 64, requires_grad=True)
        far, end = inputs, time.monotonic() + 0.4
        while time.monotonic() < end:
            far = torch.matrix_exp(far * 1e-3)
        model(far[:, :4]).sum().backward()
    dist.barrier()
    ends = threading.Thread(target=end_when_both_have_seen, args=(watch, rank, folder.parent, apart))
    ends.start()
    with watch.phase("each waits for the other"):
        dist.recv(torch.ones(1), 1 - rank, group=apart)
    ends.join()
    watch.end()
    return {"hung": dict(watch.hung), "said": watch.said}
