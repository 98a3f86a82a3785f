"""A DDP job of gloo ranks that share the first GPU, or of one NCCL rank: --backend gloo|nccl."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group(args.backend)
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = DDP(nn.Sequential(*layers).cuda(), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(args.steps):
        optimizer.zero_grad()
        model(torch.randn(64, 512, device="cuda")).square().mean().backward()
        optimizer.step()
    print(f"rank {dist.get_rank()} trained {args.steps} steps")


if __name__ == "__main__":
    main()
