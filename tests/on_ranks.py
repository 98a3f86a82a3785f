"""Run a function on real gloo ranks, once, and collect what each returns: `on_ranks(3, checks, folder)[rank]`."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import forks
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Checks = Callable[[int], dict[str, Any]]


def on_ranks(world_size: int, checks: Checks, folder: Path) -> list[dict[str, Any]]:
    """`checks` is a module's top-level function of the rank. A rank that fails or dies fails the test."""
    arguments = (world_size, checks, folder, dict(os.environ))
    if torch.cuda.is_available():  # what has been in touch with a GPU cannot fork
        mp.start_processes(_rank, arguments, nprocs=world_size, start_method="spawn")
    else:
        _fork(world_size, arguments, folder / "asked")
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


def _fork(world_size: int, arguments: Any, asked: Path) -> None:
    """Forks of the server that has imported torch."""
    from launchers import environment  # imports pytest, which a rank does without

    asked.write_bytes(pickle.dumps((sys.path, pickle.dumps(arguments))))
    ranks = [forks.popen([__file__, str(asked), str(rank)], env=environment()) for rank in range(world_size)]
    try:
        while living := [one for one in ranks if one.returncode is None]:
            for one in living:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    assert one.wait(0.05) == 0, f"rank {ranks.index(one)} of {world_size} has ended with an error"
    finally:
        for one in ranks:
            one.kill()


def _rank(rank: int, world_size: int, checks: Checks, folder: Path, environment: dict[str, str]) -> None:
    gc.freeze()  # what the server has imported is no garbage
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=100)
    )
    torch.save(checks(rank), folder / f"{rank}.pt")
    dist.barrier()
    # Not through the destructors: a reducer and gloo's threads may wait for each other there (torch 2.13).
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.path[:], asked = pickle.loads(Path(sys.argv[1]).read_bytes())
    _rank(int(sys.argv[2]), *pickle.loads(asked))
