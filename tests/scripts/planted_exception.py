"""Raises on rank 1 without torch's `record`, once a helper's error has been tolerated."""

import os
import subprocess
import sys
import time

import torch.distributed as dist

dist.init_process_group("gloo")
subprocess.run([sys.executable, "-c", "raise ValueError('tolerated')"], stderr=subprocess.DEVNULL)
dist.barrier()
if os.environ["RANK"] == "1":
    raise RuntimeError("planted: rank 1 cannot go on")
time.sleep(600)  # until it is ended: elastic tells errors of the same second in any order
