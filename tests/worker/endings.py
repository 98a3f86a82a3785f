"""Endings of a rank, each in a fork of a process that has imported torch: python endings.py CASE...

A fork ends as every Python process does: functions of atexit, modules taken apart, destructors. For each case two ranks
are forked, and a line of JSON has the exit code of rank 0 and what it has printed.

In rank 0 a thread of gloo is late: it is in the callback of a future for a while after the script has gone on. For some
microseconds that happens after each all-reduce of a backward pass.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from typing import Any

gc.disable()  # nothing of what an import makes is garbage
import torch  # noqa: E402
import torch._dynamo  # noqa: E402  (the first DDP object imports it)
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

gc.freeze()  # so that Python does not look there for garbage when a fork ends, which takes half a second
gc.enable()

LATE = 1.0  # seconds
rank, case, folder = 0, "", ""


def late(_future: object) -> None:
    time.sleep(LATE)
    os.write(1, b"late\n")


def late_collective() -> None:
    if rank == 1:
        time.sleep(0.2)  # so that rank 0 adds its callback in time
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    if rank == 0:
        future.then(late)
    future.wait()  # as DDP does; it is done before its callbacks are called


def hook(_state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    reduced = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return reduced.then(lambda future: future.value()[0])


def train() -> Any:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    if "bare" in case:
        kept = None
        late_collective()
    else:
        ddp = DDP(torch.nn.Linear(8, 8))
        if "hook" in case:
            ddp.register_comm_hook(None, hook)
        for _ in range(3):
            loss = ddp(torch.ones(2, 8)).sum()
            loss.backward()
        if "cycle" in case:
            ddp.itself = ddp
        kept = None if "dropped" in case else (ddp, loss)
        late_collective()
        del ddp, loss
    if "destroyed" in case:
        dist.destroy_process_group()
        os.write(1, b"destroyed\n")
    gc.collect()
    if rank == 1:
        os._exit(0)  # to take all modules apart costs a second
    if "raises" in case:
        raise ValueError("of the script")
    if "exit 3" in case:
        sys.exit(3)
    return kept


def forked() -> bool:
    """Fork two ranks for each case. True in a rank, which is to train; False at the end."""
    global rank, case, folder
    for case in sys.argv[1:]:
        folder, ranks = tempfile.mkdtemp(), []
        for rank in (0, 1):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                out = os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY)
                os.dup2(out, 1)
                os.dup2(out, 2)
                return True
        code, _ = (os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks)
        with open(f"{folder}/0") as file:
            print(json.dumps([case, code, file.read()]), flush=True)
        shutil.rmtree(folder)
    return False


if forked():
    torch.set_num_threads(1)
    atexit.register(print, "at exit")
    model = train()
    print("trained")  # in the buffer of a file until Python ends
