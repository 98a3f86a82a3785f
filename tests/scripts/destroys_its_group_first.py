"""Destroys its process group while its DDP object lives: in torch 2.13 alone, that hangs here nearly every time.

In the last step, the threads of gloo get the CPU only when nobody else wants it. So the main thread
goes on after the last all-reduce before the thread that did it has freed the Python objects that belong to it.

torchrun --nproc-per-node 1 tests/scripts/destroys_its_group_first.py
"""

import copy
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

COPIED, IN_A_FUNCTION, IN_THE_MODULE = range(3)


def threads_of_gloo() -> list[int]:
    comms = Path("/proc/self/task").glob("*/comm")
    return [int(comm.parent.name) for comm in comms if "gloo" in comm.read_text()]


def train(how: int) -> DDP:
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(64, 64))
    if how == COPIED:
        model = copy.deepcopy(model)
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
    for thread in threads_of_gloo():
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    model(torch.ones(2, 64)).sum().backward()
    dist.destroy_process_group()
    return model


os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for how in (COPIED, IN_A_FUNCTION):
    train(how)  # the group goes with the model, and its threads with it
    print("threads of gloo:", len(threads_of_gloo()))
model = train(IN_THE_MODULE)
print("the end")
