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

from autoddp.attempts.hang_timeout import HangTimeout
from autoddp.worker.observe.collectives import collectives
from autoddp.worker.process import heartbeat

LIMIT = 1.0  # seconds; the real one is 20
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
            if (phase := self._phase) and self._timeout.is_over(self._began, LIMIT):
                self.hung[phase] = True
                self.said = self._timeout.says(LIMIT)

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


def checks(rank: int) -> dict[str, Any]:
    """By phase, whether a launcher would have called the ranks hung."""
    heartbeat._INTERVAL, heartbeat._CLOSER = 0.1, 0.2
    folder = Path(os.environ["HEARTBEATS"])
    os.environ["RANK"] = str(rank)
    collectives.tell_waits(lambda: "", lambda stage: None)
    model = DDP(torch.nn.Linear(4, 4))
    apart = dist.new_group(timeout=timedelta(seconds=5))  # seconds until a collective of this group is given up
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
    with watch.phase("each waits for the other"), contextlib.suppress(RuntimeError):
        dist.recv(torch.ones(1), 1 - rank, group=apart)
    watch.end()
    return {"hung": dict(watch.hung), "said": watch.said}
