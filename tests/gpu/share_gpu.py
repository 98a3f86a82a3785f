"""Lets NCCL ranks share a GPU, so that one GPU is enough for collectives between ranks.

autoddp --nproc-per-node 2 share_gpu.py train.py --batch-size 32     every rank of train.py takes the first GPU
"""

import os
import runpy
import sys

import torch


def share_gpu() -> None:
    """Make NCCL take this rank's GPU although another rank has it. Call it before the process group is made.

    From 2.30 on NCCL has a variable for it. Before, it refuses two ranks of one host on one GPU, and ranks that name
    different hosts reach each other by sockets: this says nothing of NVLink, PCIe or shared memory.
    """
    if torch.cuda.nccl.version() >= (2, 30):
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:
        os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"


if __name__ == "__main__":
    share_gpu()
    os.environ["LOCAL_RANK"] = "0"
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
