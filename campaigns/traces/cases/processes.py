"""Writes from elsewhere than the script's own line: workers, children, daemons, threads, handlers."""

import atexit
import functools
import multiprocessing
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from traces.trace import files, only, trace

_ONCE: set[str] = set()


def _change(folder: Path, by: str) -> int:
    """Write over, delete, add."""
    (folder / "a.txt").write_text(f"{by}\n")
    (folder / "b.txt").unlink(missing_ok=True)
    (folder / f"by_{by}").write_text(by)
    return 0


class Cached(Dataset):
    """Writes each sample when it is read, as a cache does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        _change(self.folder, f"worker{index % 2}")
        return torch.ones(2)


def _load(folder: Path, context: str) -> None:
    for batch in DataLoader(Cached(folder), batch_size=2, num_workers=1, multiprocessing_context=context):
        assert batch.shape == (2, 2)
    assert (folder / "a.txt").read_text().startswith("worker")


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"))
def loader_by_fork(folder, rank, step):
    """A DataLoader's worker, forked."""
    _load(folder, "fork")


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"))
def loader_by_spawn(folder, rank, step):
    """A DataLoader's worker, spawned: a fresh Python (only once, it imports torch)."""
    if step == 0:
        _load(folder, "spawn")


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"))
def forked_child(folder, rank, step):
    """os.fork: the child writes, then os._exit."""
    pid = os.fork()
    if pid == 0:
        try:
            _change(folder, "child")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert (folder / "a.txt").read_text() == "child\n"


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"))
def daemon(folder, rank, step):
    """Fork, setsid, fork: the grandchild writes at once and again when its parents are gone."""
    if step:
        return
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if os.fork() == 0:
            for number in range(4):
                _change(folder, f"daemon{number}")
                time.sleep(0.5)
        os._exit(0)
    os.waitpid(pid, 0)


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"))
def thread(folder, rank, step):
    """A thread, joined; and one of a pool."""
    worker = threading.Thread(target=_change, args=(folder, "thread"))
    worker.start()
    worker.join()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_change, folder, "pool").result()


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"))
def thread_in_the_background(folder, rank, step):
    """A daemon thread that writes on while training goes on."""
    if step == 0:
        (folder / "a.txt").write_text("first\n")

        def write() -> None:
            for number in range(20):
                _change(folder, f"background{number}")
                time.sleep(0.05)

        threading.Thread(target=write, daemon=True).start()


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"))
def process_pool(folder, rank, step):
    """multiprocessing.Process and a pool of processes, forked."""
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_change, args=(folder, "process"))
    child.start()
    child.join()
    assert child.exitcode == 0
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(_change, folder, "executor").result() == 0


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"))
def at_exit(folder, rank, step):
    """atexit and weakref.finalize write when the interpreter ends."""
    if "atexit" not in _ONCE:
        _ONCE.add("atexit")
        atexit.register(_change, folder, "atexit")
        weakref.finalize(_change, functools.partial(_change, folder, "finalizer"))


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"))
def signal_handler(folder, rank, step):
    """A handler of SIGUSR1 writes a checkpoint."""
    old = signal.signal(signal.SIGUSR1, lambda *_: _change(folder, "signal"))
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, old)
    assert (folder / "a.txt").read_text() == "signal\n"


@trace(prepare=files("a.txt", "b.txt"), after=only("a.txt", "b.txt"))
def termination_handler(folder, rank, step):
    """A handler of SIGTERM, as for preemption, writes and goes on; it stays, should a launcher send one later."""

    def handle(*_: object) -> None:
        _change(folder, "termination")
        if "termination" in _ONCE:
            raise SystemExit(143)
        _ONCE.add("termination")

    if step == 0:
        signal.signal(signal.SIGTERM, handle)
        os.kill(os.getpid(), signal.SIGTERM)
