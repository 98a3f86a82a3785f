"""Run a function on real gloo ranks, once, and collect what each returns: `on_ranks(3, checks, folder)[rank]`."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Checks = Callable[[int], dict[str, Any]]


def on_ranks(world_size: int, checks: Checks, folder: Path) -> list[dict[str, Any]]:
    """`checks` is a module's top-level function of the rank. A rank that fails or dies fails the test."""
    # Forks of a server that has imported torch, and nothing of autoddp. What has been in touch with a GPU cannot fork.
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    multiprocessing.set_forkserver_preload(["torch.distributed", "torch._dynamo"])
    arguments = (world_size, checks, folder, dict(os.environ))
    mp.start_processes(_rank, arguments, nprocs=world_size, start_method=method)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


def _rank(rank: int, world_size: int, checks: Checks, folder: Path, environment: dict[str, str]) -> None:
    gc.freeze()  # what the server has imported is no garbage
    os.environ.update(environment)  # the server has that of the first test
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=100)
    )
    torch.save(checks(rank), folder / f"{rank}.pt")
    dist.barrier()
    # Not through the destructors: a reducer and gloo's threads may wait for each other there (torch 2.13).
    sys.stdout.flush()
    os._exit(0)
