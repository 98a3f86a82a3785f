"""Handwritten digits with a small convolutional network: plain DDP, real data, done in seconds on a laptop.

    torchrun --nproc-per-node 2 recipes/digits/train.py

The 1,797 images of 8x8 pixels come with scikit-learn, so nothing is downloaded. Every fifth one is held out; rank 0
prints the accuracy on those at the end.

A step accumulates the gradients of several small batches, and, as many scripts do, it leaves DDP's no_sync() out: the
gradients travel after each of them, though only the last time counts. That is slower, and trains the same.
"""

import argparse
import os
import time
from itertools import islice

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse_args() -> argparse.Namespace:
    """The options of this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40, help="passes over the training images (default: 40)")
    parser.add_argument("--batch-size", type=int, default=8, help="images per rank and backward pass (default: 8)")
    parser.add_argument("--accumulate", type=int, default=6, help="backward passes per step (default: 6)")
    parser.add_argument("--lr", type=float, default=2e-3, help="AdamW's peak learning rate (default: 0.002)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the shuffling (default: 0)")
    parser.add_argument("--save", metavar="PATH", help="write the trained weights here (default: write nothing)")
    return parser.parse_args()


def load_split() -> tuple[TensorDataset, TensorDataset]:
    """The digits as (training, test) data sets: the same split on every rank and for every seed."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0  # a pixel is 0 … 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    held_out = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


def build_network() -> nn.Module:
    """Two convolutions and two linear layers: 540,362 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )


@torch.no_grad()
def accuracy(network: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """The share of images whose digit is recognised."""
    network.eval()
    images, labels = (tensor.to(device) for tensor in data.tensors)
    right = (network(images).argmax(1) == labels).float().mean().item()
    network.train()
    return right


def train(model: DDP, data: TensorDataset, args: argparse.Namespace, device: torch.device) -> None:
    """Run every epoch; rank 0 prints one line for each."""
    sampler: DistributedSampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    steps = len(loader) // args.accumulate  # of an epoch; what is left over is in another epoch's steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * steps)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        started, total = time.perf_counter(), torch.zeros((), device=device)
        batches = iter(loader)
        for _ in range(steps):
            optimizer.zero_grad()
            for images, labels in islice(batches, args.accumulate):
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device)) / args.accumulate
                loss.backward()
                total += loss.detach()  # stays on the device: .item() here would wait for the GPU at every step
            optimizer.step()
            schedule.step()
        if dist.get_rank() == 0:
            mean, seconds = total.item() / steps, time.perf_counter() - started
            print(
                f"epoch {epoch + 1}/{args.epochs}  loss {mean:.4f}  {1000 * seconds / steps:.1f} ms per step",
                flush=True,
            )


def main() -> None:
    """Train, then test on rank 0."""
    args = parse_args()
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    torch.manual_seed(args.seed)
    training, test = load_split()
    network = build_network().to(device)
    # The DDP object must not outlive the process group: torch 2.13 on gloo may then hang while freeing it.
    train(DDP(network, device_ids=[device.index] if use_cuda else None), training, args, device)
    if dist.get_rank() == 0:
        if args.save:
            torch.save(network.state_dict(), args.save)
        print(f"test accuracy {100 * accuracy(network, test, device):.1f} %", flush=True)
    dist.barrier()  # nobody takes the process group down while others still compute: torch 2.13 may abort then
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
