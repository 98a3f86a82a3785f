"""A DDP job of gloo ranks that share the first GPU, or of NCCL ranks with a GPU each: --backend gloo|nccl.

`--share` lets NCCL ranks share the first GPU too, see share_gpu.py.
"""

import argparse
import itertools
import os

import torch
import torch.distributed as dist
from share_gpu import share_gpu
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BLOCK = 20  # steps that are timed together


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--share", action="store_true", help="NCCL ranks share the first GPU")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--wide", action="store_true", help="large batches: steps that take tens of milliseconds")
    parser.add_argument("--bucket-view", action="store_true")
    args = parser.parse_args()
    device = int(os.environ["LOCAL_RANK"]) if args.backend == "nccl" and not args.share else 0
    if args.share:
        share_gpu()
    torch.cuda.set_device(device)
    dist.init_process_group(args.backend)
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = DDP(nn.Sequential(*layers).cuda(), device_ids=[device], gradient_as_bucket_view=args.bucket_view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    marks, steps = [], 120 if args.wide else args.steps
    for step in range(steps):
        if step % BLOCK == 0:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        optimizer.zero_grad()
        inputs = torch.randn(2**17 if args.wide else 64, 512, device="cuda")
        model(inputs).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    quickest = min(one.elapsed_time(other) for one, other in itertools.pairwise(marks)) / BLOCK
    if dist.get_rank() == 0:
        print(f"ms per step {quickest:.4f}")
    print(f"rank {dist.get_rank()} trained {steps} steps")


if __name__ == "__main__":
    main()
