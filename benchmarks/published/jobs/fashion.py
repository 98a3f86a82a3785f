"""The published job of experiment A: a small convolutional network, all images in memory, a batch of 1024 on each rank.

    torchrun --nproc-per-node 1 fashion.py --network small --times times.json

The images are random and have the size of FashionMNIST's. `--compute 54` lets a step compute for so many milliseconds
whatever the machine: hosts of a lab share cores, and the published ones had a GPU each. `--late 1 20` lets rank 1
compute for 20 ms more, and with `--test 200` rank 0 tests for 200 ms after each epoch. `--alone` trains without DDP,
`--no-sync` with DDP that never reduces. With `--of batch` the times are those of getting a batch and copying it to the
device, not of whole steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

IMAGES = 1024 * 30  # half of the published 60,000


def large() -> nn.Module:
    """431,080 parameters."""
    first = [nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10))


def small() -> nn.Module:
    """29,330 parameters."""
    return nn.Sequential(nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(2880, 10))


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds * 2 / 3)
        return gradients[0], None


class Timed(nn.Module):
    """The network on a few of the images, and the time that all of them would take."""

    def __init__(self, network: nn.Module, seconds: float) -> None:
        super().__init__()
        self.network, self.seconds = network, seconds

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the first images."""
        found: Tensor = _Sleep.apply(self.network(images[:16]), self.seconds)  # type: ignore[no-untyped-call]
        return found


def parse_args() -> argparse.Namespace:
    """The options of this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=("large", "small"), default="large")
    parser.add_argument("--batch", type=int, default=1024, help="images on each rank (1024)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--compute", type=float, metavar="MS", help="milliseconds of a step's computing (for real)")
    parser.add_argument("--late", nargs=2, type=float, metavar=("RANK", "MS"), default=(-1, 0.0))
    parser.add_argument("--test", type=float, default=0.0, metavar="MS", help="of rank 0's test after an epoch (0)")
    parser.add_argument("--of", choices=("step", "batch"), default="step", help="what the times are those of (step)")
    parser.add_argument("--alone", action="store_true", help="without DDP")
    parser.add_argument("--no-sync", action="store_true", help="never reduce")
    parser.add_argument("--times", metavar="FILE", help="rank 0 writes the seconds of every rank's steps here")
    return parser.parse_args()


def train(model: nn.Module, args: argparse.Namespace, device: torch.device) -> list[float]:
    """Seconds of each step."""
    source = torch.Generator().manual_seed(0)
    images, labels = torch.randn(IMAGES, 1, 28, 28, generator=source), torch.arange(IMAGES) % 10
    dataset = TensorDataset(images, labels)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    rows = _Rows(sampler, args.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seconds: list[float] = []
    ended, epoch = time.perf_counter(), 0
    while True:
        sampler.set_epoch(epoch)
        epoch += 1
        for numbers in DataLoader(rows, batch_size=None):
            inputs, targets = images[numbers].to(device), labels[numbers].to(device)
            if args.of == "batch":
                _wait_for(device)
                copied = time.perf_counter()
            optimizer.zero_grad()
            skips = isinstance(model, DDP) and args.no_sync
            with model.no_sync() if skips else contextlib.nullcontext():  # type: ignore[operator]
                scores = model(inputs)
                nn.functional.cross_entropy(scores, targets[: len(scores)]).backward()
            optimizer.step()
            _wait_for(device)
            now = time.perf_counter()
            seconds.append((copied if args.of == "batch" else now) - ended)
            ended = now
            if len(seconds) == args.steps:
                return seconds
        if dist.get_rank() == 0:
            time.sleep(args.test / 1e3)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class _Rows(torch.utils.data.IterableDataset[Tensor]):
    """Batches of a rank's row numbers: the images are taken from memory at once, not one by one."""

    def __init__(self, sampler: DistributedSampler[Any], batch: int) -> None:
        self.sampler, self.batch = sampler, batch

    def __iter__(self) -> Any:
        order = torch.tensor(list(self.sampler))
        return iter(order[: len(order) // self.batch * self.batch].split(self.batch))


def main() -> None:
    """Train, then leave the times."""
    args = parse_args()
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    network: nn.Module = large() if args.network == "large" else small()
    if args.compute is not None:
        late = args.late[1] if dist.get_rank() == args.late[0] else 0.0
        network = Timed(network, (args.compute + late) / 1e3)
    network.to(device)
    seconds = train(network if args.alone else DDP(network), args, device)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seconds)
    if args.times and dist.get_rank() == 0:
        Path(args.times).write_text(json.dumps(everyone), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Not through the interpreter's own end: a thread of torch 2.13's gloo that waits for the GIL may abort there.
    os._exit(0)
