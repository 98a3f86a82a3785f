"""Destroys its process group while its DDP object lives: in torch 2.13 alone, that hangs here nearly every time.

The threads of gloo get the CPU only when nobody else wants it. So the last all-reduce is told as done before the thread
that did it has freed what belongs to it, which includes Python objects.

torchrun --nproc-per-node 1 tests/scripts/destroys_its_group_first.py HOW   # function, module, copy
"""

import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(how: str) -> DDP:
    before = set(os.listdir("/proc/self/task"))
    dist.init_process_group("gloo")
    for thread in set(os.listdir("/proc/self/task")) - before:
        os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
    model = DDP(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))), bucket_cap_mb=0.001)
    if how == "copy":
        model = copy.deepcopy(model)
    for _ in range(4):
        model(torch.ones(2, 64)).sum().backward()
    dist.destroy_process_group()
    return model


def main(how: str) -> None:
    for _ in range(2):
        train(how)
        # The group has gone with its model, and its threads with it.
        names = [comm.read_text() for comm in Path("/proc/self/task").glob("*/comm")]
        print("threads of gloo:", sum("gloo" in name for name in names))


os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if sys.argv[1] == "module":
    model = train("module")
else:
    main(sys.argv[1])
print("the end")
